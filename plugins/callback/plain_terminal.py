DOCUMENTATION = """
name: plain_terminal
type: aggregate
short_description: Escape control characters before they reach the terminal
description:
  - Ansible prints results, warnings and diffs as the node sent them. An escape code in them could clear the screen or
    fake a line of output.
"""

from typing import Any

from ansible.plugins.callback import CallbackBase

from farandole.core.text import on_terminal


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Wraps the one method through which Ansible prints everything, including output of workers and callbacks."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "farandole.cluster.plain_terminal"

    def __init__(self, display: Any = None, options: Any = None) -> None:
        super().__init__(display, options)
        show = self._display.display

        def shown(msg: str, *arguments: Any, **options: Any) -> None:
            show(on_terminal(str(msg)), *arguments, **options)

        self._display.display = shown
