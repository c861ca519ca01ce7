"""Run a long script on a node, say how it goes, and find it again after a run that was killed."""

from __future__ import annotations

import textwrap
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
ANSWER = {"step": text(100), "seconds": number, "last": text(200)}


def clock(seconds: float) -> str:
    """As minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def shortened(words: str, width: int) -> str:
    """As many of them as fit in a line."""
    return textwrap.shorten(words, width, placeholder=" …")


def progress(answer: dict[str, Any], host: str) -> tuple[str, float, str]:
    """Which step is at work, and how far the node says that it is."""
    try:
        told = {name: within(name, check, answer.get(name)) for name, check in ANSWER.items()}
        return told["step"], told["seconds"], told["last"]
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
            step, seconds, last = progress(answer, host)
            time.sleep(min(LONGEST, SHORTEST + seconds / 10))
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                words = f"{host}: {step}, {clock(seconds)}: {last}"
                Display().display(shortened(words, Display().columns))
            # While another step of the same build is at work, this one still has to be started.
            answer = self._look(arguments, task_vars, start=answer.get("start") is True)
        return {**result, **answer}

    def _look(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, *, start: bool) -> dict[str, Any]:
        call = {**arguments, "start": start}
        answer: dict[str, Any] = self._execute_module("build_step", module_args=call, task_vars=task_vars)
        return answer
