"""When a run that failed starts again, and where."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.node.head import runs, status
from farandole.node.head.folders import refuse_checkpoints
from farandole.node.head.job import RunKeeper, collect
from farandole.node.head.launch import Reports
from farandole.node.head.restarts import Restarts
from farandole.node.head.runs import RefusedError, Run
from farandole.node.head.slots import claimed
from farandole.node.head.slurm import fewer, minutes, share

from .test_head_runs import WISH, asked
from .test_head_slots import taken

pytestmark = pytest.mark.usefixtures("head")


def restarts(**wish: Any) -> Restarts:
    run = runs.new_run()
    (run.code / "saved").mkdir(parents=True)
    return Restarts(run, {**WISH, "restarts": 3, "checkpoints": "saved", **wish})


def test_a_lost_node_is_left_out_and_the_run_starts_again_while_it_gets_on() -> None:
    of_run = restarts()
    for number in range(3):
        (of_run.path / f"step-{number}").touch()
        assert of_run.refusal(1, ["node-2"]) == ""
    assert of_run.gone == {"node-2"}
    (of_run.path / "step-3").touch()
    assert "3 times" in of_run.refusal(1, [])


def test_a_run_that_got_nowhere_since_it_started_again_ends() -> None:
    of_run = restarts()
    assert of_run.refusal(1, ["node-2"]) == ""
    assert "nothing in saved has changed" in of_run.refusal(1, ["node-3"])


def test_nodes_that_are_lost_before_it_begins_do_not_count_as_getting_nowhere() -> None:
    of_run = restarts()
    assert of_run.refusal(1, ["node-2"]) == ""
    assert of_run.refusal(1, ["node-3"], began=False) == ""
    assert of_run.gone == {"node-2", "node-3"}


@pytest.mark.parametrize(("restarts", "status"), [(1, 0), (0, 1)])
def test_a_node_that_is_off_at_the_start_is_left_out(
    head: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, status: int
) -> None:
    (head / "hostfile").write_text("none.invalid\nnode-1\n")
    monkeypatch.setattr(runs, "HERE", "node-1")
    started: list[Any] = []
    job = RunKeeper(asked(np=1, restarts=restarts))

    def execute(slots: Any) -> int:
        started.append(slots)
        return 0

    monkeypatch.setattr(job, "execute", execute)
    monkeypatch.setattr(job, "clean", lambda _: None)
    job()
    assert started == [{"node-1": 1}] * restarts
    ended = job.run.read("ended")
    assert (ended["status"], bool(ended["reason"])) == (status, bool(status))


def test_a_node_that_answers_and_takes_no_copy_ends_the_run(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (head / "hostfile").write_text("none.invalid\nnode-1\n")
    monkeypatch.setattr("farandole.node.head.job.answers", lambda _: True)
    job = RunKeeper(asked(np=1, restarts=1))
    job()
    assert (job.restarts.done, job.lost) == (0, [])
    assert "none.invalid" in job.run.read("ended")["reason"]


def test_a_program_that_fails_twice_in_the_same_way_ends() -> None:
    of_run = restarts()
    ends = []
    for line in (b"[0] ValueError: 1\n", b"[1] KeyError: 'x'\n", b"[0] KeyError: 'x'\n"):
        of_run.read(line)
        of_run.read(b"[0] other output\n")
        ends.append(of_run.refusal(1, []))
        if len(ends) == 1:
            (of_run.path / "progress").touch()
    assert ends == ["", "", "the program has failed twice in the same way"]


def test_other_slots_are_taken_instead(head: Path) -> None:
    wish = {**WISH, "np": 2}
    with claimed(Run(9), wish) as (first, _, instead):
        assert first == {"node-1": [0], "node-2": [0]}
        with taken(head, node_2=1):
            # A free node takes the place of a lost one.
            assert instead({"node-1"}, 2) == {"node-2": [1], "node-3": [0]}
            assert instead({"node-1", "node-3"}, 1) == {"node-2": [1]}
            assert instead({"node-1", "node-3"}, 2) == {}
            assert instead({"node-1", "node-3"}, 0) == {}
            # It keeps what it had of those that are left, and others get no more than the rest.
            assert [uses for number, _, _, uses in status.others() if number == "9"] == [{"node-2": {1}}]
            assert instead({"node-1"}, 0) == {"node-2": [1], "node-3": [0]}


def test_ranks_learn_which_slots_of_how_many_they_have(
    head: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (head / "horovodrun").write_text('#!/bin/sh\necho "$FARANDOLE_RUN"\n')
    (head / "horovodrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(head), prepend=":")
    monkeypatch.setattr(runs, "HERE", "node-2")
    monkeypatch.setattr(RunKeeper, "clean", lambda *_: None)
    job = RunKeeper(asked(hosts="node-2", np=1))
    job.run.code.mkdir()
    with taken(head, node_2=1):
        job()
    assert '"slots": {"node-2": 1}, "numbers": {"node-2": [1]}, "hostfile": {"node-2": 2}' in capfd.readouterr().out


def test_a_node_that_is_left_out_meanwhile_is_not_taken_again(head: Path) -> None:
    with claimed(Run(9), {**WISH, "np": 2}) as (first, _, instead):
        assert first == {"node-1": [0], "node-2": [0]}
        (head / "hostfile").write_text("node-2 slots=2\nnode-3 slots=1\n")
        assert instead({"node-3"}, 0) == {"node-2": [0, 1]}
        (head / "hostfile").write_text("node-3 slots=1\n")
        assert instead(set(), 0) == {}
        # It no longer keeps others from that node.
        (claim,) = (head / "slots").glob("*-9-*")
        assert claim.read_text() == "{}"


def test_checkpoints_are_copied_meanwhile_and_not_from_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.node.head.restarts.COPY_EVERY", 0.01)
    monkeypatch.setattr(runs, "HERE", "node-1")
    copied: list[list[str]] = []

    def copy(paths: list[str]) -> Iterator[str]:
        copied.append(paths)
        yield "there are none yet"

    with restarts().kept({"node-1": 1}, False, copy), restarts(checkpoints="").kept({"node-2": 1}, False, copy):
        time.sleep(0.1)
    assert not copied
    with restarts().kept({"node-2": 1}, False, copy):
        while len(copied) < 2:
            time.sleep(0.01)
    assert copied[0] == ["saved"]


@pytest.mark.parametrize(("path", "fits"), [("a", True), ("/data/a", True), ("../a", False), (".", False), ("", True)])
def test_where_checkpoints_may_be(path: str, fits: bool) -> None:
    if fits:
        refuse_checkpoints(path)
    else:
        with pytest.raises(RefusedError, match="--checkpoints"):
            refuse_checkpoints(path)


def test_a_node_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.node.head.restarts.answers", lambda node: node == "node-2")
    of_run = restarts()
    of_run.refusal(1, ["node-2", "node-3"])
    of_run.take_back()
    assert of_run.gone == {"node-3"}


def test_a_node_that_misses_two_questions_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.node.head.restarts.ASK_EVERY", 0.01)
    monkeypatch.setattr(runs, "HERE", "node-1")
    said = iter([True, False, True, False, False])
    asked: list[str] = []

    def answers(node: str) -> bool:
        asked.append(node)
        return next(said, True)

    monkeypatch.setattr("farandole.node.head.restarts.answers", answers)
    ended = threading.Event()
    with restarts().watched({"node-1": 1, "node-2": 1}, ended.set):
        assert ended.wait(10)
    assert asked[:5] == ["node-2"] * 5
    with restarts(restarts=0).watched({"node-2": 1}, ended.set):
        before = len(asked)
        time.sleep(0.1)
    assert len(asked) == before


SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
cd "${0%/*}/$1" && shift && exec sh -c "$*"
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nodes have their homes, which a run reaches as if by ssh."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    for name in ("node-1", "node-2", "node-3"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(runs, "HERE", "node-3")
    return tmp_path


class Copies:
    """A run with checkpoints, of which only the copies are made."""

    def __init__(self, nodes: Path) -> None:
        self.job = RunKeeper(asked(restarts=3, checkpoints="saved"))
        run, restarts = self.job.run, self.job.restarts
        run.code.mkdir()
        self.saved = [nodes / name / f"runs/{run.number}/code/saved" for name in ("node-1", "node-2")]
        self.here, self.restarts = run.code / "saved", restarts

    def start(self, *names: str) -> None:
        slots = dict.fromkeys(names, 1)
        self.job.run.write("started", slots=slots)
        self.job.send(slots)
        self.restarts.done += 1

    def copy(self) -> list[str]:
        return list(collect(self.job.run, self.restarts.copied, self.restarts))


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(str(time.monotonic()))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_what_only_one_node_has_survives_a_start(nodes: Path) -> None:
    run = Copies(nodes)
    run.start("node-1", "node-2")
    first, other = run.saved
    write(first, "1/rank-0.pt")
    write(other, "1/rank-1.pt", "../log")
    assert run.copy() == []
    run.start("node-1", "node-2")
    assert files(other) == ["1", "1/rank-0.pt", "1/rank-1.pt"]
    assert (other / "../log").exists()
    # With a loss before it was copied, the latest is on that node alone.
    write(first, "2/rank-0.pt")
    run.start("node-2", "node-1")
    assert "2/rank-0.pt" in files(first)


def test_what_a_program_has_removed_does_not_come_back(nodes: Path) -> None:
    run = Copies(nodes)
    run.start("node-1", "node-2")
    first, other = run.saved
    names = ["1/a*b.pt", "1/back\\#012", "2 \n ü.pt", b"bad\xff".decode(errors="surrogateescape")]
    write(first, *names)
    assert run.copy() == []
    assert files(run.here) == files(first) == sorted(["1", *names])
    run.start("node-1", "node-2")
    assert files(other) == files(first)
    write(other, "1/rank-1.pt")
    for path in (first / name for name in names):
        path.unlink()
    (first / "1").rmdir()
    write(first, "3")
    assert run.copy() == []
    assert files(run.here) == ["3"]
    run.start("node-2", "node-1")
    # What the program has on that node alone is its own.
    assert files(other) == ["1", "1/rank-1.pt", "3"]


def test_a_rank_on_the_head_keeps_its_checkpoints(nodes: Path) -> None:
    run = Copies(nodes)
    run.start("node-1", "node-3")
    write(run.saved[0], "rank-0.pt")
    write(run.here, "rank-1.pt")
    assert run.copy() == []
    run.start("node-1", "node-3")
    (run.here / "rank-1.pt").write_text("newer than what was sent")
    assert run.copy() == []
    assert (run.here / "rank-1.pt").read_text() == "newer than what was sent"
    assert files(run.here) == ["rank-0.pt", "rank-1.pt"]


def test_a_copy_that_fails_changes_nothing(nodes: Path) -> None:
    run = Copies(nodes)
    run.start("node-1")
    assert run.copy() == []
    write(run.saved[0], "1")
    assert run.copy() == []
    (nodes / "node-1").rename(nodes / "gone")
    assert "saved could not be fetched from node-1" in run.copy()[0]
    assert files(run.here) == ["1"]


def test_copies_that_fail_are_told_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("farandole.node.head.restarts.COPY_EVERY", 0.01)
    ended = threading.Event()

    def told(*fails: bool) -> int:
        copies = iter(fails)
        ended.clear()

        def copy(_: list[str]) -> Iterator[str]:
            if (failed := next(copies, None)) is None:
                ended.set()
            elif failed:
                yield "no space"

        with restarts().kept({"node-2": 1}, False, copy):
            assert ended.wait(10)
        return capfd.readouterr().out.count("no space")

    assert told(True, False, True, False) == 0
    assert told(True, True, True, False, True, True) == 1


def test_a_start_that_cannot_be_leaves_the_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farandole.node.head.restarts.answers", lambda _: True)
    run = asked(restarts=1, checkpoints="saved")
    (run.code / "saved").mkdir(parents=True)
    job = RunKeeper(run)

    def use(_: Any) -> int:
        if job.restarts.done:
            raise RefusedError("the folder could not be copied")
        return 1

    monkeypatch.setattr(job, "use", use)
    job()
    assert run.read("ended")["why"] == "the folder could not be copied"
    assert "start 2; saved is empty\n" in capfd.readouterr().out
    assert (run.code / "saved").exists()


def test_the_same_failure_after_progress_is_another_one() -> None:
    of_run = restarts()
    for step in ("1", "2", "3"):
        of_run.read(b"[0] OSError: a file server is away\n")
        assert of_run.refusal(1, []) == ""
        (of_run.path / step).touch()


def test_a_node_that_was_silent_counts_as_lost_even_if_it_answers_again() -> None:
    of_run = restarts()
    for _ in range(2):
        of_run.silent = {"node-2"}
        (of_run.path / str(time.monotonic())).touch()
        assert of_run.refusal(255, []) == ""
    assert of_run.gone == {"node-2"}


def test_nodes_are_asked_before_a_run_starts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "HERE", "node-1")
    monkeypatch.setattr("farandole.node.head.restarts.answers", lambda node: node != "node-3")
    of_run = restarts()
    assert of_run.look({"node-1": 1, "node-2": 1})
    assert not of_run.look({"node-2": 1, "node-3": 1})
    assert of_run.gone == {"node-3"}


@pytest.mark.parametrize(
    ("without", "least", "ranks", "hosts"),
    [
        ({"node-3"}, 0, 2, "node-1,node-2"),
        ({"node-2"}, 2, 2, "node-1,node-3"),
        ({"node-2", "node-3"}, 1, 1, "node-1"),
        ({"node-2", "node-3"}, 2, 0, ""),
        ({"node-2", "node-3"}, 0, 0, ""),
    ],
)
def test_what_is_asked_of_the_queue_instead(without: set[str], least: int, ranks: int, hosts: str) -> None:
    smaller = fewer({**WISH, "np": 2}, without, least)
    assert (smaller.get("np", 0), smaller.get("hosts", "")) == (ranks, hosts)


@pytest.mark.parametrize(
    ("slots", "cores", "gpus"),
    [
        ({"a": 1}, 64, 4),
        ({"a": 4, "b": 2}, 16, 1),
        ({"a": 8}, 8, 0),
        ({"a": 4, "c": 2}, 4, 0),
        ({"c": 16}, 1, 0),
        ({"d": 1}, 1, 0),
    ],
)
def test_what_a_slot_is_of_its_nodes(slots: dict[str, int], cores: int, gpus: int) -> None:
    # A node is there once for each of its partitions.
    nodes = "a|64|gpu:4(S:0-1)\nb|48|gpu:tesla:4,nic:2\nc|8|(null)\na|64|gpu:4(S:0-1)\n"
    assert share(slots, nodes) == (cores, gpus)


@pytest.mark.parametrize(
    ("seconds", "longest", "asked"),
    [
        (3600, "1:00:00", 60),
        (3599, "1:00:00", 60),
        (3500, "2:00:00", 60),
        (7 * 86400, "7-00:00:00", 7 * 1440),
        (1800, "30:00", 30),
        # Refused by the queue.
        (3601, "1:00:00", 62),
        (3600, "infinite", 62),
    ],
)
def test_a_run_may_last_as_long_as_a_job(seconds: int, longest: str, asked: int) -> None:
    assert minutes(seconds, f"short|10:00\nnormal*|{longest}\nlong|30-00:00:00\n") == asked


def ended(monkeypatch: pytest.MonkeyPatch, act: str, *arguments: str, **wish: Any) -> RunKeeper:
    """A run of which one start is going on, after something has happened to it."""
    keeper = RunKeeper(asked(**wish))
    process: Any = object()
    keeper.process, ended = process, threading.Event()
    monkeypatch.setattr("farandole.node.head.job.end", lambda _: ended.set())
    getattr(keeper, act)(*arguments)
    assert ended.wait(10)
    return keeper


@pytest.mark.parametrize(
    ("state", "restarts", "goes_on"), [("NODE_FAIL", 1, True), ("NODE_FAIL", 0, False), ("TIMEOUT", 1, False)]
)
def test_the_queue_takes_nodes_away(
    monkeypatch: pytest.MonkeyPatch, state: str, restarts: int, *, goes_on: bool
) -> None:
    keeper = ended(monkeypatch, "taken", state, "gone", restarts=restarts)
    assert (keeper.broken, keeper.why) == ((True, "") if goes_on else (False, "gone"))


@pytest.mark.parametrize(("state", "fetched"), [("TIMEOUT", True), ("CANCELLED by 0", False)])
def test_results_are_fetched_if_the_limit_of_the_queue_ends_a_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], state: str, *, fetched: bool
) -> None:
    keeper = ended(monkeypatch, "taken", state, "gone", restarts=0, fetch=["out"])
    keeper.run.write("started", slots={"none.invalid": 1})
    keeper.run.code.mkdir()
    keeper.fetch()
    # It has tried to get them from that node.
    assert (keeper.fetched, "out could not be fetched from none.invalid" in capfd.readouterr().out) == (fetched,) * 2


@pytest.mark.parametrize(("restarts", "why"), [(0, "ended: rank 1 on node-2 has not met .* for 30 s"), (1, "")])
def test_a_rank_that_lets_others_wait_too_long_ends_what_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], restarts: int, why: str
) -> None:
    slots: Any = {"node-1": 1, "node-2": 1}
    monkeypatch.setattr(Reports, "missing", lambda *_: "rank 1 on node-2 has not met the others through Horovod")
    keeper = ended(monkeypatch, "look", slots, restarts=restarts, meet_within=30)
    assert re.match(why, keeper.why)
    assert keeper.broken == bool(restarts)
    keeper.look(slots)
    assert "has not met" in capfd.readouterr().out
