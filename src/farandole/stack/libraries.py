"""Which libraries the compiled parts of a wheel need, as only the wheel itself tells what it was built for."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from zipfile import ZipFile

# The half of PyTorch that its builds for CPUs do not have.
CUDA = re.compile(r"lib(?:torch|c10)_cuda\b")
NEEDS_TORCH = re.compile(rb"^Requires-Dist: torch\b", re.MULTILINE)
# Of the ELF format: kinds of segments, and tags of dynamic entries.
LOADED, DYNAMIC = 1, 2
NEEDED, STRINGS = 1, 5
# Nothing that a wheel may contain takes more of this machine's memory.
LARGEST, LONGEST = 1 << 30, 1 << 16


def for_cuda(wheel: Path) -> str:
    """The file in a wheel that loads only beside a PyTorch for CUDA, and the library that it needs; or nothing."""
    with ZipFile(wheel) as files:
        names = [one.filename for one in files.infolist() if one.file_size <= LARGEST]
        about = [name for name in names if name.endswith(".dist-info/METADATA")]
        if not any(NEEDS_TORCH.search(files.read(name)) for name in about):
            return ""
        for name in names:
            if name.endswith(".so") and (found := next(filter(CUDA.match, needed(files.read(name))), "")):
                return f"{name} needs {found}"
    return ""


def needed(data: bytes) -> list[str]:
    """The libraries that a shared object (ELF, 64 bits, little-endian) needs; none of any other file."""
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    try:
        (table,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
        # Kind, flags, offset, address, physical address, size in the file.
        segments = [struct.unpack_from("<IIQQQQ", data, table + size * number) for number in range(count)]
        start, length = next((one[2], one[5]) for one in segments if one[0] == DYNAMIC)
        entries = list(struct.iter_unpack("<QQ", data[start : start + min(length, LONGEST) // 16 * 16]))
        strings = next(value for tag, value in entries if tag == STRINGS)
        at = next(one[2] - one[3] for one in segments if one[0] == LOADED and 0 <= strings - one[3] < one[5]) + strings
        begins = [at + value for tag, value in entries if tag == NEEDED]
        return [data[begin : data.index(b"\0", begin)].decode() for begin in begins]
    except (struct.error, StopIteration, ValueError, OverflowError):
        return []
