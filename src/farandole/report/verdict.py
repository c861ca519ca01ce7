"""The verdicts of a cluster's last validations."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.schema import fields, many, text, words, yes_or_no

# From the best to the worst.
VERDICTS = ("green", "slow", "red")
VERDICT = fields(
    {"verdict": words("|".join(VERDICTS)), "time": words(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")},
    {"stack": words("|[0-9a-f]{12}"), "hosts": many(text(200)), "quick": yes_or_no},
)


def last_verdict(state: Path, report: str = "latest") -> Mapping[str, Any] | None:
    """The last validation's, or an earlier report's; nothing if there is none that can be read."""
    try:
        result: Mapping[str, Any] = VERDICT(json.loads((state / "reports" / report / "result.json").read_text()))
    except (OSError, ValueError, RecursionError, FarandoleError):
        return None
    return result


def worst_verdict(state: Path, members: Collection[str]) -> Mapping[str, Any] | None:
    """The worst of each member's last one and last whole one, as a validation of some nodes proves nothing about the
    others, and a quick one nothing about training and speed."""
    worst, left, left_whole = last_verdict(state), {*members}, {*members}
    for folder in sorted((state / "reports").glob("2*"), reverse=True):
        if not left_whole:
            break
        if not (worst and (one := last_verdict(state, folder.name))):
            continue
        hosts, quick = {*one.get("hosts", left_whole)}, one.get("quick", False)
        if hosts & (left if quick else left_whole):
            worst = max(worst, one, key=lambda known: VERDICTS.index(known["verdict"]))
        left -= hosts
        left_whole -= set() if quick else hosts
    return worst
