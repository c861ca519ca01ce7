DOCUMENTATION = """
module: stack_plan
short_description: Plan what a run must build and install
description:
  - Runs on the control machine and contacts no node, so that a run with nothing to do ends quickly. It uses the lock,
    the existing builds, of which it deletes damaged ones, and the results of M(node_probe). The fields of the plan are
    those of C(stack_plan) in the argument specs of role stack.
options:
  lock: {description: "The lock, as M(stack_lock) returns it.", type: dict, default: {}}
  back_to:
    description: "Instead of O(lock), the id of the stack to roll back to; empty for the previous one."
    type: str
  builds: {description: Folder on the control machine for packed stacks and compiled parts., type: path, required: true}
  nodes: {description: Names of the nodes of this run., type: list, elements: str, required: true}
  builder: {description: Name of the node that compiles., type: str, required: true}
  cluster:
    description: "What is known of the cluster, C(cluster_facts): jobs begin with the stack of its head."
    type: dict
    required: true
"""

from pathlib import Path
from typing import Any

from farandole.plays.action import LocalAction
from farandole.stack.cache import Builds
from farandole.stack.lock import path_of
from farandole.stack.plan import for_run, refuse_part, stacks_of


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        known = {name: variables["hostvars"][name] for name in arguments["nodes"]}
        builds = Builds(Path(arguments["builds"]))
        path = path_of(Path(variables["inventory_dir"]))
        head, members = (arguments["cluster"][key] for key in ("head", "members"))
        lock, made = for_run(arguments["lock"], arguments["back_to"], builds, known, arguments["builder"], path)
        absent = [name for name in members if name not in known]
        refuse_part(lock, stacks_of(known.get(head, {})), absent, back=arguments["back_to"] is not None)
        return {"changed": False, "lock": lock, "plan": made}
