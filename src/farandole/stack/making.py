"""Make a lock: choose every version for the nodes and the request, and look into the user's own wheels."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT, version
from farandole.stack import solver
from farandole.stack.cache import digest
from farandole.stack.catalogue import FACTS, NONE, load, near
from farandole.stack.collect import built_for_cuda, inspect
from farandole.stack.index import Build, Wheel
from farandole.stack.lock import FORMAT, Lock, identity
from farandole.stack.nodes import Nodes
from farandole.stack.problem import Known, Problem, Request
from farandole.stack.rules import Solution


def new(
    nodes: Nodes, request: Request, configure: Sequence[str], known: Known, cache: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Make a lock in which the user's own packages have no MPI of their own, and load beside PyTorch."""
    lock = make(nodes, request, configure, known)
    if lock["own"]:
        inspect(lock, cache, say)
        if cuda := built_for_cuda(lock, cache):
            say(f"{cuda}, and no index has one for CPUs that fits, so torch has to be one for CUDA, too")
            lock = make(nodes, request, configure, known, cuda)
            inspect(lock, cache, say)
    return lock


def make(
    nodes: Nodes,
    request: Request,
    configure: Sequence[str] = (),
    known: Known = Known(),  # noqa: B008, frozen
    cuda: str = "",
) -> dict[str, Any]:
    """Resolve a request into a lock; `cuda` is why PyTorch has to be a build for CUDA even on CPUs."""
    known = known if known.until else replace(known, until=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
    problem = Problem(load(), nodes, request, known, cuda)
    solution = solver.solve(problem)
    lock = {
        "format": FORMAT,
        "id": "",
        "platform": {"os": nodes.platform.os, "arch": nodes.platform.arch, "python": nodes.platform.python},
        "wanted": {
            "frameworks": list(request.frameworks),
            "pins": sorted(text for text, _ in request.pins),
            "accelerator": problem.accelerator,
            "packages": sorted(requirement for requirement, _ in request.packages),
        },
        "versions": _versions(solution),
        "openmpi": _openmpi(solution, configure),
        "horovod": _horovod(problem, solution),
        "nccl": {"version": solution.rows["nccl"].version} if "nccl" in solution.rows else None,
        "wheels": [_file(wheel) for wheel in solution.wheels if not wheel.build],
        # The wheels that the stack would not have without the user's own packages.
        "own": [wheel.name for wheel in solution.wheels if wheel.package not in solution.base],
        "index": {
            "until": known.until,
            "files": {wheel.file: {"from": wheel.url, "size": wheel.size} for wheel in _all(solution.wheels)},
        },
        "why": {name: text for name, text in solver.why(problem, solution).items() if name not in FACTS},
        "farandole": version(),
    }
    if sources := [_source(wheel, wheel.build) for wheel in solution.wheels if wheel.build]:
        lock["sources"] = sources
    # Plain data, even if Ansible passed in its own string types.
    plain: dict[str, Any] = json.loads(json.dumps(lock))
    return {**plain, "id": identity(plain)}


def _file(wheel: Wheel) -> dict[str, Any]:
    return {"name": wheel.name, "version": wheel.version, "file": wheel.file, "sha256": wheel.sha256}


def _source(wheel: Wheel, build: Build) -> dict[str, Any]:
    tools = [_file(tool) for tool in wheel.tools]
    return {**_file(wheel), "requires": list(build.requires), "modules": list(build.modules), "tools": tools}


def _all(wheels: Iterable[Wheel]) -> Iterator[Wheel]:
    for wheel in wheels:
        yield wheel
        yield from wheel.tools


def _versions(solution: Solution) -> dict[str, str]:
    versions = {"cuda": NONE, "nccl": NONE} | {name: row.version for name, row in solution.rows.items()}
    versions |= {wheel.package: wheel.version for wheel in solution.wheels}
    return {name: version for name, version in sorted(versions.items()) if name not in FACTS}


def _openmpi(solution: Solution, configure: Sequence[str]) -> dict[str, Any]:
    row = solution.rows["openmpi"]
    return {
        "version": row.version,
        "sources": load().sources(row),
        "patches": _patches(load().data["openmpi_patches"]),
        "recipe": _recipe("openmpi"),
        "configure": list(configure or load().data["openmpi_configure"]),
    }


def _horovod(problem: Problem, solution: Solution) -> dict[str, Any]:
    row = solution.rows["horovod"]
    return {
        "version": row.version,
        "file": row.data["file"],
        "sha256": row.data["sha256"],
        "patches": _patches(row.data["patches"]),
        "recipe": _recipe("horovod"),
        "environment": dict(sorted(_environment(problem).items())),
    }


def _patches(folder: str) -> list[dict[str, str]]:
    return [
        {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted((ROOT / folder).glob("*.patch"))
    ]


def _recipe(role: str) -> str:
    """A digest of how a role compiles, without the comments."""
    lines = (ROOT / f"roles/{role}/files/build.sh").read_text().splitlines()
    return digest([line for line in lines if not line.startswith("#")])


def _environment(problem: Problem) -> dict[str, str]:
    """The settings of Horovod's build; nothing is left to autodetection."""
    frameworks = {"tensorflow": "TENSORFLOW", "pytorch": "PYTORCH"}
    settings = {
        f"HOROVOD_WITH{'' if name in problem.request.frameworks else 'OUT'}_{word}": "1"
        for name, word in frameworks.items()
    }
    settings |= {"HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1"}
    # By default it uses what the builder's CPU has, and another node may have less. TensorFlow needs AVX anyway.
    settings["HOROVOD_BUILD_ARCH_FLAGS"] = "-mavx -mf16c"
    if problem.accelerator == "cuda":
        settings |= {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
    return settings


def known_of(lock: Lock | None, upgrade: Sequence[str] | None) -> Known:
    """What a former lock decides about a new one: all of it, or nothing of the packages that are to be upgraded."""
    if lock is None or upgrade == []:
        return Known()
    catalogue, versions = load(), dict(lock["versions"])
    for name in map(catalogue.named, upgrade or ()):
        if name not in versions or catalogue.is_component(name):
            raise FarandoleError(f"--upgrade {name}: the lock has no package of that name{near(name, versions)}")
        del versions[name]
    kept = {name: version for name, version in versions.items() if not catalogue.is_component(name) and version != NONE}
    return Known(kept, "" if upgrade else lock.get("index", {}).get("until", ""))
