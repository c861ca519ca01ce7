"""How long a run may still take, from how long each task of the last such run took."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from farandole.files import write_private

# More tasks than a run has.
MOST = 10_000


@dataclass
class Durations:
    """The tasks of a run in order, each with its seconds. A task that ran several times has several names."""

    last: Sequence[tuple[str, float]] = ()
    counts: Counter[str] = field(default_factory=Counter)
    # Where the present task, or what came before it, was in the last run; -1 before the first.
    at: int = -1
    known: bool = False

    def begin(self, task: str) -> None:
        """Find the task that begins now; one that the last run did not have changes nothing."""
        name = numbered(task, self.counts)
        found = next((i for i, (other, _) in enumerate(self.last) if other == name and i > self.at), None)
        self.known = found is not None
        self.at = self.at if found is None else found

    def left(self, seconds: float) -> float | None:
        """The seconds that may be left, if the present task has run so long; None if there was no such run."""
        if not self.last:
            return None
        rest = sum(one for _, one in self.last[self.at + 1 :])
        return rest + (max(0.0, self.last[self.at][1] - seconds) if self.known else 0)


def numbered(task: str, counts: Counter[str]) -> str:
    """The name of a task that may run several times, as one that is included does."""
    counts[task] += 1
    return f"{task} #{counts[task]}" if counts[task] > 1 else task


def load(path: Path) -> Durations:
    """The durations of the last run; none if there is no such file, or it is damaged."""
    with suppress(OSError, ValueError, TypeError):
        return Durations([(str(task), float(seconds)) for task, seconds in json.loads(path.read_text())[:MOST]])
    return Durations()


def save(path: Path, begun: Sequence[tuple[str, float]], end: float) -> None:
    """Keep how long each task took, from when each began."""
    counts: Counter[str] = Counter()
    ends = [*(time for _, time in begun[1:]), end]
    rows = [(numbered(task, counts), round(stop - time, 2)) for (task, time), stop in zip(begun, ends, strict=True)]
    with suppress(OSError):
        write_private(path, json.dumps(rows[:MOST]))
