"""How the launcher of Intel Caffe judges a log, and how it ends a job."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.node.caffe import plan, training


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


def verdict(said: list[str], ended: str = "", model: bool = True, tests: bool = True) -> list[str]:
    log = training.Log()
    for line in said:
        log.read(line)
    about = plan.Solver("s", ["n"], [], "p_iter_100.caffemodel", tests)
    planned = plan.Plan(["node-1", "node-2"], 1, "/m/mpiexec.hydra", ["/c/bin/caffe"], {}, about)
    return training.judge(log, planned, model, ended)


def test_a_good_training_is_green() -> None:
    assert verdict(lines()) == []
    assert verdict(lines(accuracy=None), tests=False) == []
    # A net may have such words in it.
    assert verdict([*lines(), '[0] layer { name: "Killed" }']) == []
    assert verdict(lines(), "its launcher ended with status 1") == ["its launcher ended with status 1"]
    assert verdict(lines(), model=False) == ["node-1: the model p_iter_100.caffemodel was not written by this training"]


GOOD, DONE = lines(), "`Optimization Done.` is there "
LOST = ["node-2: a rank ended before the training was over", f"{DONE}1 times, wanted 2; not from: rank 1 on node-2"]
FAILED = "[1] F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) \x1b[2J"
TESTS = "the solver tests the net, but not every `Test net output` is a number: "
NAN = "Test net output #0: accuracy = nan"
NOBODY = "; not from: rank 0 on node-1, rank 1 on node-2"


@pytest.mark.parametrize(
    ("said", "starts"),
    [
        (lines(group="group size: 1"), ["group size: 2 is wanted, the log has 1. Not all began together"]),
        (lines(group=None), ["group size: 2 is wanted, the log has none"]),
        (lines(start=None), [f"`{training.BEGUN}` is there 0 times, wanted 2{NOBODY}"]),
        (lines(accuracy=None), [f"{TESTS}none"]),
        (lines(accuracy=NAN), [f"{TESTS}accuracy nan"]),
        (lines(where="rank of caffe.sh on node-1 machine 0aa"), ["the ranks ran on fewer or more machines (node-1)"]),
        (lines(where=None), ["`rank of caffe.sh` is there 0 times, wanted 2; not from: rank 0, rank 1"]),
        (GOOD[:-1], [f"{DONE}1 times, wanted 2; not from: rank 1 on node-2"]),
        ([*GOOD, GOOD[-1]], [f"{DONE}3 times, wanted 2"]),
        ([*GOOD[:-1], GOOD[-2]], [f"{DONE}2 times, wanted 2; not from: rank 1 on node-2"]),
        ([*GOOD[:-1], "=   PID 2156 RUNNING AT node-2"], LOST),
        (
            [*GOOD[:-2], GOOD[-1], FAILED],
            [
                "rank 1 on node-2 said: F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) \\x1b[2J. "
                "Cure: the snapshot could not be written",
                f"{DONE}1 times, wanted 2; not from: rank 0 on node-1",
            ],
        ),
    ],
)
def test_a_training_that_failed_is_red_with_the_reasons(said: list[str], starts: list[str]) -> None:
    assert [why[: len(start)] for why, start in zip(verdict(said), starts, strict=True)] == starts


class Shell(plan.Plan):
    """A plan whose job is a line of shell."""

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", self.launcher]


def ran(script: str, seconds: int = 100) -> tuple[training.Log, str]:
    return training.run(Shell(["node-1", "node-2"], 1, script, [], {}, plan.Solver("s", [], [], "m", False)), seconds)


@pytest.fixture
def signals() -> Iterator[None]:
    """A job that ends leaves signals ignored, so that its end cannot be disturbed."""
    kept = {number: signal.getsignal(number) for number in training.SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_job_is_shown_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    log, why = ran("echo '[0] group size: 2'; exit 3")
    assert (log.values("size"), why) == ([["2"]], "its launcher ended with status 3")
    assert capsys.readouterr().out == "[0] group size: 2\n"
    assert ran("exit 0")[1] == ""


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", training.SIGNALS)
def test_a_signal_ends_a_job_and_one_that_was_ignored_does_not(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    training.catch_signals()
    assert signal.getsignal(number) == signal.SIG_IGN
    signal.signal(number, signal.SIG_DFL)
    training.catch_signals()
    with pytest.raises(KeyboardInterrupt):
        ran(f"sleep 0.5; kill -{number:d} $PPID; sleep 1000")


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("output", ["", "exec >&- 2>&-;"])
def test_a_job_that_hangs_is_ended_with_its_children(tmp_path: Path, output: str) -> None:
    _, why = ran(f"{output} sleep 1000 & echo $! >{tmp_path}/child; wait", 1)
    assert why == "it was ended on all its nodes, because the time limit of 1 s was over"
    about = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    # On a busy machine, a process dies some time after its signal.
    until = time.monotonic() + 10
    while (alive := about.exists() and "zombie" not in about.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("lines", "starts"),
    [
        (
            "F1124 io.cpp:69] Check failed: proto.SerializeToOstream",
            "it was ended on all its nodes, because a check of",
        ),
        ("[0] Optimization Done.\\n[1] Optimization Done.", ""),
    ],
)
def test_a_job_that_failed_or_is_done_is_ended_early(monkeypatch: pytest.MonkeyPatch, lines: str, starts: str) -> None:
    monkeypatch.setattr(training, "AFTER_FAILURE", 0.2)
    monkeypatch.setattr(training, "AFTER_DONE", 0.2)
    _, why = ran(f"printf '{lines}\\n'; sleep 1000")
    assert why.startswith(starts) and bool(why) == bool(starts)
