"""Rows of evidence: written so that they are read again, and in place of older ones."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.lab import prove
from farandole.stack.catalogue import EVIDENCE, load

from .loading import ROOT

FATAL = "\nfatal: [n]: FAILED! =>\n    msg:"
ROW: prove.Row = {
    "system": "debian-13",
    "date": "2026-11-23",
    "verdict": "fails",
    "ran": 'site.yml: "x" was not declared | in this scope, ' + "and so on " * 20,
    "wanted": "pytorch torch==2.5.0",
    "set": "gxx==14 openmpi==4.1.4 horovod==0.28.1 torch==2.5.0",
    "with": "six==1.17.0 " * 30,
}


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "evidence.yml"
    prove.add(path, ROW)
    (read,) = yaml.safe_load(path.read_text())
    shown = {key: str(value) if key == "date" else value for key, value in read.items()}
    assert shown == {key: value.strip() if key == "with" else value for key, value in ROW.items()}
    assert max(map(len, path.read_text().splitlines())) <= 120
    (evidence,) = load(evidence=path).evidence
    assert (evidence.works, evidence.set["torch"], evidence.others) == (False, "2.5.0", {"six": "1.17.0"})


def test_a_row_replaces_one_about_the_same_set(tmp_path: Path) -> None:
    path = tmp_path / "evidence.yml"
    for verdict in ("fails", "works"):
        for system in ("debian-12", "debian-13"):
            prove.add(path, {**ROW, "system": system, "verdict": verdict})
    rows = yaml.safe_load(path.read_text())
    assert [(row["system"], row["verdict"]) for row in rows] == [("debian-12", "works"), ("debian-13", "works")]


def test_of_those_that_disagree_the_failure_is_told(tmp_path: Path) -> None:
    path = tmp_path / "evidence.yml"
    for verdict, who in (("works", "SHA256:a"), ("fails", "SHA256:b"), ("works", "SHA256:c")):
        prove.add(path, {**ROW, "verdict": verdict, "by": who})
    known = load(evidence=path)
    seen = known.seen(known.evidence[0].versions, "debian-13")
    assert seen
    assert not seen.works


@pytest.mark.parametrize(("failing", "row"), [("lab up", False), ("lab down", True), ("lock", True)])
def test_what_fails_before_a_set_is_tried_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, row: bool
) -> None:
    """Whatever is started takes the set for good, but for one step."""
    state, place = tmp_path / "state", tmp_path / "inventory/prove"
    for name in ("farandole", "ansible-playbook"):
        script = f"""#!/bin/sh
case "$*" in {failing.replace(" ", "?")}*) echo "error: it has no memory"; exit 1 ;; esac
case $1 in lab) mkdir -p {place} ;; lock) cp {ROOT}/tests/unit/locks/pytorch.lock {place}/stack.lock.yml ;; esac
"""
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    report = state / "prove/reports/latest/result.json"
    report.parent.mkdir(parents=True)
    report.write_text('{"checks": [{"status": "green"}]}')
    monkeypatch.setenv("FARANDOLE_STATE", str(state))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(prove, "INVENTORY", place)
    monkeypatch.setattr(prove, "SETTINGS", place / "group_vars/all.yml")
    done = CliRunner().invoke(app, ["prove", "--evidence", str(tmp_path / "evidence.yml")])
    assert isinstance(done.exception, FarandoleError) is ("lab" in failing), done.output
    seen = (tmp_path / "evidence.yml").read_text() if row else ""
    assert (tmp_path / "evidence.yml").exists() is row
    assert ("lock: it has no memory" if failing == "lock" else "1 green" if row else "") in seen


def test_a_refused_set_is_a_row_that_no_lock_matches(tmp_path: Path) -> None:
    path = tmp_path / "evidence.yml"
    prove.add(path, {key: value for key, value in ROW.items() if key not in ("set", "with")})
    assert load(evidence=path).evidence == ()


def test_the_committed_evidence_is_as_the_command_writes_it(tmp_path: Path) -> None:
    rows, path = yaml.safe_load(EVIDENCE.read_text()), tmp_path / "evidence.yml"
    for row in rows:
        prove.add(path, row)
    assert yaml.safe_load(path.read_text()) == rows


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "error: no set of packages satisfies it.\n\n   Because a, not b.\n   - c\n\nnearest set:\n",
            "Because a, not b.",
        ),
        (f"{FATAL} |-\n        x\n        a.cc:1: error: no C++20\n        error: y\n", "no C++20"),
        (f"{FATAL} |-\n        x\n        a.ImportError: gone\n    running: false\n", "a.ImportError: gone"),
        (f"{FATAL} 'it cannot\n        be'\n\nPLAY RECAP ***\n", "'it cannot be'"),
        ("x\nmpi.sum is red: no\n  cause: no route [x]\n  cure: none\n", "no route [x]"),
        ("one\nc.cc:3:1: error: 'x' was not declared\nmake: *** [a] Error 1\n", "'x' was not declared"),
        ("Killed\n", "Killed"),
    ],
)
def test_the_cause_of_a_failure(output: str, reason: str) -> None:
    assert prove.cause(output) == reason
