"""Plan what a run has to do about the stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farandole.action import Action
from farandole.stack.cache import Builds
from farandole.stack.plan import for_run

DOCUMENTATION = """
module: stack_plan
short_description: Plan what a run has to do about the stack
description:
  - Runs on the control machine and asks no node, so that a run with nothing to do is over quickly. It looks at the
    lock, at what has been built, where it deletes what is damaged, and at what M(node_probe) found.
options:
  lock: {description: "The lock, as M(stack_lock) returns it.", type: dict, default: {}}
  back_to:
    description: "Instead of O(lock): the id of the stack to go back to; empty for the one that was current before."
    type: str
  builds: {description: Folder on the control machine for what the builder made., type: path, required: true}
  nodes: {description: The nodes of this run., type: list, elements: str, required: true}
  builder: {description: The node that compiles., type: str, required: true}
author: Farandole
"""

EXAMPLES = """
- name: Plan the run
  stack_plan:
    lock: "{{ stack_lock }}"
    builds: .farandole/mine/builds
    nodes: "{{ ansible_play_hosts }}"
    builder: node-1
  run_once: true
"""

RETURN = """
lock:
  description: O(lock), or that of the stack to go back to; only its id if no more is known.
  type: dict
  returned: always
plan:
  description: What has to be done.
  type: dict
  returned: always
  contains:
    lacking: {description: Nodes that do not have the stack., type: list}
    behind: {description: Nodes whose current stack is another., type: list}
    build: {description: Whether something has to be compiled or assembled., type: bool}
    pack: {description: Whether the builder has to pack its stack., type: bool}
    archive: {description: "The packed stack, or null.", type: dict}
    parts: {description: "OpenMPI and Horovod from earlier builds, null for each that has to be built.", type: dict}
"""


class ActionModule(Action):
    """Runs on the control machine alone."""

    _requires_connection = False

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Plans from what is known."""
        known = {name: variables["hostvars"][name] for name in arguments["nodes"]}
        builds = Builds(Path(arguments["builds"]))
        lock, made = for_run(arguments["lock"], arguments["back_to"], builds, known, arguments["builder"])
        return {"changed": False, "lock": lock, "plan": made}
