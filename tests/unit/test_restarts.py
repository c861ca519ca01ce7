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
from farandole.node.head.job import RunKeeper
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
        assert first == {"node-1": 1, "node-2": 1}
        with taken(head, node_2=1):
            # A free node takes the place of a lost one.
            assert instead({"node-1"}, 2) == {"node-2": 1, "node-3": 1}
            assert instead({"node-1", "node-3"}, 1) == {"node-2": 1}
            assert instead({"node-1", "node-3"}, 2) == {}
            assert instead({"node-1", "node-3"}, 0) == {}
            # It keeps what it had of those that are left, and others get no more than the rest.
            assert [uses for number, _, _, uses in status.others() if number == "9"] == [{"node-2": 1}]
            assert instead({"node-1"}, 0) == {"node-2": 1, "node-3": 1}


def test_a_node_that_is_left_out_meanwhile_is_not_taken_again(head: Path) -> None:
    with claimed(Run(9), {**WISH, "np": 2}) as (first, _, instead):
        assert first == {"node-1": 1, "node-2": 1}
        (head / "hostfile").write_text("node-2 slots=2\nnode-3 slots=1\n")
        assert instead({"node-3"}, 0) == {"node-2": 2}
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


@pytest.mark.parametrize(("done", "left"), [(0, ["saved/2", "train.py"]), (1, ["log", "saved/2", "train.py", "x/log"])])
def test_a_node_keeps_what_a_run_has_written_there_but_not_its_checkpoints(
    done: int, left: list[str], tmp_path: Path
) -> None:
    of_run = restarts()
    of_run.done = done
    for file in ("here/train.py", "here/saved/2", "there/saved/3", "there/log", "there/x/log"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    runs.ran("rsync", "--archive", *of_run.deleting(), f"{tmp_path}/here/", f"{tmp_path}/there/")
    files = [str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert sorted(files) == left


def test_a_start_that_cannot_be_leaves_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (run.code / "saved").exists()


def test_the_same_failure_after_progress_is_another_one() -> None:
    of_run = restarts()
    for step in ("1", "2", "3"):
        of_run.read(b"[0] OSError: a file server is away\n")
        assert of_run.refusal(1, []) == ""
        (of_run.path / step).touch()


def test_checkpoints_that_the_head_lacks_are_not_removed() -> None:
    of_run = restarts()
    of_run.done = 1
    assert "--filter=R /saved/***" in of_run.deleting()
    of_run.uncopied = ["no space"]
    assert "--filter=R /saved/***" not in of_run.deleting()


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
