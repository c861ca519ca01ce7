DOCUMENTATION = r"""
module: node_probe
short_description: Report what a node is
description:
  - Reads in one round trip what Farandole must know about a node before it changes anything. The form of the answer is
    in C(src/farandole/preflight/answer.py).
  - If a node cannot be reached or cannot run the module, the task does not fail but returns RV(unreachable_reason), so
    that M(preflight) can check all nodes together.
options:
  accounts:
    description: Names of the accounts that run jobs, and of their groups, with the uid and gid intended for each.
    type: dict
    required: true
  user:
    description: The job user, whose shells are asked what a job would find there; empty for nobody.
    type: str
    default: ""
  note:
    description:
      - Whether to note on the node that the stack is whole if all of it had to be read, so that the next run need not
        read it again. Check mode does not decide this, as the node is asked ahead in it.
    type: bool
    default: false
attributes:
  check_mode: {description: "Changes nothing but, with O(note), the time of the stack's manifest.", support: full}
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.module_utils.common.text.converters import to_text
from ansible.module_utils.json_utils import _filter_non_json_lines

from farandole.core.bounds import bounded
from farandole.core.errors import FarandoleError
from farandole.core.findings import some
from farandole.plays.action import Action
from farandole.plays.ahead.action import AsksAhead
from farandole.plays.ahead.calls import Answer
from farandole.preflight import answer as probe


def only_json(out: str) -> str:
    """Extract the JSON object from a module's output, as login scripts may print text around it."""
    text, _ = _filter_non_json_lines(out, objects_only=True)
    return str(text)


class ActionModule(AsksAhead, Action):
    """Does not fail, whatever the node does. It comes first, so the node usually answers all the rest as well."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Probes the node; adds how the login was tried and by how much the clock differs."""
        result = {"changed": False, "login": self._login(variables)}
        answer = self._probed(arguments, variables)
        if probe.is_late(answer):
            self.tell(variables, "reads the files of its stack")
            answer = self._probed({**arguments, "patient": True}, variables)
        if "probe" not in answer:
            self._forget_connection()
            return {**result, **answer}
        if unasked := arguments["accounts"].keys() - answer["probe"]["accounts"].keys():
            return {**result, "unfit": f"it says nothing about {some(sorted(unasked))}"}
        skew = round(answer["probe"]["time"] - time.time(), 3)
        return {**result, "probe": answer["probe"], "skew": skew}

    def _probed(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """What the node answers. After a failure it is asked again, but a node that is off costs only one time-out."""
        retries = int(self._option("reconnection_retries") or 0)
        if retries:
            self._connection.set_option("reconnection_retries", 0)
        begun = time.monotonic()
        try:
            return self._asked(arguments, variables)
        except AnsibleConnectionFailure as error:
            if not retries or time.monotonic() - begun > probe.QUICK_S:
                return probe.failure(error)
            return self._asked_again(arguments, variables)
        finally:
            if retries:
                self._connection.set_option("reconnection_retries", retries)

    def _asked_again(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._asked(arguments, variables)
        except AnsibleConnectionFailure as error:
            return probe.failure(error)

    def _asked(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Only what has been validated, never anything that Ansible itself takes from the answer."""
        seconds = probe.time_limit(self._option("timeout"), self._option("reconnection_retries"))
        patient = arguments.get("patient")
        try:
            with bounded(probe.PATIENT_S if patient else seconds, probe.MEMORY_MIB):
                # What the next run should not ask ahead is asked with an option, which here is the default.
                answer = self._execute_module(module_args=arguments, task_vars=variables, delete_remote_tmp=patient)
        except (FarandoleError, AnsibleConnectionFailure):
            raise
        # Any other error, because no node may end the run for the others.
        except Exception as error:
            return probe.failure(error)
        return {key: answer[key] for key in ("probe", "unfit", "unreachable_reason") if key in answer}

    def _decoded(self, answer: Answer) -> dict[str, Any]:
        checked = probe.answer_of(answer.output, "", only_json)
        return {"changed": False, **checked} if "probe" in checked else {"failed": True}

    def _configure_module(self, *arguments: Any, **options: Any) -> Any:
        """Prepare the module on this machine, where an error is not the node's fault."""
        try:
            return super()._configure_module(*arguments, **options)
        except AnsibleConnectionFailure:
            raise
        except AnsibleError as error:
            raise FarandoleError(str(error)) from error

    def _forget_connection(self) -> None:
        """Close a kept connection, which would still have the account's old groups after they were corrected."""
        if hasattr(self._connection, "reset"):
            with suppress(AnsibleError):
                self._connection.reset()

    def _parse_returned_data(self, res: Mapping[str, Any], profile: str) -> dict[str, Any]:  # noqa: ARG002
        """Replaces Ansible's own method, which prints parts of an answer and trusts more of it than is needed here."""
        return probe.answer_of(str(res.get("stdout") or ""), str(res.get("stderr") or ""), only_json)

    def _login(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        login = {
            "host": self._option("host") or variables.get("inventory_hostname"),
            "port": self._option("port"),
            "user": self._option("remote_user"),
            "key": self._option("private_key_file"),
            "common_args": " ".join(filter(None, map(self._option, ("ssh_common_args", "ssh_extra_args")))),
        }
        shared = self._shared()
        account = login["user"] or probe.account_of(shared)
        return {**login, "command": probe.ssh_command(login), "shared": shared, "account": account}

    def _shared(self) -> list[str]:
        """The ssh command that uses this connection; empty if it is not by ssh."""
        connection = self._connection
        if connection.transport != "ssh":
            return []
        ssh = connection.get_option("ssh_executable")
        command = [to_text(word) for word in connection._build_command(ssh, "ssh", connection.host)]
        return probe.shared_connection(command, ssh)

    def _option(self, name: str) -> Any:
        """An option of the connection; None if its plugin does not have it."""
        try:
            return self._connection.get_option(name)
        except KeyError:
            return None
