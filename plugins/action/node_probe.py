"""Ask a node what it is, and take no answer for an answer too."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.json_utils import _filter_non_json_lines
from ansible.plugins.action import ActionBase

from farandole import probe, words
from farandole.bounds import bounded
from farandole.errors import FarandoleError

# ssh's debug output (ansible -vvv), the frame around its warnings, and notes that are no reason.
NOISE = re.compile(r"^(debug\d:|OpenSSH_|@|Warning: Permanently added)")
# Characters of a reason that are looked at.
READ = 1 << 16
# So long a node may work on its answer beside what connecting may take, half of it until a shared connection is known
# to be dead; and so much memory its words may take here.
WORK_S, MEMORY_MIB = 30, 32


def one_line(text: str) -> str:
    """The words of ssh or of a module without their frame, as one line."""
    lines = (line.strip() for line in text[-READ:].splitlines())
    told = " ".join(line for line in lines if line and not NOISE.match(line))
    return words.one_line(told.removeprefix("Failed to connect to the host via ssh: "), 2000)


def answer_of(out: str, err: str) -> dict[str, Any]:
    """What the module said, whatever a login script printed around it; or that it said something else."""
    if len(out) > probe.LONGEST:
        return {"unfit": f"it is of {len(out) >> 10} KiB"}
    try:
        told, _ = _filter_non_json_lines(out, objects_only=True)
    except ValueError:
        return {"unreachable_reason": one_line(f"{err[-READ:]}\n{out}") or "it says nothing"}
    try:
        answer = probe.read(told)
        if "probe" in answer:
            return {"probe": probe.check(answer)}
    except FarandoleError as error:
        return {"unfit": str(error)}
    return {"unreachable_reason": one_line(f"{err[-READ:]}\n{answer.get('msg', '')}") or "it says nothing"}


def ssh_command(login: Mapping[str, Any]) -> str:
    """The command by which a person makes the same connection."""
    parts = [
        *shlex.split(login["common_args"] or ""),
        *(["-p", str(login["port"])] if login["port"] else []),
        *(["-i", str(login["key"])] if login["key"] else []),
        f"{login['user']}@{login['host']}" if login["user"] else str(login["host"]),
    ]
    return shlex.join(["ssh", *parts])


class ActionModule(ActionBase):  # type: ignore[misc]
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = {**super().run(tmp, task_vars), "changed": False, "login": self._login(task_vars or {})}
        answer = self._ask(task_vars)
        if "probe" not in answer:
            return {**result, **answer}
        asked = {"user": str(self._task.args["user"]), "id": int(self._task.args["id"])}
        return {**result, "probe": answer["probe"] | asked, "skew": round(answer["probe"]["time"] - time.time(), 3)}

    def _ask(self, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """Just what this file has made of the answer, never what Ansible would take from it."""
        seconds = WORK_S + int(self._option("timeout") or 10) * (1 + int(self._option("reconnection_retries") or 0))
        try:
            with bounded(seconds, MEMORY_MIB) as broken:
                answer = self._execute_module(task_vars=task_vars)
        # Of whatever kind: a node must not be able to end the run for all.
        except Exception as error:
            answer = {"unreachable_reason": one_line(str(error)) or "it says nothing"}
        if broken:
            return {"unreachable_reason" if broken[0].startswith("no ") else "unfit": broken[0]}
        return {key: answer[key] for key in ("probe", "unfit", "unreachable_reason") if key in answer}

    def _parse_returned_data(self, res: Mapping[str, Any], profile: str) -> dict[str, Any]:  # noqa: ARG002
        """Instead of Ansible's own, which shows some of an answer and believes more of it than is asked here."""
        return answer_of(str(res.get("stdout") or ""), str(res.get("stderr") or ""))

    def _login(self, task_vars: Mapping[str, Any]) -> dict[str, Any]:
        login = {
            "host": self._option("host") or task_vars.get("inventory_hostname"),
            "port": self._option("port"),
            "user": self._option("remote_user"),
            "key": self._option("private_key_file"),
            "common_args": " ".join(filter(None, map(self._option, ("ssh_common_args", "ssh_extra_args")))),
        }
        return {**login, "command": ssh_command(login)}

    def _option(self, name: str) -> Any:
        """An option of the connection, None where its plugin has no such option."""
        try:
            return self._connection.get_option(name)
        except KeyError:
            return None
