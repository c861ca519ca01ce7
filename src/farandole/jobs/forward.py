"""A port of a run's first node on this machine, for nobody but the user."""

import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.jobs.login import Head
from farandole.jobs.told import console

CONNECTIONS = Path("/proc/net/tcp")
# Connections at a time, each of which is a process.
AT_ONCE = 64


class PortError(FarandoleError):
    """A port of this machine cannot be used."""


@dataclass(frozen=True)
class Ports:
    """A port of this machine, and the one on the node to which it leads."""

    here: int
    there: int

    def __str__(self) -> str:
        return f"127.0.0.1:{self.here}"


def parsed(text: str) -> Ports:
    """What --forward names."""
    found = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", text)
    here, there = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not (0 < here < 1 << 16 and 0 < there < 1 << 16):
        raise FarandoleError(f"--forward {text}: write 8888, or 9999:8888 for another port on this machine")
    return Ports(here, there)


def listening(ports: Ports) -> socket.socket:
    """Listen on this machine, for programs on it alone."""
    try:
        return socket.create_server(("127.0.0.1", ports.here), backlog=AT_ONCE)
    except OSError as error:
        other = f"another one: --forward {ports.here % 60000 + 1}:{ports.there}"
        raise PortError(f"--forward: port {ports.here} of this machine: {error.strerror}; take {other}") from None


def is_mine(connection: socket.socket, ports: Ports) -> bool:
    """Whether the program at the other end, on this machine, is the user's."""
    there = f"0100007F:{connection.getpeername()[1]:04X} 0100007F:{ports.here:04X} "
    rows = (line.split() for line in CONNECTIONS.read_text().splitlines() if there in line)
    # One that no program holds any more has the number of root, and no inode.
    return any(int(row[7]) in (os.getuid(), 0) and row[9] != "0" for row in rows)


def begin(command: list[str], connection: int) -> subprocess.Popen[bytes]:
    """Start what passes on the bytes of a connection. An interrupt is for this process alone."""
    return subprocess.Popen(
        command, stdin=connection, stdout=connection, stderr=subprocess.DEVNULL, start_new_session=True
    )


@contextmanager
def forwarded(head: Head, number: str, ports: Ports | None) -> Iterator[None]:
    """Pass connections on to the first node of a run meanwhile."""
    if not ports:
        yield
        return
    processes: list[subprocess.Popen[bytes]] = []

    command = head.command("farandole", "_connect", number, str(ports.there))

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            processes[:] = [process for process in processes if process.poll() is None]
            # It may have been given up.
            with suppress(OSError), connection:
                if is_mine(connection, ports) and len(processes) < AT_ONCE:
                    processes.append(begin(command, connection.fileno()))

    with listening(ports) as server:
        console.print(f"http://{ports} is port {ports.there} of the run's first node, until this command ends")
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Wakes the thread.
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for process in processes:
                process.kill()
                process.wait()
