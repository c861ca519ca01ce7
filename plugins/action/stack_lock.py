DOCUMENTATION = """
module: stack_lock
short_description: Read or create the lock of the stack
description:
  - Runs on the control machine. An existing lock is returned unchanged if it fits the nodes and the request, and
    refused if it does not fit or was edited. Without a lock, the versions are resolved from the results of
    M(node_probe), registered as C(_preflight_probe) on O(nodes), and written to C(stack.lock.yml) next to the
    inventory. In check mode nothing is written or fetched.
options:
  inventory_dir: {description: "Folder of the inventory, where the lock is.", type: path, required: true}
  frameworks:
    description: Frameworks that the cluster trains with, V(tensorflow), V(pytorch) or both. Without it, the lock is
      only read.
    type: list
    elements: str
  nodes: {description: Names of the nodes that the versions must fit., type: list, elements: str, default: []}
  pins: {description: "Versions that the lock must use, as C(NAME==VERSION).", type: list, elements: str, default: []}
  packages: {description: "The user's own packages, as requirements.", type: list, elements: str, default: []}
  requirements:
    description: A C(requirements.txt) or C(pyproject.toml) with more of them; a relative path is beside the inventory.
    type: str
    default: ""
  build_wheels: {description: Build packages that have no wheel., type: bool, default: false}
  accelerator:
    description: V(auto) means V(cuda) if every node has an NVIDIA driver and one of them has the toolkit, else V(cpu).
    type: str
    choices: [auto, cpu, cuda]
    default: auto
  configure:
    description: Options for OpenMPI's C(./configure) that replace the catalogue's.
    type: list
    elements: str
    default: []
  cache:
    description: Cache on the control machine; empty for C(farandole) in the user's cache folder.
    type: path
    default: ""
  collect: {description: Also fetch the wheels of the lock into the cache., type: bool, default: false}
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.inventory.cluster import answer_of
from farandole.plays.action import LocalAction
from farandole.preflight.nodes import probes_of
from farandole.stack import lock as locks
from farandole.stack import own
from farandole.stack.cache import default_root
from farandole.stack.nodes import read
from farandole.stack.problem import Known, request


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Reads or creates the lock, and fetches its wheels if requested."""
        path = locks.path_of(Path(arguments["inventory_dir"]))
        cache = Path(arguments["cache"]) if arguments["cache"] else default_root()
        lock, changed = self._settle(path, cache, arguments, variables)
        if arguments["collect"] and not self._task.check_mode:
            changed = self._collect(lock, path, cache, self.say(variables)) or changed
        return {"changed": changed, "lock": lock, "cache": str(cache), "lock_path": str(path)}

    def _settle(
        self, path: Path, cache: Path, arguments: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        frameworks, configure = arguments["frameworks"], arguments["configure"]
        if frameworks is None:
            return locks.read(path), False
        folder = arguments["inventory_dir"]
        packages = own.read(arguments["packages"], arguments["requirements"], Path(folder))
        wanted = request(
            frameworks, arguments["pins"], arguments["accelerator"], inventory=folder, packages=packages,
            sources=cache / "sources" if arguments["build_wheels"] else None,
        )  # fmt: skip
        asked = {name: answer_of(variables["hostvars"][name]) for name in arguments["nodes"]}
        if not (probes := probes_of(asked)):
            inventory = shlex.quote(folder)
            raise FarandoleError(
                "no node was probed in this run, and the versions depend on the nodes: run  "
                f"farandole lock -i {inventory}  or  "
                f"ansible-playbook -i {inventory} playbooks/preflight.yml playbooks/lock.yml"
            )
        nodes = read(probes)
        if path.exists():
            lock = locks.read(path)
            if len(probes) < len(asked):
                # Where the lock or the user says CUDA, the toolkit is on a node outside --limit.
                elsewhere = "cuda" in (lock["wanted"]["accelerator"], wanted.accelerator)
                nodes = replace(nodes, toolkit_elsewhere=elsewhere)
            locks.check(path, lock, nodes, wanted, configure)
            return lock, False
        # Slow to import, and most runs have a lock.
        from farandole.stack.making import new

        lock = new(nodes, wanted, configure, Known(), cache, self.say(variables))
        if not self._task.check_mode:
            locks.write(path, lock)
        return lock, True

    @staticmethod
    def _collect(lock: Mapping[str, Any], path: Path, cache: Path, say: Callable[[str], None]) -> bool:
        # Slow to import, and needed only by runs that build.
        from farandole.stack.collect import built_for_cuda, collect_wheels

        fetched = collect_wheels(lock, cache, say)
        if wrong := built_for_cuda(lock, cache):
            raise FarandoleError(
                f"{path}: {wrong}, and does not load beside torch {lock['versions']['torch']}: make a new lock, in "
                f"which they fit together: {locks.command(path)}"
            )
        return fetched
