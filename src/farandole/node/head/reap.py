"""Kill what still runs of a job on a node, found by the mark that its processes inherit.

The node gets this file over ssh, kills what is there, and prints its names: python3 -I - MARK
"""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# The variable that holds the mark, in the environment of every process of a job.
MARK = "FARANDOLE_JOB"
# Seconds that a job has to end by itself.
GRACE = 10
# In front of the name of a process that does not end.
STAYS = "!"
# Seconds that a process may take to end by itself after its job, and that killed ones may take to be gone.
LEFT, GONE = 3, 5


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job's process group, gently at first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
            return


def reap(node: str, mark: str, program: str, seconds: int) -> list[str] | None:
    """Run this program on a node, and return what it prints; None if the node does not answer."""
    login = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds // 2}", node]
    # Here a login would only cost time.
    command = [*([] if node == socket.gethostname() else login), "python3", "-I", "-", mark]
    try:
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.split() if done.returncode == 0 else None


def left(mark: bytes) -> Iterator[tuple[int, str]]:
    """The number and the name of each process of a job."""
    for entry in Path("/proc").iterdir():
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name), (entry / "comm").read_text().strip()
        except (OSError, ValueError):
            continue


def kill_all(found: Callable[[], Iterable[tuple[int, str]]]) -> list[str]:
    """Give the processes that are found time to end, then kill them until none is left; returns their names."""
    until, killed = time.monotonic() + LEFT, dict[int, str]()
    while any(found()) and time.monotonic() < until:
        time.sleep(0.1)
    while (now := dict(found())) and time.monotonic() < until + GONE:
        killed |= now
        for number in now:
            # Those of another account, as by sudo, cannot be killed.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
    # What waits in the kernel, as for storage that is gone, ends when that answers.
    return [f"{STAYS}{name}" if number in now else name for number, name in killed.items()]


def kill(mark: str) -> list[str]:
    """Kill what is left of a job, and remove its folders."""
    killed = kill_all(lambda: left(f"{MARK}={mark}".encode()))
    for folder in Path("/tmp").glob(f"farandole-{mark}-*"):  # noqa: S108
        # A rank that was killed could not remove it. Others can give theirs such a name, and take it away again.
        with suppress(OSError):
            facts = folder.lstat()
            if facts.st_uid == os.getuid() and stat.S_ISDIR(facts.st_mode):
                (folder / "meeting").unlink(missing_ok=True)
                folder.rmdir()
    return killed


if __name__ == "__main__":
    print(*kill(sys.argv[1]), sep="\n")
