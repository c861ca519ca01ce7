"""Problems that the user has to fix: data until they are shown, and how they are shown."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, get_args

from farandole.core.causes import Severity, causes
from farandole.core.errors import FarandoleError

T = TypeVar("T")
SHOWN = 5
HEADING = "preflight found {problems}; nothing was changed."
WORDS: dict[Severity, str] = {"stop": "problem", "warn": "warning", "note": "note"}
MARKS: dict[Severity, str] = {"stop": "", "warn": "warning: ", "note": "note: "}
# A group of hosts is named by the first and the last of those that follow each other.
NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class Finding:
    """A problem: on which host, its cause and its cure. The code stays the same when the wording changes."""

    host: str
    code: str
    cause: str
    cure: str
    severity: Severity = "stop"
    # What the texts were made of.
    fields: Mapping[str, str] = field(default_factory=dict, hash=False)

    def data(self) -> dict[str, object]:
        """What a finding consists of without its texts."""
        return {"code": self.code, "host": self.host, "severity": self.severity, "fields": dict(self.fields)}


@dataclass(frozen=True)
class Group:
    """Findings with the same cure: their causes, which differ at most in what was seen, and the hosts of each."""

    severity: Severity
    code: str
    cure: str
    hosts: Sequence[str]
    causes: Mapping[str, Sequence[str]]

    @property
    def lines(self) -> list[str]:
        """The causes, each with its hosts if there are several."""
        many = len(self.causes) > 1
        return [f"{several(hosts)}: {cause}" if many else cause for cause, hosts in self.causes.items()]


class Line(NamedTuple):
    """A line for the user: its first words, the style in which a terminal shows these, and the rest."""

    head: str
    style: str = ""
    rest: str = ""


class FindingsError(FarandoleError):
    """A refusal that reports all findings at once, below a heading."""

    def __init__(self, findings: Iterable[Finding], heading: str = HEADING) -> None:
        self.findings = tuple(findings)
        self.heading = heading
        super().__init__(report(self.findings, heading))


def finding(code: str, host: str, /, **fields: object) -> Finding:
    """Make a finding from its cause in the catalogue; of these fields, the cure contains only those of CURE_FIELDS."""
    cause = causes()[code]
    told = {name: str(value) for name, value in fields.items()}
    return Finding(host, code, cause.description(told), cause.remedy(told), cause.severity, told)


def restored(data: Mapping[str, Any]) -> Finding:
    return replace(finding(data["code"], data["host"], **data["fields"]), severity=data["severity"])


def refused(findings: Iterable[Finding]) -> bool:
    """Whether any finding ends the run; warnings and notes do not."""
    return any(finding.severity == "stop" for finding in findings)


def stopped(findings: Iterable[Finding]) -> set[str]:
    """The hosts with a finding that ends the run."""
    return {finding.host for finding in findings if finding.severity == "stop"}


def together(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Put together what has the same key, in the order in which the keys come."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Group findings by their cure, the worst first."""

    def key(finding: Finding) -> Hashable:
        # How to log in is the only difference between the cures of these.
        cause = causes().get(finding.code)
        login = cause and (cause.seen == "login" or cause.code == "login-failed")
        return finding.severity, finding.code, "" if login else finding.cure

    worst = sorted(findings, key=lambda finding: get_args(Severity).index(finding.severity))
    return [_group(group) for group in together(worst, key)]


def _group(findings: Sequence[Finding]) -> Group:
    causes = {group[0].cause: [item.host for item in group] for group in together(findings, lambda item: item.cause)}
    first, hosts = findings[0], [*dict.fromkeys(item.host for item in findings)]
    others = [item.host for item in findings if item.cure != first.cure]
    cure = f"{first.cure} (so for {first.host}; likewise for {several(others)})" if others else first.cure
    return Group(first.severity, first.code, cure, hosts, causes)


def report(findings: Iterable[Finding], heading: str = HEADING) -> str:
    """Format findings for the user, with one numbered item for all that have the same cure."""
    return joined(lines(findings, heading))


def joined(lines: Iterable[Line]) -> str:
    """Lines where there are no colours."""
    return "\n".join(line.head + line.rest for line in lines)


def lines(findings: Iterable[Finding], heading: str) -> list[Line]:
    """A heading, and a numbered list with an empty line before each item."""
    groups = grouped(findings)
    lines = [Line(heading.replace("{problems}", totals([group.severity for group in groups])))]
    for number, group in enumerate(groups, 1):
        lines.append(Line(""))
        for at, (cause, hosts) in enumerate(group.causes.items()):
            head = f"{number}. " if not at else "   "
            rest = f" {MARKS[group.severity]}{cause} [{group.code}]"
            lines.append(Line(f"{head}{several(hosts)}:", group.severity, rest))
        lines.append(Line("   cure:", "cure", f" {group.cure}"))
    return lines


def totals(severities: Sequence[Severity]) -> str:
    """How many problems, warnings and notes there are."""
    counts = [count(severities.count(severity), word) for severity, word in WORDS.items() if severity in severities]
    return ", ".join([*counts[:-2], " and ".join(counts[-2:])]) or "no finding"


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def several(hosts: Iterable[str]) -> str:
    """Name hosts in a few words: node-1 to node-64."""
    parts: list[list[str]] = []
    for host in sorted(dict.fromkeys(hosts), key=natural):
        if parts and _follows(parts[-1][-1], host):
            parts[-1].append(host)
        else:
            parts.append([host])
    shown = [", ".join(part) if len(part) < 3 else f"{part[0]} to {part[-1]}" for part in parts[:SHOWN]]
    rest = sum(len(part) for part in parts[SHOWN:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def natural(name: str) -> tuple[str, int, str]:
    """Sorts node-10 after node-9."""
    match = NUMBERED.fullmatch(name)
    return (match[1], int(match[2][:18]), name) if match else (name, -1, name)


def _follows(host: str, other: str) -> bool:
    (stem, at, _), (stem2, at2, _) = natural(host), natural(other)
    return stem == stem2 and at >= 0 and at2 == at + 1


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
