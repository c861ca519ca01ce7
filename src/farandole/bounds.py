"""Bounds for a talk with somebody who may never end it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_S = 0.05
MIB = 1 << 20


@contextmanager
def bounded(seconds: float, mib: int) -> Iterator[list[str]]:
    """End the programs that this process has started when it takes longer or needs more memory; the list says which."""
    broken: list[str] = []
    over = threading.Event()
    until, most = time.monotonic() + seconds, resident() + mib * MIB

    def watch() -> None:
        # Again and again, as what is ended may be started once more by its caller.
        while not over.wait(LOOK_S):
            if not broken and time.monotonic() > until:
                broken.append(f"no whole answer in {seconds:.0f} s")
            elif not broken and resident() > most:
                broken.append(f"an answer of more than {mib} MiB")
            if broken:
                end(descendants(os.getpid()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield broken
    finally:
        over.set()
        watcher.join()


def resident() -> int:
    """Bytes that this process has in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def descendants(process: int) -> list[int]:
    """The programs that a process has started, and theirs."""
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        # Its thread may have ended since.
        with suppress(OSError):
            found += map(int, file.read_text().split())
    return [*found, *(one for child in found for one in descendants(child))]


def end(processes: list[int]) -> None:
    """At once: what they were saying is not wanted any more."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
