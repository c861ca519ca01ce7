"""What the compiled parts of a wheel need, read from real libraries and from damaged ones."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from farandole.stack import libraries
from farandole.stack.libraries import for_cuda, needed

from .packages import write_wheel

# Some library of this machine with dependencies.
LIBRARY = Path(sys.executable).resolve()


def test_needed_libraries_are_those_that_readelf_names() -> None:
    shown = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    wanted = re.findall(r"\(NEEDED\) .*\[(.*)\]", shown)
    assert wanted
    assert needed(LIBRARY.read_bytes()) == wanted


def test_damaged_libraries_are_no_reason_to_fail() -> None:
    whole = LIBRARY.read_bytes()[: 1 << 16]
    generator = random.Random(1)  # noqa: S311
    for _ in range(300):
        damaged = bytearray(whole[: generator.randrange(64, len(whole))])
        for _ in range(20):
            damaged[generator.randrange(4, min(len(damaged), 1024))] = generator.randrange(256)
        needed(bytes(damaged))
    assert needed(b"") == needed(b"\x7fELF\x02\x01" + b"\xff" * 200) == needed(b"#!/bin/sh") == []


def test_a_library_of_any_size_costs_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ("torch==2.13.0",)
    bomb = write_wheel(tmp_path, "bomb", "1.0", torch, content={"a.so": LIBRARY.read_bytes()})
    monkeypatch.setattr(libraries, "LARGEST", LIBRARY.stat().st_size - 1)
    monkeypatch.setattr(libraries, "needed", lambda _: ["libc10_cuda.so"])
    assert for_cuda(bomb) == ""
    monkeypatch.setattr(libraries, "LARGEST", LIBRARY.stat().st_size)
    assert for_cuda(bomb) == "a.so needs libc10_cuda.so"
    # Every entry of the dynamic section would become a Python object.
    endless = bytearray(LIBRARY.read_bytes()[:64]) + struct.pack("<IIQQQQQQ", 2, 0, 120, 0, 0, 1 << 62, 0, 8)
    struct.pack_into("<QxxxxxxxxxxxxxxHH", endless, 32, 64, 56, 1)
    endless += bytes(1 << 24)
    tracemalloc.start()
    try:
        assert needed(bytes(endless)) == []
        assert tracemalloc.get_traced_memory()[1] < 3 * len(endless)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("requires", [(), ("torchmetrics",)])
def test_only_what_needs_torch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requires: tuple[str, ...]
) -> None:
    """A zip that is no wheel of PyTorch's family may have libraries of any size."""
    monkeypatch.setattr(libraries, "needed", lambda _: ["libc10_cuda.so"])
    assert for_cuda(write_wheel(tmp_path, "six", "1.0", requires, content={"a.so": b"\x7fELF"})) == ""
