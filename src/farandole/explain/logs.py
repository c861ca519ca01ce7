"""Read logs of any size and origin as numbered lines of plain text, a piece at a time."""

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

from farandole.core.errors import FarandoleError

# What is read at once. A longer line is read in parts, which overlap so that no message is cut in two.
PIECE, OVERLAP = 1 << 16, 1 << 10
# More of a log is not read: it ends somewhere, even if it is /dev/zero.
MOST = 1 << 28
CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|\x08|\x00")
PACKED = {b"\x1f\x8b": "zcat", b"\xfd7zXZ": "xzcat", b"BZh": "bzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}

codecs.register_error("farandole.latin", lambda error: _as_latin(error))


def _as_latin(error: UnicodeError) -> tuple[str, int]:
    """What is not UTF-8 is most likely Latin-1, which has a letter for every byte."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("latin-1"), error.end


def lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """The lines of a log with their numbers, without terminal codes; what overwrote a line is a line of its own."""
    number, rest = 1, ""
    for text in _texts(stream, name):
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            yield from ((number, part) for part in parts(line))
            number += 1
        while len(rest) > PIECE:
            yield from ((number, part) for part in parts(rest[:PIECE]))
            rest = rest[PIECE - OVERLAP :]
    yield from ((number, part) for part in parts(rest))


def parts(line: str) -> Iterator[str]:
    """A line without terminal codes, in parts that are not too long."""
    for shown in line.strip("\r").split("\r"):
        plain = CONTROL.sub("", shown)
        for start in range(0, max(1, len(plain) - OVERLAP), 3 * OVERLAP):
            yield plain[start : start + 4 * OVERLAP]


def _texts(stream: BinaryIO, name: str) -> Iterator[str]:
    """The text of a log, a piece at a time."""
    raw = stream.read(PIECE)
    if packed := next((program for magic, program in PACKED.items() if raw.startswith(magic)), ""):
        raise FarandoleError(f"{name} is compressed; run {packed} on it and pipe that into: farandole explain -")
    encoding, mark = _encoding(raw)
    decoder = codecs.getincrementaldecoder(encoding)("farandole.latin" if encoding == "utf-8" else "replace")
    raw, taken = raw[len(mark) :], 0
    while raw and taken < MOST:
        taken += len(raw)
        yield decoder.decode(raw)
        raw = stream.read(PIECE)
    yield decoder.decode(b"", final=True)


def _encoding(start: bytes) -> tuple[str, bytes]:
    """The encoding of a log that begins with these bytes, and its byte order mark."""
    for mark, encoding in MARKS.items():
        if start.startswith(mark):
            return encoding, mark
    # Without a mark, UTF-16 shows by the zero byte of almost every letter.
    half = len(start) // 2
    for odd, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if half and start[odd::2].count(0) > 0.7 * half and start[1 - odd :: 2].count(0) < 0.1 * half:
            return encoding, b""
    return "utf-8", b""
