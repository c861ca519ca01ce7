"""How the launcher of Intel Caffe judges a log, and how it ends a job."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.node.caffe import job, log, plan, solver


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
    kept = [text for text in made.values() if text is not None]
    return [f"[{rank}] {text.format(rank=rank, host=rank + 1)}" for text in kept for rank in (0, 1)]


def verdict(said: list[str], *why: str, model: bool = True, tests: bool = True) -> list[str]:
    read = log.Log()
    for line in said:
        read.read(line)
    about = solver.Solver("s", ["n"], [], "p", "p_iter_100.caffemodel", tests)
    planned = plan.Plan(["node-1", "node-2"], 1, "/m/mpirun", ["/c/bin/caffe"])
    return log.judge(read, planned, about, model, list(why))


def test_a_good_training_is_green() -> None:
    assert verdict(lines()) == []
    assert verdict(lines(accuracy=None), tests=False) == []
    # A net may have such words in it.
    assert verdict([*lines(), '[0] layer { name: "Killed" }']) == []
    assert verdict(lines(), "mpirun ended with status 1") == ["mpirun ended with status 1"]
    assert verdict(lines(), model=False) == ["node-1: the model p_iter_100.caffemodel was not written by this training"]


GOOD, DONE = lines(), "`Optimization Done.` is there "
LOST = ["node-2: a rank ended before the training was over", f"{DONE}1 times, wanted 2: not from rank 1 on node-2"]
FAILED = "[1] F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) \x1b[2J"
NAN = "Test net output #0: accuracy = nan"


@pytest.mark.parametrize(
    ("said", "starts"),
    [
        (lines(group="group size: 1"), ["group size: 2 is wanted, the log has 1. Each rank has trained alone"]),
        (lines(group=None), ["there is no line `group size: 2`"]),
        (lines(start=None), [f"`{log.BEGUN}` is there 0 times, wanted 2: not from rank 0 on node-1, rank 1 on node-2"]),
        (lines(accuracy=None), ["the solver tests the net, but not every `Test net output` is a number: none"]),
        (
            lines(accuracy=NAN),
            ["the solver tests the net, but not every `Test net output` is a number: accuracy = nan"],
        ),
        (lines(where="rank of caffe.sh on node-1 machine 0aa"), ["the ranks ran on 1 machines (node-1), wanted 2: "]),
        (lines(where=None), ["0 ranks were started, wanted 2: not 0, 1"]),
        (GOOD[:-1], [f"{DONE}1 times, wanted 2: not from rank 1 on node-2"]),
        ([*GOOD, GOOD[-1]], [f"{DONE}3 times, wanted 2"]),
        ([*GOOD[:-1], GOOD[-2]], [f"{DONE}2 times, wanted 2: not from rank 1 on node-2"]),
        ([*GOOD[:-1], "=   PID 2156 RUNNING AT node-2"], LOST),
        (
            [*GOOD[:-2], GOOD[-1], FAILED],
            [
                "rank 1 on node-2 said: F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) \\x1b[2J. "
                "Cure: the snapshot could not be written",
                f"{DONE}1 times, wanted 2: not from rank 0 on node-1",
            ],
        ),
    ],
)
def test_a_training_that_failed_is_red_with_the_reasons(said: list[str], starts: list[str]) -> None:
    assert [why[: len(start)] for why, start in zip(verdict(said), starts, strict=True)] == starts


class Shell(plan.Plan):
    """A plan whose job is a line of shell."""

    def command(self, hostfile: str) -> list[str]:
        return ["/bin/sh", "-c", self.launcher, hostfile]


def ran(script: str, seconds: int = 100) -> tuple[log.Log, int, str]:
    return job.run(Shell(["node-1", "node-2"], 1, script, []), seconds)


@pytest.fixture
def signals() -> Iterator[None]:
    """A job that ends leaves signals ignored, so that its end cannot be disturbed."""
    kept = {number: signal.getsignal(number) for number in job.SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_job_is_shown_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    read, status, ended = ran("echo '[0] group size: 2'; exit 3")
    assert (read.sizes, status, ended) == ({2}, 3, "")
    assert capsys.readouterr().out == "[0] group size: 2\n"


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("output", ["", "exec >&- 2>&-;"])
def test_a_job_that_hangs_is_ended_with_its_children(tmp_path: Path, output: str) -> None:
    _, _, ended = ran(f"{output} sleep 1000 & echo $! >{tmp_path}/child; wait", 1)
    assert ended == "the time limit of 1 s was over"
    about = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    # On a busy machine, a process dies some time after its signal.
    until = time.monotonic() + 10
    while (alive := about.exists() and "zombie" not in about.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("F1124 io.cpp:69] Check failed: proto.SerializeToOstream", "a check of Caffe failed"),
        ("[0] Optimization Done.\\n[1] Optimization Done.", job.NOT_ENDED),
    ],
)
def test_a_job_that_failed_or_is_done_is_ended_early(monkeypatch: pytest.MonkeyPatch, lines: str, why: str) -> None:
    monkeypatch.setattr(job, "AFTER_FAILURE", 0.2)
    monkeypatch.setattr(job, "AFTER_DONE", 0.2)
    _, _, ended = ran(f"printf '{lines}\\n'; sleep 1000")
    assert ended.startswith(why)
