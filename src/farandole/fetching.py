"""Fetch a file with a limit of bytes and of time; nodes use it too, so it needs the standard library alone."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

BLOCK = 1 << 20
# So long nothing at all may come.
SILENCE_S = 60
# A file may take so long, and this many bytes a second on top: slower than any network that trains.
PATIENCE_S = 120
SLOWEST = 1 << 16

Outcome = TypeVar("Outcome")


class TooMuchError(OSError):
    """More was sent than was announced; nothing of it is kept."""


def within(seconds: float, work: Callable[[], Outcome], otherwise: str = "not whole") -> Outcome:
    """What the work returns or raises; in a thread, as a server that drips never lets a socket's own limit pass."""
    came: queue.SimpleQueue[tuple[Outcome | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            came.put((work(), None))
        except BaseException as error:
            came.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        outcome, error = came.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"{otherwise} after {round(seconds, 1):g} seconds") from None
    if error:
        raise error
    return outcome  # type: ignore[return-value]


def blocks(answer: Any, limit: int) -> Iterator[bytes]:
    """An answer as it comes."""
    count = 0
    while block := answer.read1(BLOCK):
        count += len(block)
        if count > limit:
            raise TooMuchError(f"more than {limit} bytes were sent")
        yield block
    if missing := getattr(answer, "length", 0):
        raise ConnectionError(f"it broke off {missing} bytes before the end")


def read(answer: Any, limit: int) -> bytes:
    """All of a short answer."""
    return b"".join(blocks(answer, limit))


def copy(answer: Any, target: Path, limit: int) -> str:
    """Write an answer to a file; its sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for block in blocks(answer, limit):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def download(opened: Callable[[], Any], target: Path, limit: int) -> str:
    """Open and copy; the sha256 of what came."""

    def work() -> str:
        with contextlib.closing(opened()) as answer:
            return copy(answer, target, limit)

    return within(patience(limit), work)


def patience(limit: int) -> float:
    """Seconds in which so many bytes have to be there."""
    return PATIENCE_S + limit / SLOWEST


def from_depot(url: str, target: Path, size: int) -> str:
    """The same from the cluster's depot, where a proxy to the world may not get."""
    depot = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return download(lambda: depot.open(url, timeout=SILENCE_S), target, size)
