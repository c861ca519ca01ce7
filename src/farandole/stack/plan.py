"""What a run has to do about the stack, from the lock, what is built and what the nodes were found to have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from farandole.errors import FarandoleError
from farandole.stack.cache import Builds, Built, Lock, horovod_key, listed, openmpi_key, recall_whole

Stacks = Mapping[str, Any]
NONE: Stacks = {"current": "", "former": "", "installed": []}
# MiB of the disk where /opt lies; what is known of a packed stack counts instead.
ROOM_TO_INSTALL = 4_000
ROOM_TO_BUILD = 8_000


def for_run(
    lock: Lock, back_to: str | None, builds: Builds, known: Mapping[str, Mapping[str, Any]], builder: str
) -> tuple[Lock, dict[str, Any]]:
    """The lock of this run, which may be one to go back to, and what has to be done for it on the nodes."""
    nodes = {name: stacks_of(variables) for name, variables in known.items()}
    if back_to is not None:
        systems = {name: system_of(variables) for name, variables in known.items()}
        lock = choose(back_to, nodes, systems.values(), builds)
        refuse_elsewhere(lock, systems)
    made = plan(lock, builds, nodes, builder)
    refuse_without_room(made, {name: free_of(variables) for name, variables in known.items()}, builder)
    return lock, made


def stacks_of(variables: Mapping[str, Any]) -> Stacks:
    """What a node said of its stacks when it was probed."""
    probe = (variables.get("_preflight_probe") or {}).get("probe") or {}
    return probe.get("stacks") or NONE


def free_of(variables: Mapping[str, Any]) -> int | None:
    """MiB that it has free, unless it was not probed."""
    probe = (variables.get("_preflight_probe") or {}).get("probe") or {}
    return probe.get("disk_free_mb")


def plan(lock: Lock, builds: Builds, nodes: Mapping[str, Stacks], builder: str) -> dict[str, Any]:
    """Which nodes lack the stack, which do not run it yet, and what there is to build."""
    lacking = [name for name, stacks in nodes.items() if lock["id"] not in stacks["installed"]]
    behind = [name for name, stacks in nodes.items() if stacks["current"] != lock["id"]]
    made: dict[str, Any] = {"lacking": lacking, "behind": behind, "archive": None, "pack": False, "build": False}
    if not lacking:
        return made
    archive = listed(recall_whole(builds.stack(lock)))
    # Root on the builder runs what parts bring: those of another builder, perhaps a fallen one, are built anew.
    openmpi, horovod = (own(recall_whole(path), builder) for path in (builds.openmpi(lock), builds.horovod(lock)))
    # A builder that has the stack, while it is packed nowhere, only has to pack.
    build = archive is None and (builder in lacking or builder not in nodes)
    return {
        **made,
        "archive": told(archive),
        "archive_path": str(builds.stack(lock)),
        "pack": archive is None,
        "build": build,
        "openmpi": {"key": openmpi_key(lock), "path": str(builds.openmpi(lock))},
        "horovod": {"key": horovod_key(lock), "path": str(builds.horovod(lock))},
        "parts": {"openmpi": told(openmpi if build else None), "horovod": told(horovod if build else None)},
    }


def own(part: Built | None, builder: str) -> Built | None:
    """A part that this builder made."""
    return part if part and part.about.get("builder") == builder else None


def told(built: Built | None) -> dict[str, Any] | None:
    """For a playbook."""
    return built.told() if built else None


def refuse_without_room(made: Mapping[str, Any], free: Mapping[str, int | None], builder: str) -> None:
    """Before anything is touched, and for all nodes at once."""
    archive = made["archive"]
    install = (archive["size"] + archive["unpacked"]) // 2**20 + 256 if archive else ROOM_TO_INSTALL
    short = []
    for name in made["lacking"]:
        need = ROOM_TO_BUILD if made["build"] and name == builder else install
        have = free.get(name)
        if have is not None and have < need:
            short.append(f"{name} has {have} MiB free where /opt lies and needs {need}")
    if short:
        raise FarandoleError(f"no room for the stack: {'; '.join(short)}: make room there and run again")


def choose(wanted: str, nodes: Mapping[str, Stacks], systems: Collection[str], builds: Builds) -> Lock:
    """The stack to go back to: the one whose id begins so, else the one that was current before on every node."""
    packed = {lock["id"]: dict(lock) for lock in (built.about["lock"] for built in builds.packed())}
    everywhere = set.intersection(*(set(stacks["installed"]) for stacks in nodes.values()))
    there = {stack: packed.get(stack, {"id": stack}) for stack in sorted({*packed, *everywhere})}
    begun = wanted or former(nodes)
    found = [lock for stack, lock in there.items() if stack.startswith(begun)]
    if len(found) == 1:
        return found[0]
    fitting = [stack for stack, lock in there.items() if "platform" not in lock or lock["platform"]["os"] in systems]
    what = (
        f"more than one stack begins with {begun}"
        if found
        else f"no stack {begun} is on every node or in {builds.stacks}"
    )
    raise FarandoleError(f"{what}; there are {', '.join(fitting) or 'none'}: name one with -e stack_id=...")


def refuse_elsewhere(lock: Lock, systems: Mapping[str, str]) -> None:
    """A stack runs on the release that it was built on."""
    built = (lock.get("platform") or {}).get("os")
    if other := [f"{name} has {system}" for name, system in systems.items() if built and system and system != built]:
        raise FarandoleError(f"stack {lock['id']} was built for {built}; {', '.join(other)}: name another stack")


def system_of(variables: Mapping[str, Any]) -> str:
    """The release of a node, as locks call it; empty when it was not probed."""
    probe = (variables.get("_preflight_probe") or {}).get("probe") or {}
    return f"{probe['os_id']}-{probe['os_version']}" if "os_id" in probe else ""


def former(nodes: Mapping[str, Stacks]) -> str:
    """The stack that was current before, when the nodes agree."""
    told = {name: stacks["former"] for name, stacks in nodes.items()}
    if len(set(told.values())) == 1 and (stack := next(iter(told.values()))):
        return str(stack)
    each = ", ".join(f"{name}: {stack or 'none'}" for name, stack in told.items())
    raise FarandoleError(
        f"there is no one former stack to go back to ({each}); name a stack with -e stack_id=..., "
        "`farandole stack list -i <inventory>` shows them"
    )
