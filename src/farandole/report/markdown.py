"""A result as Markdown for an issue."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farandole.core.findings import several
from farandole.report.compare import Comparison
from farandole.report.figures import figures, number
from farandole.report.page import ALARMS, ORDER, alarms, command, counts, problems, when

LINES = 40


def markdown(result: Mapping[str, Any], comparison: Comparison | None = None) -> str:
    """The verdict, what to fix, the figures and the stack; no word of a node is markup."""
    return "\n".join(_markdown(result, comparison)) + "\n"


def _markdown(result: Mapping[str, Any], comparison: Comparison | None) -> Iterator[str]:
    checks = sorted(result["checks"], key=lambda check: ORDER.index(check["status"]))
    amounts = ", ".join(f"{amount} {status}" for status, amount in counts(checks))
    yield f"**{result['verdict']}**: {len(result['hosts'])} nodes, {plain(when(result['time']))} ({amounts})"
    unmeasured = [plain(check["id"]) for check in checks if check["status"] == "not measured"]
    yield f"\nNot measured: {', '.join(unmeasured) or 'nothing was left out'}"
    for group in problems(checks, result):
        yield from _problem(group)
    for alarm in alarms(result):
        yield f"\n### {ALARMS[alarm.severity]} of preflight: {plain(several(alarm.hosts))}\n"
        yield from (f"- cause: {plain(line)} ({code(alarm.code)})" for line in alarm.lines)
        yield f"- cure: {plain(alarm.cure)}"
        yield f"- repeat: {code(command('preflight', result))}"
    if comparison:
        yield f"\n### Changed since {plain(when(comparison.old_time))}\n"
        yield f"The verdict was {comparison.old_verdict} and is {comparison.new_verdict}."
        for head, rows in comparison.tables():
            yield from table(head, rows)
    rows = [
        (figure["id"], number(figure["value"]), number(figure["bar"]), number(figure["limit"]), figure["status"])
        for figure in figures(checks)
    ]
    if rows:
        yield "\n### Figures"
        yield from table(("check", "value", "bar", "limit", "result"), rows)
    if result["versions"]:
        versions = ", ".join(f"{plain(name)} {plain(version)}" for name, version in result["versions"].items())
        yield f"\n<details><summary>Stack {plain(result['stack'])}</summary>\n\n{versions}\n\n</details>"


def _problem(group: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for check in group:
        yield f"\n### {check['status']}: {plain(check['id'])}\n"
        yield f"{plain(check['words'])}\n"
        if check["hosts"]:
            yield f"- hosts: {plain(', '.join(check['hosts']))}"
        yield from _log(check)
    yield f"- cause: {plain(check['cause'])} ({code(check['code'])})"
    yield f"- cure: {plain(check['cure'])}"
    yield from (f"- repeat: {code(again)}" for again in dict.fromkeys(check["again"] for check in group))


def _log(check: Mapping[str, Any]) -> Iterator[str]:
    if check["log"]:
        fence = "`" * (2 + max([1, *map(len, re.findall("`+", "\n".join(check["log"])))]))
        yield "\n<details><summary>The end of its output</summary>\n"
        yield "\n".join([fence + "text", *check["log"][-LINES:], fence])
        yield "\n</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table, if it has rows."""
    if rows:
        yield f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}"
        yield from (f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows)


def plain(text: str) -> str:
    """Escape what Markdown or HTML would take for markup, and what would call people or link to issues."""
    escaped = (
        re.sub(r"([\\`*_{}\[\]<>|~])", r"\\\1", text.replace("&", "&amp;"))
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
    )
    return re.sub(r"([@#])(?=\w)", r"\1&#8203;", escaped)


def code(text: str) -> str:
    """Words as code, whatever backticks are in them."""
    fence = "`" * (1 + max([0, *map(len, re.findall("`+", text))]))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"
