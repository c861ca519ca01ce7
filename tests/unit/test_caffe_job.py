"""How the launcher of Intel Caffe judges a log, and how it ends a job."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.node.caffe import job, log, plan, solver


def planned() -> plan.Plan:
    return plan.Plan(["node-1", "node-2"], 1, "/m/mpirun", ["/c/bin/caffe"])


def lines(**changed: str | None) -> list[str]:
    """The log of a good training on two nodes, with each kind of line replaced, or left out."""
    made = {
        "where": "rank of caffe.sh on node-{host} machine {rank}aa",
        "group": "I1124 13:00:00.0  1 x.cpp:1] Number of groups: 1, group size: 2",
        "start": "I1124 13:00:00.0  1 x.cpp:1] Starting Multi-node Optimization in MLSL environment",
        "accuracy": "I1124 13:00:00.0  1 x.cpp:1]     Test net output #0: accuracy = 0.98",
        "done": "I1124 13:00:00.0  1 x.cpp:1] Optimization Done.",
        **changed,
    }
    return [
        f"[{rank}] {text.format(rank=rank, host=rank + 1)}"
        for text in made.values() if text is not None
        for rank in (0, 1)
    ]  # fmt: skip


def verdict(said: list[str], *why: str, model: bool = True, tests: bool = True) -> list[str]:
    found = log.Log()
    for line in said:
        found.read(line)
    about = solver.Solver("s", ["n"], [], "p", "p_iter_100.caffemodel", tests)
    return log.judge(found, planned(), about, model, list(why))


def test_a_good_training_is_green() -> None:
    assert verdict(lines()) == []
    assert verdict(lines(accuracy=None), tests=False) == []
    # A net may have such words in it.
    assert verdict([*lines(), '[0] layer { name: "Killed" }']) == []
    assert verdict(lines(), "mpirun ended with status 1") == ["mpirun ended with status 1"]


def test_separate_trainings_are_red() -> None:
    assert verdict(lines(group="Number of groups: 1, group size: 1")) == [
        "group size: 2 is wanted, the log has 1. Each rank has trained alone, or only with some others: /m/mpirun does "
        "not belong to the MPI of caffe, or the ranks could not find each other"
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group": None}, "there is no line `group size: 2`: the training did not begin"),
        ({"start": None}, "`Starting Multi-node Optimization in MLSL environment` is there 0 times, wanted 2: not from "
         "rank 0 on node-1, rank 1 on node-2"),
        ({"accuracy": None}, "the solver tests the net, but not every `Test net output` is a number: none"),
        ({"accuracy": "Test net output #0: accuracy = nan"},
         "the solver tests the net, but not every `Test net output` is a number: accuracy = nan"),
        ({"where": "rank of caffe.sh on node-1 machine 0aa"},
         "the ranks ran on 1 machines (node-1), wanted 2: node-1, node-2"),
        ({"where": None}, "0 ranks were started, wanted 2: not 0, 1"),
    ],
)  # fmt: skip
def test_each_missing_line_is_red(changed: dict[str, str | None], said: str) -> None:
    assert verdict(lines(**changed)) == [said]


def test_a_rank_that_does_not_end_and_a_missing_model_are_red() -> None:
    assert verdict(lines()[:-1]) == ["`Optimization Done.` is there 1 times, wanted 2: not from rank 1 on node-2"]
    assert verdict([*lines(), lines()[-1]]) == ["`Optimization Done.` is there 3 times, wanted 2"]
    assert verdict([*lines()[:-1], lines()[-2]]) == [
        "`Optimization Done.` is there 2 times, wanted 2: not from rank 1 on node-2"
    ]
    assert verdict(lines(), model=False) == ["node-1: the model p_iter_100.caffemodel was not written by this training"]


def test_a_rank_that_ends_too_early_is_named() -> None:
    assert verdict([*lines()[:-1], "=   PID 2156 RUNNING AT node-2"]) == [
        "node-2: a rank ended before the training was over. Cure: its last lines in the log say why, or `journalctl "
        "-k` there, if the kernel ended it",
        "`Optimization Done.` is there 1 times, wanted 2: not from rank 1 on node-2",
    ]


def test_a_failed_check_is_named_with_its_host_and_cure() -> None:
    failed = "[1] F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) \x1b[2J"
    assert verdict([*lines()[:-2], lines()[-1], failed]) == [
        "rank 1 on node-2 said: F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) ?[2J. Cure: the "
        "snapshot could not be written: look at the folder of snapshot_prefix and its disk",
        "`Optimization Done.` is there 1 times, wanted 2: not from rank 0 on node-1",
    ]


class Shell(plan.Plan):
    """A plan whose job is a line of shell."""

    def command(self, hostfile: str) -> list[str]:
        return ["/bin/sh", "-c", self.launcher, hostfile]


def ran(script: str, seconds: int) -> tuple[log.Log, int, str]:
    return job.run(Shell(["node-1", "node-2"], 1, script, []), seconds)


@pytest.fixture
def signals() -> Iterator[None]:
    """A job that ends leaves signals ignored, so that its end cannot be disturbed."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_job_is_shown_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    found, status, ended = ran("echo '[0] group size: 2'; exit 3", 20)
    assert (found.sizes, status, ended) == ({2}, 3, "")
    assert capsys.readouterr().out == "[0] group size: 2\n"


@pytest.mark.usefixtures("signals")
def test_a_job_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    _, _, ended = ran(f"sleep 1000 & echo $! >{tmp_path}/child; wait", 2)
    assert ended == "the time limit of 2 s was over"
    about = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    # On a busy machine, a process dies some time after its signal.
    until = time.monotonic() + 10
    while (alive := about.exists() and "zombie" not in about.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive


@pytest.mark.usefixtures("signals")
def test_a_failed_check_that_hangs_is_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "AFTER_FAILURE", 1)
    _, _, ended = ran("echo 'F1124 io.cpp:69] Check failed: proto.SerializeToOstream'; sleep 1000", 100)
    assert ended == "a check of Caffe failed 1 seconds ago, and it hangs since then"


@pytest.mark.usefixtures("signals")
def test_a_job_that_is_done_but_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "AFTER_DONE", 1)
    found, _, ended = ran("echo '[0] Optimization Done.'; echo '[1] Optimization Done.'; sleep 1000", 100)
    assert (ended, sum(found.seen[log.DONE].values())) == (job.NOT_ENDED, 2)


@pytest.mark.usefixtures("signals")
def test_a_job_that_closes_its_output_is_waited_for() -> None:
    _, _, ended = ran("echo '[0] Optimization Done.'; exec >&- 2>&-; sleep 1000", 3)
    assert ended == "the time limit of 3 s was over"
