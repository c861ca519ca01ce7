DOCUMENTATION = """
module: upgrade_plan
short_description: Note on the control machine what each node has to upgrade
description:
  - Reads what M(system_upgrade) has returned in C(_base_upgrade), and refuses an answer that has another form.
options:
  state: {description: The state folder of the cluster., type: path, required: true}
"""

from pathlib import Path
from typing import Any

from farandole.inventory.state import claim
from farandole.plays.action import LocalAction
from farandole.plays.upgrade import WANTED, note


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Notes the answers of the nodes that have given one."""
        state = Path(arguments["state"])
        claim(state, Path(variables["inventory_dir"]))
        told = {
            name: variables["hostvars"][name].get("_base_upgrade") or {} for name in variables["ansible_play_hosts"]
        }
        note(state, {name: {key: one.get(key) for key in WANTED} for name, one in told.items()})
        return {"changed": False}
