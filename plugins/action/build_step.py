DOCUMENTATION = """
module: build_step
short_description: Run a long script on a node
description:
  - The script runs as a transient systemd unit, so it survives a lost connection and a killed control machine. A
    later run of the same step waits for the running one instead of starting another.
  - If a killed run left another step of the same O(build) running, this step waits for it, and that step is not
    repeated later. A step of another build is killed, in any unit.
  - If two runs wait for the same step, because a killed ansible-playbook can leave a process behind, both get its
    result.
  - While the script runs, the last line of its log is shown every 20 seconds.
options:
  name: {description: "Short name of the step.", type: str, required: true}
  script: {description: Text of the script; C(sh) runs it with C(set -eu) in O(directory)., type: str, required: true}
  directory:
    description: >-
      Working directory of the script, where it and its log are kept. A directory that accounts other than root can
      write to, or that has such a parent, is refused.
    type: str
    required: true
  environment:
    description: Environment variables, besides a PATH with only the distribution's programs.
    type: dict
    default: {}
  build: {description: The build that the step is part of., type: str, default: ""}
  creates:
    description: A path that the step creates. While it and O(directory) exist, a finished step is not repeated.
    type: str
  root:
    description: >-
      Whether the script runs as root. If not, it runs as an account that exists only for it, without the network, and
      can write only to the folder C($CACHE_DIRECTORY), which is C(/var/cache/private/farandole-build).
    type: bool
    default: true
  unit:
    description: >-
      The systemd unit, C(farandole-build) or with more after it. Steps in different units run at the same time.
    type: str
    default: farandole-build
  wait:
    description: Whether to wait until the step has ended. If not, call it again with the same arguments to wait for it.
    type: bool
    default: true
"""

import time
from typing import Any

from ansible.utils.display import Display

from farandole.plays.action import Action
from farandole.watch.steps import SHOW_EVERY, progress


class ActionModule(Action):
    """Starts the step and polls it until it ends."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Starts the step and waits for its result."""
        if self._task.check_mode:
            return {"changed": True}
        host, wait = variables.get("inventory_hostname", ""), arguments.pop("wait")
        quiet = {**variables, "ansible_no_target_syslog": True}
        answer = self.ask({**arguments, "start": True}, variables)
        shown = time.monotonic()
        while wait and answer.get("running"):
            at = progress(answer, host)
            self.tell(variables, f"{at.step}: {at.last}")
            time.sleep(at.pause)
            if time.monotonic() - shown >= SHOW_EVERY:
                shown = time.monotonic()
                Display().display(at.line(Display().columns))
            # If the running step is another one of the same build, this one has yet to be started. The node has logged
            # it, and need not log each look at it.
            answer = self.ask({**arguments, "start": answer.get("start") is True}, quiet)
        return answer
