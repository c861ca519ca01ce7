"""Ask a node what it is; no answer is a result too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.json_utils import _filter_non_json_lines

from farandole import probe
from farandole.action import Action
from farandole.bounds import bounded

DOCUMENTATION = r"""
module: node_probe
short_description: Say what a node is
description:
  - Reads, in one round trip, what Farandole must know of a node before it touches it.
  - A node that cannot be reached or cannot run the module is an answer too, given as RV(unreachable_reason);
    the task does not fail, so that M(preflight) can judge all nodes together.
options:
  user:
    description: Name of the account, and of its group, that runs jobs.
    type: str
    required: true
  id:
    description: The uid and gid that this account wants.
    type: int
    required: true
attributes:
  check_mode:
    description: Changes nothing, in check mode or out of it.
    support: full
author: Farandole
"""

EXAMPLES = r"""
- name: Probe the nodes
  node_probe:
    user: trainer
    id: 2000
  register: _preflight_probe
"""

RETURN = r"""
probe:
  description: What the node says of itself. Missing when it gave no answer.
  returned: the node answered
  type: dict
  contains:
    os_id: {description: "ID of /etc/os-release.", type: str, sample: debian}
    os_version: {description: "VERSION_ID of /etc/os-release.", type: str, sample: "12"}
    codename: {description: "VERSION_CODENAME of /etc/os-release.", type: str, sample: bookworm}
    arch: {description: "Machine architecture.", type: str, sample: x86_64}
    python: {description: "Python of the system, major and minor.", type: str, sample: "3.11"}
    glibc: {description: "The C library.", type: str, sample: "2.36"}
    nvidia_driver: {description: "Version of the NVIDIA driver that is loaded; empty without.", type: str}
    cuda: {description: "Version of the CUDA toolkit, by its nvcc; empty without.", type: str, sample: "13.0"}
    hostname: {description: "Host name.", type: str, sample: node-1}
    machine_id: {description: "/etc/machine-id.", type: str}
    addresses: {description: "All its IP addresses; null without the command ip.", type: list, elements: str}
    interfaces: {description: "Name, address and prefix length of each of them.", type: list, elements: dict}
    gpus: {description: "How many NVIDIA GPUs the driver has.", type: int}
    init: {description: "Name of process 1.", type: str, sample: systemd}
    container: {description: "Whether the node is a container.", type: bool}
    user: {description: "The account asked about.", type: str}
    id: {description: "The uid and gid asked about.", type: int}
    user_id: {description: "The uid that the account has; null without the account.", type: int}
    group_id: {description: "The gid that the group has; null without the group.", type: int}
    id_owner: {description: "The account that has the wanted uid; null when it is free.", type: str}
    group_id_owner: {description: "The group that has the wanted gid; null when it is free.", type: str}
    python_apt: {description: "Whether the interpreter has python3-apt.", type: bool}
    sshd_drop_ins: {description: "Whether sshd reads /etc/ssh/sshd_config.d/*.conf.", type: bool}
    disk_free_mb: {description: "Free space where /opt lies, in MiB.", type: int}
    stacks: {description: "Ids of the stacks that are C(installed), C(current) and C(former).", type: dict}
    data: {description: "The sha256 of each file of the sample scripts' data.", type: dict}
    time: {description: "The node's clock, in seconds since 1970.", type: float}
    root: {description: "Whether the module ran as root.", type: bool}
skew:
  description: Seconds by which the node's clock is ahead of the controller's.
  returned: the node answered
  type: float
unreachable_reason:
  description: Why there is no answer, in the words of ssh, sudo or Python, on one line.
  returned: the node gave no answer
  type: str
unfit:
  description: What in its answer is of a form that no node gives; nothing of such an answer is used.
  returned: the node answered, and strangely
  type: str
login:
  description: How Ansible tried to log in, and the same as an ssh command.
  returned: always
  type: dict
"""

# So long a node may work on its answer beside what connecting may take, half of it until a shared connection is known
# to be dead; and so much memory its words may take here.
WORK_S, MEMORY_MIB = 30, 32


def only_json(out: str) -> str:
    """The JSON object in a module's output, whatever a login script printed around it."""
    found, _ = _filter_non_json_lines(out, objects_only=True)
    return str(found)


class ActionModule(Action):
    """Never fails because of a node."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Adds how the login was tried and how far the clock is off."""
        result = {"changed": False, "login": self._login(variables)}
        answer = self._ask(arguments, variables)
        if "probe" not in answer:
            self._forget_connection()
            return {**result, **answer}
        skew = round(answer["probe"]["time"] - time.time(), 3)
        return {**result, "probe": answer["probe"] | arguments, "skew": skew}

    def _ask(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Just what this file has made of the answer, never what Ansible would take from it."""
        seconds = WORK_S + int(self._option("timeout") or 10) * (1 + int(self._option("reconnection_retries") or 0))
        try:
            with bounded(seconds, MEMORY_MIB) as broken:
                answer = self._execute_module(module_args=arguments, task_vars=variables)
        # Any error: no node may be able to end the run for all.
        except Exception as error:
            answer = {"unreachable_reason": probe.reason(str(error)) or "it says nothing"}
        if broken:
            return {"unreachable_reason" if broken[0].startswith("no ") else "unfit": broken[0]}
        return {key: answer[key] for key in ("probe", "unfit", "unreachable_reason") if key in answer}

    def _forget_connection(self) -> None:
        """A kept connection would go on with the groups that the account had before what is wrong was mended."""
        if hasattr(self._connection, "reset"):
            with suppress(AnsibleError):
                self._connection.reset()

    def _parse_returned_data(self, res: Mapping[str, Any], profile: str) -> dict[str, Any]:  # noqa: ARG002
        """Instead of Ansible's own, which shows some of an answer and believes more of it than is asked here."""
        return probe.answer_of(str(res.get("stdout") or ""), str(res.get("stderr") or ""), only_json)

    def _login(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        login = {
            "host": self._option("host") or variables.get("inventory_hostname"),
            "port": self._option("port"),
            "user": self._option("remote_user"),
            "key": self._option("private_key_file"),
            "common_args": " ".join(filter(None, map(self._option, ("ssh_common_args", "ssh_extra_args")))),
        }
        return {**login, "command": probe.ssh_command(login)}

    def _option(self, name: str) -> Any:
        """An option of the connection, None where its plugin has no such option."""
        try:
            return self._connection.get_option(name)
        except KeyError:
            return None
