"""Problems that the user has to fix, and how they are reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from farandole.causes import Severity, causes
from farandole.errors import FarandoleError

SHOWN_HOSTS = 5
WORDS: dict[Severity, str] = {"stop": "problem", "warn": "warning", "note": "note"}
MARKS: dict[Severity, str] = {"stop": "", "warn": "warning: ", "note": "note: "}


@dataclass(frozen=True)
class Finding:
    """A problem: on which host, its cause and its cure. The code stays the same when the wording changes."""

    host: str
    code: str
    cause: str
    cure: str
    severity: Severity = "stop"


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


def report(findings: Iterable[Finding], heading: str = "preflight found {problems}; nothing was changed.") -> str:
    """Format findings for the user, worst first, with one numbered item for all hosts that share cause and cure."""
    hosts: dict[Finding, list[str]] = {}
    for one in sorted(findings, key=lambda one: get_args(Severity).index(one.severity)):
        hosts.setdefault(replace(one, host=""), []).append(one.host)
    items = [
        f"{number}. {some(names)}: {MARKS[one.severity]}{one.cause} [{one.code}]\n   cure: {one.cure}"
        for number, (one, names) in enumerate(hosts.items(), 1)
    ]
    return "\n\n".join([heading.format(problems=totals([one.severity for one in hosts])), *items])


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
