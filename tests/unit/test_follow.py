"""Which rank failed first, and why, as the output of a job tells it."""

from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.jobs import follow, told
from farandole.jobs.follow import first_cause, first_end, in_words
from farandole.jobs.login import Head

SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
# What Slurm prints of a rank that it ends after another one.
CANCELLED = (
    "[1] slurmstepd-node-2: error: *** STEP 2.1 ON node-2 CANCELLED AT 2026-11-25T03:08:32 ***",
    "[1] srun: error: node-2: task 0: Killed",
    "Process 1 exit with status code 137.",
)
NOTICED = "mpirun noticed that process rank 1 with PID 2029 on node node-2 exited on signal 9 (Killed)."
KILLED = "it was ended by SIGKILL"


@pytest.mark.parametrize(
    ("lines", "code", "raised"),
    [
        ((f"[0] HorovodInternalError: {SHUT_DOWN}", "[1] ValueError: negative"), "", "[1] ValueError: negative"),
        ((f"[0] RuntimeError: {SHUT_DOWN}", "[1] mine.OddError: x"), "", "[1] mine.OddError: x"),
        ((f"[0] horovod.common.exceptions.HorovodInternalError: {SHUT_DOWN}",), "horovod-shut-down", ""),
        (("[0] step 1", "[1] Errors: none"), "", ""),
    ],
)
def test_the_rank_that_failed_is_told_and_not_the_others(lines: tuple[str, ...], code: str, raised: str) -> None:
    match, line = first_cause(lines)
    assert (match.cause.code if match else "", line) == (code, raised)


@pytest.mark.parametrize(
    ("lines", "first", "reason"),
    [
        (("Process 2 exit with status code 7.",), 2, "it ended with exit status 7"),
        ((f"[0] x: {SHUT_DOWN}", *(f"Process {n} exit with status code {s}." for n, s in ((0, 1), (1, 7)))), 1, "it "),
        (("Process 0 exit with status code 143.", "Process 1 exit with status code 137."), 1, KILLED),
        (("  Process name: [[37815,1],1]", "  Exit code:    127"), 1, "it was not found"),
        # What says that a rank was killed makes it no victim.
        ((f"[0] x: {SHUT_DOWN}", "[1] Killed", "Process 1 exit with status code 137."), 1, KILLED),
        (("[0] Killed", f"[1] x: {SHUT_DOWN}", "Process 0 exit with status code 137.", *CANCELLED), 0, KILLED),
        ((NOTICED,), 1, KILLED),
        ((f"[0] x: {SHUT_DOWN}", "  Process name: [[3,1],0]", "  Exit code:    1"), -1, ""),
        (("[0] Process 3 exit with status code 3.",), -1, ""),
        (("Process 3 exit with status code 0.",), -1, ""),
    ],
)
def test_the_rank_that_failed_by_itself(lines: tuple[str, ...], first: int, reason: str) -> None:
    rank, status = first_end(lines)
    assert rank == first
    assert rank < 0 or in_words(status).startswith(reason)


@pytest.mark.parametrize(
    ("said", "is_its_own"),
    [
        ("run 7: failed with exit status 255", True),
        ("Welcome\nrun 7: failed with exit status 255", True),
        ("error: there is no run 7", True),
        ("Timeout, server node-1 not responding.", False),
        ("", False),
    ],
)
def test_a_lost_connection_is_not_the_end_of_a_run_that_has_ended_since(
    said: str, is_its_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(f"echo '{said}' >&2; exit 255\n")
    head = Head("node-1", ("sh", str(tmp_path / "ssh")), "trainer@node-1", ())
    monkeypatch.setattr(follow, "has_ended", lambda *_: True)
    monkeypatch.setattr(follow, "known", lambda *_: None)
    monkeypatch.setattr(follow, "explain", lambda *_: None)
    if is_its_own:
        assert follow.follow(head, "7") == 255
    else:
        with pytest.raises(FarandoleError, match="connection to node-1 was lost"):
            follow.follow(head, "7")


def test_what_nodes_print_cannot_rule_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    told.show("[0] loss 1\r[0] loss 2\x1b]0;title\x07\x1b[2J\x9b1A\u202eend\n")
    printed = capsys.readouterr().out
    assert printed.startswith("[0] loss 1\n[0] loss 2")
    assert printed.endswith("end\n")
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*printed}


@pytest.mark.parametrize(
    ("launcher", "lines", "cause"),
    [
        ("horovod", ["[1] ValueError: bad"], "rank 1 on node-1: ValueError: bad"),
        ("horovod", ["Process 1 exit with status code 7."], "rank 1 on node-1 failed: it ended with exit status 7"),
        # Of these it starts one on each node, and they start the ranks.
        ("torchrun", ["[1] [rank3]: ValueError: bad"], "torchrun on node-2: [rank3]: ValueError: bad"),
        (
            "accelerate",
            ["Process 1 exit with status code 7."],
            "accelerate on node-2 failed: it ended with exit status 7",
        ),
    ],
)
def test_a_number_is_a_rank_or_a_node(
    launcher: str, lines: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = told.State(
        number="1", launcher=launcher, ended=True, why="", fetched=True, complete=True, late="", with_head=False,
        lost=(), slots=(("node-1", 2), ("node-2", 2)),
    )  # fmt: skip
    follow.explain(Head("node-1", (), "", ()), state, lines)
    assert capsys.readouterr().err.startswith(f"cause: {cause} [")
