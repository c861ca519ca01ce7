DOCUMENTATION = """
module: run_script
short_description: Run a Python script on a node as another account
description:
  - Python reads the script from standard input, and its output goes directly to the connection, without a module in
    between. So a script that watches its standard output notices when the run that started it has died.
  - The task does not fail if the script does; check C(rc).
options:
  script: {description: Text of the script., type: str, required: true}
  user: {description: Account that runs the script., type: str, required: true}
  argument: {description: The only argument of the script., type: str, required: true}
"""

import shlex
import time
from collections.abc import Mapping
from typing import Any

from farandole.plays.action import Action


class ActionModule(Action):
    """Needs no module, because every node has Python and runuser."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Runs the script and returns its output."""
        if self._task.check_mode:
            return {"changed": False, "skipped": True}
        command = ["runuser", "--user", arguments["user"], "--", "python3", "-", arguments["argument"]]
        script, begun = arguments["script"].encode(), time.time()
        # In a loop over jobs, which is extended, each has a title.
        if isinstance(item := variables.get("item"), Mapping) and "title" in item:
            at = variables["ansible_loop"]
            self.tell(variables, f"{at['index']} of {at['length']}: {item['title']}")
        answer = self._low_level_execute_command(shlex.join(command), sudoable=True, in_data=script)
        return {"changed": False, "begun": begun, **{key: answer[key] for key in ("rc", "stdout", "stderr")}}
