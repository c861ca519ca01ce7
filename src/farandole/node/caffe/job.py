"""Run a training in a process group of its own, and end it on all nodes when its time is over or it hangs."""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from farandole.node.caffe.log import DONE, Log
from farandole.node.caffe.plan import Plan
from farandole.node.head.reap import end

# Seconds for a job with a failed check to end by itself, and for one whose ranks are all done: with several ranks per
# node, Debian's MPICH 4.0.2 sometimes hangs in MPI_Finalize.
AFTER_FAILURE, AFTER_DONE = 20, 30
NOT_ENDED = "it did not end"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedError(BaseException):
    """A signal asked for the end of the job."""


def catch_signals() -> None:
    """Let a signal end the job; one that was ignored from the start, as by nohup, stays ignored."""

    def raise_it(number: int, _: FrameType | None) -> None:
        raise EndedError(signal.Signals(number).name)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, raise_it)


def unread() -> bool:
    """Whether the other end of our output is closed: its ssh session is lost, for example."""
    watch = select.poll()
    watch.register(1, 0)
    return bool(watch.poll(0))


def overdue(log: Log, ranks: int, since: dict[str, float]) -> str:
    """Why a job has to be ended before its time; `since` holds when it failed or was done."""
    now = time.monotonic()
    if log.failed and now - since.setdefault("failed", now) > AFTER_FAILURE:
        return f"a check of Caffe failed {AFTER_FAILURE} seconds ago, and it hangs since then"
    if sum(log.seen[DONE].values()) == ranks and now - since.setdefault("done", now) > AFTER_DONE:
        return NOT_ENDED
    return ""


def follow(job: subprocess.Popen[bytes], log: Log, ranks: int, time_limit: int) -> str:
    """Show and read a job's lines until it ends; returns why it had to be ended, or nothing."""
    lines: queue.Queue[bytes] = queue.Queue(10000)

    def collect(output: Iterable[bytes]) -> None:
        for line in output:
            lines.put(line)

    # Something that the job leaves behind may hold its output open.
    threading.Thread(target=collect, args=[job.stdout], daemon=True).start()
    until, since = time.monotonic() + time_limit, dict[str, float]()
    while time.monotonic() < until:
        try:
            text = lines.get(timeout=0.5).decode(errors="replace").rstrip("\n")
        except queue.Empty:
            if job.poll() is not None:
                return ""
        else:
            log.read(text)
            print(text, flush=True)
        if unread():
            raise BrokenPipeError("its output is no longer read")
        if why := overdue(log, ranks, since):
            return why
    return f"the time limit of {time_limit} s was over"


def run(plan: Plan, time_limit: int) -> tuple[Log, int, str]:
    """Run a training; returns its log, its status and why it had to be ended."""
    log, folder = Log(), tempfile.mkdtemp(prefix="caffe.")
    hostfile = Path(folder, "hosts")
    try:
        hostfile.write_text(plan.hosts())
        job = subprocess.Popen(
            plan.command(str(hostfile)), env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,
        )  # fmt: skip
        try:
            ended = follow(job, log, plan.ranks, time_limit)
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            end(job)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        return log, job.wait(), ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)
