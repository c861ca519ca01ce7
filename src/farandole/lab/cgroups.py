"""What cgroups of this machine give a node to compute with."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.lab.lab import LabNode
from farandole.node.mounts import TABLE, mounts_in

_ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
# What is limited here, and how the second version of cgroups says that it is unlimited.
_CONTROLLERS = {"cpu": f"max {PERIOD_US}", "memory": "max"}


def limit(target: LabNode, controller: str, first: dict[str, int], second: str) -> None:
    """Limit a node, in the words of the version of cgroups that is in use."""
    if tree := _tree(controller):
        _confine(target, tree, first)
    else:
        (_unified(target) / f"{controller}.max").write_text(second)


def lift(target: LabNode) -> None:
    """Lift all limits of a node."""
    for controller, unlimited in _CONTROLLERS.items():
        if (tree := _tree(controller)) is None:
            (_unified(target) / f"{controller}.max").write_text(unlimited)
        elif (group := tree / target.container).exists():
            _move(_processes(target), tree)
            _remove(group)


def forget(lab: str) -> None:
    """Remove the groups of a lab, once its nodes are gone."""
    for tree in filter(None, map(_tree, _CONTROLLERS)):
        for group in tree.glob(f"farandole-{lab}-node-*"):
            if re.fullmatch(rf"farandole-{re.escape(lab)}-node-\d+", group.name):
                _remove(group)


def _tree(controller: str) -> Path | None:
    """Where the first version of cgroups has its groups for this; None where the second one is in use."""
    mounted = (mount for mount in mounts_in(TABLE.read_text()) if mount.kind == "cgroup")
    return next((Path(mount.point) for mount in mounted if controller in mount.options), None)


def _confine(target: LabNode, tree: Path, limits: dict[str, int]) -> None:
    """Put all that runs on a node into a group of its own."""
    group = tree / target.container
    group.mkdir(exist_ok=True)
    for name, limit in limits.items():
        (group / name).write_text(str(limit))
    # What starts while the first ones are moved inherits the old group.
    for _ in range(3):
        _move(_processes(target), group)


def _unified(target: LabNode) -> Path:
    """The group of a node's container, above those of its systemd."""
    inside = Path(f"/proc/{target.pid}/cgroup").read_text().rpartition("::")[2].strip().strip("/")
    parts = inside.split("/")
    depth = next(index for index, part in enumerate(parts) if part.startswith("libpod-"))
    return _ROOT.joinpath(*parts[: depth + 1])


def _processes(target: LabNode) -> Iterator[str]:
    """All processes of a node, by their ids on this machine."""
    namespace = os.stat(f"/proc/{target.pid}/ns/pid").st_ino  # noqa: PTH116
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (folder / "ns/pid").stat().st_ino == namespace:
                yield folder.name


def _move(processes: Iterator[str], group: Path) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(process)


def _remove(group: Path) -> None:
    """Remove a group once the last process that it had has ended or moved."""
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise FarandoleError(f"{group} still has processes: cat {group}/cgroup.procs")
