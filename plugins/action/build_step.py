"""Run a long script on a node, say how it goes, and find it again after a run that was killed."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from farandole.errors import FarandoleError
from farandole.form import number, text, within

# Looking costs the node's processor something: often at first, then ever less.
SHORTEST, LONGEST = 1.0, 10.0
# A line of progress so often; what is over sooner needs none.
SAY_EVERY = 20.0


def clock(seconds: float) -> str:
    """As minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def progress(answer: dict[str, Any], host: str) -> tuple[float, str]:
    """How far the node says that it is."""
    try:
        return within("seconds", number, answer.get("seconds")), within("last", text(200), answer.get("last"))
    except FarandoleError as error:
        raise AnsibleActionFail(f"{host} does not say how far its step is: {error}; look at that machine") from error


class ActionModule(ActionBase):  # type: ignore[misc]
    """Starts the step and looks at it until it is over."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if self._task.check_mode:
            return {**result, "changed": True}
        host = (task_vars or {}).get("inventory_hostname", "")
        answer = self._look(arguments, task_vars, start=True)
        said = time.monotonic()
        while answer.get("running"):
            seconds, last = progress(answer, host)
            time.sleep(min(LONGEST, SHORTEST + seconds / 10))
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                words = f"{host}: {arguments['name']}, {clock(seconds)}: {last}"
                Display().display(words[: Display().columns])
            answer = self._look(arguments, task_vars, start=False)
        return {**result, **answer}

    def _look(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, *, start: bool) -> dict[str, Any]:
        call = {**arguments, "start": start}
        answer: dict[str, Any] = self._execute_module("build_step", module_args=call, task_vars=task_vars)
        return answer
