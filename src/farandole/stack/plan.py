"""Decide what a run must build and install, from the lock, the existing builds and the nodes' stacks."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.core.findings import several
from farandole.core.project import ROOT
from farandole.inventory.cluster import probe_of
from farandole.stack.cache import Builds, Built, Lock, listed, openmpi_key, recall_whole
from farandole.stack.catalogue import load
from farandole.stack.lock import base_of, command, own_wheels

Stacks = Mapping[str, Any]
NONE: Stacks = {"current": "", "former": "", "installed": [], "left": False}
# MiB needed on the disk with /opt, at least and per MiB of wheels; once a stack is packed, its real size is used.
ROOM_TO_INSTALL = (4_000, 4)
ROOM_TO_BUILD = (8_000, 6)
# Patches that a refusal names.
MOST_NAMED = 3


def for_run(
    lock: Lock, back_to: str | None, builds: Builds, known: Mapping[str, Mapping[str, Any]], builder: str, path: Path
) -> tuple[Lock, dict[str, Any]]:
    """Return the lock of this run, from a path or a former one for a rollback, and the plan for the nodes."""
    nodes = {name: stacks_of(variables) for name, variables in known.items()}
    if back_to is not None:
        systems = {name: system_of(variables) for name, variables in known.items()}
        lock = choose(back_to, nodes, systems.values(), builds)
        refuse_elsewhere(lock, systems)
    made = plan(lock, builds, nodes, builder)
    if back_to is None:
        refuse_other_patches(lock, made, path)
    else:
        # They have run it before.
        made["replacing"] = []
    refuse_without_room(lock, made, {name: free_of(variables) for name, variables in known.items()}, builder)
    return lock, made


def stacks_of(variables: Mapping[str, Any]) -> Stacks:
    """The stacks that a node's probe reported."""
    return probe_of(variables).get("stacks") or NONE


def free_of(variables: Mapping[str, Any]) -> int | None:
    """The MiB that a node has free; None if it was not probed."""
    return probe_of(variables).get("disk_free_mb")


def plan(lock: Lock, builds: Builds, nodes: Mapping[str, Stacks], builder: str) -> dict[str, Any]:
    """Which nodes lack the stack, which do not run it yet or have others left to remove, and what to build.

    A stack with packages of the user's own is a layer on a base, the same stack without them; the plan is about the
    base, and has another one for the layer."""
    behind = [name for name, stacks in nodes.items() if stacks["current"] != lock["id"] or stacks["left"]]
    base, layer = base_of(lock), None
    if base["id"] != lock["id"]:
        layer = _archive(lock, builds, nodes, builder)
        layer["sources"] = [_source(lock, source, builds, builder) for source in lock.get("sources", ())]
        # Where the layer is installed, so is its base.
        nodes = {
            name: stacks if name in layer["lacking"] else {**stacks, "installed": [*stacks["installed"], base["id"]]}
            for name, stacks in nodes.items()
        }
    made = _stack(base, builds, nodes, builder)
    work = made["pack"] or bool(layer and layer["pack"])
    lacked = [(part, below) for part, below in ((made, ""), (layer, base["id"])) if part and part["lacking"]]
    mpi = openmpi_key(lock) if lacked else ""
    installs = [
        {**{key: part[key] for key in ("id", "lacking", "archive", "whole")}, "base": below, "mpi": mpi}
        for part, below in lacked
    ]
    made |= {"behind": behind, "layer": layer, "installs": installs, "mpi": mpi, "work": work}
    made["replacing"] = replacing(base["id"], builds, {name: nodes[name]["current"] for name in behind})
    # Without work the base is not needed, and it is large.
    return {**made, "base": base if work else None}


def replacing(base: str, builds: Builds, current: Mapping[str, str]) -> list[str]:
    """The nodes that switch to another stack than they have, beside packages of the user's own."""
    locks = [built.about["lock"] for built in builds.packed()] if any(current.values()) else []
    known = {lock["id"]: base_of(lock)["id"] for lock in locks}
    return [name for name, stack in current.items() if stack and known.get(stack, stack) != base]


def trial(made: Mapping[str, Any], head: str) -> list[str]:
    """The nodes that try a stack before all switch to it: the head and another one, or none if there is no need."""
    others = [name for name in made["replacing"] if name != head]
    return [head, *others[:1]] if head in made["behind"] and made["replacing"] else []


def _archive(lock: Lock, builds: Builds, nodes: Mapping[str, Stacks], builder: str) -> dict[str, Any]:
    """Which nodes lack a stack, its archive, and whether the builder must build or pack it."""
    lacking = [name for name, stacks in nodes.items() if lock["id"] not in stacks["installed"]]
    made: dict[str, Any] = {"id": lock["id"], "lacking": lacking, "archive": None, "whole": None}
    made |= {"pack": False, "build": False}
    if not lacking:
        return made
    archive = listed(recall_whole(builds.stack(lock)))
    # If the stack is not packed but the builder has it, it only needs packing.
    build = archive is None and (builder in lacking or builder not in nodes)
    made |= {"archive": described(archive), "archive_path": str(builds.stack(lock))}
    made |= {"changes_path": str(builds.changed(lock))}
    changes = recall_whole(builds.changed(lock))
    # Those that have the stack before it get what has changed; it may be left of a build before this one.
    if (
        archive and changes and changes.about["contents"] == archive.about["contents"]
        and all(changes.about["former"] in nodes[name]["installed"] for name in lacking)
    ):  # fmt: skip
        made |= {"archive": described(changes), "whole": described(archive)}
    return made | {"pack": archive is None, "build": build}


def _stack(lock: Lock, builds: Builds, nodes: Mapping[str, Stacks], builder: str) -> dict[str, Any]:
    """The plan for a stack that has everything but packages of the user's own."""
    made = _archive(lock, builds, nodes, builder)
    if not made["lacking"]:
        return made
    # Root on the builder runs code from these parts, so parts of another, perhaps compromised builder are not used.
    openmpi, horovod = (own(recall_whole(path), builder) for path in (builds.openmpi(lock), builds.horovod(lock)))
    return {
        **made,
        "paths": {"openmpi": str(builds.openmpi(lock)), "horovod": str(builds.horovod(lock))},
        "parts": {
            "openmpi": described(openmpi if made["build"] else None),
            "horovod": described(horovod if made["build"] else None),
        },
    }


def _source(lock: Lock, source: dict[str, Any], builds: Builds, builder: str) -> dict[str, Any]:
    """A package that is built: how, and the wheel if this builder has made it before."""
    path = builds.wheel(lock, source)
    return {**source, "path": str(path), "part": described(own(recall_whole(path), builder))}


def refuse_part(lock: Lock, head: Stacks, absent: Collection[str], *, back: bool) -> None:
    """Refuse to let the head, and so each new job, switch to a stack without nodes that take part in jobs."""
    if absent and head["current"] not in ("", lock["id"]):
        stay = "" if back else "; or, to stay with the present stack, put the former stack.lock.yml back"
        raise FarandoleError(
            f"jobs would run with stack {lock['id']} from then on, and {several(absent)} may not have it: leave out "
            f"--limit{stay}"
        )


def unavailable(made: Mapping[str, Any], builds: str, builder: str) -> str:
    """Why nodes that lack the stack cannot get it; empty if they can, or if none lacks it."""
    for part in (made, made["layer"]):
        if part and part["lacking"] and not part["archive"]:
            return (
                f"{', '.join(part['lacking'])} have no stack {part['id']}, and no archive of it is in {builds}; "
                f"{builder}, which builds and packs, is not part of this run: run site.yml with the lock of this stack "
                "and without --limit"
            )
    return ""


def own(part: Built | None, builder: str) -> Built | None:
    return part if part and part.about.get("builder") == builder else None


def described(built: Built | None) -> dict[str, Any] | None:
    """The description for playbooks, or None."""
    return built.describe() if built else None


def refuse_other_patches(lock: Lock, made: Mapping[str, Any], path: Path) -> None:
    """Refuse before anything is changed to compile with other patches than those in the lock."""
    compiled = [name for name, part in made.get("parts", {}).items() if made["build"] and not part]
    other = [f"{name}: {text}" for name in compiled for text in other_patches(name, lock[name])]
    if other:
        by = lock.get("farandole", "")
        more = f"; and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
        raise FarandoleError(
            f"stack {lock['id']} of {path} has to be compiled, with patches that this version of Farandole does not "
            f"have: {'; '.join(other[:MOST_NAMED])}{more}. Make a new lock, which keeps the versions: {command(path)}; "
            f"or build it with the version that wrote the lock{f' ({by})' if by else ''}"
        )


def other_patches(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    """The patches in a part of a lock that are others, or missing, here."""
    folder = f"files/patches/horovod-{part['version']}" if name == "horovod" else load().data["openmpi_patches"]
    # Locks of earlier versions have none of OpenMPI.
    for patch in part.get("patches", ()):
        file = ROOT / folder / patch["file"]
        if not file.exists():
            yield f"{patch['file']} is missing"
        elif (here := sha256(file)) != patch["sha256"]:
            yield f"{patch['file']} has sha256 {here[:12]}… here, {patch['sha256'][:12]}… in the lock"


def refuse_without_room(lock: Lock, made: Mapping[str, Any], free: Mapping[str, int | None], builder: str) -> None:
    """Refuse before anything is changed, naming all nodes that lack space."""
    need: dict[str, int] = {}
    sizes = {wheel["name"]: size_of(lock, wheel) for wheel in lock.get("wheels", ())}
    added = sum(sizes[wheel["name"]] for wheel in own_wheels(lock)) if made["layer"] else 0
    for part, least, wheels in ((made, True, sum(sizes.values()) - added), (made["layer"], False, added)):
        for name in part["lacking"] if part else ():
            at_least, each = ROOM_TO_BUILD if part["build"] and name == builder else ROOM_TO_INSTALL
            mib = max(at_least if least else 0, each * wheels >> 20)
            if part["archive"]:
                mib = (part["archive"]["size"] + part["archive"]["unpacked"] >> 20) + (256 if least else 0)
            need[name] = need.get(name, 0) + mib
    short = [
        f"{name} has {have} MiB free for /opt and needs {mib}"
        for name, have in free.items()
        if have is not None and have < (mib := need.get(name, 0))
    ]
    if short:
        raise FarandoleError(f"not enough space for the stack: {'; '.join(short)}: free some and run again")


def size_of(lock: Lock, wheel: Mapping[str, str]) -> int:
    """The size of a wheel in bytes; 0 in a lock of an earlier version."""
    return int(lock.get("index", {}).get("files", {}).get(wheel["file"], {}).get("size", 0))


def choose(wanted: str, nodes: Mapping[str, Stacks], systems: Collection[str], builds: Builds) -> Lock:
    """Choose the stack for a rollback: by the beginning of its id, else the former one of all nodes."""
    packed = {lock["id"]: dict(lock) for lock in (built.about["lock"] for built in builds.packed())}
    everywhere = set.intersection(*(set(stacks["installed"]) for stacks in nodes.values()))
    available = {stack: packed.get(stack, {"id": stack}) for stack in sorted({*packed, *everywhere})}
    prefix = wanted or former(nodes)
    matches = [lock for stack, lock in available.items() if stack.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    usable = [stack for stack, lock in available.items() if "platform" not in lock or lock["platform"]["os"] in systems]
    problem = (
        f"more than one stack begins with {prefix}"
        if matches
        else f"no stack {prefix} is on every node or in {builds.stacks}"
    )
    raise FarandoleError(f"{problem}; available: {', '.join(usable) or 'none'}: choose one with -e stack_id=...")


def refuse_elsewhere(lock: Lock, systems: Mapping[str, str]) -> None:
    """Refuse a stack that was built for another release."""
    built = (lock.get("platform") or {}).get("os")
    if other := [f"{name} has {system}" for name, system in systems.items() if built and system and system != built]:
        raise FarandoleError(f"stack {lock['id']} was built for {built}; {', '.join(other)}: choose another stack")


def system_of(variables: Mapping[str, Any]) -> str:
    """A node's release, as written in locks; empty if it was not probed."""
    probe = probe_of(variables)
    return f"{probe['os_id']}-{probe['os_version']}" if "os_id" in probe else ""


def former(nodes: Mapping[str, Stacks]) -> str:
    """The former stack, if it is the same on all nodes."""
    reported = {name: stacks["former"] for name, stacks in nodes.items()}
    if len(set(reported.values())) == 1 and (stack := next(iter(reported.values()))):
        return str(stack)
    each = ", ".join(f"{name}: {stack or 'none'}" for name, stack in reported.items())
    raise FarandoleError(
        f"the nodes do not share one former stack to go back to ({each}); choose a stack with -e stack_id=..., "
        "`farandole stack list -i <inventory>` shows them"
    )
