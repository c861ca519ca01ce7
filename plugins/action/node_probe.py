"""Ask a node what it is, and take no answer for an answer too."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

# ssh's debug output (ansible -vvv), the frame around its warnings, and notes that are no reason.
NOISE = re.compile(r"^(debug\d:|OpenSSH_|@|Warning: Permanently added)")


def one_line(text: str) -> str:
    """The words of ssh or of a module without their frame, as one line."""
    lines = (line.strip() for line in text.splitlines())
    words = " ".join(line for line in lines if line and not NOISE.match(line))
    return words.removeprefix("Failed to connect to the host via ssh: ")


def failure_text(answer: Mapping[str, Any]) -> str:
    """What a module that failed left behind; its message says least when it never started."""
    parts = (answer.get(key) for key in ("module_stderr", "module_stdout", "msg"))
    return "\n".join(str(part) for part in parts if part)


def ssh_command(login: Mapping[str, Any]) -> str:
    """The command by which a person makes the same connection."""
    words = (
        "ssh",
        login["common_args"],
        login["port"] and f"-p {login['port']}",
        login["key"] and f"-i {login['key']}",
        f"{login['user']}@{login['host']}" if login["user"] else login["host"],
    )
    return " ".join(str(word) for word in words if word)


class ActionModule(ActionBase):  # type: ignore[misc]
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = {**super().run(tmp, task_vars), "changed": False, "login": self._login(task_vars or {})}
        answer = self._ask(task_vars)
        if "probe" not in answer:
            return {**result, "unreachable_reason": one_line(failure_text(answer))}
        skew = answer["probe"]["time"] - time.time()
        return {**result, "probe": answer["probe"], "skew": round(skew, 3)}

    def _ask(self, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._execute_module(task_vars=task_vars)
        except AnsibleError as error:
            return {"msg": str(error)}
        return answer

    def _login(self, task_vars: Mapping[str, Any]) -> dict[str, Any]:
        login = {
            "host": self._option("host") or task_vars.get("inventory_hostname"),
            "port": self._option("port"),
            "user": self._option("remote_user"),
            "key": self._option("private_key_file"),
            "common_args": self._option("ssh_common_args"),
        }
        return {**login, "command": ssh_command(login)}

    def _option(self, name: str) -> Any:
        """An option of the connection, None where its plugin has no such option."""
        try:
            return self._connection.get_option(name)
        except KeyError:
            return None
