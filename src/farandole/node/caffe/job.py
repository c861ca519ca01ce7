"""Run a training in a process group of its own, and end it on all nodes when its time is over or it hangs."""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from types import FrameType

from farandole.node.caffe.log import DONE, Log
from farandole.node.caffe.plan import Plan

# Seconds for a job to end when asked to, for one with a failed check to end by itself, and for one whose ranks are all
# done: with several ranks per node, Debian's MPICH 4.0.2 sometimes hangs in MPI_Finalize.
PATIENCE, AFTER_FAILURE, AFTER_DONE = 10, 20, 30
NOT_ENDED = "it did not end"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedError(BaseException):
    """A signal asked for the end of the job."""


def catch_signals() -> None:
    """Let a signal end the job; one that was ignored from the start, as by nohup, stays ignored."""

    def end(number: int, _: FrameType | None) -> None:
        raise EndedError(signal.Signals(number).name)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def kill(job: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, number)


def reap(job: subprocess.Popen[bytes]) -> None:
    """End a job: asked first, so that its launcher ends the ranks on all nodes, then by force."""
    kill(job, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(PATIENCE)
    kill(job, signal.SIGKILL)
    job.wait()


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
    lines: queue.Queue[bytes | None] = queue.Queue(10000)

    def collect(output: Iterable[bytes]) -> None:
        for line in output:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=collect, args=[job.stdout], daemon=True).start()
    until, closed, since = time.monotonic() + time_limit, False, dict[str, float]()
    while time.monotonic() < until:
        line: bytes | None = b""
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=0.5)
        closed = closed or line is None
        # Something that it left behind may hold its output open.
        if not line and (closed or line == b"") and job.poll() is not None:
            return ""
        if line:
            text = line.decode(errors="replace").rstrip("\n")
            log.read(text)
            print(text, flush=True)
        if unread():
            raise BrokenPipeError("nobody reads its output any more")
        if why := overdue(log, ranks, since):
            return why
    return f"the time limit of {time_limit // 3600}:{time_limit // 60 % 60:02}:{time_limit % 60:02} was over"


def run(plan: Plan, time_limit: int) -> tuple[Log, int, str]:
    """Run a training; returns its log, its status and why it had to be ended."""
    log, folder = Log(), tempfile.mkdtemp(prefix="caffe.")
    hostfile = Path(folder, "hosts")
    try:
        hostfile.write_text(plan.hosts())
        job = subprocess.Popen(
            plan.command(str(hostfile)),
            env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Not a session of its own: the stack's mpirun ends with the ssh session that it was started from.
            preexec_fn=os.setpgrp,
        )
        try:
            ended = follow(job, log, plan.ranks, time_limit)
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            reap(job)
        return log, job.returncode, ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)
