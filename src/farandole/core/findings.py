"""Problems that the user has to fix, and how they are reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from farandole.core.causes import Severity, causes
from farandole.core.errors import FarandoleError

SHOWN_HOSTS = 5
# A group of hosts is named by the first and the last of those that follow each other.
NUMBERED = re.compile(r"(.*?)(\d+)")
WORDS: dict[Severity, str] = {"stop": "problem", "warn": "warning", "note": "note"}
MARKS: dict[Severity, str] = {"stop": "", "warn": "warning: ", "note": "note: "}
# Marks a list of findings, which names the host of each: the task may have run on the control machine, for one of them.
CURE = "\n   cure: "


@dataclass(frozen=True)
class Finding:
    """A problem: on which host, its cause and its cure. The code stays the same when the wording changes."""

    host: str
    code: str
    cause: str
    cure: str
    severity: Severity = "stop"


@dataclass(frozen=True)
class Group:
    """Findings that one cure mends: their causes, which differ at most in what was seen, and the hosts of each."""

    severity: Severity
    code: str
    cure: str
    hosts: str
    causes: Mapping[str, Sequence[str]]

    @property
    def lines(self) -> list[str]:
        """The causes, each with its hosts if there are several."""
        several = len(self.causes) > 1
        return [f"{some(hosts)}: {cause}" if several else cause for cause, hosts in self.causes.items()]


class FindingsError(FarandoleError):
    """A refusal that reports all findings at once, below a heading."""

    def __init__(self, findings: Sequence[Finding], heading: str) -> None:
        super().__init__(report(findings, heading))
        self.findings = tuple(findings)


def finding(code: str, host: str, /, **fields: object) -> Finding:
    """Make a finding from its cause in the catalogue; of these fields, the cure contains only those of CURE_FIELDS."""
    cause = causes()[code]
    return Finding(host, code, cause.description(fields), cause.remedy(fields), cause.severity)


def refused(findings: Iterable[Finding]) -> bool:
    """Whether any finding ends the run; warnings and notes do not."""
    return any(one.severity == "stop" for one in findings)


def stopped(findings: Iterable[Finding]) -> set[str]:
    """The hosts with a finding that ends the run."""
    return {one.host for one in findings if one.severity == "stop"}


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Put together what one cure mends, the worst first."""
    groups: dict[tuple[Severity, str, str], list[Finding]] = {}
    for one in sorted(findings, key=lambda one: get_args(Severity).index(one.severity)):
        # How to log in is the only difference between the cures of these.
        cure = "" if one.code in causes() and causes()[one.code].seen == "login" else one.cure
        groups.setdefault((one.severity, one.code, cure), []).append(one)
    return [_group(group) for group in groups.values()]


def _group(findings: Sequence[Finding]) -> Group:
    causes: dict[str, list[str]] = {}
    for one in findings:
        causes.setdefault(one.cause, []).append(one.host)
    first, hosts = findings[0], some([*dict.fromkeys(one.host for one in findings)])
    others = [one.host for one in findings if one.cure != first.cure]
    cure = f"{first.cure} (so for {first.host}; likewise for {some(others)})" if others else first.cure
    return Group(first.severity, first.code, cure, hosts, causes)


def report(findings: Iterable[Finding], heading: str = "preflight found {problems}; nothing was changed.") -> str:
    """Format findings for the user, with one numbered item for all that have the same cure."""
    groups = grouped(findings)
    items = [f"{number}. {_item(group)}" for number, group in enumerate(groups, 1)]
    return "\n\n".join([heading.format(problems=totals([one.severity for one in groups])), *items])


def _item(group: Group) -> str:
    causes = [f"{some(hosts)}: {MARKS[group.severity]}{cause} [{group.code}]" for cause, hosts in group.causes.items()]
    return "\n   ".join(causes) + CURE + group.cure


def totals(severities: Sequence[Severity]) -> str:
    """How many problems, warnings and notes there are."""
    counts = [count(severities.count(severity), word) for severity, word in WORDS.items() if severity in severities]
    return ", ".join([*counts[:-2], " and ".join(counts[-2:])]) or "no finding"


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - SHOWN_HOSTS
    return ", ".join(names[:SHOWN_HOSTS]) + (f" and {rest} more" if rest > 0 else "")


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def several(names: Sequence[str]) -> str:
    """Name hosts in a few words: node-1 to node-64; the number tells whether some are missing in between."""
    parts: list[list[str]] = []
    for name in sorted(dict.fromkeys(names), key=natural):
        if parts and follows(parts[-1][-1], name):
            parts[-1].append(name)
        else:
            parts.append([name])
    shown = [", ".join(one) if len(one) < 3 else f"{one[0]} to {one[-1]}" for one in parts[:4]]
    rest = sum(len(one) for one in parts[4:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def natural(name: str) -> tuple[str, int, str]:
    """Sorts node-10 after node-9."""
    found = NUMBERED.fullmatch(name)
    return (found[1], int(found[2][:18]), name) if found else (name, -1, name)


def follows(one: str, other: str) -> bool:
    """Whether a name has the next number."""
    (stem, at, _), (stem2, at2, _) = natural(one), natural(other)
    return stem == stem2 and at >= 0 and at2 == at + 1
