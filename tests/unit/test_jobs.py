"""Runs: which slots they get, what is refused, and what is told of them."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from farandole.jobs import head
from farandole.jobs.commands import first_cause, first_end, in_words
from farandole.jobs.head import Job, RefusedError, Run, Slots, StoppedError

WISH: dict[str, Any] = {"np": 0, "hosts": "", "wait": False, "mpi": False, "seconds": 0, "fetch": [], "source": "/a"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head with three nodes, and no runs."""
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=2\nnode-3\n")
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots/.lock").touch()
    monkeypatch.setattr(head, "HOSTFILE", tmp_path / "hostfile")
    monkeypatch.setattr(head, "SLOTS_IN_USE", tmp_path / "slots")
    monkeypatch.setattr(head, "RUNS", tmp_path / "runs")
    return tmp_path


@contextmanager
def taken(here: Path, number: int, **slots: int) -> Iterator[None]:
    """Another run that uses slots."""
    path = here / "slots" / f"{os.getuid()}-{number}-x"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({name.replace("_", "-"): count for name, count in slots.items()}))
        file.flush()
        yield


def slots_of(**wish: Any) -> Slots:
    with head.claimed(Run(9), {**WISH, **wish}) as found:
        return found


@pytest.mark.parametrize(
    ("wish", "slots"),
    [
        ({}, {"node-1": 1, "node-2": 2, "node-3": 1}),
        ({"np": 2}, {"node-1": 1, "node-2": 1}),
        ({"hosts": "node-3, node-2", "np": 2}, {"node-3": 1, "node-2": 1}),
        ({"hosts": "node-2"}, {"node-2": 2}),
        ({"without": ["node-2"]}, {"node-1": 1, "node-3": 1}),
    ],
)
def test_ranks_fill_the_nodes_in_order(wish: dict[str, Any], slots: Slots) -> None:
    assert slots_of(**wish) == slots


def test_slots_that_others_use_are_left_out(here: Path) -> None:
    with taken(here, 3, node_1=1, node_2=1):
        assert slots_of(np=2) == {"node-2": 1, "node-3": 1}
        with pytest.raises(
            RefusedError, match=r"free slots for -np 3: run 3 of \w+, since \d\d:\d\d, on node-1, node-2"
        ):
            slots_of(np=3)
    # The file of a run that was killed is locked by nobody.
    assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"node-1": "x"}', '{"node-1": [1]}', '{"node-1": -9}', "[" * 9999])
def test_nonsense_of_others_is_ignored(here: Path, content: str) -> None:
    with (here / "slots/0-1-x").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}


@pytest.mark.parametrize("name", ["0-1-x\x1b[2J", "0-1", "x-1-x", "0-9999999999-x"])
def test_files_with_other_names_are_ignored(here: Path, name: str) -> None:
    with (here / "slots" / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write('{"node-1": 1}')
        file.flush()
        assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}


def test_what_is_no_file_blocks_nobody(here: Path) -> None:
    os.mkfifo(here / "slots/0-1-fifo")
    (here / "slots/0-2-folder").mkdir()
    (here / "slots/0-3-link").symlink_to("/dev/zero")
    assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}
    assert sorted(path.name for path in (here / "slots").iterdir())[1:] == ["0-1-fifo", "0-2-folder", "0-3-link"]


def test_others_name_only_nodes(here: Path) -> None:
    with taken(here, 3, **{"node_1": 1, "evil\x1b": 1}):
        assert [uses for *_, uses in head.others()] == [{"node-1": 1}]


def test_a_run_waits_for_slots_if_asked(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor() as pool:
        with taken(here, 3, node_1=1):
            waits = pool.submit(slots_of, wait=True)
            time.sleep(1.5)
            assert not waits.done()
        assert waits.result() == {"node-1": 1, "node-2": 2, "node-3": 1}
    assert "farandole: waiting for 4 slots: run 3 of" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"hosts": "node-9,node-1"}, "--hosts: there is no node node-9; the nodes are node-1, node-2, node-3"),
        ({"np": 5}, "-np 5: node-1, node-2, node-3 have 4 slots"),
        ({"np": 3, "hosts": "node-2"}, "-np 3: node-2 have 2 slots"),
    ],
)
def test_ranks_that_no_free_slot_would_help(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        slots_of(**wish, wait=True)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("program", "there"),
    [
        (["python", "train.py"], True),
        (["python3", "-u", "none.py", "train.py"], False),
        (["python", "-m", "package.module"], True),
        (["python", "-c", "import x.py"], True),
        (["./run.sh"], False),
        (["hostname"], True),
        (["/usr/bin/env", "x"], True),
    ],
)
def test_a_program_that_is_not_in_the_folder(tmp_path: Path, program: list[str], *, there: bool) -> None:
    (tmp_path / "train.py").touch()
    if there:
        head.refuse_early(program, [], tmp_path)
    else:
        with pytest.raises(RefusedError, match="in this folder"):
            head.refuse_early(program, [], tmp_path)


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", ".", "", ".git", "a/.git/hooks"])
def test_results_are_below_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(RefusedError, match="name something below this folder"):
        head.refuse_early(["hostname"], ["results", path], tmp_path)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400)])
def test_times(text: str, seconds: int) -> None:
    assert head.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1", "1.5h", "2 h", "1w", "h", "99999999"])
def test_no_times(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        head.duration(text)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"[1]<stdout>:step 3\n", b"[1] step 3\n"),
        (b"[1,12]<stderr>: oh\n", b"[12] oh\n"),
        (b"[INFO] mine\n", b"[INFO] mine\n"),
        (b"[0]<stderr>:\r[0]<stderr>:50%\n", b"[0] \r[0] 50%\n"),
        (b"x [0]<stdout>:y\n", b"x [0]<stdout>:y\n"),
    ],
)
def test_the_rank_in_front_of_a_line(line: bytes, shown: bytes) -> None:
    assert head.OF_RANK.sub(rb"\1[\2] ", line) == shown


def test_runs_are_counted_and_found() -> None:
    with pytest.raises(RefusedError, match="no runs yet"):
        head.chosen("")
    assert [head.new_run().number for _ in range(3)] == [1, 2, 3]
    assert head.new_run().number == 4
    # The nodes may still have what the head has no more.
    (head.RUNS / "4").rmdir()
    assert head.new_run().number == 5
    (head.RUNS / "5").rmdir()
    (head.RUNS / ".sent").mkdir()
    assert (head.chosen("").number, head.chosen("2").number) == (3, 2)
    for text in ("4", "02", "x", "../1"):
        with pytest.raises(RefusedError, match=rf"there is no run {text}; the latest are: 1, 2, 3"):
            head.chosen(text)


def test_a_stop_before_the_job_begins_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = head.new_run()
    run.write("run", **WISH, program=["hostname"])
    job = Job(run)
    with pytest.raises(StoppedError):
        job.stop("stopped")
    # As the signal would, in the middle of what comes before.
    monkeypatch.setattr(job, "send", lambda _: job.stop("stopped"))
    job()
    assert run.read("ended")["why"] == "stopped"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ({"status": 0, "why": "", "seconds": 61.4}, "finished after 61 s on node-1:1"),
        ({"status": 3, "why": "", "seconds": 2}, "failed with exit status 3 after 2 s on node-1:1"),
        ({"status": 143, "why": "stopped", "seconds": 2}, "stopped after 2 s on node-1:1"),
    ],
)
def test_what_is_told_of_a_run(ended: dict[str, Any], told: str) -> None:
    run = head.new_run()
    run.write("started", slots={"node-1": 1})
    run.write("ended", **ended)
    assert head.told(run) == told


def test_nothing_is_copied_to_nodes_that_see_the_same_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = head.new_run()
    run.write("run", **{**WISH, "fetch": ["x"]}, program=["hostname"])
    monkeypatch.setattr(head, "SHARED", tmp_path / "home")
    # No command is found, so a copy would fail.
    monkeypatch.setenv("PATH", "/none")
    for users, fails in (("root-not\n", True), (f"alice\n{head.owner(os.getuid())}\n", False)):
        (tmp_path / "home").write_text(users)
        with pytest.raises(FileNotFoundError) if fails else nullcontext():
            Job(run).send({"elsewhere": 1})
        run.write("started", slots={"elsewhere": 1})
        with pytest.raises(FileNotFoundError) if fails else nullcontext():
            assert list(head.collect(run, ["x"])) == []


def test_a_run_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run = head.new_run()
    run.code.mkdir()
    run.write("run", **WISH, program=["hostname"])
    monkeypatch.setattr(head, "HERE", "node-1")
    monkeypatch.setenv("PATH", "/none")
    Job(run)()
    assert run.read("ended")["why"].startswith("broke off on the head: [Errno 2] No such file")


def test_a_run_that_was_ended_has_failed_even_if_its_launcher_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = head.new_run()
    run.write("run", **WISH, program=["hostname"])
    job = Job(run)
    monkeypatch.setattr(job, "send", lambda _: None)
    monkeypatch.setattr(job, "clean", lambda _: None)
    launched = subprocess.Popen(
        ["sh", "-c", "trap 'exit 0' TERM; echo up; read _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def execute(_: Slots) -> int:
        job.process = launched
        assert launched.stdout
        launched.stdout.readline()
        job.stop("ended at its limit of 3 s (--time)")
        return launched.wait()

    monkeypatch.setattr(job, "execute", execute)
    job()
    assert launched.returncode == 0
    assert run.read("ended")["status"] == 1


def test_a_damaged_record_of_a_run_does_not_hide_the_others() -> None:
    run = head.new_run()
    (run.folder / "run.json").write_text("{")
    assert run.read("run") == {}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("--copy-dest x\nrsync: write failed: No space\nrsync error: x (code 11)\n", "rsync: write failed: No space"),
        ("--copy-dest x\nrsync error: error in file IO\n", "a file could not be written, as when the disk is full"),
    ],
)  # fmt: skip
def test_why_a_copy_failed(said: str, why: str) -> None:
    assert head.reason(said) == why


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".git/config", ".", ""])
def test_results_are_below_the_folder_of_a_run(path: str) -> None:
    with pytest.raises(RefusedError, match="name something below this folder"):
        head.refuse_outside([path])


SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"


@pytest.mark.parametrize(
    ("lines", "code", "raised"),
    [
        ([f"[0] HorovodInternalError: {SHUT_DOWN}", "[1] ValueError: negative"], "", "[1] ValueError: negative"),
        ([f"[0] RuntimeError: {SHUT_DOWN}", "[1] mine.OddError: x"], "", "[1] mine.OddError: x"),
        ([f"[0] horovod.common.exceptions.HorovodInternalError: {SHUT_DOWN}"], "horovod-shut-down", ""),
        (["[0] step 1", "[1] Errors: none"], "", ""),
    ],
)
def test_the_rank_that_failed_is_told_and_not_the_others(lines: list[str], code: str, raised: str) -> None:
    match, line = first_cause(lines)
    assert (match.cause.code if match else "", line) == (code, raised)


# What Slurm prints of a rank that it ends after another one.
CANCELLED = [
    "[1] slurmstepd-node-2: error: *** STEP 2.1 ON node-2 CANCELLED AT 2026-11-25T03:08:32 ***",
    "[1] srun: error: node-2: task 0: Killed",
    "Process 1 exit with status code 137.",
]


@pytest.mark.parametrize(
    ("lines", "first", "words"),
    [
        (["Process 2 exit with status code 7."], 2, "it ended with exit status 7"),
        (
            [f"[0] x: {SHUT_DOWN}", "Process 0 exit with status code 1.", "Process 1 exit with status code 7."],
            1,
            "it ended",
        ),
        (
            ["Process 0 exit with status code 143.", "Process 1 exit with status code 137."],
            1,
            "it was ended by SIGKILL",
        ),
        (["  Process name: [[37815,1],1]", "  Exit code:    127"], 1, "it was not found"),
        # What says that a rank was killed makes it no victim.
        ([f"[0] x: {SHUT_DOWN}", "[1] Killed", "Process 1 exit with status code 137."], 1, "it was ended by SIGKILL"),
        (
            ["[0] Killed", f"[1] x: {SHUT_DOWN}", "Process 0 exit with status code 137.", *CANCELLED],
            0,
            "it was ended by SIGKILL",
        ),
        (
            ["mpirun noticed that process rank 1 with PID 2029 on node node-2 exited on signal 9 (Killed)."],
            1,
            "it was ended by SIGKILL",
        ),
        ([f"[0] x: {SHUT_DOWN}", "  Process name: [[3,1],0]", "  Exit code:    1"], -1, ""),
        (["[0] Process 3 exit with status code 3."], -1, ""),
        (["Process 3 exit with status code 0."], -1, ""),
    ],
)
def test_the_rank_that_failed_by_itself(lines: list[str], first: int, words: str) -> None:
    rank, status = first_end(lines)
    assert rank == first
    assert rank < 0 or in_words(status).startswith(words)


def test_a_folder_that_is_no_checkout_is_filtered_as_git_would(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.pt\n!keep.pt\n/data/\n")
    (tmp_path / "data").mkdir()
    for name in ("a.pt", "keep.pt", "data/x", "b"):
        (tmp_path / name).touch()
    assert set(head.filters(tmp_path)[1].split()) == {"/a.pt", "/data/"}
