"""NCCL's debs: whether they fit a node's driver and CUDA toolkit, and how the depot serves them."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farandole.core.findings import Finding, finding, refused, report
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


def decision(settings: Mapping[str, Any], host: str, probe: Mapping[str, Any]) -> dict[str, Any]:
    """Whether role nccl installs on a node, whether it is refused, and the findings as text."""
    findings = judge(settings, host, probe)
    shown = report(findings, "NCCL: {problems}.") if findings else ""
    return {"wanted": wanted(settings, probe), "refused": refused(findings), "report": shown}


def wanted(settings: Mapping[str, Any], probe: Mapping[str, Any]) -> bool:
    """Whether a node gets NCCL: if it is told to, or if it has a driver and a version is known."""
    install = str(settings.get("nccl_install", "auto")).lower()
    return install == "true" or bool(install == "auto" and settings.get("nccl_version") and probe.get("nvidia_driver"))


def judge(settings: Mapping[str, Any], host: str, probe: Mapping[str, Any]) -> list[Finding]:
    """Problems with the NCCL that a node is to get, by the variables of role nccl and by the node's probe."""
    if not wanted(settings, probe):
        return []
    return [*_source(settings, host), *_fit(str(settings["nccl_version"]), host, probe)]


def _source(settings: Mapping[str, Any], host: str) -> Iterator[Finding]:
    source, repository = settings.get("nccl_source", "repository"), settings.get("nccl_repository")
    if source == "files" and not settings.get("nccl_files"):
        yield finding("nccl-files-missing", host)
    # Unset in the inventory, it is NVIDIA's, which the role knows for every system that preflight accepts.
    if source == "repository" and repository is not None and not repository.get("key_fingerprint"):
        yield finding("nccl-repository-missing", host)


def _fit(version: str, host: str, probe: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the debs of this version fit the driver and CUDA toolkit of a node."""
    driver, toolkit = probe.get("nvidia_driver", ""), probe.get("cuda", "")
    if not DEB.fullmatch(version):
        yield finding("nccl-version-inexact", host, seen=repr(version))
    elif not driver:
        yield finding("nccl-driver-missing", host, version=version)
    if not (suffix := CUDA.search(version)):
        return
    built, major = suffix.groups()
    floor = driver_floor(built)
    if driver and numbers(driver) < numbers(floor):
        yield finding("nccl-driver-old", host, version=version, built=built, floor=floor, seen=driver)
    if toolkit and numbers(toolkit)[:1] != [int(major)]:
        yield finding("nccl-toolkit-differs", host, version=version, built=built, seen=toolkit, cuda=major)


def depot_debs(files: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Files of the control machine with their names on the depot and their sizes."""
    # The task that sends a file reports that it is missing.
    return [
        {**file, "name": f"debs/{path.name}", "size": path.stat().st_size if path.is_file() else 0}
        for file in files
        for path in [Path(file["path"])]
    ]
