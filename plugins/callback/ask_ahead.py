DOCUMENTATION = """
name: ask_ahead
type: aggregate
short_description: Ask each node for everything at once
description:
  - Records which modules a run calls on each host. The next run of the same playbook, with the same inventory and tags,
    asks for all of them at once in check mode, and a task whose module would change nothing takes this answer.
  - Discards the answers of a host after the first change there.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import action_loader, filter_loader, test_loader
from ansible.release import __version__

from farandole.inventory.state import states
from farandole.plays.ahead.action import FOLDER, OVERRIDES, decode, encode
from farandole.plays.ahead.calls import Answer, RunCalls

# Of other releases of ansible-core, nobody knows whether what this builds on is the same.
TESTED = "2.19."
# Whatever their task says, nobody knows what they change.
COMMANDS = {
    collection + name
    for collection in ("", "ansible.builtin.", "ansible.legacy.")
    for name in ("command", "raw", "script", "shell")
}


def record() -> Path:
    """The folder for the calls of this kind of run, beside the states: root on the nodes runs what is kept there."""
    given = context.CLIARGS
    options = [list(given.get(key) or ()) for key in ("args", "inventory")]
    # Ansible's own order of these is another one in each process.
    tags = [sorted(given.get(key) or ()) for key in ("tags", "skip_tags")]
    kind = json.dumps([str(Path.cwd()), *options, *tags])
    inventory = next(iter(given.get("inventory") or ()), "")
    return states(inventory) / ".calls" / hashlib.sha256(kind.encode()).hexdigest()[:16]


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Begins and ends a run, and notices changes."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "farandole.cluster.ask_ahead"
    # So that it can be switched off: ANSIBLE_CALLBACKS_ENABLED=farandole.cluster.plain_terminal
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, playbook: Any) -> None:  # noqa: ARG002
        if not __version__.startswith(TESTED):
            why = f"asking ahead is for ansible-core {TESTED}x, and this is {__version__}"
            self._display.display(f"note: each task asks the nodes by itself: {why}")
            return
        with suppress(FileExistsError):
            RunCalls.begin(FOLDER, record())
        # Modules without an action of their own have Ansible's, which no collection can replace.
        action_loader.add_directory(str(OVERRIDES))
        # Otherwise the process of each task imports them.
        filter_loader.get("farandole.cluster.state_folder")
        test_loader.get("ansible.builtin.file")
        decode(Answer(encode({}), "legacy"))

    def v2_runner_on_ok(self, result: Any) -> None:
        changed = result.is_changed() and not result.task.check_mode
        # A command that was skipped, because what it creates exists, took no time.
        if changed or (result.task.action in COMMANDS and result.result.get("delta")):
            self._forget(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:  # noqa: ARG002
        """Discards answers after a failure, which may have changed something."""
        self._forget(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Discards the answers of a node that may have been restarted."""
        self._forget(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Keeps the calls of a run that came to its end; after a failure, those of the run before are worth more."""
        run = RunCalls.current(FOLDER)
        if run and not (context.CLIARGS.get("check") or stats.failures or stats.dark):
            for name in stats.processed:
                run.host(name).keep()

    @staticmethod
    def _forget(result: Any) -> None:
        if run := RunCalls.current(FOLDER):
            own = result.host.get_name()
            for name in {own, result.task.delegate_to or own}:
                run.host(str(name)).forget()
