"""What the probes of a job have in common, and how they are sent."""

import argparse
import ast
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.core.causes import causes
from farandole.validation.nodes import program

from .loading import ROOT, load_probe

ranks = load_probe("ranks")
HERE = socket.gethostname()


def rank(host: str, **other: str) -> dict[str, str]:
    return {"host": host, "machine": f"id-of-{host}", "stack": "0a", "python": "/p", "version": "2", **other}


def judged(*reports: dict[str, str], expect: int | None = 2, hosts: int | None = 2) -> list[dict[str, str]]:
    return list(ranks.judge(reports, argparse.Namespace(expect=expect, expect_hosts=hosts)))


def test_a_correct_job() -> None:
    assert judged(rank("a"), rank("b")) == []
    assert judged(rank("a"), rank("a"), hosts=1) == []
    assert judged(rank("a"), rank("a"), rank("b"), expect=None, hosts=None) == []


@pytest.mark.parametrize(
    ("reports", "code", "seen"),
    [
        ([rank("a")], "ranks-missing", "1 of 2 ranks are in this job, a job of its own"),
        ([rank("a"), rank("b"), rank("b")], "ranks-missing", "3 of 2 ranks are in this job"),
        ([rank("a"), rank("a")], "machines-missing", "the ranks are on 1 of 2 machines: a"),
        ([rank("a"), rank("b", machine="id-of-a")], "machines-missing", "the ranks are on 1 of 2 machines: a, b"),
        ([rank("a"), rank("b", stack="1b")], "nodes-differ", "not the same stack on all ranks: 0a on a; 1b on b"),
        ([rank("a"), rank("b", stack="")], "nodes-differ", "not the same stack on all ranks: 0a on a; none on b"),
        ([rank("a"), rank("b", python="/q")], "nodes-differ", "not the same python on all ranks: /p on a; /q on b"),
        ([rank("a"), rank("b", version="3")], "nodes-differ", "not the same version on all ranks: 2 on a; 3 on b"),
    ],
)
def test_an_error_is_reported_with_its_code(reports: list[dict[str, str]], code: str, seen: str) -> None:
    assert judged(*reports)[0] == {"code": code, "host": HERE, "seen": seen}
    assert causes()[code].seen == "probe"


@pytest.mark.parametrize(("number", "printed"), [(0, ["a", "b"]), (1, ["b"])])
def test_what_all_ranks_see_is_printed_once(number: int, printed: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    common, mine = [ranks.error("ranks-missing", "a")], [ranks.error("wrong-values", "b", "node-2")]
    assert ranks.report(number, common, mine) == 1
    assert [json.loads(line)["seen"] for line in capfd.readouterr().out.splitlines()] == printed
    assert ranks.report(number, common, []) == 1
    assert ranks.report(number, [], []) == 0


def sent(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the MPI probe as a job does, where no stack is."""
    text = program("mpi").replace("/opt/farandole/current", str(tmp_path))
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_probe_that_is_sent_has_all_it_needs(tmp_path: Path) -> None:
    done = sent(tmp_path)
    error: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, done.stderr, error["code"], error["host"]) == (1, "", "mpi-missing", HERE)
    assert str(tmp_path) in error["seen"]
    assert causes()["mpi-missing"].seen == "probe"
    assert "--expect-hosts" in sent(tmp_path, "--help").stdout


def test_a_program_runs_after_all_of_its_functions_are_known() -> None:
    for path in (ROOT / "src/farandole/node").rglob("*.py"):
        *before, _ = ast.parse(path.read_text()).body
        choices = [statement for statement in before if isinstance(statement, ast.If)]
        # What only type checkers import runs nothing.
        assert not any(ast.unparse(choice.test) != "TYPE_CHECKING" for choice in choices), path
