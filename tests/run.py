"""`make test`: every stage in turn, its output in a log, one line each on the terminal, and a count at the end."""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".farandole" / "test"
# Ten minutes; runs only if it is named.
LONG = "lab samples"


@dataclass
class Result:
    """The counts of a stage."""

    passed: int
    failed: int
    skipped: int


def stages() -> Iterator[tuple[str, list[str]]]:
    """All stages, fast ones first; then every scenario in molecule/ and every module in tests/lab/."""
    yield "ansible-lint", ["env", "ANSIBLE_INVENTORY=inventory/example", "ansible-lint", "--strict", "-q"]
    yield "yamllint", ["yamllint", "--strict", "."]
    yield "ruff", ["ruff", "check", "--quiet", "."]
    yield "format", ["ruff", "format", "--quiet", "--check", "."]
    yield "mypy", ["mypy"]
    yield "unit", ["pytest", "tests/unit"]
    for scenario in sorted(ROOT.glob("molecule/*/molecule.yml")):
        yield f"molecule {scenario.parent.name}", ["molecule", "test", "--scenario-name", scenario.parent.name]
    for module in sorted(ROOT.glob("tests/lab/test_*.py")):
        yield f"lab {module.stem.removeprefix('test_')}", ["pytest", str(module)]


def run(name: str, command: list[str]) -> Result:
    """Run a stage in its own process group, so that Ctrl-C ends all of it."""
    stem = name.replace(" ", "-")
    log, report = LOGS / f"{stem}.log", LOGS / f"{stem}.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTEST_ADDOPTS": f"--junitxml={report}"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    return count(code, report)


def count(code: int, report: Path) -> Result:
    """Count pytest's tests; a stage without pytest counts as one, and so does a failure outside its tests."""
    if not report.exists():
        return Result(int(code == 0), int(code != 0), 0)
    suite = ET.parse(report).getroot()[0]  # noqa: S314, pytest wrote it a moment ago
    total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    return Result(total - failed - skipped, failed + int(code != 0 and not failed), skipped)


def main() -> int:
    """Run all stages, even after a failure."""
    # SIGTERM should clean up too, and shells start background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    begun, results = time.monotonic(), []
    wanted = sys.argv[1:]
    for name, command in stages():
        if not (any(word in name for word in wanted) if wanted else name != LONG):
            continue
        stage_begun = time.monotonic()
        print(f"{name:<24}", end="", flush=True)
        result = run(name, command)
        results.append(result)
        seconds = time.monotonic() - stage_begun
        print(f"{result.passed:>4} passed {result.failed:>3} failed {seconds:>6.0f} s", flush=True)
        if result.failed:
            log = LOGS / f"{name.replace(' ', '-')}.log"
            print(f"--- the end of {log.relative_to(ROOT)}\n" + "\n".join(log.read_text().splitlines()[-60:]) + "\n---")
    minutes = (time.monotonic() - begun) / 60
    passed, failed, skipped = (sum(getattr(result, key) for result in results) for key in Result.__annotations__)
    print(f"{minutes:.1f} minutes")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the next run cleans up after this one")
