"""Let one run at a time change a cluster."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from multiprocessing import parent_process
from pathlib import Path
from subprocess import Popen
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.text.converters import to_text

from farandole import runs
from farandole.action import Action
from farandole.errors import FarandoleError
from farandole.state import claim

DOCUMENTATION = """
module: run_lock
short_description: Let one run at a time change a cluster
description:
  - Records the run in the state folder on the control machine, and on the head for runs from other control machines.
    While another run goes on, this one is refused.
  - The lock needs no release. On the control machine a run is over when its process is gone; on the head, when the
    connection is closed that the run holds open.
  - Does nothing in check mode.
options:
  state_dir: {description: The cluster's state folder on the control machine., type: path, required: true}
author: Farandole
"""

EXAMPLES = """
- name: Keep other runs out
  run_lock:
    state_dir: "{{ base_state_dir }}"
  delegate_to: "{{ groups['head'][0] }}"
  run_once: true
"""


class ActionModule(Action):
    """Runs where the connection is the head's."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Takes the lock on this machine, then on the head."""
        if self._task.check_mode:
            return {"changed": False}
        main, state = parent_process(), Path(arguments["state_dir"])
        mine = runs.this_run(main.pid if main and main.pid else 0)
        claim(state, Path(variables["inventory_dir"]))
        runs.take(state, mine)
        if notice := self._tell_head(mine, variables):
            self._display.warning(
                f"runs from other control machines are not kept out of this cluster: {notice}. "
                "See to it that there are none"
            )
        return {"changed": False}

    def _tell_head(self, mine: runs.Run, variables: dict[str, Any]) -> str:
        """Why the head could not be told; empty where it was."""
        notice = ""
        # The second time over the connection that asking leaves open, where a login wants a password.
        for _ in range(2):
            keeper, holder = None, 0
            try:
                keeper, holder, source = runs.start_keeper(mine, self._command())
                mine = replace(mine, source=source)
            except FarandoleError as error:
                notice = f"no connection can be held open to the head ({error})"
            try:
                held = self._ask(mine, holder, variables)
            except AnsibleError as error:
                self._end(keeper)
                return notice or f"the head does not answer ({runs.plain(str(error))})"
            if held:
                self._end(keeper)
                raise FarandoleError(runs.refusal(held))
            if holder:
                return ""
        return notice

    def _ask(self, mine: runs.Run, holder: int, variables: dict[str, Any]) -> runs.Run | None:
        """The run that keeps this one out, as the head knows it."""
        call = {"run": asdict(mine), "holder": holder}
        held = self._held(call, variables)
        if held and held.here and not held.lives:
            held = self._held({**call, "over": asdict(held)}, variables)
        return held

    def _held(self, call: dict[str, Any], variables: dict[str, Any]) -> runs.Run | None:
        answer = self._execute_module("run_lock", module_args=call, task_vars=variables)
        if "held" not in answer:
            raise AnsibleError(str(answer.get("msg", "no answer"))[:300])
        if not answer["held"]:
            return None
        if held := runs.read(answer["held"]):
            return held
        raise FarandoleError(
            "the head says that another run is at work, and not which: remove /var/lib/farandole-run on it"
        )

    def _command(self) -> list[str]:
        """The ssh of this connection; it never asks for anything, and is no connection for others to share."""
        connection = self._connection
        if connection.transport != "ssh":
            raise FarandoleError(f"it is reached by {connection.transport}, not by ssh")
        ssh = connection.get_option("ssh_executable")
        words = [to_text(word) for word in connection._build_command(ssh, "ssh", connection.host, runs.HOLDER)]
        # Before ssh stands what gives it a password; -v would fill a pipe that nobody reads.
        options = [word for word in words[words.index(ssh) + 1 :] if not re.fullmatch("-v+", word)]
        return [ssh, "-o", "BatchMode=yes", "-o", "ControlMaster=no", *options]

    @staticmethod
    def _end(keeper: Popen[str] | None) -> None:
        if keeper:
            keeper.kill()
