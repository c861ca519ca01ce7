"""stack.lock.yml: every component of a cluster's stack, with version, source and sha256."""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.inventory.state import newer
from farandole.stack.catalogue import NONE, load
from farandole.stack.nodes import Nodes
from farandole.stack.problem import Problem, Request

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


# The file


def path_of(inventory: Path) -> Path:
    return (inventory if inventory.is_dir() else inventory.parent) / NAME


def id_of(inventory: Path) -> str:
    """The stack of an inventory's lock; empty if it has none."""
    path = path_of(inventory.absolute())
    return str(read(path)["id"]) if path.exists() else ""


def command(path: Path) -> str:
    """The command that writes a new lock."""
    folder = path.parent
    return f"farandole lock -i {os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder}"


def text(lock: Lock) -> str:
    """The content of the lock file."""
    return HEAD + "".join(_dump(key, lock[key]) for key in KEYS if key in lock)


def write(path: Path, lock: Lock) -> None:
    files.write(path, text(lock))


def _dump(key: str, value: Any) -> str:
    """Format one key with one line per version, file and reason, so that diffs read well."""
    flow = None if key in ("platform", "wanted", "openmpi", "horovod", "wheels", "own", "sources", "index") else False
    return yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=flow, width=10**6, allow_unicode=True)


def read(path: Path) -> dict[str, Any]:
    """Read a lock; refuse one that is damaged or was edited."""
    cure = f"make a new one: rm {shlex.quote(str(path))} && {command(path)}"
    try:
        lock = files.from_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise FarandoleError(f"{path} is not YAML{f' (line {where.line + 1})' if where else ''}; {cure}") from None
    if not isinstance(lock, dict) or lock.get("format") not in READABLE:
        number = lock.get("format") if isinstance(lock, dict) else "none"
        if isinstance(number, int) and number > FORMAT:
            raise FarandoleError(newer(path, str(lock.get("farandole", "of a newer version"))))
        raise FarandoleError(f"{path} has format {number}, and this version reads formats 1 and 2; {cure}")
    if missing := set(KEYS) - lock.keys() - SELDOM - (NOT_IN_1 if lock["format"] == 1 else set()):
        raise FarandoleError(f"{path} lacks {', '.join(sorted(missing))}; {cure}")
    if (content := identity(lock)) != lock["id"]:
        raise FarandoleError(
            f"{path} was edited or damaged: it says id {lock['id']}, its content gives {content}. "
            f"Undo the edit, or put the versions that you want into stack_pins and {cure}"
        )
    return lock


def differences(lock: Lock, nodes: Nodes, request: Request, configure: Sequence[str] = ()) -> list[str]:
    problem = Problem(load(), nodes, request)
    wanted = lock["wanted"]
    pins = {text for text, _ in request.pins}
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
    lines = [f"{name}: the lock says {_text(old)}, now it is {_text(new)}" for name, old, new in pairs if old != new]
    return lines + [f"pin {pin}: the lock was made without it" for pin in sorted(pins - set(wanted["pins"]))]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def check(path: Path, lock: Lock, nodes: Nodes, request: Request, configure: Sequence[str] = ()) -> None:
    """Refuse a lock that does not match these nodes and this request."""
    if lines := differences(lock, nodes, request, configure):
        raise FarandoleError(
            f"{path} does not fit this cluster: {'; '.join(lines)}. Make a new one: {command(path)}; or undo the change"
        )


def changes(old: Lock | None, new: Lock) -> list[str]:
    """What a new lock changes, one line per component."""
    before: Mapping[str, str] = old["versions"] if old else {}
    after: Mapping[str, str] = new["versions"]
    return [
        f"{name}: {before.get(name, NONE)} -> {after.get(name, NONE)}"
        for name in sorted({*before, *after})
        if before.get(name, NONE) != after.get(name, NONE)
    ]
