"""Pass a file on to other nodes while it is still being fetched, from a process of an unprivileged account."""

import errno
import os
import pwd
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ansible_collections.farandole.cluster.plugins.module_utils.fetching import PIECE

ACCOUNT, NAME = "nobody", "farandole-peer"
# What is left of the time of a process that has the whole file: hosts that wait for their turn come later, and those
# behind a child that has everything only if that child is of no use to them.
IDLE_S, SERVED_S, MOST_S = 300, 30, 3600
# Seconds that one has to end, and how the kernel calls a socket that is listened to.
REPLACED_S, LISTENS = 5, "0A"
REQUEST_BYTES, REQUEST_S, SOCKET_S = 2048, 5, 60
# Connections of one address at a time: a node may ask again before the end of its former connection is noticed.
CONNECTIONS = 2
RANGE = re.compile(rb"\r\nRange: bytes=(\d{1,15})-\r\n", re.IGNORECASE)


class Passing:
    """The process that passes a file on, as seen by the one that fetches it; none if it has no descriptor."""

    def __init__(self, pipe: int | None = None) -> None:
        self.pipe = pipe

    def tell(self) -> None:
        """Say that there is another piece."""
        if self.pipe is not None:
            # It may have been killed.
            with suppress(OSError):
                os.write(self.pipe, b".")

    def close(self) -> None:
        """Say that no more pieces come; if any are missing, the other process ends at once."""
        if self.pipe is not None:
            os.close(self.pipe)


def start(target: Path, path: str, size: int, order: Mapping[str, Any]) -> Passing:
    """Start a process that passes a file on, unless there is nobody who would ask, or another program has the port."""
    if not order["children"]:
        return Passing()
    address = order["address"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = listen((address, order["port"]), family)
        # Of its own, as this process must not be able to write, and so that the file may be removed.
        content = target.open("rb", buffering=0)
        reader, writer = os.pipe()
        child = os.fork()
    except OSError:
        return Passing()
    if child:
        listener.close()
        content.close()
        os.close(reader)
        return Passing(writer)
    try:
        detach({listener.fileno(), content.fileno(), reader})
        Server(listener, content, reader, path, size, order).run()
    finally:
        os._exit(0)


def listen(place: tuple[str, int], family: int) -> socket.socket:
    """Listen, in place of a process that still passes on what an earlier run has sent."""
    until = time.monotonic() + (REPLACED_S if end_former(place, family) else 0)
    while True:
        try:
            return socket.create_server(place, family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
            time.sleep(0.05)


def end_former(place: tuple[str, int], family: int) -> bool:
    """End such a process, and return whether there was one."""
    packed = socket.inet_pton(family, place[0])
    # As the kernel writes it on machines with the lowest byte first.
    address = "".join(packed[at : at + 4][::-1].hex() for at in range(0, len(packed), 4))
    listens = f"{address}:{place[1]:04x}".upper()
    # The other one is missing where IPv6 is switched off.
    table = Path("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp")
    rows = map(str.split, table.read_text().splitlines())
    sockets = {f"socket:[{row[9]}]" for row in rows if (row[1], row[3]) == (listens, LISTENS)}
    found = False
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        # It may end meanwhile.
        with suppress(OSError):
            name = (process / "comm").read_text().strip()
            if name == NAME and sockets & {os.readlink(file) for file in (process / "fd").iterdir()}:  # noqa: PTH115
                os.kill(int(process.name), signal.SIGTERM)
                found = True
    return found


def detach(keep: Collection[int]) -> None:
    """Let go of all that the module has, such as its lock and Ansible's connection, and of root's rights."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number > 2 and number not in keep:
            # The list's own is closed already.
            with suppress(OSError):
                os.close(number)
    Path("/proc/self/comm").write_text(NAME)
    if os.geteuid() == 0:
        account = pwd.getpwnam(ACCOUNT)
        os.setgroups([])
        os.setresgid(*[account.pw_gid] * 3)
        os.setresuid(*[account.pw_uid] * 3)


class Server:
    """Answers requests for one file from the addresses that the control machine has named, and ends by itself."""

    def __init__(
        self, listener: socket.socket, content: IO[bytes], pipe: int, path: str, size: int, order: Mapping[str, Any]
    ) -> None:
        self.listener, self.content, self.pipe, self.size = listener, content, pipe, size
        self.asked = [f"GET {path} HTTP/1.{minor}".encode() for minor in (0, 1)]
        self.children = set(order["children"])
        self.allowed = self.children | set(order["grandchildren"])
        self.ready, self.active, self.served = 0, Counter[str](), set[str]()
        self.changed, self.last = threading.Condition(), time.monotonic()

    def run(self) -> None:
        """Serve until nobody needs it any more."""
        until = time.monotonic() + MOST_S
        threading.Thread(target=self.watch, daemon=True).start()
        self.listener.settimeout(1)
        while time.monotonic() < until and not self.is_over():
            # Nobody came in this second, or they have gone again.
            with suppress(OSError):
                connection, (address, *_) = self.listener.accept()
                with self.changed:
                    welcome = address in self.allowed and self.active[address] < CONNECTIONS
                    self.active[address] += welcome
                if welcome:
                    threading.Thread(target=self.answer, args=(connection, address), daemon=True).start()
                else:
                    connection.close()

    def is_over(self) -> bool:
        """Whether it has everything, and nobody has wanted it for a while."""
        with self.changed:
            idle = time.monotonic() - self.last
            busy = self.ready < self.size or self.active.total() > 0
            return not busy and idle > (SERVED_S if self.children <= self.served else IDLE_S)

    def watch(self) -> None:
        """Count the pieces that there are, and end with a module that ends before it has them all."""
        while told := os.read(self.pipe, 1 << 10):
            with self.changed:
                self.ready, self.last = min(self.size, self.ready + len(told) * PIECE), time.monotonic()
                self.changed.notify_all()
        if self.ready < self.size:
            os._exit(0)

    def answer(self, connection: socket.socket, address: str) -> None:
        """Answer a request."""
        try:
            with connection, suppress(OSError):
                offset, status = self.requested(connection)
                connection.settimeout(SOCKET_S)
                length = max(0, self.size - offset)
                head = f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n"
                if status.startswith("206"):
                    head += f"Content-Range: bytes {offset}-{self.size - 1}/{self.size}\r\n"
                connection.sendall(f"{head}\r\n".encode())
                self.send(connection, offset)
                if length:
                    self.served.add(address)
        finally:
            with self.changed:
                self.active[address] -= 1
                self.last = time.monotonic()

    def requested(self, connection: socket.socket) -> tuple[int, str]:
        """From where on the file is wanted, and the status of the answer; from its end if something else is wanted."""
        until, request = time.monotonic() + REQUEST_S, b""
        while b"\r\n\r\n" not in request and len(request) < REQUEST_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))
            if not (block := connection.recv(REQUEST_BYTES - len(request))):
                break
            request += block
        if request.partition(b"\r\n")[0] not in self.asked or not request.endswith(b"\r\n\r\n"):
            return self.size, "404 Not Found"
        if not (part := RANGE.search(request)):
            return 0, "200 OK"
        offset = int(part[1])
        return offset, "206 Partial Content" if offset < self.size else "416 Range Not Satisfiable"

    def send(self, connection: socket.socket, offset: int) -> None:
        """Send the file from an offset on, as soon as it is there."""
        while offset < self.size:
            with self.changed:
                while (ready := self.ready) <= offset:
                    self.changed.wait()
            offset += connection.sendfile(self.content, offset, ready - offset)
