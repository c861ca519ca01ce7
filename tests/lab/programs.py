"""The pages in docs/programs: a program, and lines that start it."""

import re
import shlex
from pathlib import Path

from clusters import ROOT, Cluster


def lines(*pages: str) -> list[tuple[str, str]]:
    """Each line of these pages, with the name of its page."""
    return [(page, line) for page in pages for line in _blocks(page, "").splitlines()]


def _blocks(page: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", (ROOT / f"docs/programs/{page}.md").read_text(), re.M | re.S)
    assert found, page
    return found[1]


def program(page: str) -> str:
    """The program of a page."""
    return _blocks(page, "python")


def meet(cluster: Cluster, folder: Path, page: str, line: str, nodes: int) -> None:
    """Run a line of a page, whose ranks have to know each other."""
    (folder / "train.py").write_text(program(page))
    command, run, *rest = shlex.split(line)
    assert (command, run) == ("farandole", "run")
    done = cluster.farandole("run", *rest, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^farandole: {nodes} (ranks|programs) on {nodes} nodes, ", done.stdout, re.MULTILINE)
    assert {*re.findall(rf"rank (\d) of {nodes}\b", done.stdout)} == {*map(str, range(nodes))}, done.stdout
    assert "\x02" not in done.stdout
