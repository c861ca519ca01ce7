"""Playbooks, run as users run them. What they did is read from the events that they record."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from farandole.watch import events

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
ANSWERS = {"ok", "changed", "failed", "ignored", "unreachable"}
# Which of the numbers of the play recap is which of those that the last event has.
COUNTS = {"unreachable": "dark", "failed": "failures"}
# Descriptors of the processes of killed runs. They have sessions of their own, and one of them sometimes waits forever.
WORKERS: list[int] = []


@atexit.register
def end_workers() -> None:
    for worker in WORKERS:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)


@dataclass
class Run:
    """The result of a playbook."""

    rc: int
    output: str
    events: Sequence[events.Event] = ()

    def _answers(self, *kinds: str) -> list[tuple[int, str, str]]:
        names = {event["task"]: event["name"] for event in self.events if event.get("event") == "task"}
        answers = (event for event in self.events if event.get("event") in kinds)
        return [(event["task"], names[event["task"]], event["host"]) for event in answers]

    @property
    def changes(self) -> set[tuple[str, str]]:
        """(task, host) of everything that changed."""
        return {(task, host) for _, task, host in self._answers("changed")}

    @property
    def failures(self) -> set[tuple[str, str]]:
        """(task, host) of everything that failed, or found a host that does not answer."""
        return {(task, host) for _, task, host in self._answers("failed", "unreachable")}

    @property
    def tasks(self) -> list[str]:
        """The tasks that at least one node has answered, in order."""
        return [*{number: task for number, task, _ in self._answers(*ANSWERS)}.values()]

    def count(self, kind: str) -> dict[str, int]:
        """A column of the play recap, by host; empty if the run was killed."""
        ends = [event["hosts"] for event in self.events if event.get("event") == "end"]
        return {host: row[COUNTS.get(kind, kind)] for hosts in ends for host, row in hosts.items()}

    @property
    def changed_hosts(self) -> set[str]:
        """The hosts on which anything changed."""
        return {host for host, number in self.count("changed").items() if number}

    @property
    def flat(self) -> str:
        """The output as one line."""
        return " ".join(self.output.split())


class Play:
    """A playbook that is running: in a session of its own, or ended with the tests by Ctrl-C or `tests/run.py`."""

    def __init__(
        self, inventory: Path, playbook: str, *arguments: str, before: Sequence[str] = (), own_session: bool = True
    ) -> None:
        self.folder = events.new_folder(inventory)
        self.log = self.folder / events.LOG
        self.reader, self.recorded = events.Reader(self.folder / events.EVENTS), list[events.Event]()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*before, "ansible-playbook", "-i", str(inventory), playbook, *arguments],
                cwd=ROOT, env={**ENVIRONMENT, events.VARIABLE: str(self.folder)}, start_new_session=own_session,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def until(self, condition: Callable[[Run], bool]) -> None:
        """Wait until what was done fulfils a condition, or the end."""
        while self.process.poll() is None and not condition(Run(0, "", self._read())):
            time.sleep(0.002)

    def end(self, number: signal.Signals | None = None) -> Run:
        """Wait for the end, after a signal to all its processes if there is one."""
        if number and self.process.poll() is None:
            for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                for child in children.read_text().split():
                    with suppress(ProcessLookupError):
                        WORKERS.append(os.pidfd_open(int(child)))
            os.killpg(self.process.pid, number)
        code = self.process.wait()
        return Run(code, self.log.read_text(errors="replace"), self._read())

    def _read(self) -> list[events.Event]:
        self.recorded += [events.parse(raw) for raw in self.reader.lines()]
        return self.recorded


def play(inventory: Path, *arguments: str, playbook: str = "site.yml", before: Sequence[str] = ()) -> Run:
    """Run a playbook to its end."""
    return Play(inventory, playbook, *arguments, before=before, own_session=False).end()
