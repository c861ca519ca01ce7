"""How far a long step on a node is."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farandole.errors import FarandoleError
from farandole.form import number, text, within

# Looking costs the node's processor something: often at first, then ever less.
SHORTEST, LONGEST = 1.0, 10.0
# Seconds between two lines of progress; a step that is over sooner needs none.
SAY_EVERY = 20.0
ANSWER = {"step": text(100), "seconds": number, "last": text(200)}


@dataclass(frozen=True)
class Progress:
    """The step at work on a host, how long it has taken, and the last line of its log."""

    host: str
    step: str
    seconds: float
    last: str

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return min(LONGEST, SHORTEST + self.seconds / 10)

    def line(self, width: int) -> str:
        """As many words as fit in a line of the terminal."""
        words = f"{self.host}: {self.step}, {clock(self.seconds)}: {self.last}"
        return textwrap.shorten(words, width, placeholder=" …")


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def progress(answer: Mapping[str, Any], host: str) -> Progress:
    """How far the node says that it is."""
    try:
        return Progress(host, **{name: within(name, check, answer.get(name)) for name, check in ANSWER.items()})
    except FarandoleError as error:
        raise FarandoleError(f"{host} does not say how far its step is: {error}; look at that machine") from None
