DOCUMENTATION = """
module: removal_report
short_description: Say what was removed from the nodes, what stays, and why
description:
  - Collects what M(remove) and others have returned on each node. Fails if nodes were not reached.
options:
  answers:
    description: The variables in which their results are registered. A node that lacks the last one is not done.
    type: list
    elements: str
    required: true
  cluster:
    description: What is known of the cluster, C(cluster_facts) of role C(cluster).
    type: dict
    required: true
"""

from typing import Any

from farandole.core.errors import FarandoleError
from farandole.inventory.facts import typed
from farandole.plays.action import LocalAction
from farandole.plays.removal import report


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Shows the report, as a failure if nodes are missing."""
        text, missed = report(
            variables["ansible_play_hosts_all"],
            variables["hostvars"],
            arguments["answers"],
            typed(arguments["cluster"]),
            inventory=variables["inventory_dir"],
            check_mode=self._task.check_mode,
        )
        result = self.shown(text)
        if missed:
            self._display.display(text)
            raise FarandoleError(missed)
        return result
