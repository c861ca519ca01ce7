"""Run a long script on a node and show its progress."""

from __future__ import annotations

import time
from typing import Any

from ansible.utils.display import Display

from farandole.action import Action
from farandole.steps import SAY_EVERY, progress

DOCUMENTATION = """
module: build_step
short_description: Run a long script on a node
description:
  - The script runs as a transient unit of systemd, so neither a lost connection nor a killed control machine ends it. A
    run that asks for the same step again waits for the one at work instead of starting another.
  - If a killed run left another step of the same O(build) running, this one waits for it, and it is not repeated when
    its turn comes. A step of another build is killed.
  - If two runs wait for one step, as a killed ansible-playbook can leave a process behind, both get its result.
  - While it runs, the last line of its log is shown every 20 seconds.
options:
  name: {description: "What is done, in a few words.", type: str, required: true}
  script: {description: Text for C(sh); it runs with C(set -eu) in O(directory)., type: str, required: true}
  directory:
    description: >-
      Where the script runs; it and its log are kept there. A directory in which another account than root could write,
      or with such a parent, is refused.
    type: str
    required: true
  environment:
    description: Its variables, beside a PATH with only the distribution's programs.
    type: dict
    default: {}
  build: {description: What the step is a part of., type: str, default: ""}
  creates:
    description: What the step leaves behind. While this and O(directory) exist, a finished step is not repeated.
    type: str
author: Farandole
"""

EXAMPLES = """
- name: Build OpenMPI
  build_step:
    name: OpenMPI 4.1.4
    directory: /opt/farandole/build
    script: "{{ lookup('file', 'build.sh') }}"
    environment: {PREFIX: /opt/farandole/mpi/0123456789ab}
    build: 0123456789ab
    creates: /opt/farandole/mpi/0123456789ab
"""

RETURN = """
seconds: {description: How long the step took., type: float, returned: always}
log: {description: The script's log on the node., type: str, returned: always}
"""


class ActionModule(Action):
    """Starts the step and polls it until it has ended."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Waits for the end of the step."""
        if self._task.check_mode:
            return {"changed": True}
        host = variables.get("inventory_hostname", "")
        answer = self._look(arguments, variables, start=True)
        said = time.monotonic()
        while answer.get("running"):
            at = progress(answer, host)
            time.sleep(at.pause)
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                Display().display(at.line(Display().columns))
            # While another step of the same build is at work, this one still has to be started.
            answer = self._look(arguments, variables, start=answer.get("start") is True)
        return answer

    def _look(self, arguments: dict[str, Any], variables: dict[str, Any], *, start: bool) -> dict[str, Any]:
        call = {**arguments, "start": start}
        answer: dict[str, Any] = self._execute_module("build_step", module_args=call, task_vars=variables)
        return answer
