DOCUMENTATION = """
module: munge_key
short_description: Make the key of a queue on the control machine, or refuse a damaged one
description:
  - Runs on the control machine. The key is in a file of mode 0600, and never in a result.
options:
  path: {description: The file., type: path, required: true}
  nodes: {description: Those that need the same key at once., type: list, elements: str, required: true}
"""

from pathlib import Path
from typing import Any

from farandole.plays.action import LocalAction
from farandole.queue import key


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Makes or checks the key."""
        absent = [name for name in arguments["nodes"] if name not in variables["ansible_play_hosts"]]
        return {"changed": key.keep(Path(arguments["path"]), absent, check_mode=self._task.check_mode)}
