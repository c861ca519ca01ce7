"""Run a training, end it when its time is over or it hangs, and judge whether all ranks trained together."""

import os
import queue
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from farandole.core.text import one_line
from farandole.node.caffe.plan import Plan
from farandole.node.head.reap import end

# Seconds for a job with a failed check to end by itself, and for one whose ranks are all done: with several ranks per
# node, Debian's MPICH 4.0.2 sometimes hangs in MPI_Finalize.
AFTER_FAILURE, AFTER_DONE = 20, 30
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PLACE, BEGUN, DONE = "rank of caffe.sh", "Starting Multi-node Optimization in MLSL environment", "Optimization Done."
# The lines that count, by their kinds; the first that matches is a line's kind.
PATTERNS = {
    PLACE: r"rank of caffe\.sh on (\S+) machine (\S+)",
    "size": r"group size: (\d+)",
    BEGUN: BEGUN,
    DONE: DONE,
    "test": r"Test net output #\d+: (\S+) = (\S+)",
    # How the launcher names a rank that has ended too early.
    "lost": r"PID \d+ RUNNING AT (\S+)",
    "failed": "(.*Check failed.*)",
    "bad": "(.*(?:srun: error|error while loading|Segmentation fault|Killed|No space left|out of memory).*)",
}
CURES = {
    "SerializeToOstream": "the snapshot could not be written: look at the folder of snapshot_prefix and its disk",
    "Killed": "look at its memory: `journalctl -k` there says whether the kernel ended it",
    "": "the lines above it say more",
}


class Log:
    """The lines of a log that count, by their kinds: the rank, which the launcher's own have not, and what they say."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[int | None, list[str]]]] = {kind: [] for kind in PATTERNS}

    def read(self, line: str) -> None:
        label = re.match(r"\[(\d+)\] ?", line)
        for kind, pattern in PATTERNS.items():
            if match := re.search(pattern, line[label.end() :] if label else line):
                values = [one_line(value) for value in match.groups()]
                self.lines[kind].append((int(label[1]) if label else None, values))
                return

    def values(self, kind: str) -> list[list[str]]:
        return [values for _, values in self.lines[kind]]

    def tested(self) -> list[str]:
        """The last value of each output of the net."""
        return [f"{name} {value}" for name, value in dict(self.values("test")).items()]

    def where(self, rank: int | None) -> str:
        host = "".join(f" on {values[0]}" for at, values in self.lines[PLACE] if at == rank)
        return "the launcher" if rank is None else f"rank {rank}{host}"


def catch_signals() -> None:
    """Let a signal end the job as Ctrl-C does; one that was ignored from the start, as by nohup, stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def follow(job: subprocess.Popen[bytes], log: Log, ranks: int, time_limit: int) -> str:
    """Show and read a job's lines until it ends; returns what went wrong, or nothing."""
    lines: queue.Queue[bytes] = queue.Queue(10000)

    def collect() -> None:
        for line in job.stdout or ():
            lines.put(line)

    # Something that the job leaves behind may hold its output open.
    threading.Thread(target=collect, daemon=True).start()
    reader = select.poll()
    reader.register(1, 0)
    limits = {f"the time limit of {time_limit} s was over": time.monotonic() + time_limit}
    while not (over := [why for why, until in limits.items() if time.monotonic() > until]):
        try:
            text = lines.get(timeout=0.5).decode(errors="replace").rstrip("\n")
        except queue.Empty:
            if (status := job.poll()) is not None:
                return f"its launcher ended with status {status}" if status else ""
        else:
            log.read(text)
            print(text, flush=True)
        if reader.poll(0):
            # The ssh session of the user is lost, for example.
            raise BrokenPipeError
        if log.lines["failed"]:
            hangs = f"a check of Caffe failed {AFTER_FAILURE} seconds ago, and it hangs since then"
            limits.setdefault(hangs, time.monotonic() + AFTER_FAILURE)
        if len(log.lines[DONE]) == ranks:
            limits.setdefault("", time.monotonic() + AFTER_DONE)
    return over[0] and f"it was ended on all its nodes, because {over[0]}"


def run(plan: Plan, time_limit: int) -> tuple[Log, str]:
    """Run a training; returns its log, and what went wrong."""
    log = Log()
    job = subprocess.Popen(
        plan.command(), env=plan.environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp,
    )  # fmt: skip
    try:
        return log, follow(job, log, plan.ranks, time_limit)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end(job)
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def judge(log: Log, plan: Plan, has_model: bool, ended: str) -> list[str]:
    """Why a training has failed; empty if it succeeded. `ended` says so if its launcher failed, or we ended it."""
    missing = list(islice(wrong(log, plan, has_model), 1))
    if not (ended or missing):
        # Then a line that looks bad was not.
        return []
    told = [
        f"{log.where(rank)} said: {text}. Cure: {next(cure for part, cure in CURES.items() if part in text)}"
        for rank, (text,) in [*log.lines["failed"], *log.lines["bad"]][:5]
    ]
    cure = "its last lines in the log say why, or `journalctl -k` there, if the kernel ended it"
    lost = [f"{host}: a rank ended before the training was over. Cure: {cure}" for (host,) in log.values("lost")[-1:]]
    return [*([ended] if ended else []), *told, *lost, *missing]


def wrong(log: Log, plan: Plan, has_model: bool) -> Iterator[str]:
    """What a good training leaves behind and this one has not; the first says most."""
    if (sizes := {size for (size,) in log.values("size")}) != {str(plan.ranks)}:
        why = f"Not all began together: {plan.launcher} is not of the MPI of caffe, or they could not find each other"
        yield f"group size: {plan.ranks} is wanted, the log has {', '.join(sorted(sizes)) or 'none'}. {why}"
    for text in (PLACE, BEGUN, DONE):
        ranks = [rank for rank, _ in log.lines[text]]
        silent = [log.where(rank) for rank in range(plan.ranks) if rank not in ranks]
        if silent or len(ranks) != plan.ranks:
            yield f"`{text}` is there {len(ranks)} times, wanted {plan.ranks}; not from: {', '.join(silent[:5]) or '-'}"
    if len({machine for _, machine in log.values(PLACE)}) != len(plan.nodes):
        hosts = ", ".join(sorted({host for host, _ in log.values(PLACE)}))
        yield f"the ranks ran on fewer or more machines ({hosts}) than wanted: {', '.join(plan.nodes)}"
    outputs = log.tested()
    if plan.solver.tests and not (outputs and all(re.search(r" -?[0-9.]+(e[+-]?\d+)?$", text) for text in outputs)):
        yield f"the solver tests the net, but not every `Test net output` is a number: {', '.join(outputs) or 'none'}"
    if not has_model:
        yield f"{plan.nodes[0]}: the model {plan.solver.model} was not written by this training"
