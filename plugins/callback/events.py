DOCUMENTATION = """
name: events
type: aggregate
short_description: Record what a run does
description:
  - Appends a line of JSON for each event to one file, which C(farandole watch) and others read, and keeps how long each
    task took. Adds one line to the recap.
  - Of a result only its status is kept, with C(--diff) also the differences, of a failure also its message; of what has
    C(no_log) nothing but the status.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

from farandole.core.errors import FarandoleError
from farandole.core.project import COLLECTION
from farandole.core.text import one_line
from farandole.inventory.run_lock import this_run
from farandole.plays.action import failure_of
from farandole.watch import durations, events
from farandole.watch.watched import summary


def options() -> dict[str, Any]:
    given = context.CLIARGS
    # Ansible's own order is another one in each process.
    lists = {name: sorted(given.get(name) or ()) for name in ("tags", "skip_tags")}
    return {
        "playbook": " ".join(map(str, given.get("args") or ())),
        "inventory": str((given.get("inventory") or ("/etc/ansible/hosts",))[0]),
        **lists,
        "limit": str(given.get("subset") or ""),
        "check": bool(given.get("check")),
    }


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Writes a line per event; looks into a result only if it failed or is a report."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "farandole.cluster.events"
    # So that it can be switched off: ANSIBLE_CALLBACKS_ENABLED=farandole.cluster.plain_terminal
    CALLBACK_NEEDS_ENABLED = True

    # Of the run that is recorded.
    durations: Path | None = None

    def v2_playbook_on_start(self, playbook: Any) -> None:  # noqa: ARG002
        """Begins, if there is a folder that can be written."""
        self.begun: list[tuple[str, float]] = []
        self.numbers: dict[str, int] = {}
        self.elsewhere: set[str] = set()
        self.started, self.play = time.time(), ""
        about = options()
        with suppress(FarandoleError, OSError):
            given = os.environ.get(events.VARIABLE)
            folder = Path(given) if given else events.new_folder(about["inventory"])
            events.record(folder)
            self.durations = folder.parent / events.DURATIONS
            run = asdict(this_run(os.getpid()))
            events.add("start", format=events.FORMAT, run=run, **about)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self.play = one_line(play.get_name(), events.NAME)
        events.add("play", name=self.play)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:  # noqa: ARG002
        self._task(task)

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self._task(task)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        events.add("begin", task=self.numbers.get(task._uuid, 0), host=host.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
        """Tells of a host that is done with a task, and of what a report says."""
        self._done("changed" if result.is_changed() else "ok", result)
        # Actions of ours show their reports themselves. Ansible copies a result for whoever looks at it.
        if result.task.action.rsplit(".", 1)[-1] == "debug" and isinstance(said := result.result.get("msg"), str):
            events.add("message", host=result.host.get_name(), text=events.text(said))

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._done("skipped", result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._failed("ignored" if ignore_errors else "failed", result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._failed("ignored" if result.task.ignore_unreachable else "unreachable", result)

    def v2_on_file_diff(self, result: Any) -> None:
        """Tells what differs in files, if the user asked for that with --diff."""
        said: Mapping[str, Any] = result.result
        items = said.get("results", ()) if result.task.loop else [said]
        texts = [self._get_diff(item["diff"]) for item in items if item.get("changed") and item.get("diff")]
        if text := "".join(texts):
            events.add(
                "diff", task=self.numbers.get(result.task._uuid, 0), host=result.host.get_name(), text=events.text(text)
            )

    def v2_playbook_on_stats(self, stats: Any) -> None:
        names = ("ok", "changed", "failures", "dark", "skipped")
        hosts = {name: {key: getattr(stats, key).get(name, 0) for key in names} for name in sorted(stats.processed)}
        now, check = time.time(), options()["check"]
        events.add("end", hosts=hosts)
        if self.durations and self.begun and not (check or stats.failures or stats.dark):
            durations.save(self.durations, self.begun, now)
        self._display.display(summary(hosts, now - self.started, self.elsewhere, check=check))
        self._display.display("")

    def _task(self, task: Any) -> None:
        name = one_line(task.get_name().removeprefix(COLLECTION), events.NAME)
        self.begun.append((f"{self.play} / {name}", time.time()))
        self.numbers[task._uuid] = len(self.begun)
        events.add("task", task=len(self.begun), name=name)

    def _done(self, status: str, result: Any, **more: Any) -> None:
        events.add(status, task=self.numbers.get(result.task._uuid, 0), host=result.host.get_name(), **more)

    def _failed(self, status: str, result: Any) -> None:
        kept = failure_of(result, lost=status == "unreachable")
        findings = [asdict(finding) for finding in kept.findings] if kept else []
        self.elsewhere |= {result.host.get_name()} if findings else set()
        self._done(status, result, text=events.text(kept.text if kept else ""), findings=findings)
