DOCUMENTATION = """
module: run_lock
short_description: Let one run at a time change a cluster
description:
  - Records the run in the state folder on the control machine, and on the head, where runs from other control machines
    see it. While another run is active, this one is refused.
  - The lock need not be released. On the control machine a run is over when its process has ended; on the head, when
    the connection that the run holds open is closed.
  - In check mode it is only refused while another run of this control machine is active, as what it would say may be
    wrong a moment later. It keeps no other run out.
options:
  state_dir: {description: State folder of the cluster on the control machine., type: path, required: true}
"""

from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.text.converters import to_text

from farandole.core.errors import FarandoleError
from farandole.inventory import run_lock as runs
from farandole.inventory.state import claim
from farandole.plays.action import Action


class ActionModule(Action):
    """Needs a connection to the head."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Records the run on this machine, then on the head."""
        main, state = parent_process(), Path(arguments["state_dir"])
        mine = runs.this_run(main.pid if main and main.pid else 0)
        if self._task.check_mode:
            runs.refuse_another(state, mine)
            return {"changed": False}
        claim(state, Path(variables["inventory_dir"]))
        runs.take(state, mine)
        if notice := runs.register_on_head(mine, partial(self._connect, mine), partial(self._ask, variables)):
            self._display.warning(notice)
        return {"changed": False}

    def _connect(self, mine: runs.ClusterRun) -> runs.Keeper:
        return runs.start_keeper(mine, self._command())

    def _ask(self, variables: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.ask(call, variables)
        except AnsibleError as error:
            return {"msg": str(error)}

    def _command(self) -> list[str]:
        """The ssh command of this connection, with the program to run on the head."""
        connection = self._connection
        if connection.transport != "ssh":
            raise FarandoleError(f"the connection uses {connection.transport} instead of ssh")
        ssh = connection.get_option("ssh_executable")
        command = [to_text(word) for word in connection._build_command(ssh, "ssh", connection.host, runs.HOLDER)]
        return runs.own_connection(command, ssh)
