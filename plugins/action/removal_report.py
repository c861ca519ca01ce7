"""Say what was removed from the nodes, what stays, and why."""

from __future__ import annotations

from typing import Any

from farandole.plays.action import Action
from farandole.plays.removal import report
from farandole.watch.events import add
from farandole.watch.events import text as message

DOCUMENTATION = """
module: removal_report
short_description: Say what was removed from the nodes, what stays, and why
description:
  - Collects what M(remove) and others have returned into variables that end with C(_removed). Fails if nodes were not
    reached.
options:
  state_dir: {description: State folder of the cluster on the control machine., type: path, required: true}
author: Farandole
"""

EXAMPLES = """
- name: Say what was removed
  farandole.cluster.removal_report:
    state_dir: .farandole/mine
  run_once: true
"""


class ActionModule(Action):
    """Runs on the control machine alone."""

    _requires_connection = False

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Shows the report, as a failure if nodes are missing."""
        text, missed = report(
            variables["ansible_play_hosts_all"],
            variables["hostvars"],
            cluster=variables["groups"]["cluster"],
            inventory=variables["inventory_dir"],
            state=arguments["state_dir"],
            check_mode=self._task.check_mode,
        )
        self._display.display(text)
        add("message", text=message(text))
        return {"changed": False, **({"failed": True, "msg": missed} if missed else {})}
