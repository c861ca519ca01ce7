"""Fetch a file with a limit on size and time; nodes use it too, so it needs only the standard library."""

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

BLOCK = 1 << 20
# A file that nodes pass on is checked piece by piece; a node passes on what it has checked.
PIECE = 16 << 20
# A file may take this long, plus its size at this rate in bytes per second, slower than any network fit for training.
BASE_S = 120
SLOWEST_RATE = 1 << 16

Outcome = TypeVar("Outcome")


class TooMuchError(OSError):
    """More was sent than allowed; nothing of it is kept."""


def within(seconds: float, work: Callable[[], Outcome], otherwise: str = "incomplete") -> Outcome:
    """Do work within a time limit, in a thread, as a server that trickles data never triggers a socket timeout."""
    outcomes: queue.SimpleQueue[tuple[Outcome | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((work(), None))
        except BaseException as error:
            outcomes.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        outcome, error = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"{otherwise} after {round(seconds, 1):g} seconds") from None
    if error:
        raise error
    return outcome  # type: ignore[return-value]


def blocks(answer: Any, limit: int) -> Iterator[bytes]:
    """Read a response block by block, and raise an error if it is too long or too short."""
    count = 0
    while block := _block(answer):
        count += len(block)
        if count > limit:
            raise TooMuchError(f"more than {limit} bytes were sent")
        yield block
    if missing := getattr(answer, "length", 0):
        raise ConnectionError(f"the transfer stopped {missing} bytes before the end")


def _block(answer: Any) -> bytes:
    """Read a block; callers must be able to tell a lost network from a full disk, and both can be a plain OSError."""
    try:
        block: bytes = answer.read1(BLOCK)
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error
    return block


def read(answer: Any, limit: int) -> bytes:
    """Read a short response into memory."""
    return b"".join(blocks(answer, limit))


def copy(answer: Any, target: Path, limit: int) -> str:
    """Write a response to a file and return its sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for block in blocks(answer, limit):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def download(opened: Callable[[], Any], target: Path, limit: int) -> str:
    """Open a URL, write the response to a file and return its sha256."""

    def work() -> str:
        with contextlib.closing(opened()) as answer:
            return copy(answer, target, limit)

    return within(time_limit(limit), work)


def time_limit(size: int) -> float:
    """The seconds that a file of this size may take."""
    return BASE_S + size / SLOWEST_RATE
