"""What can be checked of the documentation without reading it."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from farandole.cli.app import app
from farandole.core.causes import causes
from farandole.plays.action import argument_spec

from .loading import ROOT, load

FARANDOLE = typer.main.get_command(app)
PATCHES = ROOT / "files/patches/horovod-0.28.1"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("roles/*/README.md"), PATCHES / "README.md"]


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


def test_the_page_of_horovods_patches_has_each_of_them_once() -> None:
    rows = re.findall(r"^\| \[\d+\]\((.*?)\) \|", (PATCHES / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in PATCHES.glob("*.patch"))


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `farandole` command, up to those of the program that it runs."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [
        *(line for block in blocks for line in block.replace("\\\n", " ").splitlines()),
        *re.findall(r"`([^`\n]+)`", text),
    ]
    for line in lines:
        if match := re.fullmatch(r"(?:\$ )?(?:\.venv/bin/)?farandole ([a-z]+(?: .*)?)", line):
            words = shlex.split(match[1].replace("'", ""), comments=True)
            yield words[: words.index("--")] if "--" in words else words


def misspelt(words: list[str]) -> str:
    """The first word that is no subcommand, or no option, of `farandole`; empty if there is none."""
    command: Any = FARANDOLE
    for word in words:
        if isinstance(command, TyperGroup) and not word.startswith("-"):
            if word not in command.commands and word != "…":
                return word
            command = command.commands.get(word, command)
        elif re.match(r"--?[a-z]", word) and word.split("=")[0] not in known(command):
            return word
    return ""


def known(command: Any) -> set[str]:
    """The options of a command."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}


# On nodes `farandole` is another program, which has these commands and no inventory.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist_with_their_options(page: Path) -> None:
    assert [words for words in commands(page.read_text()) if misspelt(words)] == []


@pytest.mark.parametrize("words", [["aply"], ["apply", "--chek"], ["node", "exlude"], ["lab", "up", "--node", "2"]])
def test_a_misspelt_command_is_noticed(words: list[str]) -> None:
    assert misspelt(words)


def all_of(group: Any) -> Iterator[Any]:
    """A group's commands, and those of the groups in it."""
    for command in group.commands.values():
        yield from all_of(command) if isinstance(command, TyperGroup) else [command]


def test_who_is_not_asked_for_a_password_of_sudo_learns_where_to_write_it() -> None:
    takes = "--ask-become-pass"
    others = [one for one in all_of(FARANDOLE) if "--vault-password-file" in known(one) and takes not in known(one)]
    assert {"upgrade", "replace", "include"} <= {one.name for one in others}
    assert [one.name for one in others if "ansible_become_password" not in one.help] == []
    cures = [cause.cure for cause in causes().values() if takes in cause.cure]
    assert cures and [cure for cure in cures if "ansible_become_password" not in cure] == []


def test_contributors_are_sent_to_paths_that_exist() -> None:
    named = re.findall(r"`([\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = {
        name for name in named if "/" in name and not re.search("NAME|CODE|test_x|^[.]farandole|tasks/|meta/", name)
    }
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


# The node's half of an action is documented in the action.
DOCUMENTED = [path.stem for path in ROOT.glob("plugins/modules/*.py") if "DOCUMENTATION = " in path.read_text()]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_module_takes_the_arguments_that_it_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, taken = load("modules", name), dict[str, Any]()

    def take(argument_spec: dict[str, Any], **_: Any) -> None:
        taken.update(argument_spec)
        raise InterruptedError

    monkeypatch.setattr(module, "AnsibleModule", take)
    with pytest.raises(InterruptedError):
        module.main()
    documented = argument_spec(yaml.safe_load(module.DOCUMENTATION).get("options", {}))
    # Documentation has no place for no_log.
    spec = {option: {key: value for key, value in about.items() if key != "no_log"} for option, about in taken.items()}
    assert spec == documented


def test_ansible_doc_reads_every_documented_module() -> None:
    names = {f"farandole.cluster.{name}" for name in DOCUMENTED}
    command = ["ansible-doc", "--type", "module", "--json", *names]
    shown = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert names and shown.keys() == names
    assert all(about["doc"]["short_description"] for about in shown.values())
