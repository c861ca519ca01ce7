"""How a step is named and recognised, and how its failure is reported. Tests on real nodes run it under systemd."""

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
REST = [f"make: waiting {number}" for number in range(24)]
WHY = [f"x.c:{number}: error: no such thing" for number in range(7)]


def test_a_steps_name_is_a_valid_file_name() -> None:
    files = {"OpenMPI 4.1.4": "openmpi-4.1.4", "pack the stack": "pack-the-stack", "../a/b;c": "..-a-b-c"}
    assert {name: step.slug(name) for name in files} == files


def test_a_step_is_recognised_and_no_other_is_mistaken_for_it() -> None:
    turned = {**dict(reversed(STEP.items())), "environment": {"B": "2", "A": "1"}, "start": False}
    assert step.digest(turned) == step.digest(STEP)
    others = {"name": "NCCL", "script": "true\n", "directory": "/b", "environment": {"A": "1"}, "root": False}
    assert step.digest(STEP) not in [step.digest({**STEP, name: value}) for name, value in others.items()]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (b"", []),
        (b"one\n\n  \n\xff two\n", ["one", "\ufffd two"]),
        ("".join(f"line {number}\n" for number in range(30)).encode(), [f"line {number}" for number in range(5, 30)]),
        # The first errors and the last; each line appears once, even if it is also at the end of the log.
        ("\n".join([*WHY, "checking", *REST, "error: last"]).encode(), [*WHY[:3], *WHY[4:], *REST, "error: last"]),
    ],
)
def test_a_failure_shows_the_lines_with_the_cause_and_the_last(tmp_path: Path, log: bytes, shown: list[str]) -> None:
    path = tmp_path / "log"
    if log:
        path.write_bytes(log)
    head, *lines = step.failure("OpenMPI", UNIT, path).splitlines()
    assert head == f"OpenMPI failed (2) after 61 s; its log is {path}:"
    assert lines == shown
    killed = step.failure("OpenMPI", {**UNIT, "Result": "oom-kill", "ExecMainStatus": "9"}, path)
    assert killed.startswith("OpenMPI failed (oom-kill) after 61 s")


def test_a_running_step_is_timed_until_now() -> None:
    assert step.seconds(UNIT) == 61.4
    assert step.seconds({**UNIT, "ExecMainExitTimestampMonotonic": "0"}) > 0
    assert step.seconds({}) > 0
    assert [steps.clock(seconds) for seconds in (0.9, 61.4, 3600)] == ["0:00", "1:01", "60:00"]
    assert [steps.Progress("node-1", "", seconds, "").pause for seconds in (0, 10, 3600)] == [1, 2, 10]


def test_progress_ends_with_a_whole_word() -> None:
    last = "[ 82%] Building CXX object horovod/tensorflow/mpi_ops.cc.o"
    at = steps.progress({"step": "Horovod 0.28.1", "seconds": 146, "last": last}, "node-1")
    assert at.line(200) == f"node-1: Horovod 0.28.1, 2:26: {last}"
    assert at.line(80) == "node-1: Horovod 0.28.1, 2:26: [ 82%] Building CXX object …"
    with pytest.raises(FarandoleError, match="node-1 gives no valid progress of its step: seconds is 'x'"):
        steps.progress({"step": "", "seconds": "x", "last": ""}, "node-1")


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], ""),
        (["one", "  CC  two.lo"], "CC  two.lo"),
        (["[ 40%] Building a.o", "g++ -c b.cc", "   |   ^~~~"], "[ 40%] Building a.o"),
        (["[100%] Built a", "[  3%] Building b.o", "note: x"], "[  3%] Building b.o"),
    ],
)
def test_progress_is_the_percentage_if_there_is_one_or_the_last_line(lines: list[str], shown: str) -> None:
    assert step.progress(lines) == shown


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
        (0o777, "other accounts can write to {} (mode 0777)"),
        (0o2775, "other accounts can write to {} (mode 2775)"),
    ],
)
def test_root_does_not_build_where_others_write(folder: Path, mode: int, why: str) -> None:
    inside = folder / "openmpi"
    inside.mkdir()
    inside.chmod(mode)
    assert step.open_to_others(inside).startswith(why.format(inside))
    inside.chmod(0o755)
    # Whoever can write to its parent can replace it.
    folder.chmod(mode)
    assert step.open_to_others(inside).startswith(why.format(folder))
    # A symlink is judged by its target.
    (folder.parent / "link").symlink_to("build")
    assert step.open_to_others(folder.parent / "link/deeper").startswith(why.format(folder))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_root_does_not_build_in_another_accounts_folder(folder: Path) -> None:
    os.chown(folder, 4711, 4711)
    assert f"{folder} belongs to uid 4711" in step.open_to_others(folder / "openmpi")


def test_what_is_no_folder_is_to_be_removed(folder: Path) -> None:
    link = folder / "openmpi"
    for target in ("nowhere", "openmpi"):
        link.symlink_to(target)
        assert step.open_to_others(link) == f"{link} is a dangling symlink: remove it"
        link.unlink()
    link.touch()
    assert step.open_to_others(link) == f"{link} is not a directory: remove it"


def test_a_step_in_an_unsafe_directory_is_refused_with_the_reason() -> None:
    answer = run_module("build_step", {**STEP, "directory": "/var/tmp/farandole-build"})  # noqa: S108
    assert "root does not build in /var/tmp/farandole-build" in answer["msg"]
    assert "every account can write to /var/tmp: choose another directory" in answer["msg"]
