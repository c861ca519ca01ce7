"""Explain the failures of a playbook at its end, where they are read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from farandole.core.findings import HEADING, Finding, restored, several, together
from farandole.core.findings import Line as Shown
from farandole.core.findings import lines as listed
from farandole.explain.diagnosis import SHOWN, Line, explain
from farandole.explain.told import Told, telling, told
from farandole.explain.told import listed as causes_listed

# The letters and lines that are kept of what a failure says, and of how many failures.
LENGTH, LINES, MOST = 1 << 14, 200, 100
# What programs print, with what says most last.
OUTPUT = ("stdout", "module_stdout", "stderr", "module_stderr")
# These say in our own words what is wrong.
SPOKEN = {"assert", "fail"}


@dataclass(frozen=True)
class Failure:
    """What a host said when a task failed there, and the host that Ansible counts it for."""

    host: str
    blamed: str
    task: str
    text: str
    findings: tuple[Finding, ...] = ()
    heading: str = HEADING
    # Whether it is a message for people, which needs no other words, or at most a cause of the catalogue.
    plain: bool = False
    final: bool = False

    @property
    def known(self) -> bool:
        """Whether the catalogue has a cause of it."""
        return not self.final and bool(explain(self.lines()).codes)

    def lines(self) -> Iterator[Line]:
        """What was said, line by line."""
        return (Line("", 0, line, self.host) for line in self.text.splitlines())


def failure(
    host: str, blamed: str, task: str, action: str, result: Mapping[str, Any], *, lost: bool = False, ours: bool = False
) -> Failure | None:
    """Keep what explains a failure, of an action of ours also its findings; nothing if it is secret."""
    if "censored" in result:
        return None
    text = said(result)
    findings = tuple(restored(data) for part in parts(result) for data in part.get("findings", ())) if ours else ()
    heading = next((str(part["heading"]) for part in parts(result) if findings and "heading" in part), HEADING)
    plain = not any(part.get(name) for part in parts(result) for name in ("rc", *OUTPUT)) and "[Errno " not in text
    # Ansible spreads one message over several lines, and what it is about stands in the first one.
    text = f"unreachable: {' '.join(text.split())}" if lost else text
    final = bool(findings) or action.rsplit(".", 1)[-1] in SPOKEN
    return Failure(host, blamed, task, text, findings, heading, plain or final, final)


def parts(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of which a failure consists: of a loop those of each item that failed."""
    items = result.get("results")
    if not isinstance(items, list):
        return [result]
    failed = [item for item in items if isinstance(item, dict) and (item.get("failed") or item.get("unreachable"))]
    return [item for item in failed[:MOST] if "censored" not in item] or [{"msg": result.get("msg")}]


def said(result: Mapping[str, Any]) -> str:
    """The words of a failed result."""
    texts = [dict.fromkeys(_text(part.get(field)) for field in (*OUTPUT, "msg")) for part in parts(result)]
    return "\n".join(filter(None, ("\n".join(filter(None, text)) for text in texts)))[-LENGTH:]


def _text(value: object) -> str:
    """The end of a text; what is not a text says nothing to a person."""
    return "\n".join(value[-LENGTH:].strip().splitlines()[-LINES:]) if isinstance(value, str) else ""


@dataclass
class Why:
    """Why a playbook failed: findings below their headings, messages and unknown lines by hosts, and known causes."""

    findings: list[tuple[str, list[Finding]]] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    causes: list[Told] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """For an event."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """From an event."""
        findings = [(str(heading), [Finding(**item) for item in items]) for heading, items in data["findings"]]
        pairs = {name: [(str(place), str(text)) for place, text in data[name]] for name in ("messages", "unknown")}
        return cls(findings, **pairs, causes=[Told(**cause) for cause in data["causes"]])

    def explanation(self) -> list[Shown]:
        """What was not said in the messages: what is not known first, the root cause last."""
        return telling(self.unknown, bool(self.causes)) + causes_listed(self.causes)

    def lines(self) -> list[Shown]:
        """All of it."""
        lines = [line for heading, findings in self.findings for line in (Shown(""), *listed(findings, heading))]
        for hosts, text in self.messages:
            lines += [Shown(""), *(Shown(line) for line in f"{hosts}: {text}".splitlines())]
        return lines + self.explanation()


def why(failures: Sequence[Failure]) -> Why:
    """Sort out why a playbook failed."""
    refusals = together((failure for failure in failures if failure.findings), lambda failure: failure.heading)
    refused = [
        (group[0].heading, [*dict.fromkeys(each for failure in group for each in failure.findings)])
        for group in refusals
    ]
    others = [failure for failure in failures if failure.text and not failure.findings]
    known = [failure for failure in others if failure.known]
    messages = together(
        (failure for failure in others if failure.plain and failure not in known), lambda failure: failure.text
    )
    unknown = together(
        (failure for failure in others if not failure.plain and failure not in known), lambda failure: failure.task
    )
    return Why(
        refused,
        [(several(failure.host for failure in group), group[0].text) for group in messages[-SHOWN:]],
        [line for group in unknown[:SHOWN] for line in _telling(group)],
        told(explain(line for failure in known for line in failure.lines())) if known else [],
    )


def _telling(failures: Iterable[Failure]) -> list[tuple[str, str]]:
    """The lines of a task's failures that say most, each with the hosts that say it."""
    lines = [line for failure in failures for line in explain(failure.lines()).telling or failure.lines()]
    same = together(lines, lambda line: line.text)
    return [(several(line.host for line in group), group[0].text) for group in same[-SHOWN:]]
