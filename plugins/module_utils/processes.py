"""Find and end the processes of an account."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

# Debian keeps it for no account, as programs mistake it for an error.
NOBODYS = 65535


def processes(uid: int) -> list[int]:
    """The processes of an account that have not ended."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == uid and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                pids.append(int(entry.name))
    return pids


def kill_all(uid: int) -> None:
    """Kill all processes of an account at once.

    A program that forks all the time is another process before a list of processes is read. The kernel lets nothing
    fork while it kills whatever the sender may kill: as real or effective root, that would be the whole machine.
    """
    if (child := os.fork()) == 0:
        try:
            # With this real user, they cannot stop it either.
            os.setresuid(NOBODYS, uid, NOBODYS)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def end_all(uid: int, seconds: float) -> None:
    """Kill all processes of an account until none is left."""
    if uid == 0:
        raise ValueError("the processes of root are those of the machine")
    until = time.monotonic() + seconds
    kill_all(uid)
    while left := processes(uid):
        if time.monotonic() > until:
            raise TimeoutError(f"processes {', '.join(map(str, left))} do not end; restart the node")
        time.sleep(0.2)
        kill_all(uid)
