"""How a step is named and recognised, and how its failure is reported. Tests on real nodes run it under systemd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.watch import steps

from .loading import load
from .stack import run_module

step = load("modules", "build_step")

STEP = {
    "name": "OpenMPI",
    "script": "make\n",
    "directory": "/build",
    "environment": {"A": "1", "B": "2"},
    "unit": "farandole-build",
    "root": True,
}
UNIT = {
    "Result": "exit-code",
    "ExecMainStatus": "2",
    "ExecMainStartTimestampMonotonic": "1000000",
    "ExecMainExitTimestampMonotonic": "62400000",
}


@pytest.mark.parametrize(
    ("name", "file"),
    [("OpenMPI 4.1.4", "openmpi-4.1.4"), ("pack the stack", "pack-the-stack"), ("../a/b;c", "..-a-b-c")],
)
def test_a_steps_name_is_a_valid_file_name(name: str, file: str) -> None:
    assert step.slug(name) == file


def test_a_step_is_recognised() -> None:
    turned = {**dict(reversed(STEP.items())), "environment": {"B": "2", "A": "1"}, "start": False}
    assert step.digest(turned) == step.digest(STEP)


@pytest.mark.parametrize(
    "other", [{"name": "NCCL"}, {"script": "true\n"}, {"directory": "/b"}, {"environment": {"A": "1"}}, {"root": False}]
)
def test_another_step_is_not_mistaken_for_it(other: dict[str, object]) -> None:
    assert step.digest({**STEP, **other}) != step.digest(STEP)


def test_empty_lines_and_invalid_utf_8_are_tolerated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert step.lines_of(log) == []
    log.write_bytes(b"one\n\n  \n\xff two\n")
    assert step.lines_of(log) == ["one", "\ufffd two"]


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(30)))
    head, *shown = step.failure("OpenMPI", UNIT, log).splitlines()
    assert head == f"OpenMPI failed (2) after 61 s; its log is {log}:"
    assert shown == [f"line {number}" for number in range(5, 30)]


def test_a_failure_shows_the_lines_with_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    why = [f"x.c:{number}: error: no such thing" for number in range(7)]
    rest = [f"make: waiting {number}" for number in range(24)]
    log.write_text("\n".join([*why, "checking", *rest, "error: last"]))
    # The first errors and the last; each line appears once, even if it is also at the end of the log.
    assert step.failure("OpenMPI", UNIT, log).splitlines()[1:] == [*why[:3], *why[4:], *rest, "error: last"]


def test_a_failure_without_an_exit_code_is_described(tmp_path: Path) -> None:
    words = step.failure("OpenMPI", {**UNIT, "Result": "oom-kill", "ExecMainStatus": "9"}, tmp_path / "log")
    assert words == f"OpenMPI failed (oom-kill) after 61 s; its log is {tmp_path / 'log'}:\n"


def test_a_running_step_is_timed_until_now() -> None:
    unit = {**UNIT, "ExecMainExitTimestampMonotonic": "0"}
    assert step.seconds(unit) > 0
    assert step.seconds(UNIT) == 61.4
    assert step.seconds({}) > 0


@pytest.mark.parametrize(("seconds", "shown"), [(0.9, "0:00"), (61.4, "1:01"), (3600, "60:00")])
def test_progress_shows_minutes_and_seconds(seconds: float, shown: str) -> None:
    assert steps.clock(seconds) == shown


def test_progress_ends_with_a_whole_word() -> None:
    last = "[ 82%] Building CXX object horovod/tensorflow/mpi_ops.cc.o"
    at = steps.progress({"step": "Horovod 0.28.1", "seconds": 146, "last": last}, "node-1")
    assert at.line(200) == f"node-1: Horovod 0.28.1, 2:26: {last}"
    assert at.line(80) == "node-1: Horovod 0.28.1, 2:26: [ 82%] Building CXX object …"


def test_a_step_is_polled_less_and_less_often() -> None:
    pauses = [steps.Progress("node-1", "", seconds, "").pause for seconds in (0, 10, 3600)]
    assert pauses == [1, 2, 10]


def test_malformed_progress_is_refused() -> None:
    with pytest.raises(FarandoleError, match="node-1 gives no valid progress of its step: seconds is 'x'; inspect"):
        steps.progress({"step": "", "seconds": "x", "last": ""}, "node-1")


def test_progress_is_the_percentage_if_there_is_one_or_the_last_line() -> None:
    assert step.progress([]) == ""
    assert step.progress(["one", "  CC  two.lo"]) == "CC  two.lo"
    assert step.progress(["[ 40%] Building a.o", "g++ -c b.cc", "   |   ^~~~"]) == "[ 40%] Building a.o"
    assert step.progress(["[100%] Built a", "[  3%] Building b.o", "note: x"]) == "[  3%] Building b.o"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose parents count as safe, although those of a test are world-writable."""
    real = step.fault
    monkeypatch.setattr(step, "fault", lambda path: real(path) if path.is_relative_to(tmp_path) else "")
    made: Path = tmp_path / "opt/build"
    made.mkdir(parents=True)
    return made


def test_root_builds_where_only_root_writes(folder: Path) -> None:
    assert step.open_to_others(folder / "not/there/yet") == ""
    (folder.parent / "link").symlink_to("build")
    assert step.open_to_others(folder.parent / "link/openmpi") == ""


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (0o1777, "every account can write to {}: choose another directory"),
        (0o777, "other accounts can write to {} (mode 0777): inspect its contents, then run  chmod go-w {}"),
        (0o2775, "other accounts can write to {} (mode 2775): inspect its contents, then run  chmod go-w {}"),
    ],
)
def test_root_does_not_build_where_others_write(folder: Path, mode: int, why: str) -> None:
    inside = folder / "openmpi"
    inside.mkdir()
    inside.chmod(mode)
    assert step.open_to_others(inside) == why.format(inside, inside)
    inside.chmod(0o755)
    # Whoever can write to its parent can replace it.
    folder.chmod(mode)
    assert step.open_to_others(inside) == why.format(folder, folder)


def test_root_does_not_build_in_another_accounts_folder(folder: Path) -> None:
    try:
        os.chown(folder, 4711, 4711)
    except PermissionError:
        pytest.skip("only root can give a folder away")
    said = step.open_to_others(folder / "openmpi")
    assert said == f"{folder} belongs to uid 4711: inspect its contents, then run  chown root:root {folder}"


def test_a_symlink_is_judged_by_its_target(folder: Path) -> None:
    link, others = folder / "openmpi", folder.parent / "others"
    others.mkdir()
    others.chmod(0o777)
    link.symlink_to("../others")
    assert f"other accounts can write to {others}" in step.open_to_others(link / "deeper")
    for target in ("nowhere", "openmpi"):
        link.unlink()
        link.symlink_to(target)
        assert step.open_to_others(link) == f"{link} is a dangling symlink: remove it"
    link.unlink()
    link.touch()
    assert step.open_to_others(link) == f"{link} is not a directory: remove it"


def test_a_step_in_an_unsafe_directory_is_refused_with_the_reason() -> None:
    answer = run_module("build_step", {**STEP, "directory": "/var/tmp/farandole-build"})  # noqa: S108
    assert answer["msg"] == (
        "OpenMPI: root does not build in /var/tmp/farandole-build, where others could make it run their programs: "
        "every account can write to /var/tmp: choose another directory"
    )
