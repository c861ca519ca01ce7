"""Fetch a file from other nodes, which may be hostile, while passing on what is there; the depot has the rest."""

import hashlib
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any

from ansible_collections.farandole.cluster.plugins.module_utils import serving
from ansible_collections.farandole.cluster.plugins.module_utils.depot import DamagedError, ask, words
from ansible_collections.farandole.cluster.plugins.module_utils.fetching import PIECE, blocks, time_limit, within

CONNECT_S = 5
BLOCK = 1 << 18
# Bytes per second below which the next source is asked: a third of 100 Mbit/s is more, and a node sends to two others
# at most when it is asked. On a slower network nodes end at the depot, as they would without peers.
FLOOR = 2 << 20
ANSWER = re.compile(rb"HTTP/1\.[01] (\d{3})")
ANSWER_BYTES = 4096
# How a node takes part, as the control machine decides.
PEERS = {
    "address": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "patience": {"type": "int", "required": True},
    "sources": {"type": "list", "elements": "dict", "required": True},
    "children": {"type": "list", "elements": "str", "required": True},
    "grandchildren": {"type": "list", "elements": "str", "required": True},
}


class PeerError(Exception):
    """Why a node is of no use as a source."""


class Checked:
    """A file that grows by pieces whose sha256 was right, and tells of each."""

    def __init__(self, file: IO[bytes], size: int, pieces: Sequence[str], tell: Callable[[], None]) -> None:
        self.file, self.size, self.pieces, self.tell = file, size, pieces, tell
        self.done, self.whole = 0, hashlib.sha256()

    def take(self, content: Iterable[bytes]) -> None:
        """Add what a source sends from here on."""
        piece = bytearray()
        for block in content:
            piece += block
            while self.done < self.size and len(piece) >= (length := min(PIECE, self.size - self.done)):
                self.add(bytes(piece[:length]))
                del piece[:length]
        if self.done < self.size:
            raise DamagedError(f"it is shorter than {self.size} bytes")

    def add(self, piece: bytes) -> None:
        """Add a piece."""
        got, wanted = hashlib.sha256(piece).hexdigest(), self.pieces[self.done // PIECE]
        if got != wanted:
            raise DamagedError(f"from byte {self.done} on, its sha256 is {got}, expected {wanted}")
        self.file.write(piece)
        self.file.flush()
        self.whole.update(piece)
        self.done += len(piece)
        self.tell()


class Shared:
    """A file that nodes pass on: from where this one got it, and how often a source was of no use."""

    def __init__(self, pieces: Sequence[str], order: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.pieces, self.order, self.warn = pieces, order, warn
        self.source, self.retries = "", 0

    def get(self, url: str, target: Path, size: int) -> str:
        """Fetch it, pass on what is there, and return its sha256."""
        path = f"/{url.rpartition('/')[2]}"
        with target.open("wb") as file, closing(serving.start(target, path, size, self.order)) as passing:
            checked = Checked(file, size, self.pieces, passing.tell)
            if not any(self.try_peer(source, checked, path) for source in self.order["sources"]):
                self.source = "the depot"
                within(time_limit(size), lambda: checked.take(from_depot(url, checked.done, size)))
        return checked.whole.hexdigest()

    def try_peer(self, source: Mapping[str, str], checked: Checked, path: str) -> bool:
        """Fetch what is missing from a node; returns whether that is all."""
        self.source, port = source["name"], self.order["port"]
        try:
            checked.take(from_peer(source["address"], path, checked.done, checked.size, self.order, self.retries == 0))
        except (DamagedError, PeerError) as error:
            self.retries += 1
            why = f"sent wrong bytes of {path[1:]}" if isinstance(error, DamagedError) else error
            self.warn(
                f"{self.source} {why}. The next source is asked for the rest; check what listens there on port {port}"
            )
            return False
        return True


def from_depot(url: str, offset: int, size: int) -> Iterator[bytes]:
    """What the depot sends from an offset on."""
    with closing(ask(url, offset)) as answer:
        # 206 is a part, anything else the whole.
        skip = 0 if answer.status == 206 else offset
        for block in blocks(answer, size - offset + skip):
            yield block[skip:]
            skip = max(0, skip - len(block))


def from_peer(address: str, path: str, offset: int, size: int, order: Mapping[str, Any], wait: bool) -> Iterator[bytes]:
    """What another node sends from an offset on, as long as it is fast enough; it can be anything."""
    pace = Pace(order["patience"])
    request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nRange: bytes={offset}-\r\n\r\n"
    try:
        connection, block = connect(address, request.encode(), order, pace, wait)
        with connection:
            while offset < size:
                if not block and not (block := pace.receive(connection, BLOCK)):
                    raise PeerError("stopped before the end")
                yield block[: size - offset]
                offset, block = offset + len(block), b""
    except OSError as error:
        raise PeerError(f"cannot be reached: {words(error)}") from error


def connect(
    address: str, request: bytes, order: Mapping[str, Any], pace: "Pace", wait: bool
) -> tuple[socket.socket, bytes]:
    """Ask another node from the address that it knows, perhaps waiting until it has this file."""
    until = time.monotonic() + order["patience"]
    while True:
        is_last = not wait or time.monotonic() > until
        with ExitStack() as stack:
            # It may not listen yet, or still pass on another file.
            try:
                place, own = (address, order["port"]), (order["address"], 0)
                connection = stack.enter_context(socket.create_connection(place, CONNECT_S, own))
                status, block = begin(connection, request, pace)
                if status == b"206":
                    stack.pop_all()
                    return connection, block
                if status != b"404" or is_last:
                    raise PeerError(f"answered {status.decode() if status else 'no HTTP'}")
            except (ConnectionRefusedError, ConnectionResetError):
                if is_last:
                    raise
        time.sleep(0.2)


def begin(connection: socket.socket, request: bytes, pace: "Pace") -> tuple[bytes, bytes]:
    """The status of an answer, and what has come of its content."""
    connection.settimeout(1)
    connection.sendall(request)
    received = b""
    while b"\r\n\r\n" not in received:
        block = pace.receive(connection, ANSWER_BYTES)
        received += block
        if not block or len(received) > 2 * ANSWER_BYTES:
            raise PeerError("gave no valid answer")
    head, _, block = received.partition(b"\r\n\r\n")
    status = ANSWER.match(head)
    return status[1] if status else b"", block


class Pace:
    """Whether a source sends enough, in the seconds that are spent waiting for it."""

    def __init__(self, patience: float) -> None:
        self.patience, self.waited, self.count = patience, 0.0, 0
        self.marks = deque([(0.0, 0)])

    def receive(self, connection: socket.socket, most: int) -> bytes:
        """What comes next; nothing at the end."""
        while True:
            since, block = time.monotonic(), None
            with suppress(TimeoutError):
                block = connection.recv(most)
            self.waited += time.monotonic() - since
            self.count += len(block or b"")
            self.judge()
            if block is not None:
                return block

    def judge(self) -> None:
        """Refuse a source from which too little came lately."""
        if self.waited - self.marks[-1][0] >= 1:
            self.marks.append((self.waited, self.count))
        while len(self.marks) > 1 and self.waited - self.marks[1][0] >= self.patience:
            self.marks.popleft()
        seconds, count = self.waited - self.marks[0][0], self.count - self.marks[0][1]
        if seconds >= self.patience and count < FLOOR * seconds:
            raise PeerError(f"sent {count >> 10} KiB in {seconds:.0f} s")
