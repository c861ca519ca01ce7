"""Runs: which slots they get, what is refused, and what is told of them."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from farandole.core.programs import LIBRARY, program_files
from farandole.jobs.follow import first_cause, first_end, in_words
from farandole.node.head import folders, main, runs, slots, status
from farandole.node.head import job as keeper
from farandole.node.head.job import OF_RANK, Job, StoppedError
from farandole.node.head.runs import Output, RefusedError, Run
from farandole.node.head.status import Slots

WISH: dict[str, Any] = {"np": 0, "hosts": "", "wait": False, "mpi": False, "seconds": 0, "fetch": [], "source": "/a"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head with three nodes, and no runs."""
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=2\nnode-3\n")
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots/.lock").touch()
    monkeypatch.setattr(status, "HOSTFILE", tmp_path / "hostfile")
    monkeypatch.setattr(status, "SLOTS_IN_USE", tmp_path / "slots")
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    return tmp_path


@contextmanager
def taken(here: Path, number: int, **uses: int) -> Iterator[None]:
    """Another run that uses slots."""
    path = here / "slots" / f"{os.getuid()}-{number}-x"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({name.replace("_", "-"): count for name, count in uses.items()}))
        file.flush()
        yield


def slots_of(**wish: Any) -> Slots:
    with slots.claimed(Run(9), {**WISH, **wish}) as found:
        return found


@pytest.mark.parametrize(
    ("wish", "ranks"),
    [
        ({}, {"node-1": 1, "node-2": 2, "node-3": 1}),
        ({"np": 2}, {"node-1": 1, "node-2": 1}),
        ({"hosts": "node-3, node-2", "np": 2}, {"node-3": 1, "node-2": 1}),
        ({"hosts": "node-2"}, {"node-2": 2}),
        ({"without": ["node-2"]}, {"node-1": 1, "node-3": 1}),
    ],
)
def test_ranks_fill_the_nodes_in_order(wish: dict[str, Any], ranks: Slots) -> None:
    assert slots_of(**wish) == ranks


def test_slots_that_others_use_are_left_out(here: Path) -> None:
    with taken(here, 3, node_1=1, node_2=1):
        assert slots_of(np=2) == {"node-2": 1, "node-3": 1}
        with pytest.raises(
            RefusedError, match=r"free slots for -np 3: run 3 of \w+, since \d\d:\d\d, on node-1, node-2"
        ):
            slots_of(np=3)
    # The file of a run that was killed is locked by nobody.
    assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}


NONSENSE = [
    *("", "{", "[]", "3", '"node-1"', "null", "[" * 9999, '{"node-1": "1"}', '{"node-1": [1]}', '{"node-1": {"a": 1}}'),
    *('{"node-1": -9}', '{"node-1": true}', '{"node-1": 1.0}', '{"node-1": Infinity}', '{"node-1": NaN}'),
    *('{"node-1": 1e999}', '{"node-1": 65537}', f'{{"node-1": {10**4000}}}', f'{{"node-1": {"9" * 9999}}}', "\udcff"),
]


@pytest.mark.parametrize("content", NONSENSE)
def test_nonsense_of_others_is_ignored(here: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    with (here / "slots/0-1-x").open("w", errors="surrogateescape") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}
        assert main.show(argparse.Namespace()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("when", [-(10**17), 10**17])
def test_times_that_others_set_are_not_shown(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    # As the real one, on a file system that keeps any time.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(status, "SLOTS_IN_USE", Path(folder))
        path = Path(folder, "0-3-x")
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write('{"node-1": 1}')
            file.flush()
            os.utime(path, (when, when))
            assert "since" in slots.in_the_way(["node-1"])


@contextmanager
def locked_by(path: Path, how: str) -> Iterator[int]:
    """Another process that keeps a file locked."""
    words = (
        f"import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.{how}); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", words, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["LOCK_EX", "LOCK_SH"])
def test_who_keeps_the_lock_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(slots, "PATIENCE", 0.3)
    with locked_by(here / "slots/.lock", how) as pid:
        for count in (0, 1):
            begun = time.monotonic()
            with pytest.raises(RefusedError, match=rf"process {pid} of {status.owner(os.getuid())} keeps .*kill {pid}"):
                slots_of(np=count)
            assert time.monotonic() - begun < 5
    assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}


def test_others_cannot_lock_the_file_of_a_run_before_it_does(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = os.fchmod

    def opened(handle: int, mode: int) -> None:
        public(handle, mode)
        (path,) = (here / "slots").glob("*-9-*")
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(os, "fchmod", opened)
    assert slots_of() == {"node-1": 1, "node-2": 2, "node-3": 1}


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of others")
def test_files_of_others_that_look_like_own_ones_cost_no_question(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.Run, "is_alive", lambda _: pytest.fail("systemd was asked"))
    file = here / f"slots/{os.getuid()}-777-x"
    file.touch()
    os.chown(file, 65534, 65534)
    slots.forget_ended()
    assert file.exists()


def test_the_files_of_own_runs_that_were_killed_are_removed(here: Path) -> None:
    three = [runs.new_run() for _ in range(3)]
    for run in three[1:]:
        run.write("ended", status=1, why="")
    for run in three:
        (here / f"slots/{os.getuid()}-{run.number}-x").touch()
    (here / "slots/77-2-x").touch()
    # Run 1 may be starting; run 3 ended, but somebody keeps its file.
    with locked_by(here / f"slots/{os.getuid()}-3-x", "LOCK_EX"):
        slots_of()
    left = {f"{os.getuid()}-1-x", f"{os.getuid()}-3-x", "77-2-x", ".lock"}
    assert {path.name for path in (here / "slots").iterdir()} == left


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
        assert [uses for *_, uses in status.others()] == [{"node-1": 1}]


def test_a_run_waits_for_slots_if_asked(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor() as pool:
        with taken(here, 3, node_1=1):
            waits = pool.submit(slots_of, wait=True)
            time.sleep(1.5)
            assert not waits.done()
        assert waits.result() == {"node-1": 1, "node-2": 2, "node-3": 1}
    assert "farandole: waiting for 4 slots: run 3 of" in capfd.readouterr().out


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
        folders.refuse_early(program, [], tmp_path)
    else:
        with pytest.raises(RefusedError, match="in this folder"):
            folders.refuse_early(program, [], tmp_path)


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", ".", "", ".git", "a/.git/hooks"])
def test_results_are_below_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(RefusedError, match="name something below this folder"):
        folders.refuse_early(["hostname"], ["results", path], tmp_path)
    with pytest.raises(RefusedError, match="name something below this folder"):
        folders.refuse_outside([path])


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400)])
def test_times(text: str, seconds: int) -> None:
    assert main.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1", "1.5h", "2 h", "1w", "h", "99999999"])
def test_no_times(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        main.duration(text)


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
    assert OF_RANK.sub(rb"\1[\2] ", line) == shown


def test_runs_are_counted_and_found() -> None:
    with pytest.raises(RefusedError, match="no runs yet"):
        runs.chosen("")
    assert [runs.new_run().number for _ in range(3)] == [1, 2, 3]
    assert runs.new_run().number == 4
    # The nodes may still have what the head has no more.
    (runs.RUNS / "4").rmdir()
    assert runs.new_run().number == 5
    (runs.RUNS / "5").rmdir()
    (runs.RUNS / ".sent").mkdir()
    assert (runs.chosen("").number, runs.chosen("2").number) == (3, 2)
    for text in ("4", "02", "x", "../1"):
        with pytest.raises(RefusedError, match=rf"there is no run {text}; the latest are: 1, 2, 3"):
            runs.chosen(text)


@pytest.mark.parametrize("content", ["", "x", "-3", "²", "٣", "9999999999", "7" * 5000, "1e9", "\udcff"])
def test_a_damaged_last_number_ends_nothing(content: str) -> None:
    assert runs.new_run().number == 1
    (runs.RUNS / ".last").write_bytes(content.encode(errors="surrogateescape"))
    (runs.RUNS / "1²").mkdir()
    assert runs.new_run().number == 2
    assert (runs.RUNS / ".last").read_text() == "2"
    assert runs.chosen("").number == 2


@pytest.fixture
def small(here: Path) -> Iterator[Path]:
    """Runs on a small file system."""
    folder = here / "runs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def use_up(folder: Path) -> Path:
    """Leave no byte on the file system of a folder."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return folder / "filler"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_a_full_disk_ends_no_job_and_its_end_is_known(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.new_run()
    run.write("run", **WISH, program=["hostname"])
    run.reserve("ended")
    output = Output(os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    monkeypatch.setattr(runs, "OUTPUT", output)
    job = Job(run)
    monkeypatch.setattr(job, "send", lambda _: None)
    monkeypatch.setattr(job, "clean", lambda _: None)

    def execute(_: Slots) -> int:
        output.write(b"one\n")
        filler = use_up(small)
        output.write(b"x" * 20_000 + b"\n")
        filler.unlink()
        output.write(b"two\n")
        use_up(small)
        output.write(b"y" * 20_000 + b"\n")
        return 0

    monkeypatch.setattr(job, "execute", execute)
    job()
    ended = run.read("ended")
    assert (ended["status"], ended["why"], output.lost > 20_000) == (0, "", True)
    assert f"; {output.lost} bytes of output could not be kept on the head: No space left on device" in runs.told(run)
    text = run.output.read_text()
    assert text.startswith("one\nx")
    assert re.search(r"x\nfarandole: \d+ bytes are missing here: No space left on device\ntwo\n", text)
    # Without the space that was reserved, it could not be told.
    use_up(small)
    with pytest.raises(OSError, match="No space left"):
        run.write("other", why="x" * 9000)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_a_run_that_finds_no_space_leaves_the_number_of_the_last(small: Path) -> None:
    assert runs.new_run().number == 1
    use_up(small)
    with pytest.raises(OSError, match="No space left"):
        runs.new_run()
    assert ([path.name for path in small.glob("[0-9]*")], (small / ".last").read_text()) == (["1"], "1")


def test_a_node_that_cannot_be_reached_is_found_in_the_catalogue(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "hostfile").write_text("none.invalid\n")
    run = runs.new_run()
    run.write("run", **WISH, program=["hostname"])
    Job(run)()
    # With a reason, `farandole run` would not look for the cause.
    assert run.read("ended")["why"] == ""
    assert runs.told(run).startswith("the folder could not be copied: none.invalid: ssh: Could not resolve hostname")
    match, _ = first_cause(capfd.readouterr().out.splitlines())
    assert match
    assert (match.cause.code, match.words["host"]) == ("job-name-unknown", "none.invalid")


def test_a_stop_before_the_job_begins_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.new_run()
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
    run = runs.new_run()
    run.write("started", slots={"node-1": 1})
    run.write("ended", **ended)
    assert runs.told(run) == told


def test_nothing_is_copied_to_nodes_that_see_the_same_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.new_run()
    run.write("run", **{**WISH, "fetch": ["x"]}, program=["hostname"])
    monkeypatch.setattr(keeper, "SHARED", tmp_path / "home")
    # No command is found, so a copy would fail.
    monkeypatch.setenv("PATH", "/none")
    for users, fails in (("root-not\n", True), (f"alice\n{status.owner(os.getuid())}\n", False)):
        (tmp_path / "home").write_text(users)
        with pytest.raises(FileNotFoundError) if fails else nullcontext():
            Job(run).send({"elsewhere": 1})
        run.write("started", slots={"elsewhere": 1})
        with pytest.raises(FileNotFoundError) if fails else nullcontext():
            assert list(keeper.collect(run, ["x"])) == []


def test_a_run_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.new_run()
    run.code.mkdir()
    run.write("run", **WISH, program=["hostname"])
    monkeypatch.setattr(runs, "HERE", "node-1")
    monkeypatch.setenv("PATH", "/none")
    Job(run)()
    assert run.read("ended")["why"].startswith("broke off on the head: [Errno 2] No such file")


def test_a_run_that_was_ended_has_failed_even_if_its_launcher_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.new_run()
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
    run = runs.new_run()
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
    assert runs.reason(said) == why


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
    assert set(folders.filters(tmp_path)[1].split()) == {"/a.pt", "/data/"}


def test_what_the_head_gets_is_all_that_the_command_needs(tmp_path: Path) -> None:
    for file in program_files("farandole.node.head", {"/farandole": "farandole.node.head.main"}):
        path = Path(f"{tmp_path}{file['path']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["content"].replace(LIBRARY, f"{tmp_path}{LIBRARY}"))
        path.chmod(int(file["mode"], 8))
    done = subprocess.run([tmp_path / "farandole", "logs", "0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:22]) == (1, "error: there is no run")
    missing = tmp_path / LIBRARY.removeprefix("/") / "farandole/node/head/slots.py"
    missing.unlink()
    assert subprocess.run([tmp_path / "farandole", "runs"], capture_output=True, check=False).returncode == 1
