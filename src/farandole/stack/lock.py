"""stack.lock.yml: every component of a cluster's stack, with version, source and sha256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT, version
from farandole.inventory.state import newer
from farandole.stack import solver
from farandole.stack.catalogue import FACTS, NONE, load, near
from farandole.stack.index import Build, Wheel
from farandole.stack.nodes import Nodes, Probe
from farandole.stack.nodes import read as read_nodes
from farandole.stack.problem import Known, Problem, Request
from farandole.stack.solver import Solution

NAME = "stack.lock.yml"
FORMAT = 2
# Format 1 has no index and no packages of the user's.
READABLE = (1, 2)
HEAD = """\
# The stack of this cluster, down to the last file. Written by `farandole lock`; commit it, and do not edit it:
# set stack_frameworks, stack_pins, stack_packages, stack_accelerator and openmpi_configure instead.
"""
# In the order in which they are written.
KEYS = (
    "format", "id", "platform", "wanted", "versions", "openmpi", "horovod", "nccl", "wheels", "own", "sources", "index",
    "why", "farandole",
)  # fmt: skip
# What says nothing about what is installed, and what older locks, and most others, do not have.
NOT_IDENTITY, NOT_IN_1, SELDOM = ("id", "index", "why", "farandole"), {"own", "index"}, {"sources", "farandole"}
Lock = Mapping[str, Any]


def identity(lock: Lock) -> str:
    """The stack's id, a digest of everything but the reasons and the places of the files."""
    content = {key: value for key, value in lock.items() if key not in NOT_IDENTITY}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


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
            "pins": sorted(f"{name}=={version}" for name, version in request.pins),
            "accelerator": problem.accelerator,
            "packages": sorted(requirement for requirement, _ in request.packages),
        },
        "versions": _versions(solution),
        "openmpi": _openmpi(solution, configure),
        "horovod": _horovod(problem, solution),
        "nccl": {"version": solution.rows["nccl"].version} if "nccl" in solution.rows else None,
        "wheels": [_file(one) for one in solution.wheels if not one.build],
        # The wheels that the stack would not have without the user's own packages.
        "own": [one.name for one in solution.wheels if one.package not in solution.base],
        "index": {
            "until": known.until,
            "files": {one.file: {"from": one.url, "size": one.size} for one in _all(solution.wheels)},
        },
        "why": {name: text for name, text in solver.why(problem, solution).items() if name not in FACTS},
        "farandole": version(),
    }
    if sources := [_source(one, one.build) for one in solution.wheels if one.build]:
        lock["sources"] = sources
    # Plain data, even if Ansible passed in its own string types.
    plain: dict[str, Any] = json.loads(json.dumps(lock))
    return {**plain, "id": identity(plain)}


def _file(wheel: Wheel) -> dict[str, Any]:
    return {"name": wheel.name, "version": wheel.version, "file": wheel.file, "sha256": wheel.sha256}


def _source(wheel: Wheel, build: Build) -> dict[str, Any]:
    """Sources from which the builder makes a wheel."""
    tools = [_file(tool) for tool in build.tools]
    return {**_file(wheel), "requires": list(build.requires), "modules": list(build.modules), "tools": tools}


def _all(wheels: Iterable[Wheel]) -> Iterator[Wheel]:
    for wheel in wheels:
        yield wheel
        yield from wheel.build.tools if wheel.build else ()


def base_of(lock: Lock) -> dict[str, Any]:
    """The lock of the same stack without the user's own packages, which are installed beside it."""
    own = set(lock.get("own", ()))
    if not own:
        return dict(lock)
    wheels = [wheel for wheel in lock["wheels"] if wheel["name"] not in own]
    pins = [pin for pin in lock["wanted"]["pins"] if pin.partition("==")[0] not in own]
    index = lock["index"] | {"files": {wheel["file"]: lock["index"]["files"][wheel["file"]] for wheel in wheels}}
    base = {
        **{key: value for key, value in lock.items() if key != "sources"},
        "wanted": lock["wanted"] | {"pins": pins, "packages": []},
        "versions": {name: version for name, version in lock["versions"].items() if name not in own},
        "wheels": wheels,
        "own": [],
        "index": index,
        "why": {name: text for name, text in lock["why"].items() if name not in own},
    }
    return {**base, "id": identity(base)}


def own_wheels(lock: Lock) -> list[dict[str, Any]]:
    """The wheels of the user's own packages and of what only these need."""
    return [wheel for wheel in lock["wheels"] if wheel["name"] in set(lock.get("own", ()))]


def _versions(solution: Solution) -> dict[str, str]:
    found = {"cuda": NONE, "nccl": NONE} | {name: row.version for name, row in solution.rows.items()}
    found |= {wheel.package: wheel.version for wheel in solution.wheels}
    return {name: version for name, version in sorted(found.items()) if name not in FACTS}


def _openmpi(solution: Solution, configure: Sequence[str]) -> dict[str, Any]:
    row = solution.rows["openmpi"]
    return {
        "version": row.version,
        "sources": load().sources(row),
        "patches": _patches(load().data["openmpi_patches"]),
        "configure": list(configure or load().data["openmpi_configure"]),
    }


def _horovod(problem: Problem, solution: Solution) -> dict[str, Any]:
    row = solution.rows["horovod"]
    return {
        "version": row.version,
        "file": row.data["file"],
        "sha256": row.data["sha256"],
        "patches": _patches(row.data["patches"]),
        "environment": dict(sorted(_environment(problem).items())),
    }


def _patches(folder: str) -> list[dict[str, str]]:
    return [
        {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted((ROOT / folder).glob("*.patch"))
    ]


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


# The file


def path_of(inventory: Path) -> Path:
    """The path of an inventory's lock."""
    return (inventory if inventory.is_dir() else inventory.parent) / NAME


def command(path: Path) -> str:
    """The command that writes a new lock."""
    folder = path.parent
    return f"farandole lock -i {os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder}"


def text(lock: Lock) -> str:
    """The content of the lock file."""
    return HEAD + "".join(_dump(key, lock[key]) for key in KEYS if key in lock)


def write(path: Path, lock: Lock) -> None:
    """Write the lock file."""
    files.write(path, text(lock))


def _dump(key: str, value: Any) -> str:
    """Format one key with one line per version, file and reason, so that diffs read well."""
    flow = None if key in ("platform", "wanted", "openmpi", "horovod", "wheels", "own", "sources", "index") else False
    return yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=flow, width=10**6, allow_unicode=True)


def read(path: Path) -> dict[str, Any]:
    """Read a lock; refuse one that is damaged or was edited."""
    cure = f"make a new one: {command(path)}"
    try:
        lock = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - the safe loader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise FarandoleError(f"{path} is not YAML{f' (line {where.line + 1})' if where else ''}; {cure}") from None
    if not isinstance(lock, dict) or lock.get("format") not in READABLE:
        found = lock.get("format") if isinstance(lock, dict) else "none"
        if isinstance(found, int) and found > FORMAT:
            raise FarandoleError(newer(path, str(lock.get("farandole", "of a newer version"))))
        raise FarandoleError(f"{path} has format {found}, and this version reads formats 1 and 2; {cure}")
    if missing := set(KEYS) - lock.keys() - SELDOM - (NOT_IN_1 if lock["format"] == 1 else set()):
        raise FarandoleError(f"{path} lacks {', '.join(sorted(missing))}; {cure}")
    if (content := identity(lock)) != lock["id"]:
        raise FarandoleError(
            f"{path} was edited or damaged: it says id {lock['id']}, its content gives {content}. "
            f"Undo the edit, or put what you want into stack_pins and {cure}"
        )
    return lock


def differences(lock: Lock, nodes: Nodes, request: Request, configure: Sequence[str] = ()) -> list[str]:
    """How a lock differs from these nodes and this request."""
    problem = Problem(load(), nodes, request)
    wanted = lock["wanted"]
    pins = {f"{name}=={version}" for name, version in request.pins}
    platform = {"os": nodes.platform.os, "arch": nodes.platform.arch, "python": nodes.platform.python}
    pairs: list[tuple[str, Any, Any]] = [
        (f"platform.{key}", lock["platform"].get(key), value) for key, value in platform.items()
    ]
    pairs += [
        ("frameworks", wanted["frameworks"], list(request.frameworks)),
        ("accelerator", wanted["accelerator"], problem.accelerator),
        ("packages", wanted.get("packages", []), sorted(requirement for requirement, _ in request.packages)),
    ]
    if lock.get("sources"):
        pairs.append(("stack_build_wheels", "true", "true" if request.sources else "false"))
    if configure:
        pairs.append(("openmpi_configure", lock["openmpi"]["configure"], list(configure)))
    found = [f"{name}: the lock says {_text(old)}, now it is {_text(new)}" for name, old, new in pairs if old != new]
    return found + [f"pin {pin}: the lock was made without it" for pin in sorted(pins - set(wanted["pins"]))]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def check(path: Path, lock: Lock, nodes: Nodes, request: Request, configure: Sequence[str] = ()) -> None:
    """Refuse a lock that does not match these nodes and this request."""
    if found := differences(lock, nodes, request, configure):
        raise FarandoleError(
            f"{path} does not fit this cluster: {'; '.join(found)}. Make a new one: {command(path)}; or undo the change"
        )


def settle(
    path: Path,
    request: Request,
    configure: Sequence[str],
    probes: Mapping[str, Probe],
    *,
    renew: bool = False,
    save: bool = True,
    known: Known = Known(),  # noqa: B008, frozen
    cache: Path,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], bool]:
    """Return a cluster's lock, and whether it is new; an existing one must fit, unless it is to be renewed."""
    nodes = read_nodes(probes)
    if path.exists() and not renew:
        lock = read(path)
        check(path, lock, nodes, request, configure)
        return lock, False
    lock = make(nodes, request, configure, known)
    if lock["own"]:
        # Slow to import.
        from farandole.stack.collect import built_for_cuda, inspect

        inspect(lock, cache, say)
        if cuda := built_for_cuda(lock, cache):
            say(f"{cuda}, and no index has one for CPUs that fits, so torch has to be one for CUDA, too")
            lock = make(nodes, request, configure, known, cuda)
            inspect(lock, cache, say)
    if save:
        write(path, lock)
    return lock, True


def known_of(lock: Lock | None, upgrade: Sequence[str] | None) -> Known:
    """What a former lock decides about a new one: all of it, or nothing of the packages that are to be upgraded."""
    if lock is None or upgrade == []:
        return Known()
    catalogue, found = load(), dict(lock["versions"])
    for name in map(catalogue.named, upgrade or ()):
        if name not in found or catalogue.is_component(name):
            raise FarandoleError(f"--upgrade {name}: the lock has no package of that name{near(name, found)}")
        del found[name]
    kept = {name: version for name, version in found.items() if not catalogue.is_component(name) and version != NONE}
    return Known(kept, "" if upgrade else lock.get("index", {}).get("until", ""))


def changes(old: Lock | None, new: Lock) -> list[str]:
    """What a new lock changes, one line per component."""
    before: Mapping[str, str] = old["versions"] if old else {}
    after: Mapping[str, str] = new["versions"]
    return [
        f"{name}: {before.get(name, NONE)} -> {after.get(name, NONE)}"
        for name in sorted({*before, *after})
        if before.get(name, NONE) != after.get(name, NONE)
    ]
