"""Run a Python script on a node as another account, straight over the connection."""

from __future__ import annotations

import shlex
from typing import Any

from farandole.action import Action

DOCUMENTATION = """
module: run_script
short_description: Run a Python script on a node as another account
description:
  - The script is the program's standard input, and its output goes straight to the connection, without a module in
    between. So a script that watches its standard output notices when the run that started it is gone.
  - Its exit status decides nothing; look at C(rc).
options:
  script: {description: The text of the script., type: str, required: true}
  user: {description: The account that it runs as., type: str, required: true}
  argument: {description: Its only argument., type: str, required: true}
author: Farandole
"""

EXAMPLES = """
- name: Run a job
  run_script:
    script: "{{ lookup('file', 'job.py') }}"
    user: trainer
    argument: "{{ job | to_json }}"
"""

RETURN = """
rc: {description: The exit status., type: int, returned: not in check mode}
stdout: {description: What it printed., type: str, returned: not in check mode}
stderr: {description: What it complained., type: str, returned: not in check mode}
"""


class ActionModule(Action):
    """Needs no module, as Python and runuser are on every node."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Runs the script and returns its output."""
        if self._task.check_mode:
            return {"changed": False, "skipped": True}
        command = ["runuser", "--user", arguments["user"], "--", "python3", "-", arguments["argument"]]
        script = arguments["script"].encode()
        answer = self._low_level_execute_command(shlex.join(command), sudoable=True, in_data=script)
        return {"changed": False, **{key: answer[key] for key in ("rc", "stdout", "stderr")}}
