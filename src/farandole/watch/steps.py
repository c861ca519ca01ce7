"""The progress of a long step on a node."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.schema import number, text, within

# Each poll costs the node processor time, so the interval grows from the shortest to the longest.
SHORTEST, LONGEST = 1.0, 10.0
# Seconds between two lines of progress; shorter steps need none.
SHOW_EVERY = 20.0
ANSWER = {"step": text(100), "seconds": number, "last": text(200)}


@dataclass(frozen=True)
class Progress:
    """The step that runs on a host, its duration so far, and the last line of its log."""

    host: str
    step: str
    seconds: float
    last: str

    @property
    def pause(self) -> float:
        """Seconds until the next poll."""
        return min(LONGEST, SHORTEST + self.seconds / 10)

    def line(self, width: int) -> str:
        """The progress, shortened to fit in a line of the terminal."""
        text = f"{self.host}: {self.step}, {clock(self.seconds)}: {self.last}"
        return textwrap.shorten(text, width, placeholder=" …")


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def progress(answer: Mapping[str, Any], host: str) -> Progress:
    """Read the progress that a node reports."""
    try:
        return Progress(host, **{name: within(name, check, answer.get(name)) for name, check in ANSWER.items()})
    except FarandoleError as error:
        raise FarandoleError(f"{host} gives no valid progress of its step: {error}; inspect that machine") from None
