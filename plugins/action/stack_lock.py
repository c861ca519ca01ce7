"""Settle the versions of a cluster's stack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.utils.display import Display

from farandole.action import Action
from farandole.preflight.nodes import probes_of
from farandole.stack import lock as locks
from farandole.stack.cache import default_root
from farandole.stack.request import request

DOCUMENTATION = """
module: stack_lock
short_description: Settle the versions of the stack
description:
  - Runs on the control machine. An existing lock is returned unchanged if it fits the nodes and what is wanted, and
    refused if it does not or was edited. Without one, the versions are resolved for what M(node_probe) found,
    registered as C(_preflight_probe) on the hosts of group C(cluster), and written to C(stack.lock.yml) beside the
    inventory; in check mode nothing is written or fetched.
options:
  inventory_dir: {description: "Folder of the inventory, where the lock is.", type: path, required: true}
  frameworks:
    description: What the cluster trains with, V(tensorflow), V(pytorch) or both. Without it, the lock is only read.
    type: list
    elements: str
  pins: {description: "Versions to insist on, each as C(NAME==VERSION).", type: list, elements: str, default: []}
  accelerator:
    description: V(auto) means V(cuda) if all nodes have a driver and the toolkit is found, else V(cpu).
    type: str
    choices: [auto, cpu, cuda]
    default: auto
  configure:
    description: Options for OpenMPI's configure instead of the catalogue's.
    type: list
    elements: str
    default: []
  cache:
    description: The control machine's cache; empty for C(farandole) in the user's cache folder.
    type: path
    default: ""
  collect: {description: Fetch the wheels and sources of the lock into the cache too., type: bool, default: false}
author: Farandole
"""

EXAMPLES = """
- name: Settle the versions
  stack_lock:
    inventory_dir: "{{ inventory_dir }}"
    frameworks: [tensorflow, pytorch]
  register: _stack_locked
  run_once: true
"""

RETURN = """
lock: {description: The lock; in check mode a new one is not written., type: dict, returned: always}
lock_path: {description: Its file., type: str, returned: always}
cache: {description: The control machine's cache., type: str, returned: always}
"""


def probes(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the nodes said that were asked in this run."""
    names = variables["groups"]["cluster"]
    return probes_of({name: variables["hostvars"][name].get("_preflight_probe") or {} for name in names})


class ActionModule(Action):
    """Reads, solves and collects on this machine alone."""

    _requires_connection = False

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Settles the lock and fetches its files where that is asked for."""
        path = locks.path_of(Path(arguments["inventory_dir"]))
        cache = Path(arguments["cache"]) if arguments["cache"] else default_root()
        lock, changed = self._settle(path, arguments, variables)
        if arguments["collect"] and not self._task.check_mode:
            changed = self._collect(lock, cache) or changed
        return {"changed": changed, "lock": lock, "cache": str(cache), "lock_path": str(path)}

    def _settle(
        self, path: Path, arguments: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        frameworks, configure = arguments["frameworks"], arguments["configure"]
        if frameworks is None:
            return locks.read(path), False
        wanted = request(frameworks, arguments["pins"], arguments["accelerator"], inventory=arguments["inventory_dir"])
        return locks.settle(path, wanted, configure, probes(variables), save=not self._task.check_mode)

    @staticmethod
    def _collect(lock: Mapping[str, Any], cache: Path) -> bool:
        # Imported here, as a run that builds nothing has no use for it.
        from farandole.stack.collect import collect_wheels

        return collect_wheels(lock, cache, Display().display)
