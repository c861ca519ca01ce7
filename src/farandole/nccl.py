"""NCCL's debs: whether they fit a node's driver and CUDA toolkit, and how the depot serves them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from farandole.stack.catalogue import load

DEB = re.compile(r"\d+\.\d+\.\d+-\S+")
CUDA = re.compile(r"\+cuda((\d+)\.\d+)$")
# From CUDA 11 on, a driver that runs one minor version runs all of that major version.
MINOR_VERSIONS_COMPATIBLE = 11


def numbers(version: str) -> list[int]:
    """Split a version into numbers, for comparison."""
    return [int(part) for part in re.findall(r"\d+", version)]


@functools.cache
def driver_floors() -> dict[str, str]:
    """The oldest driver for each CUDA version in the catalogue."""
    rows = load().components["cuda"]
    return {cuda: row["needs"]["driver"]["want"].removeprefix(">=") for cuda, row in rows.items()}


def driver_floor(cuda: str) -> str:
    """The oldest driver that runs code built with this CUDA; empty if the catalogue does not know it."""
    floors, major = driver_floors(), numbers(cuda)[0]
    if major < MINOR_VERSIONS_COMPATIBLE:
        return floors.get(cuda, "")
    return next((floor for known, floor in floors.items() if numbers(known)[0] == major), "")


def nccl_misfit(version: str, driver: str, cuda: str) -> str:
    """Why the debs of this version do not fit the driver and CUDA found; empty if they do."""
    if not DEB.fullmatch(version):
        return f"nccl_version is {version!r}: give the exact version of the debs, for example 2.27.3-1+cuda12.9"
    suffix = CUDA.search(version)
    if not suffix:
        return ""
    built, major = suffix.groups()
    floor = driver_floor(built)
    if driver and numbers(driver) < numbers(floor):
        return (
            f"NCCL {version} is built with CUDA {built}, which needs the NVIDIA driver {floor} or newer, and the node "
            f"has {driver}: upgrade the driver, or set nccl_version to one that was built with an older CUDA"
        )
    if cuda and numbers(cuda)[:1] != [int(major)]:
        return (
            f"NCCL {version} is built with CUDA {built}, and the node has the CUDA toolkit {cuda}: set nccl_version to "
            f"one that was built with that version, or install CUDA {major}"
        )
    return ""


def depot_debs(files: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Files of the control machine with their names on the depot and their sizes."""
    return [{**file, "name": f"debs/{Path(file['path']).name}", "size": _size(Path(file["path"]))} for file in files]


def _size(path: Path) -> int:
    # The task that sends the file reports that it is missing.
    return path.stat().st_size if path.is_file() else 0
