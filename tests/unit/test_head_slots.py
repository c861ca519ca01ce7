"""Which slots a run gets, whatever other accounts have written where all of them write."""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from farandole.node.head import main, runs, slots, status
from farandole.node.head.runs import RefusedError, Run
from farandole.node.head.status import Slots

WISH: dict[str, Any] = {"np": 0, "hosts": "", "wait": False, "without": []}
FREE = {"node-1": 1, "node-2": 2, "node-3": 1}
pytestmark = pytest.mark.usefixtures("head")


@contextmanager
def locked(path: Path, content: str) -> Iterator[None]:
    """A file of another run."""
    with path.open("w", errors="surrogateescape") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        yield


def taken(head: Path, **uses: int) -> Any:
    """Another run that uses slots."""
    content = json.dumps({name.replace("_", "-"): count for name, count in uses.items()})
    return locked(head / f"slots/{os.getuid()}-3-x", content)


def slots_of(**wish: Any) -> Slots:
    with slots.claimed(Run(9), {**WISH, **wish}) as (numbers, *_):
        return status.counted(numbers)


@pytest.mark.parametrize(
    ("wish", "ranks"),
    [
        ({}, FREE),
        ({"np": 2}, {"node-1": 1, "node-2": 1}),
        ({"hosts": "node-3, node-2", "np": 2}, {"node-3": 1, "node-2": 1}),
        ({"hosts": "node-2"}, {"node-2": 2}),
        ({"without": ["node-2"]}, {"node-1": 1, "node-3": 1}),
    ],
)
def test_ranks_fill_the_nodes_in_order(wish: dict[str, Any], ranks: Slots) -> None:
    assert slots_of(**wish) == ranks


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"hosts": "node-9,node-1"}, "--hosts: there is no node node-9; the nodes are node-1, node-2, node-3"),
        ({"np": 5}, "-np 5: node-1, node-2, node-3 have 4 slots"),
        ({"np": 3, "hosts": "node-2"}, "-np 3: node-2 have 2 slots"),
    ],
)
def test_ranks_that_no_free_slot_would_help(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        slots_of(**wish, wait=True)


def test_slots_that_others_use_are_left_out(head: Path) -> None:
    with taken(head, node_1=1, node_2=1, **{"evil\x1b": 1}):
        assert [status.counted(uses) for *_, uses in status.others()] == [{"node-1": 1, "node-2": 1}]
        assert status.used([]) == {"node-1": 1, "node-2": 1}
        assert slots_of(np=2) == {"node-2": 1, "node-3": 1}
        with pytest.raises(
            RefusedError, match=r"free slots for -np 3: run 3 of \w+, since \d\d:\d\d, on node-1, node-2"
        ):
            slots_of(np=3)
    # The file of a run that was killed is locked by nobody.
    assert slots_of() == FREE


def test_runs_on_one_node_have_different_slots(head: Path) -> None:
    (head / "hostfile").write_text("node-1 slots=4\n")

    def claimed(count: int) -> Any:
        return slots.claimed(Run(9), {**WISH, "np": count})

    with claimed(1) as (first, *_):
        with claimed(2) as (second, *_), pytest.raises(RefusedError), claimed(2):
            pass
        # What runs of an earlier version have is as many as they say, though all of them use the first ones.
        older = [locked(head / f"slots/0-{number}-x", '{"node-1": 1}') for number in (1, 2)]
        with older[0], older[1], claimed(1) as (third, *_), pytest.raises(RefusedError), claimed(1):
            pass
    assert [first, second, third] == [{"node-1": [0]}, {"node-1": [1, 2]}, {"node-1": [1]}]


def test_a_silent_queue_leaves_unknown_what_is_used(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status.used(status.of_queue()) == {}
    monkeypatch.setattr(status, "QUEUE", head)
    monkeypatch.setenv("PATH", str(head))
    assert status.used(status.of_queue()) is None


def test_nodes_that_the_queue_gives_no_jobs_are_told_with_its_reason(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "QUEUE", head)
    monkeypatch.setenv("PATH", f"{head}:{os.environ['PATH']}")
    says = {
        "squeue": "",
        "sinfo": "node-1|0/1/0/1|drained|its fan|is loud\nnode-2|2/0/0/2|mixed|none\nnode-3|0/0/1/1|down*|none\n",
    }
    for name, output in says.items():
        (head / name).write_text(f"#!/bin/sh\nprintf '{output}'\n")
        (head / name).chmod(0o755)
    answer = status.status()
    assert (answer["queue"], answer["used"]["node-2"]) == ([], 2)
    assert answer["no_jobs"] == {"node-1": "drained: its fan|is loud", "node-3": "down*"}
    (head / "sinfo").write_text("#!/bin/sh\necho gone >&2; exit 1\n")
    answer = status.status()
    # Nobody knows then whether they get jobs.
    assert (answer["queue"], answer["used"], answer["no_jobs"]) == ("gone\n", None, {})


def test_a_run_waits_for_slots_if_asked(head: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor() as pool:
        with taken(head, node_1=1):
            waits = pool.submit(slots_of, wait=True)
            time.sleep(1.5)
            assert not waits.done()
        assert waits.result() == FREE
    assert "farandole: waiting for 4 slots: run 3 of" in capfd.readouterr().out


def test_a_run_that_waits_gets_no_builder_that_is_upgraded_meanwhile(head: Path) -> None:
    with ThreadPoolExecutor() as pool:
        with taken(head, node_1=1, node_2=1):
            waits = pool.submit(slots_of, np=4, wait=True)
            time.sleep(0.5)
            status.UPGRADING.write_text("node-2\n")
        time.sleep(1.5)
        assert not waits.done()
        assert slots.in_the_way(FREE) == "node-2 is being upgraded"
        assert slots_of(np=2) == {"node-1": 1, "node-3": 1}
        # What has it keeps it, as its end is waited for; nothing else gets it instead of a lost one.
        status.UPGRADING.unlink()
        assert waits.result() == FREE
    for first, instead in (("node-2", {"node-2": 1}), ("node-1", {"node-3": 1})):
        with slots.claimed(Run(9), {**WISH, "np": 1, "hosts": f"{first},node-2,node-3"}) as (_, _, others_instead):
            status.UPGRADING.write_text("node-2\n")
            assert status.counted(others_instead({"node-1"}, 0)) == instead
        status.UPGRADING.unlink()


def test_a_run_that_waits_goes_on_before_the_head_is_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "HERE", "node-2")
    status.UPGRADING.write_text("node-2\n")
    assert slots_of() == FREE


def test_a_run_that_waits_gets_no_node_that_is_left_out_meanwhile(head: Path) -> None:
    hostfile = status.HOSTFILE.read_text()
    with ThreadPoolExecutor() as pool:
        with taken(head, node_1=1, node_2=2):
            waits, waits_for_all = pool.submit(slots_of, np=2, wait=True), pool.submit(slots_of, wait=True)
            time.sleep(0.5)
            status.HOSTFILE.write_text("".join(line for line in hostfile.splitlines(True) if "node-2" not in line))
        assert waits.result() == {"node-1": 1, "node-3": 1}
        time.sleep(1.5)
        assert not waits_for_all.done()
        assert slots.in_the_way(FREE) == "node-2 is left out"
        status.HOSTFILE.write_text(hostfile)
        assert waits_for_all.result() == FREE


NONSENSE = [
    *(
        "",
        "{",
        "[]",
        "3",
        '"node-1"',
        "null",
        "[" * 9999,
        '{"node-1": "1"}',
        '{"node-1": [[1]]}',
        '{"node-1": {"a": 1}}',
    ),
    *('{"node-1": [-1]}', '{"node-1": [true]}', '{"node-1": ["0"]}', '{"node-1": [65537]}', '{"node-1": [0, {}]}'),
    *('{"node-1": -9}', '{"node-1": true}', '{"node-1": 1.0}', '{"node-1": Infinity}', '{"node-1": NaN}'),
    *('{"node-1": 1e999}', '{"node-1": 65537}', f'{{"node-1": {10**4000}}}', f'{{"node-1": {"9" * 9999}}}', "\udcff"),
]
NAMES = ["0-1-x\x1b[2J", "0-1", "x-1-x", "0-9999999999-x"]


@pytest.mark.parametrize(
    ("name", "content"), [*(("0-1-x", content) for content in NONSENSE), *((name, '{"node-1": 1}') for name in NAMES)]
)
def test_nonsense_of_others_is_ignored(head: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(head / "slots" / name, content):
        assert slots_of() == FREE
        main.show(argparse.Namespace())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("when", [-(10**17), 10**17])
def test_times_that_others_set_are_not_shown(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    # As the real one, on a file system that keeps any time.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(status, "SLOTS_IN_USE", Path(folder))
        with locked(Path(folder, "0-3-x"), '{"node-1": 1}'):
            os.utime(Path(folder, "0-3-x"), (when, when))
            assert "since" in slots.in_the_way(["node-1"])


def test_what_is_no_file_blocks_nobody(head: Path) -> None:
    os.mkfifo(head / "slots/0-1-fifo")
    (head / "slots/0-2-folder").mkdir()
    (head / "slots/0-3-link").symlink_to("/dev/zero")
    assert slots_of() == FREE
    assert {path.name for path in (head / "slots").iterdir()} >= {"0-1-fifo", "0-2-folder", "0-3-link"}


@contextmanager
def locked_by(path: Path, how: str) -> Iterator[int]:
    """Another process that keeps a file locked."""
    code = f"import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.{how}); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["LOCK_EX", "LOCK_SH"])
def test_who_keeps_the_lock_is_named(head: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(slots, "PATIENCE", 0.3)
    with locked_by(head / "slots/.lock", how) as pid:
        for count in (0, 1):
            begun = time.monotonic()
            with pytest.raises(RefusedError, match=rf"process {pid} of {status.owner(os.getuid())} keeps .*kill {pid}"):
                slots_of(np=count)
            assert time.monotonic() - begun < 5
    assert slots_of() == FREE


def test_others_cannot_lock_the_file_of_a_run_before_it_does(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = os.fchmod

    def opened(handle: int, mode: int) -> None:
        public(handle, mode)
        (path,) = (head / "slots").glob("*-9-*")
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(os, "fchmod", opened)
    assert slots_of() == FREE


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of others")
def test_files_of_others_that_look_like_own_ones_cost_no_question(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.Run, "is_alive", lambda _: pytest.fail("systemd was asked"))
    file = head / f"slots/{os.getuid()}-777-x"
    file.touch()
    os.chown(file, 65534, 65534)
    slots.forget_ended()
    assert file.exists()


def test_the_files_of_own_runs_that_were_killed_are_removed(head: Path) -> None:
    own = [runs.new_run() for _ in range(3)]
    for run in own:
        (head / f"slots/{os.getuid()}-{run.number}-x").touch()
        if run.number > 1:
            run.write("ended", status=1, why="")
    (head / "slots/77-2-x").touch()
    # Run 1 may be starting; run 3 ended, but somebody keeps its file.
    with locked_by(head / f"slots/{os.getuid()}-3-x", "LOCK_EX"):
        slots_of()
    left = {f"{os.getuid()}-1-x", f"{os.getuid()}-3-x", "77-2-x", ".lock"}
    assert {path.name for path in (head / "slots").iterdir()} == left
