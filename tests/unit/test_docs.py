"""What can be checked of the documentation without reading it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("roles/*/README.md")]


def anchors(page: Path) -> set[str]:
    """The names that headings have as targets of links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_code_end_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) % 2 == 0
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
