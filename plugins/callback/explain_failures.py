DOCUMENTATION = """
name: explain_failures
type: aggregate
short_description: Explain the failures of a run, root cause last
description:
  - Below the recap, looks the messages of failed tasks and lost nodes up in the catalogue of causes, as C(farandole
    explain) does, and prints what is wrong where, and how to fix it; of a failure that is not known the lines that say
    most.
  - Says nothing of a failure whose message already names its cause, or whose result is secret.
"""

from typing import Any

from ansible.plugins.callback import CallbackBase

from farandole.core.findings import joined
from farandole.explain.failures import MOST, Failure, why
from farandole.plays.action import failure_of
from farandole.watch import events


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Keeps what failed; costs nothing in a run in which nothing fails."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "farandole.cluster.explain_failures"
    # So that it can be switched off: ANSIBLE_CALLBACKS_ENABLED=farandole.cluster.plain_terminal
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, display: Any = None, options: Any = None) -> None:
        super().__init__(display, options)
        self.failures: list[Failure] = []

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Keeps why a task failed."""
        if not ignore_errors:
            self._keep(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Keeps why a node does not answer."""
        if not result.task.ignore_unreachable:
            self._keep(result, lost=True)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Explains."""
        hosts = {*stats.failures, *stats.dark}
        failed = [failure for failure in self.failures if failure.blamed in hosts]
        reasons = why(failed)
        if text := joined(reasons.explanation()).strip():
            self._display.display(f"Why it failed:\n\n{text}")
        if failed:
            events.add("why", **reasons.data())

    def _keep(self, result: Any, *, lost: bool = False) -> None:
        if len(self.failures) < MOST:
            kept = failure_of(result, lost=lost)
            self.failures += [kept] if kept else []
