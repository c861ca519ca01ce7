"""Runs on the head: how they are numbered and kept, how they end, and what is refused before they begin."""

import argparse
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.history import program
from farandole.jobs import files
from farandole.jobs.follow import first_cause
from farandole.node import mounts
from farandole.node.arguments import duration
from farandole.node.head import folders, launch, main, runs, status
from farandole.node.head import job as keeper
from farandole.node.head.job import RunKeeper, StoppedError
from farandole.node.head.launch import OF_RANK, SIGN, Reports
from farandole.node.head.runs import Output, RefusedError, Run

from .loading import ROOT, install

pytestmark = pytest.mark.usefixtures("head")
WISH: dict[str, Any] = {"np": 0, "hosts": "", "wait": False, "seconds": 0, "fetch": [], "source": "/a", "restarts": 0}
WISH |= {"min_nodes": 0, "checkpoints": "", "meet_within": 600}
# The fixture has another one.
UPGRADING = status.UPGRADING
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")


def asked(**wish: Any) -> Run:
    """A new run that has not begun."""
    run = runs.new_run()
    run.write("run", **{**WISH, **wish}, launcher="horovod", program=["hostname"])
    return run


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[RunKeeper], int]], RunKeeper]:
    """Makes a job that sends nothing to nodes, and does this instead of starting ranks."""
    monkeypatch.setattr(RunKeeper, "send", lambda *_: None)
    monkeypatch.setattr(RunKeeper, "clean", lambda *_: None)

    def make(execute: Callable[[RunKeeper], int]) -> RunKeeper:
        job = RunKeeper(asked())
        monkeypatch.setattr(job, "execute", lambda _: execute(job))
        return job

    return make


@pytest.mark.parametrize(
    ("program", "there"),
    [
        ("python train.py", True),
        ("python3 -u none.py train.py", False),
        ("python -m package.module", True),
        ("python -c x.py", True),
        ("python3 -u -c print(1/2)", True),
        ("python -u -m package.module a/b", True),
        ("python /data/train.py", True),
        ("./run.sh", False),
        ("hostname", True),
        ("/usr/bin/env x", True),
    ],
)
def test_a_program_that_is_not_in_the_folder(tmp_path: Path, program: str, *, there: bool) -> None:
    (tmp_path / "train.py").touch()
    with nullcontext() if there else pytest.raises(RefusedError, match="in this folder"):
        folders.refuse_early(program.split(), [], tmp_path)


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", ".", "", ".git", "a/.git/hooks"])
def test_results_are_below_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(RefusedError, match="name something below this folder"):
        folders.refuse_early(["hostname"], ["results", path], tmp_path)


def test_a_folder_that_is_no_checkout_is_filtered_as_git_would(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.pt\n!keep.pt\n/data/\n")
    (tmp_path / "data").mkdir()
    for name in ("a.pt", "keep.pt", "data/x", "b"):
        (tmp_path / name).touch()
    assert set(folders.filters(tmp_path)[1].split()) == {"/a.pt", "/data/"}


def test_a_checkout_that_git_does_not_read_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    code = tmp_path / "code"
    code.mkdir()
    (code / "tracked.pt").touch()
    subprocess.run(["git", "-C", tmp_path, "add", "code/tracked.pt"], check=True)
    (tmp_path / ".gitignore").write_text("*.pt\n")
    assert folders.filters(code)[1] == ""
    (tmp_path / ".git/config").write_text("[")
    for folder in (tmp_path, code):
        with pytest.raises(RefusedError, match=r"bad config line .* Run `git status`"):
            folders.filters(folder)


def test_links_that_lead_nowhere_on_the_nodes_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a").write_text("abc")
    for name, target in {"absolute": f"{folder}/a", "away": "../x", "good": "a"}.items():
        (folder / name).symlink_to(target)
    assert files.survey(folder, [], "") == (3, [f"absolute -> {folder}/a", "away -> ../x"])


def test_times() -> None:
    times = {"90": 90, "90s": 90, "30m": 1800, "2h": 7200, "1d": 86400}
    assert {text: duration(text) for text in times} == times
    for text in ("", "0", "0h", "-1", "1.5h", "2 h", "1w", "h", "99999999"):
        with pytest.raises(argparse.ArgumentTypeError):
            duration(text)


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
    assert [runs.new_run().number for _ in range(4)] == [1, 2, 3, 4]
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
def test_damaged_records_end_nothing(content: str) -> None:
    (runs.new_run().folder / "run.json").write_text("{")
    (runs.RUNS / ".last").write_bytes(content.encode(errors="surrogateescape"))
    (runs.RUNS / "1²").mkdir()
    assert runs.new_run().number == 2
    assert (runs.RUNS / ".last").read_text() == "2"
    assert runs.chosen("").number == 2
    assert runs.chosen("1").read("run") == {}


@pytest.fixture
def small(head: Path) -> Iterator[Path]:
    """Runs on a small file system."""
    folder = head / "runs"
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


def test_a_run_begins_with_the_stack_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = tmp_path / "current"
    current.symlink_to("stacks/aaaa")
    monkeypatch.setattr(status, "STACK", current)

    def send(*_: object) -> None:
        """Another one becomes current while the folder is copied."""
        current.unlink()
        current.symlink_to("stacks/bbbb")

    monkeypatch.setattr(RunKeeper, "send", send)
    monkeypatch.setattr(RunKeeper, "clean", lambda *_: None)
    monkeypatch.setattr(launch, "command", lambda *_: ["env"])
    monkeypatch.setattr(launch, "free_port", lambda _: 1)
    job = RunKeeper(asked())
    job.run.code.mkdir()
    monkeypatch.setattr(runs, "OUTPUT", Output(os.open(job.run.output, os.O_WRONLY | os.O_CREAT)))
    job()
    assert job.run.read("started")["stack"] == "aaaa"
    assert f"FARANDOLE_STACK={tmp_path}/stacks/aaaa" in job.run.output.read_text().splitlines()


@root_only
def test_a_full_disk_ends_no_job_and_its_end_is_known(
    small: Path, monkeypatch: pytest.MonkeyPatch, local: Callable[[Callable[[RunKeeper], int]], RunKeeper]
) -> None:
    def execute(_: RunKeeper) -> int:
        output.write(b"one\n")
        filler = use_up(small)
        output.write(b"x" * 20_000 + b"\n")
        filler.unlink()
        output.write(b"two\n")
        use_up(small)
        output.write(b"y" * 20_000 + b"\n")
        return 0

    job = local(execute)
    run = job.run
    run.reserve("ended")
    output = Output(os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    monkeypatch.setattr(runs, "OUTPUT", output)
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


@root_only
def test_a_run_that_finds_no_space_leaves_the_number_of_the_last(small: Path) -> None:
    assert runs.new_run().number == 1
    use_up(small)
    with pytest.raises(OSError, match="No space left"):
        runs.new_run()
    assert ([path.name for path in small.glob("[0-9]*")], (small / ".last").read_text()) == (["1"], "1")


@pytest.mark.parametrize("before", [b"[1]<stderr>: 57%\r", b"[1]<stderr>:a word", b"[0]<stdout>:a word", b""])
def test_what_a_rank_tells_is_not_lost_behind_what_another_draws(before: bytes) -> None:
    job = RunKeeper(asked())
    job.reports = Reports(job.mark, {})
    told = b'{"number": 0, "told": ["uses torch"], "status": 0}\n'
    job.pass_on(before + b"[0]<stdout>:" + SIGN % job.mark.encode() + told, {"node-1": 2})
    assert job.reports.said == {0: {"told": ["uses torch"], "status": 0}}


def test_a_folder_that_contains_all_runs_is_not_copied_into_one(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(head)
    monkeypatch.setattr(runs, "RUNS", head / "runs")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(RefusedError, match="contains all runs"):
        main.started(argparse.Namespace(source="", program=["hostname"], fetch=[]))


@pytest.mark.parametrize(("least", "checkpoints"), [(1, ""), (0, "out")])
def test_what_only_a_second_start_needs_is_refused_without_one(
    least: int, checkpoints: str, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (head / "code").mkdir()
    monkeypatch.chdir(head / "code")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    wish = argparse.Namespace(
        source="", program=["hostname"], fetch=[], checkpoints=checkpoints, min_nodes=least, restarts=0
    )
    with pytest.raises(RefusedError, match="are for a run with --restarts N"):
        main.started(wish)


@pytest.mark.parametrize(
    ("why", "copied"), [("", True), ("stopped", False), ("ended by the shutdown of the head", False)]
)
def test_a_run_that_is_stopped_waits_for_no_checkpoints(
    why: str, copied: bool, local: Callable[[Callable[[RunKeeper], int]], RunKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(job: RunKeeper) -> int:
        job.why = why
        return 1

    def collect(*arguments: object) -> Iterator[str]:
        asks.append(arguments)
        return iter(())

    asks = list[tuple[object, ...]]()
    monkeypatch.setattr(keeper, "collect", collect)
    job = local(execute)
    job.begin()
    job.use({"node-1": [0]})
    assert bool(asks) == copied


def test_a_node_that_cannot_be_reached_is_found_in_the_catalogue(head: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (head / "hostfile").write_text("none.invalid\n")
    run = asked()
    RunKeeper(run)()
    # With a reason, `farandole run` would not look for the cause.
    assert run.read("ended")["why"] == ""
    assert runs.told(run).startswith("the folder could not be copied: none.invalid: ssh: Could not resolve hostname")
    match, _ = first_cause(capfd.readouterr().out.splitlines())
    assert match
    assert (match.cause.code, match.fields["host"]) == ("job-name-unknown", "none.invalid")


def test_no_run_begins_while_the_head_is_upgraded() -> None:
    assert f"dest: {UPGRADING}\n" in (ROOT / "roles/base/tasks/upgrade.yml").read_text()
    for tasks in ("base/tasks/upgrade.yml", "jobs/tasks/main.yml"):
        assert f"path: {UPGRADING}\n" in (ROOT / "roles" / tasks).read_text()
    with pytest.raises(RefusedError, match="root starts no jobs"):
        main.started(argparse.Namespace())
    status.UPGRADING.touch()
    with pytest.raises(RefusedError, match="the head or the builder is being upgraded"):
        main.started(argparse.Namespace())


@pytest.mark.parametrize("end", [KeyboardInterrupt, RefusedError])
def test_a_run_that_ends_while_its_folder_is_copied_is_none(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch, head: Path
) -> None:
    def copy(*_: object) -> None:
        if end is KeyboardInterrupt:
            raise end
        # The builder's upgrade begins.
        status.UPGRADING.touch()

    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(main, "bus", lambda: {"XDG_RUNTIME_DIR": str(head)})
    monkeypatch.setattr(main, "copy", copy)
    (head / "code").mkdir()
    monkeypatch.chdir(head / "code")
    wish = argparse.Namespace(source="", program=["hostname"], fetch=[], checkpoints="", min_nodes=0, launcher="", np=1)
    with pytest.raises(end, match="upgraded" if end is RefusedError else None):
        main.started(wish)
    assert runs.all_runs() == []


class SlowPool(ThreadPoolExecutor):
    """One where the stop comes before the caller knows of what has begun."""

    def submit(self, *asked: Any, **wish: Any) -> Any:
        future = super().submit(*asked, **wish)
        for _ in range(600):
            time.sleep(0.1)
        return future


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, SlowPool])
def test_a_stop_ends_the_copies_to_nodes(pool: type, monkeypatch: pytest.MonkeyPatch, head: Path) -> None:
    monkeypatch.setattr(keeper, "ThreadPoolExecutor", pool)
    (head / "hostfile").write_text("far\n")
    (head / "rsync").write_text("#!/bin/sh\nkill $PPID\nexec sleep 600\n")
    (head / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{head}:{os.environ['PATH']}")
    run, usual = asked(), signal.getsignal(signal.SIGTERM)
    begun = time.monotonic()
    try:
        RunKeeper(run)()
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert (run.read("ended")["why"], time.monotonic() - begun < 60) == ("stopped", True)


def test_a_stop_before_the_job_begins_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    job = RunKeeper(asked())
    with pytest.raises(StoppedError):
        job.stop("stopped")
    # As the signal would, in the middle of what comes before.
    monkeypatch.setattr(job, "send", lambda _: job.stop("stopped"))
    job()
    assert job.run.read("ended")["why"] == "stopped"


def test_a_run_that_was_ended_has_failed_even_if_its_launcher_says_otherwise(
    local: Callable[[Callable[[RunKeeper], int]], RunKeeper],
) -> None:
    command = ["sh", "-c", "trap 'exit 0' TERM; echo up; read _"]
    launched = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def execute(job: RunKeeper) -> int:
        job.process = launched
        assert launched.stdout
        launched.stdout.readline()
        job.stop("ended at its limit of 3 s (--time)")
        return launched.wait()

    job = local(execute)
    job()
    assert launched.returncode == 0
    assert job.run.read("ended")["status"] == 1


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
    run = asked(fetch=["x"])
    monkeypatch.setattr(mounts, "SHARED", tmp_path / "home")
    # No command is found, so a copy would fail.
    monkeypatch.setenv("PATH", "/none")
    for users, fails in (("root-not\n", True), (f"alice\n{status.owner(os.getuid())}\n", False)):
        (tmp_path / "home").write_text(users)
        with pytest.raises(FileNotFoundError) if fails else nullcontext():
            RunKeeper(run).send({"elsewhere": 1})
        run.write("started", slots={"elsewhere": 1})
        with pytest.raises(FileNotFoundError) if fails else nullcontext():
            assert list(keeper.collect(run, ["x"])) == []


def test_a_run_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run = asked()
    run.code.mkdir()
    monkeypatch.setattr(runs, "HERE", "node-1")
    monkeypatch.setenv("PATH", "/none")
    RunKeeper(run)()
    assert run.read("ended")["why"].startswith("broke off on the head: [Errno 2] No such file")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("rsync: write failed: No space\nrsync error: x (code 11)\n", "rsync: write failed: No space"),
        ("rsync error: error in file IO\n", "a file could not be written, as when the disk is full"),
    ],
)
def test_why_a_copy_failed(said: str, why: str) -> None:
    assert runs.reason(f"--copy-dest x\n{said}") == why


def test_what_the_head_gets_is_all_that_the_command_needs(tmp_path: Path) -> None:
    install(tmp_path / "node", "farandole.node.head", command="main")
    done = subprocess.run([tmp_path / "node/command", "logs", "0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:22]) == (1, "error: there is no run")


def test_history_reads_what_the_head_says_of_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for run in (asked(created="\x1b"), asked(created=7.0), asked()):
        run.write("started", stack="0123456789ab", slots={"node-1": 2})
        run.write("ended", status=1, why="", seconds=3)
    runs.new_run().write("run", created=1.0, program=7)
    main.listed(argparse.Namespace())
    read = [program(line) for line in capsys.readouterr().out.splitlines()]
    [known] = [entry for entry in read if entry]
    assert (known.time, known.what, known.nodes) == (7, "run 2: hostname", ("node-1",))
    assert known.how == "failed with exit status 1 after 3 s on node-1:2"
