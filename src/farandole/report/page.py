"""The page of a result: one file that needs no network, no script and no other file."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from farandole.core.findings import Finding, Group, grouped, several, together
from farandole.report.compare import Comparison
from farandole.report.figures import bandwidth, figures, losses, number, pace, scaling, signed
from farandole.report.matrix import MARKS, matrix

LARGEST = 2_000_000
# How much is shown if a page gets too large: checks, lines of each log, jobs, nodes, characters of a text.
CUTS = ((4096, 400, 4096, 4096, 2000), (4096, 40, 200, 1000, 1000), (1000, 10, 60, 200, 300), (200, 0, 20, 60, 160))
ORDER = ("red", "slow", "not measured", "green")
SIGNS = {"green": "✓", "slow": "▲", "red": "✕", "not measured": "○"}
# What preflight may have found, the worst first.
ALARMS = {"stop": "problem", "warn": "warning"}
VERDICTS = {
    "green": "everything that was measured is fine",
    "slow": "everything is correct, but something is slower than it should be",
    "red": "something does not work, or is wrong",
}


def page(result: Mapping[str, Any], comparison: Comparison | None = None) -> str:
    """The page; what is too long for it is cut, and it says so."""
    template = _environment().get_template("page.html.j2")
    text = ""
    for cut in CUTS:
        text = template.render(**_view(_shortened(result, cut), result, comparison))
        if len(text.encode()) <= LARGEST:
            break
    return text


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("farandole", "report"),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    for shown in (number, signed, duration, when, breakable, several):
        environment.filters[shown.__name__] = shown
    return environment


def _shortened(result: Mapping[str, Any], cut: Sequence[int]) -> dict[str, Any]:
    """A result of which no more is left than a cut allows, the worst checks first."""
    checks, lines, jobs, nodes, width = cut
    worst = sorted(result["checks"], key=lambda check: ORDER.index(check["status"]))[:checks]
    short = [
        {
            **check,
            "log": check["log"][len(check["log"]) - lines :] if len(check["log"]) > lines else check["log"],
            "lost": max(0, len(check["log"]) - lines),
            "hosts": check["hosts"][:nodes],
            **{field: check[field][:width] for field in ("words", "cause", "cure")},
        }
        for check in worst
    ]
    return {
        **result,
        "checks": short,
        "jobs": [{**job, "nodes": job["nodes"][:nodes]} for job in result["jobs"][:jobs]],
        "preflight": _fewer(result["preflight"], nodes, width),
        "versions": dict([*result["versions"].items()][:nodes]),
    }


def _fewer(preflight: Mapping[str, Any] | None, nodes: int, width: int) -> dict[str, Any] | None:
    if not preflight:
        return None
    findings = [
        {**item, "cause": item["cause"][:width], "cure": item["cure"][:width]} for item in preflight["findings"]
    ]
    return {**preflight, "findings": findings[:nodes], "hosts": dict([*preflight["hosts"].items()][:nodes])}


def _view(result: Mapping[str, Any], whole: Mapping[str, Any], comparison: Comparison | None) -> dict[str, Any]:
    """All that the template shows."""
    checks, preflight = result["checks"], result["preflight"]
    bad = alarms(result)
    return {
        "result": result,
        "style": Markup(Path(__file__).with_name("page.css").read_text()),  # noqa: S704, a file of this package
        "sign": SIGNS,
        "meaning": VERDICTS[result["verdict"]],
        "when": when(result["time"]),
        "counts": counts(whole["checks"]),
        "total": len(whole["checks"]),
        "unmeasured": [check for check in checks if check["status"] == "not measured"],
        "problems": problems(checks, result),
        "alarms": bad,
        "alarm_counts": [(word, sum(alarm.severity == severity for alarm in bad)) for severity, word in ALARMS.items()],
        "notes": [group for group in findings_of(result) if group.severity not in ALARMS],
        "preflight_again": command("preflight", result),
        "figures": figures(checks),
        "bandwidth": bandwidth(result),
        "losses": losses(result),
        "scaling": [*scaling(result)],
        "pace": pace(result),
        "matrix": _matrix(preflight, result["hosts"]) if preflight else None,
        "marks": {"good": "", "none": "", **MARKS},
        "time_line": time_line(result),
        "cut": _missing(result, whole),
        "comparison": comparison,
    }


def _matrix(preflight: Mapping[str, Any], hosts: Sequence[str]) -> Any:
    names = list(dict.fromkeys([*hosts, *(name for pair in preflight["pairs"] for name in pair[:2])]))
    return matrix(preflight["pairs"], names) if preflight["pairs"] and len(names) > 1 else None


def _missing(result: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    parts = {"checks": len(whole["checks"]) - len(result["checks"]), "jobs": len(whole["jobs"]) - len(result["jobs"])}
    return " and ".join(f"{count} {noun}" for noun, count in parts.items() if count)


def problems(checks: Iterable[Mapping[str, Any]], result: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The checks that are not green, each with the command that repeats it; those with one cause and cure together."""
    bad = [
        {**check, "again": repeat(check, result)} for check in checks if check["code"] and check["status"] != "green"
    ]
    return together(bad, lambda check: tuple(check[name] for name in ("status", "code", "cause", "cure")))


def findings_of(result: Mapping[str, Any]) -> list[Group]:
    """What preflight found, the worst first."""
    return grouped(Finding(**finding) for finding in result["preflight"]["findings"]) if result["preflight"] else []


def alarms(result: Mapping[str, Any]) -> list[Group]:
    """The problems and warnings of preflight."""
    return [group for group in findings_of(result) if group.severity in ALARMS]


def repeat(check: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The command that repeats a check with all of its nodes."""
    quick = result["quick"] or check["id"].split(".")[0] in ("trust", "stack", "files", "mpi")
    return command("validate", result, *["--quick"] * quick)


def command(verb: str, result: Mapping[str, Any], *options: str) -> str:
    inventory = result["inventory"] or f"inventory/{result['cluster'] or 'NAME'}"
    return shlex.join(["farandole", verb, "-i", inventory, *options])


def counts(checks: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """How many checks have each status, the worst first."""
    seen = [check["status"] for check in checks]
    return [(status, seen.count(status)) for status in ORDER if status in seen]


def when(time: str) -> str:
    """A date for people; anything else stays as it is."""
    try:
        return f"{datetime.strptime(time, '%Y-%m-%dT%H:%M:%SZ'):%-d %B %Y, %H:%M} UTC"
    except ValueError:
        return time


def breakable(name: str) -> Markup:
    """A name that may go on in the next line after each of its parts."""
    return Markup(re.sub(r"([._])(?=.)", r"\1<wbr>", str(escape(name))))  # noqa: S704, it is escaped


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def time_line(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The phases and jobs, each with its place on the line of the whole run in percent."""
    parts = [{"name": phase["name"], "title": phase["name"], "phase": True, **phase} for phase in result["phases"]]
    parts += [{"name": job["id"], "phase": False, **job} for job in result["jobs"] if result["phases"]]
    end = max([result["seconds"], *(part["begin"] + part["seconds"] for part in parts)], default=0)
    return [
        {
            **part,
            "left": round(100 * max(0, part["begin"]) / end, 2),
            "width": round(100 * max(0, part["seconds"]) / end, 2),
        }
        for part in sorted(parts, key=lambda part: (part["begin"], not part["phase"]))
        if end > 0
    ]
