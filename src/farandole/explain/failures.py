"""Explain the failures of a playbook at its end, where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from farandole.core.findings import CURE, some
from farandole.core.project import ROOT
from farandole.explain.diagnosis import Line, Verdict, explain, report

# The letters and lines that are kept of what a failure says, and of how many failures.
LENGTH, LINES, MOST = 1 << 14, 200, 100
# Of failures that are not known, so many are shown.
SHOWN = 3
# Where a module says why it failed, with what says most last.
FIELDS = ("stdout", "module_stdout", "stderr", "module_stderr", "msg")
# These say in our own words what is wrong.
SPOKEN = {"assert", "fail"}


@dataclass(frozen=True)
class Failure:
    """What a host said when a task failed there, and the host that Ansible counts it for."""

    host: str
    blamed: str
    task: str
    text: str
    # Whether the message was written by us, so that it needs no other words if it is not in the catalogue.
    ours: bool = False

    def lines(self) -> Iterator[Line]:
        """What was said, line by line."""
        return (Line("", 0, line, self.host) for line in self.text.splitlines())


def failure(
    host: str, blamed: str, task: str, action: str, result: Mapping[str, Any], *, lost: bool = False
) -> Failure | None:
    """Keep what explains a failure; nothing if it explains itself, or is secret."""
    name = action.rsplit(".", 1)[-1]
    text = said(result)
    if name in SPOKEN or "censored" in result or CURE in text:
        return None
    # Ansible spreads one message over several lines, and what it is about stands in the first one.
    text = f"unreachable: {' '.join(text.split())}" if lost else text
    # What a program printed, or Python itself, is not in our words.
    return Failure(host, blamed, task, text, ours=name in own() and "rc" not in result and "[Errno " not in text)


def speaks_for_itself(host: str, action: str, result: Mapping[str, Any], *, lost: bool = False) -> tuple[str, bool]:
    """What a failure said, unless it is secret, and whether that is all there is to say about it."""
    if "censored" in result:
        return "", False
    kept = failure(host, host, "", action, result, lost=lost)
    if kept is None:
        return said(result), True
    return kept.text, kept.ours and not explain(kept.lines()).codes


@cache
def own() -> frozenset[str]:
    """The names of our own actions and modules."""
    paths = [*ROOT.glob("plugins/action/*.py"), *ROOT.glob("plugins/modules/*.py")]
    return frozenset(path.stem for path in paths)


def said(result: Mapping[str, Any]) -> str:
    """The words of a failed result, of a loop those of each item that failed."""
    items = result.get("results")
    if isinstance(items, list):
        failed = [one for one in items if isinstance(one, dict) and (one.get("failed") or one.get("unreachable"))]
        texts = [said({**one, "results": None}) for one in failed[:MOST] if "censored" not in one]
        return "\n".join(filter(None, texts))[-LENGTH:] or _text(result.get("msg"))
    return "\n".join(dict.fromkeys(filter(None, (_text(result.get(field)) for field in FIELDS))))


def _text(value: object) -> str:
    """The end of a text; what is not a text says nothing to a person."""
    return "\n".join(value[-LENGTH:].strip().splitlines()[-LINES:]) if isinstance(value, str) else ""


def explained(failures: Sequence[Failure]) -> str:
    """Say why a playbook failed: what is not known first, the root cause last; nothing if all was said before."""
    known: list[Failure] = []
    unknown: dict[str, list[Failure]] = {}
    for one in failures:
        if explain(one.lines()).codes:
            known.append(one)
        elif not one.ours and one.text:
            unknown.setdefault(one.task, []).append(one)
    parts = [_unknown(group) for group in [*unknown.values()][:SHOWN]]
    if known:
        parts.append(report(explain(line for one in known for line in one.lines())))
    return "\n\n".join(parts)


def _unknown(failures: Sequence[Failure]) -> str:
    """The lines of a task's failures that say most, each with the hosts that say it."""
    hosts: dict[str, dict[str, None]] = {}
    for one in failures:
        for line in explain(one.lines()).telling or one.lines():
            hosts.setdefault(line.text, {})[one.host] = None
    return report(Verdict(telling=[Line("", 0, text, some([*names])) for text, names in hosts.items()]))
