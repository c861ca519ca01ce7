"""The report of a validation: result.json, the page that is made from it, junit.xml and a table."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree as ET

from farandole.core.errors import FarandoleError
from farandole.core.findings import together
from farandole.core.table import table
from farandole.core.text import in_xml, on_terminal
from farandole.links.examine import links_in
from farandole.report.page import page
from farandole.report.read import read
from farandole.validation import kept
from farandole.validation.answer import job_result
from farandole.validation.files import file_checks
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, SLOW, Bars, Check, explanation, judge
from farandole.validation.nodes import stack_checks, trust_checks
from farandole.validation.predicted import predictions, scaling

FORMAT = 3
# A check with one of these has a cause and a cure.
BAD = (RED, SLOW)
SHOWN = 8


def make(folder: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Judge what a validation measured, write the report, and return its text, its verdict and where it is."""
    earlier = folder.parent / "preflight.json"
    links, ended = links_in(earlier), time.time()
    results = {item["item"]["id"]: job_result(item) for item in measured["jobs"]}
    bars = Bars.changed(measured["bars"])
    judged = judge(results, bars, measured["inventory"])
    checks = [
        *trust_checks(measured["trust"], measured["about"]["hosts"]),
        # Without ssh to all, no stack is verified and no job runs.
        *stack_checks(
            measured["stacks"],
            measured["inventory"],
            measured["about"]["hosts"] if measured["stacks"] or results else [],
        ),
        *file_checks(measured["files"]),
        *judged,
        *predictions(results, judged, links, measured["inventory"]),
        *(Check(name, NOT_MEASURED, why) for name, why in measured["unmeasured"].items()),
    ]
    if not results and not any(check.status == RED for check in checks):
        why = explanation("node-unusable", [], seen="it has not reported a job, although it answered before")
        checks.append(Check("jobs", RED, "the head ran no job").explain(why))
    series = {
        "started": f"{datetime.fromtimestamp(measured['started'], UTC):%Y-%m-%dT%H:%M:%SZ}",
        "phases": kept.phases(measured.get("phases") or {}, measured["started"], ended),
        "jobs": kept.jobs(results, measured["started"]),
        "scaling": list(scaling(results, judged, links)),
        "preflight": kept.preflight(earlier, measured["about"]["hosts"], links),
    }
    data = sorted({result["data"] for result in results.values() if "data" in result})
    seconds = round(ended - measured["started"], 1)
    about = {**measured["about"], "data": data, "seconds": seconds, "bars": asdict(bars)}
    target = write(folder, about, checks, series)
    shown = text(checks, target, seconds)
    try:
        (target / "index.html").write_text(page(read(target)))
    except FarandoleError as error:
        # The results are not lost with it.
        shown += f"\nthere is no page of them: {on_terminal(str(error))}"
    return {"msg": shown, "verdict": verdict(checks), "report": str(target)}


def verdict(checks: Sequence[Check]) -> str:
    """Red: something failed, or nothing was measured. Slow: all is correct, but something is too slow."""
    seen = {check.status for check in checks}
    if RED in seen or not seen & {GREEN, SLOW}:
        return RED
    return SLOW if SLOW in seen else GREEN


def write(
    folder: Path, about: Mapping[str, Any], checks: Sequence[Check], series: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write the report of a run to a folder of its own, and point `latest` to it."""
    now = datetime.now(UTC)
    target = folder / f"{now:%Y%m%dT%H%M%SZ}"
    target.mkdir(parents=True, exist_ok=True)
    header = {"format": FORMAT, "time": f"{now:%Y-%m-%dT%H:%M:%SZ}", "verdict": verdict(checks), **about}
    result = {**header, "checks": [asdict(check) for check in checks], **series}
    (target / "junit.xml").write_bytes(junit(checks))
    # Written last, as other programs wait for it.
    (target / "result.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    draft = folder / ".latest"
    draft.unlink(missing_ok=True)
    draft.symlink_to(target.name)
    draft.replace(folder / "latest")
    return target


def junit(checks: Sequence[Check]) -> bytes:
    """Format the checks as JUnit XML for a CI system."""
    failures = str(sum(check.status in BAD for check in checks))
    skipped = str(sum(check.status == NOT_MEASURED for check in checks))
    suite = ET.Element("testsuite", name="farandole", tests=str(len(checks)), failures=failures, skipped=skipped)
    for check in checks:
        case = ET.SubElement(suite, "testcase", classname="farandole", name=in_xml(check.id), time=str(check.seconds))
        details = in_xml("\n".join(filter(None, [check.cause, check.cure, *check.log])))
        if check.status in BAD:
            kind = f"{check.status}.{check.code}"
            ET.SubElement(case, "failure", type=kind, message=in_xml(check.words)).text = details
        elif check.status == NOT_MEASURED:
            ET.SubElement(case, "skipped", message=in_xml(check.words)).text = details
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def text(checks: Sequence[Check], target: Path, seconds: float) -> str:
    """Format the report for the terminal: a table of all checks, then those with a cause in full."""
    rows = [["check", "result", "value", "bar", "seconds", "what was seen"]]
    for check in checks:
        numbers = ["" if number is None else f"{number:.4g}" for number in (check.value, check.bar)]
        rows.append([check.id, check.status, *numbers, f"{check.seconds:.1f}" if check.seconds else "", check.words])
    lines = [table(rows), ""]
    bad = (check for check in checks if check.cause)
    for group in together(bad, lambda check: (check.status, check.code, check.cause, check.cure)):
        lines += [f"{check.id} is {check.status}: {check.words}" for check in group]
        lines += [f"  cause: {group[0].cause} [{group[0].code}]", f"  cure: {group[0].cure}"]
        # Of what fails for one cause, one output is enough here.
        lines += [f"  | {line}" for line in group[0].log[-SHOWN:]]
    counts = {status: sum(check.status == status for check in checks) for status in (GREEN, SLOW, RED, NOT_MEASURED)}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    lines.append(f"{verdict(checks)}: {summary}; {seconds:.0f} s; report: {target}")
    return on_terminal("\n".join(lines))
