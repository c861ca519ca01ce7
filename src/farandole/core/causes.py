"""Known causes of failures, by their code: what happened, and how to fix it. They are data, in causes.yml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from farandole.core.files import from_yaml

# Where a cause is seen. By its pattern: in what ssh, sudo or Python print when this machine logs in to a node (login),
# in what ssh prints between two nodes (peer), in the output of a job (job), or, unless it says otherwise, in any log
# (log). By its code: in the answer of the probe of connections between nodes (trust) or of shared files (files), in
# that of a job's probe (probe), or, unless it says otherwise, in a check that this package makes itself (check). By its
# alert: by the head's Prometheus (monitor).
Place = Literal["login", "peer", "job", "log", "trust", "files", "probe", "check", "monitor"]
READ: tuple[Place, ...] = ("login", "peer", "job", "log")
# Whether a finding ends the run, may spoil a job, or is only good to know.
Severity = Literal["stop", "warn", "note"]
# All that a cure may contain. The caller takes the values from the inventory or from this package, and quotes them
# for a shell where the cure is a command: what a node says never becomes part of it.
CURE_FIELDS = frozenset(
    {"host", "inventory", "file", "fingerprint", "forget", "port_option", "ssh", "target", "user", "verbose_ssh"}
    | {"cuda", "description", "example", "group", "known", "label", "subnet", "supported"}
)


@dataclass(frozen=True)
class Cause:
    """A reason for a failure. A cascade follows from another failure and is reported only if no root cause is found."""

    code: str
    seen: Place
    what: str
    cure: str
    pattern: str = ""
    cascade: bool = False
    # Of a cascade, whether others follow from it, as from the end of a process: it is the root cause if none is found.
    leads: bool = False
    # Whether programs print it after a message that says more, which is reported instead if a log has one.
    general: bool = False
    # Whether it gives way to any other root cause that the same line shows.
    vague: bool = False
    severity: Severity = "stop"
    # What such a line rules out when the worker that failed first is searched: the worker, or only the line.
    excuses: Literal["", "worker", "line"] = ""
    # The GitHub issue in which upstream discusses the message, as owner/name#number.
    upstream: str = ""
    # Why tests/unit/logs has no real log of it.
    unprovoked: str = ""
    # What Prometheus computes, with a result for each node that has it, and how long that has to last.
    alert: str = ""
    lasting: str = "5m"
    # The label of that result, or the function of its value, that its texts show.
    shows: str = "humanize"

    def __post_init__(self) -> None:
        if self.seen not in get_args(Place) or bool(self.pattern) != (self.seen in READ):
            raise ValueError(f"cause {self.code}: it needs a pattern if it is seen in {', '.join(READ)}, and only then")
        if bool(self.alert) != (self.seen == "monitor"):
            raise ValueError(f"cause {self.code}: it needs an alert if it is seen in monitor, and only then")
        if self.severity not in get_args(Severity):
            raise ValueError(f"cause {self.code}: its severity has to be one of {', '.join(get_args(Severity))}")
        re.compile(self.pattern)

    def description(self, told: Mapping[str, object]) -> str:
        """What happened, as a message to the user."""
        return self.what.format_map(told)

    def remedy(self, inventory: Mapping[str, object]) -> str:
        """The command or action that fixes it."""
        return self.cure.format_map({name: text for name, text in inventory.items() if name in CURE_FIELDS})


@dataclass(frozen=True)
class Match:
    """A cause, and the words that show it."""

    cause: Cause
    seen: str


def parse(text: str) -> dict[str, Cause]:
    """Parse causes by their code, in the order of the file."""
    usual = {"pattern": "log", "alert": "monitor"}
    entries = [
        Cause(**{"seen": next((usual[name] for name in usual if name in entry), "check"), **entry})
        for entry in from_yaml(text)
    ]
    by_code = {cause.code: cause for cause in entries}
    if len(by_code) != len(entries):
        raise ValueError("two causes have the same code")
    return by_code


@cache
def causes() -> Mapping[str, Cause]:
    """All known causes, read once."""
    return parse(Path(__file__).with_name("causes.yml").read_text())


def excused(scope: Literal["worker", "line"], line: str) -> bool:
    """Whether a worker's line shows that another one failed first, or does not explain its failure."""
    return any(cause.excuses == scope and re.search(cause.pattern, line) for cause in causes().values())


def patterns(place: Place) -> list[str]:
    return [cause.pattern for cause in causes().values() if cause.seen == place]


def recognize(place: Literal["login", "peer"], line: str) -> Match | None:
    """The first cause that a message shows, in the order of causes."""
    for cause in causes().values():
        if cause.seen == place and (match := re.search(cause.pattern, line)):
            return Match(cause, match[0].strip())
    return None
