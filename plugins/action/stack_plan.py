"""Plan what a run must build and install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farandole.plays.action import Action
from farandole.stack.cache import Builds
from farandole.stack.plan import for_run

DOCUMENTATION = """
module: stack_plan
short_description: Plan what a run must build and install
description:
  - Runs on the control machine and contacts no node, so that a run with nothing to do ends quickly. It uses the lock,
    the existing builds, of which it deletes damaged ones, and the results of M(node_probe).
options:
  lock: {description: "The lock, as M(stack_lock) returns it.", type: dict, default: {}}
  back_to:
    description: "Instead of O(lock), the id of the stack to roll back to; empty for the previous one."
    type: str
  builds: {description: Folder on the control machine for packed stacks and compiled parts., type: path, required: true}
  nodes: {description: Names of the nodes of this run., type: list, elements: str, required: true}
  builder: {description: Name of the node that compiles., type: str, required: true}
author: Farandole
"""

EXAMPLES = """
- name: Plan the run
  farandole.cluster.stack_plan:
    lock: "{{ stack_lock }}"
    builds: .farandole/mine/builds
    nodes: "{{ ansible_play_hosts }}"
    builder: node-1
  run_once: true
"""

RETURN = """
lock:
  description: O(lock), or the lock of the stack to roll back to; only its id if nothing else is known.
  type: dict
  returned: always
plan:
  description: What must be done.
  type: dict
  returned: always
  contains:
    lacking: {description: Names of the nodes that do not have the stack., type: list}
    behind: {description: Names of the nodes whose current stack is another one., type: list}
    build: {description: Whether the builder must build the stack., type: bool}
    pack: {description: Whether the builder must pack its stack., type: bool}
    archive: {description: "The packed stack; null if there is none.", type: dict}
    parts: {description: "OpenMPI and Horovod from earlier builds; null for each that must be built.", type: dict}
"""


class ActionModule(Action):
    """Runs on the control machine alone."""

    _requires_connection = False

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        known = {name: variables["hostvars"][name] for name in arguments["nodes"]}
        builds = Builds(Path(arguments["builds"]))
        lock, made = for_run(arguments["lock"], arguments["back_to"], builds, known, arguments["builder"])
        return {"changed": False, "lock": lock, "plan": made}
