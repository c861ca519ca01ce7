"""The stages of `make test`: what counts as passed, and what is told of the rest."""

from pathlib import Path

import pytest
import run
from labs import LONG_REASON

SUITE = """<testsuites><testsuite tests="{tests}" failures="0" errors="0" skipped="{skipped}">
<testcase name="test_kept" time="1"/>{more}</testsuite></testsuites>"""
SKIPPED = '<testcase name="test_{name}"><skipped message="{why}"/></testcase>'


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "LOGS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "passed"), [("pytest", 0), ("molecule", 0), ("mypy", 1)])
def test_tests_that_did_not_run_have_not_passed(command: str, passed: int) -> None:
    result = run.count(run.Stage("one", [command]), 0)
    assert (result.passed, result.failed, bool(result.failures)) == (passed, 1 - passed, not passed)


def test_an_empty_report_is_a_failure(logs: Path) -> None:
    (logs / "one.xml").write_text('<testsuites><testsuite tests="0"/></testsuites>')
    assert run.count(run.Stage("one", ["pytest"]), 0).failed == 1


def test_what_is_skipped_is_told_unless_it_only_takes_long(logs: Path) -> None:
    more = SKIPPED.format(name="long", why=LONG_REASON) + SKIPPED.format(name="alone", why="other labs are up")
    (logs / "lab-one.xml").write_text(SUITE.format(tests=3, skipped=2, more=more))
    result = run.count(run.Stage("lab one", ["pytest"]), 0)
    assert (result.passed, result.failed, result.skipped) == (1, 0, 2)
    assert result.skips == ["lab one: test_alone: other labs are up"]


def test_a_log_may_be_in_any_encoding(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = run.Stage("molecule default", ["molecule"])
    monkeypatch.setattr(run, "ROOT", logs)
    stage.log.write_bytes(b"caf\xe9")
    assert run.building([stage])
    run.show(stage, run.Result(0, 1, 0), "1 of 1")
    assert "caf" in capsys.readouterr().out


def test_docs_are_read_anew_each_time() -> None:
    """Otherwise a page that has not changed itself is not judged again."""
    (docs,) = (stage for stage in run.stages() if stage.name == "docs")
    assert "--fresh-env" in docs.command
