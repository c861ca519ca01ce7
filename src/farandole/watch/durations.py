"""How long a run may still take, from how long each task of the last such run took.

A task that compiles takes a thousand times as long as the same task when there is nothing to do. So two durations of it
are kept, and what the run has changed until now tells which of them is to be expected.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.schema import number

# More tasks than a run has.
MOST = 10_000


@dataclass(frozen=True)
class Took:
    """The seconds of a task when last it changed nothing, and when last it changed something; None if it never did."""

    task: str
    idle: float | None
    busy: float | None


@dataclass
class Durations:
    """The tasks of the last run in order. A task that ran several times has several names."""

    last: Sequence[Took] = ()
    counts: Counter[str] = field(default_factory=Counter)
    # Where the present task, or what came before it, was in the last run; -1 before the first.
    at: int = -1
    known: bool = False
    # Whether the present task has changed something; of those that once did, how many more did again than did not.
    changed: bool = False
    votes: int = 0

    def __post_init__(self) -> None:
        idle = [took.idle for took in self.last if took.idle is not None]
        # What a task takes that has never found nothing to do.
        self.typical = median(idle) if idle else 0.0

    def begin(self, task: str) -> None:
        """Find the task that begins now; one that the last run did not have changes nothing."""
        if self.known and self.last[self.at].busy is not None:
            self.votes += 1 if self.changed else -1
        name = numbered(task, self.counts)
        found = next((i for i, took in enumerate(self.last) if took.task == name and i > self.at), None)
        self.known, self.changed = found is not None, False
        self.at = self.at if found is None else found

    def left(self, seconds: float) -> float | None:
        """The seconds that may be left, if the present task has run so long; None if there was no such run."""
        if not self.last:
            return None
        rest = sum(self._expected(took, busy=self.votes > 0) for took in self.last[self.at + 1 :])
        return rest + (self._present(self.last[self.at], seconds) if self.known else 0)

    def _present(self, took: Took, seconds: float) -> float:
        """What is left of a task; one that is not over when it should have been is at work."""
        busy = self.changed or self.votes > 0 or seconds > self._expected(took, busy=False)
        return max(0.0, self._expected(took, busy=busy) - seconds)

    def _expected(self, took: Took, *, busy: bool) -> float:
        idle = took.idle if took.idle is not None else min(self.typical, took.busy or 0)
        return took.busy if busy and took.busy is not None else idle


def numbered(task: str, counts: Counter[str]) -> str:
    """The name of a task that may run several times, as one that is included does."""
    counts[task] += 1
    return f"{task} #{counts[task]}" if counts[task] > 1 else task


def load(path: Path) -> Durations:
    """The durations of the last run; none if there is no such file, or it is damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, FarandoleError):
        rows = json.loads(path.read_text())[:MOST]
        return Durations([Took(str(task), known(idle), known(busy)) for task, idle, busy in rows])
    return Durations()


def known(value: object) -> float | None:
    """A duration, if there is one."""
    return None if value is None else number(value)


def save(path: Path, begun: Sequence[tuple[str, float]], changed: Collection[int], end: float) -> None:
    """Keep how long each task took, from when each began; those whose number is in `changed` have changed something."""
    before = {took.task: took for took in load(path).last}
    counts: Counter[str] = Counter()
    ends = [*(time for _, time in begun[1:]), end]
    rows = []
    for at, ((task, time), stop) in enumerate(zip(begun, ends, strict=True), 1):
        name, seconds = numbered(task, counts), round(stop - time, 2)
        was = before.get(name, Took(name, None, None))
        rows.append((name, was.idle, seconds) if at in changed else (name, seconds, was.busy))
    with suppress(OSError):
        write_private(path, json.dumps(rows[:MOST]))
