"""`make test`: its stages, two at a time, each with its output in a log."""

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from labs import LONG_REASON, labs
from rich.console import Console

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".farandole" / "test"
# Wants no other lab on this machine, so it comes before all that start one.
NO_LABS = "lab lab"
# Want the machine for themselves, and some of them Debian's own kernel.
ALONE = ("lab administrator", "lab delay", "lab kernels", "lab many_kernels", "lab rdma", "lab waves")
# The labs of `make test`; the others run by name, or with FARANDOLE_EVERY.
LABS = (NO_LABS, "lab build", "lab hostile", "lab kernels", "lab kill", "lab site", "lab stack", "lab trust_life")
EVERY = "FARANDOLE_EVERY" in os.environ
# Compiles the stack that other labs use, until its log says this.
BUILDS = "molecule default"
HAS_BUILT = re.compile(r"converge\W+Executed")
# Labs that do without.
WITHOUT = ("lab bad_node", "lab build", "lab depot", "lab kernels")
# Compiles another one.
SECOND = "molecule trixie"
# What takes longest comes first, and the others fill the gaps.
LONGEST = (
    "lab stack", SECOND, "lab site", "lab slurm", "lab storage", "lab trust_life", "lab upgrade", "lab kill",
    "lab hostile", "lab monitor", "lab peers", "lab caffe", "lab frameworks", "lab installed",
)  # fmt: skip
# With more, two cores answer so late that tests fail.
AT_A_TIME = 2
SLOWEST = 10
# Letters of the beginning and of the end of the reason of a failure: how it ends is often the cause.
BEGINNING, END = 200, 800
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Stage:
    """A command that tests something, in its own process group, so that Ctrl-C ends all of it."""

    name: str
    command: list[str]
    begun: float = 0

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name.replace(' ', '-')}.log"

    @property
    def report(self) -> Path:
        return self.log.with_suffix(".xml")

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def start(self) -> subprocess.Popen[bytes]:
        self.begun = time.monotonic()
        self.report.unlink(missing_ok=True)
        environment = {**os.environ, "PYTEST_ADDOPTS": f"--junitxml={self.report}", "NO_COLOR": "1"}
        with self.log.open("w") as output:
            return subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip


@dataclass
class Result:
    """The counts of a stage, and how long each of its tests took."""

    passed: int
    failed: int
    skipped: int
    tests: list[tuple[float, str]] = field(default_factory=list)
    # Which tests failed, in order, and why, in a line each; the first may have caused the others.
    failures: list[str] = field(default_factory=list)
    # Which tests were skipped, and why, apart from those for which there is no time.
    skips: list[str] = field(default_factory=list)


def stages() -> Iterator[Stage]:
    """All stages: those without hosts, then every scenario in molecule/ and every lab of tests/lab/."""
    yield Stage("ansible-lint", ["env", "ANSIBLE_INVENTORY=inventory/example", "ansible-lint", "--strict", "-q"])
    yield Stage("mypy", ["mypy"])
    yield Stage("yamllint", ["yamllint", "--strict", "."])
    yield Stage("ruff", ["ruff", "check", "--quiet", "."])
    yield Stage("format", ["ruff", "format", "--quiet", "--check", "."])
    # Pages that have not changed are judged, too.
    docs = ["sphinx-build", "--fresh-env", "-q", "-W", "--keep-going", "-c", "docs", ".", str(LOGS.with_name("site"))]
    yield Stage("docs", docs)
    yield Stage("unit", ["pytest", "--numprocesses", "auto", "--dist", "worksteal", "tests/unit"])
    for scenario in sorted(ROOT.glob("molecule/*/molecule.yml")):
        name = scenario.parent.name
        yield Stage(f"molecule {name}", ["molecule", "test", "--scenario-name", name])
    for name, modules in labs().items():
        yield Stage(f"lab {name}", ["pytest", *map(str, modules)])


def by_default(stage: Stage) -> bool:
    if EVERY:
        return stage.name not in ALONE
    return stage.name in LABS if is_lab(stage) else stage.name != SECOND


def has_hosts(stage: Stage) -> bool:
    return stage.name.startswith(("molecule ", "lab "))


def in_order(chosen: Iterable[Stage]) -> list[Stage]:
    """The stages in the order in which they start, unless one has to wait."""
    first = (BUILDS, *LONGEST)

    def place(stage: Stage) -> tuple[bool, bool, int]:
        return stage.name != NO_LABS, has_hosts(stage), (*first, stage.name).index(stage.name)

    return sorted(chosen, key=place)


def is_lab(stage: Stage) -> bool:
    return stage.name.startswith("lab ")


def wants_stack(stage: Stage) -> bool:
    return stage.name == SECOND or (is_lab(stage) and stage.name not in (NO_LABS, *WITHOUT))


def building(running: list[Stage]) -> bool:
    """Whether the stack is being compiled."""
    return any(stage.name == BUILDS and not HAS_BUILT.search(stage.output) for stage in running)


def may_start(stage: Stage, running: list[Stage]) -> bool:
    """Whether a stage can run beside those that are running."""
    if any(other.name == NO_LABS for other in running) and has_hosts(stage):
        return False
    return len(running) < AT_A_TIME and not (building(running) and wants_stack(stage))


def run(waiting: list[Stage], report: Callable[[Stage, int], None]) -> None:
    """Run the stages side by side, and report the exit status of each one when it has ended."""
    running: list[tuple[Stage, subprocess.Popen[bytes]]] = []
    with console.status("") as status:
        try:
            while waiting or running:
                for stage in list(waiting):
                    if may_start(stage, [other for other, _ in running]):
                        waiting.remove(stage)
                        running.append((stage, stage.start()))
                status.update(", ".join(f"{stage.name} ({stage.seconds / 60:.0f} min)" for stage, _ in running))
                time.sleep(0.2)
                for stage, process in list(running):
                    if process.poll() is not None:
                        running.remove((stage, process))
                        report(stage, process.returncode)
        finally:  # after Ctrl-C, some stages still run
            for _, process in running:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGTERM)
            for stage, process in running:
                process.wait()
                remove_lab(stage)


def remove_lab(stage: Stage) -> None:
    kind, _, name = stage.name.partition(" ")
    lab = {"molecule": f"molecule-{name}", "lab": f"test-{name.replace('_', '-')}"}.get(kind)
    if lab:
        subprocess.run(["farandole", "lab", "down", "--name", lab], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)


def count(stage: Stage, code: int) -> Result:
    """Count pytest's tests; a stage without pytest counts as one, and so does a failure outside its tests."""
    if not stage.report.exists():
        if code == 0 and stage.command[0] in ("pytest", "molecule"):
            return Result(0, 1, 0, failures=[f"{stage.name}: no test ran"])
        return Result(int(code == 0), int(code != 0), 0, failures=[stage.name] if code else [])
    suite = ET.parse(stage.report).getroot()[0]  # noqa: S314, pytest wrote it a moment ago
    total, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    tests = [(float(test.get("time", 0)), f"{stage.name}: {test.get('name')}") for test in suite.iter("testcase")]
    why = [
        f"{stage.name}: {test.get('name')}: {shortened(reason(broken))}"
        for test in suite.iter("testcase")
        for broken in (*test.iter("failure"), *test.iter("error"))
    ]
    skips = [
        f"{stage.name}: {test.get('name')}: {left.get('message')}"
        for test in suite.iter("testcase")
        for left in test.iter("skipped")
        if left.get("message") != LONG_REASON
    ]
    outside = (code != 0 or not total) and not failed
    return Result(total - failed - skipped, failed + int(outside), skipped, tests, why, skips)


def reason(broken: ET.Element) -> str:
    """Why a test failed: the lines that pytest marks so, because it cuts the end of its message."""
    text = broken.text or ""
    return " ".join(line[1:] for line in text.splitlines() if line.startswith("E  ")) or broken.get("message") or text


def shortened(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= BEGINNING + END else f"{words[:BEGINNING]} [...] {words[-END:]}"


def show(stage: Stage, result: Result, progress: str) -> None:
    console.print(
        f"{progress}  {stage.name:<22}{result.passed:>5} passed {result.failed:>3} failed {result.skipped:>3} skipped "
        f"{stage.seconds:>5.0f} s",
        markup=False,
    )
    if result.failed:
        end = "\n".join(stage.output.splitlines()[-60:])
        failures = "\n".join(result.failures)
        console.print(f"--- the end of {stage.log.relative_to(ROOT)}\n{end}\n---\n{failures}", markup=False)


def main() -> int:
    """Run all stages, even after a failure."""
    # SIGTERM should clean up too, and shells start background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    begun, results = time.monotonic(), list[Result]()
    wanted = sys.argv[1:]
    chosen = [
        stage for stage in stages() if (any(word in stage.name for word in wanted) if wanted else by_default(stage))
    ]
    if not chosen:
        console.print(f"no stage has that in its name: {', '.join(stage.name for stage in stages())}")

    def report(stage: Stage, code: int) -> None:
        results.append(count(stage, code))
        minutes = (time.monotonic() - begun) / 60
        show(stage, results[-1], f"{len(results):>2} of {len(chosen)} {minutes:>5.1f} min")

    run(in_order(chosen), report)
    for seconds, name in sorted((test for result in results for test in result.tests), reverse=True)[:SLOWEST]:
        console.print(f"{seconds:>5.0f} s for {name}", markup=False)
    for skip in (skip for result in results for skip in result.skips):
        console.print(f"skipped: {skip}", markup=False)
    for failure in (failure for result in results for failure in result.failures):
        console.print(f"failed: {failure}", markup=False)
    passed, failed, skipped = (
        sum(getattr(result, key) for result in results) for key in ("passed", "failed", "skipped")
    )
    console.print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    console.print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
