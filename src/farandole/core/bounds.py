"""Limits on time and memory for talking to a node that may send without end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from farandole.core.fetching import TooMuchError

INTERVAL_S = 0.05
MIB = 1 << 20


def answer(command: Sequence[str], seconds: float, longest: int, source: IO[bytes] | None = None) -> tuple[str, int]:
    """What a command prints on both streams, one byte more than the longest at most, and its status.

    That is negative if the command was ended, after so many seconds or because it said more."""
    with subprocess.Popen(
        command, stdin=source or subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        late = threading.Timer(seconds, end_group, (process.pid,))
        late.start()
        try:
            output = process.stdout.read(longest + 1) if process.stdout else b""
            if len(output) > longest:
                end_group(process.pid)
            status = process.wait()
        finally:
            late.cancel()
    return output.decode(errors="replace"), status


def end_group(group: int) -> None:
    """Kill ssh, and what it has started to reach the node."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def bounded(seconds: float, mib: int) -> Iterator[None]:
    """Kill this process's children when a limit is exceeded; then raise a TimeoutError or a TooMuchError."""
    exceeded: list[Exception] = []
    ended = threading.Event()
    until, most = time.monotonic() + seconds, resident() + mib * MIB

    def watch() -> None:
        # Repeatedly, because the caller may start a killed program again.
        while not ended.wait(INTERVAL_S):
            if not exceeded and time.monotonic() > until:
                exceeded.append(TimeoutError(f"no complete answer in {seconds:.0f} s"))
            elif not exceeded and resident() > most:
                exceeded.append(TooMuchError(f"an answer of more than {mib} MiB"))
            if exceeded:
                end(descendants(os.getpid()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        # An error caused by the kill says less than the limit does.
        if not exceeded:
            raise
    finally:
        ended.set()
        watcher.join()
    if exceeded:
        raise exceeded[0]


def resident() -> int:
    """This process's resident memory in bytes; 0 if it is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def descendants(process: int) -> list[int]:
    """All direct and indirect children of a process."""
    children: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        # The thread may have ended in the meantime.
        with suppress(OSError):
            children += map(int, file.read_text().split())
    return [*children, *(descendant for child in children for descendant in descendants(child))]


def end(processes: list[int]) -> None:
    """Kill processes immediately; their output is no longer needed."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
