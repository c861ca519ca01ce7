"""Known causes of failures, by their code: what happened, and what mends it. They are data, in causes.yml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import yaml

# Where a cause is seen. By its pattern: in what ssh, sudo or Python say to this machine (login), in what ssh says
# between two nodes (peer), in the output of a job (job). By its code: in the answer of a probe (probe), or
# it is this package that finds it (check).
Place = Literal["login", "peer", "job", "probe", "check"]
READ: tuple[Place, ...] = ("login", "peer", "job")
# All that a cure may contain. Whoever hands it over takes it from the inventory and quotes it for a shell: what a node
# says never becomes part of a command.
CURE_FIELDS = frozenset(
    {"host", "inventory", "file", "fingerprint", "forget", "port_option", "ssh", "target", "user", "verbose_ssh"}
)


@dataclass(frozen=True)
class Cause:
    """A reason for a failure. A cascade is what another failure brings about, and is told only if no root is known."""

    code: str
    seen: Place
    what: str
    cure: str
    pattern: str = ""
    cascade: bool = False
    # The issue on GitHub in which its authors discuss the message, as owner/name#number.
    upstream: str = ""
    # Why there is no real log of it in tests/unit/logs.
    unprovoked: str = ""

    def __post_init__(self) -> None:
        if self.seen not in get_args(Place) or bool(self.pattern) != (self.seen in READ):
            raise ValueError(f"cause {self.code}: a pattern belongs to what is seen in {', '.join(READ)}, to no other")
        re.compile(self.pattern)

    def told(self, words: Mapping[str, str]) -> str:
        """What happened, for a person."""
        return self.what.format_map(words)

    def mended(self, inventory: Mapping[str, str]) -> str:
        """The command or action that mends it."""
        return self.cure.format_map({name: text for name, text in inventory.items() if name in CURE_FIELDS})


@dataclass(frozen=True)
class Sight:
    """A cause that was recognized in a line."""

    cause: Cause
    line: str
    words: Mapping[str, str]


def parse(text: str) -> dict[str, Cause]:
    """The causes by their code, in the order of the file."""
    entries = [Cause(**entry) for entry in yaml.safe_load(text)]
    found = {cause.code: cause for cause in entries}
    if len(found) != len(entries):
        raise ValueError("two causes have the same code")
    return found


@cache
def causes() -> Mapping[str, Cause]:
    """All of them, read once."""
    return parse(Path(__file__).with_name("causes.yml").read_text())


def recognize(place: Place, lines: Sequence[str], *, cascade: bool = False) -> Sight | None:
    """The first root cause, or the first cascade, that a line shows; the order of causes comes before that of lines."""
    for cause in causes().values():
        if cause.seen != place or cause.cascade != cascade:
            continue
        for line in lines:
            if match := re.search(cause.pattern, line):
                words = {name: text for name, text in match.groupdict().items() if text is not None}
                return Sight(cause, line, {"seen": match[0].strip(), **words})
    return None
