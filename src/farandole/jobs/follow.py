"""Show what a run prints until it ends, and if it failed, which rank was the first, and the cause in its output."""

import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence

from farandole.core.causes import causes
from farandole.core.errors import FarandoleError
from farandole.core.findings import some
from farandole.core.text import on_terminal, one_line
from farandole.explain.diagnosis import Hit, is_raised, of_job
from farandole.jobs.login import Head
from farandole.jobs.told import State, console, has_ended, known, show
from farandole.node.rank.place import OF_RUN

# Lines in which a cause is searched.
REMEMBERED, LONGEST = 2000, 1 << 16
# The exit status of ssh itself.
OF_SSH = 255
# What the head says at the end of a run, or of one that it refuses.
OF_HEAD = re.compile(r"^(error: |run \d+: )", re.MULTILINE)
OF_RANK = re.compile(r"\[(\d{1,6})\] (.*)")
# How the launchers say that a rank has ended: Gloo's of each, MPI's of the first one, by itself or by a signal; and the
# head, as Gloo's does not know the signal on another node.
ENDED = re.compile(
    r"^Process (\d{1,6}) exit with status code (-?\d{1,3})\.$|"
    r"^  Process name: \[\[\d+,\d+\],(\d{1,6})\]\n  Exit code:\s+(\d{1,3})$|"
    r"^mpirun noticed that process rank (\d{1,6}) with PID \d+ on node \S+ exited on signal (\d{1,2}) |"
    r"^farandole: rank (\d{1,6}) was ended by signal (\d{1,2})$",
    re.MULTILINE,
)
# Ended by the launcher, after another one.
TERMINATED = {143, -15}


def follow(head: Head, number: str) -> int:
    """Show what a run prints until it ends, and the cause if it failed; returns its exit status."""
    status, errors, lines = stream(head, "attach", number)
    # The run may also have ended since, or have this status itself.
    if status == OF_SSH and not (OF_HEAD.search(errors) and has_ended(head, number)):
        raise FarandoleError(
            f"the connection to {head.name} was lost ({one_line(errors) or 'no reason given'}); unless that node went "
            "down, the run goes on there; `farandole attach` shows it again, or how it ended"
        )
    sys.stderr.write(on_terminal(errors))
    if status and not errors.startswith("error: "):
        explain(head, known(head, number), lines)
    return status


def stream(head: Head, command: str, number: str) -> tuple[int, str, Sequence[str]]:
    """Show what a command on the head prints; returns its exit status, its errors, and its last lines."""
    lines: deque[str] = deque(maxlen=REMEMBERED)
    # An interrupt is for this process: the run is then ended in order, or goes on.
    with tempfile.TemporaryFile("w+", errors="replace") as errors, subprocess.Popen(
        head.command("farandole", command, *([number] if number else [])), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while line := process.stdout.readline(LONGEST) if process.stdout else "":
                lines.append(line.rstrip("\n"))
                show(line)
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        return status, errors.read(1 << 16), lines


def explain(head: Head, state: State, lines: Sequence[str]) -> None:
    """Say why a run failed, unless it was ended or refused, which the head says."""
    if state.with_head:
        tell("head-restarted", state, head.name, seen=head.name)
        return
    if state.why and not state.late:
        return
    hit, raised = first_cause(lines)
    first, status = first_end(lines)
    if state.late:
        tell("rank-late", state, "", seen=on_terminal(state.late))
    elif state.lost:
        # The ranks only tell that a connection broke.
        tell("node-silent", state, state.lost[0], seen=some(state.lost))
    elif first >= 0 and not raised and (hit is None or hit.cause.cascade):
        worker, host = worker_of(first, state)
        # Of a worker that a signal has ended on another node, ssh only says 255.
        code = "worker-killed" if killed(status) or status == OF_SSH else "worker-failed"
        tell(code, state, host, f"{worker} failed: {in_words(status)}")
    elif hit or raised:
        own = OF_RANK.match(raised)
        rank = hit.rank if hit else int(own[1]) if own else None
        worker, host = worker_of(rank, state) if rank is not None else ("", "a node")
        # A consequence says nothing of where its cause is.
        where = "" if rank is None or (hit and hit.cause.cascade) else f"{worker}: "
        cause = hit.cause.description({"host": host, **hit.fields}) if hit else one_line(own[2] if own else raised)
        code, fields = (hit.cause.code, hit.fields) if hit else ("worker-failed", {})
        tell(code, state, fields.get("host", host), f"{where}{on_terminal(cause)}")


def tell(code: str, state: State, host: str, message: str = "", **fields: str) -> None:
    """Print a cause and its cure, in which only nodes of the run are named."""
    cause = causes()[code]
    there = shlex.quote(host) if host in dict(state.slots) else "that node"
    console.print(f"cause: {message or cause.description(fields)} [{code}]")
    console.print(f"cure: {cause.remedy({'host': there})}")


def first_cause(lines: Sequence[str]) -> tuple[Hit | None, str]:
    """A cause of the catalogue, or the line of a rank's own exception, of which the others' are often a consequence."""
    verdict = of_job(lines)
    if verdict.roots:
        return verdict.roots[0], ""
    own = (line for line in lines if line.startswith("[") and is_raised(line) and not of_job([line]).cascades)
    raised = next(own, "")
    return None if raised or not verdict.cascades else verdict.cascades[-1], raised


def first_end(lines: Sequence[str]) -> tuple[int, int]:
    """The rank that failed by itself, and its exit status; -1 if the launcher does not say that."""
    others = [line for line in lines if any(not hit.cause.leads for hit in of_job([line]).cascades)]
    innocent = {int(rank[1]) for line in others if (rank := OF_RANK.match(line))}
    for match in ENDED.finditer("\n".join(lines)):
        number, status = (int(text) for text in match.groups() if text)
        status = -status if match[6] or match[8] else status
        if status and number not in innocent and status not in TERMINATED:
            return number, status
    return -1, 0


def killed(status: int) -> str:
    """The signal that ended a program, if its exit status says so; else empty."""
    number = status - 128 if status > 128 else -status
    return signal.Signals(number).name if number in {*signal.Signals} else ""


def in_words(status: int) -> str:
    """What an exit status means."""
    known = {
        126: "it could not be executed; start a Python program with python",
        127: "it was not found on this node",
        255: "its exit status is not known; see what it printed, or journalctl -k there if the memory was full",
    }
    if status in known:
        return known[status]
    if name := killed(status):
        memory = "; journalctl -k there shows if that was because memory was full" if name == "SIGKILL" else ""
        return f"it was ended by {name}{memory}"
    return f"it ended with exit status {status}"


def worker_of(number: int, state: State) -> tuple[str, str]:
    """What the launcher means by a number, and its node: of torchrun and accelerate it starts one on each."""
    of_node = state.launcher in OF_RUN
    host = host_of(number, [(node, 1) for node, _ in state.slots] if of_node else state.slots)
    return f"{state.launcher} on {host}" if of_node else f"rank {number} on {host}", host


def host_of(rank: int, slots: Sequence[tuple[str, int]]) -> str:
    """The node of a rank; the launcher fills them in order."""
    for node, ranks in slots:
        if rank < ranks:
            return on_terminal(node)
        rank -= ranks
    return "a node"
