"""`make test-horovod`: on two nodes, Horovod's own tests, from the folder test of its sources, and ours of Keras 3."""

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from clusters import Cluster
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
NODES = ("node-1", "node-2")
PACKAGES = ["mock", "mpi4py", "parameterized", "pytest<8", "pytest-timeout"]
PLACE = "/home/trainer/horovod-tests"
# A module and a test may take so long.
MOST_S, ONE_S = 1500, 300
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Group:
    """Modules that run alike."""

    # Globs in the folder of tests; "ours" is this one.
    modules: tuple[str, ...]
    # Horovod's controllers, or alone: a single process.
    ways: tuple[str, ...] = ("gloo", "mpi")
    environment: tuple[str, ...] = ()
    # What tells it from another group with the same modules.
    name: str = ""


GROUPS = (
    Group(("parallel/test_torch.py", "parallel/test_tensorflow.py", "parallel/test_common.py")),
    Group(("parallel/test_*keras*.py",), environment=("TF_USE_LEGACY_KERAS=1",), name="Keras 2"),
    Group(("ours/test_keras_3.py",), environment=("KERAS_BACKEND=tensorflow",), name="TensorFlow"),
    Group(("ours/test_keras_3.py",), environment=("KERAS_BACKEND=torch",), name="PyTorch"),
    Group(("ours/test_patches.py",)),
    Group(("ours/test_launcher.py",), ways=("alone",)),
    Group(("parallel/test_tensorflow_process_sets*.py",)),
    # Not test_compute_worker.py, whose ranks on two nodes wait for each other without end: TensorFlow's data service.
    Group(("parallel/test_process_sets*.py", "parallel/test_timeline.py")),
    # Adasum needs MPI.
    Group(("parallel/test_adasum_*.py",), ways=("mpi",)),
    # On one node, by themselves: the launcher's parts, and whole launches of it at localhost.
    Group(
        tuple(
            f"single/test_{name}.py"
            for name in (
                "run",
                "service",
                "task_service",
                "util",
                "elastic_discovery",
                "elastic_driver",
                "torch_elastic",
                "compute_service",
            )
        ),
        ways=("alone",),
    ),
    Group(
        (
            "integration/test_static_run.py",
            # Not test_stall.py, which needs two ranks and notices nothing: ours/test_patches.py does.
            "integration/test_interactiverun.py",
            "integration/test_elastic_t*.py",
        ),
        ways=("alone",),
        environment=(f"PYTHONPATH={PLACE}/utils",),
    ),
)


@dataclass
class Outcome:
    """What became of the tests of one module; of a test on several ranks, the worst."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0

    def add(self, report: str) -> None:
        """Count pytest's report of one rank."""
        for case in ET.fromstring(report).iter("testcase"):  # noqa: S314, our own nodes wrote it
            name = str(case.get("name"))
            bad = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
            if bad is not None:
                self.failed.setdefault(name, one_line(bad.get("message") or bad.text or ""))
            elif case.find("skipped") is not None:
                self.skipped.add(name)
            else:
                self.passed.add(name)

    def settle(self) -> None:
        self.passed -= {*self.failed}
        self.skipped -= {*self.failed} | self.passed


def one_line(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())[:160]


def command(module: str, way: str, environment: tuple[str, ...]) -> str:
    """What runs a module as the job user on the head; each node has a report of its own then."""
    test = (
        f"cd {PLACE}/{Path(module).parent} && env {' '.join(environment)} python -m pytest -q -p no:cacheprovider"
        f" --timeout {ONE_S} --junitxml /tmp/horovod-tests.xml {Path(module).name}"
    )
    if way == "alone":
        return test
    ranks = ",".join(f"{node}:1" for node in NODES)
    return f"horovodrun --{way} -np {len(NODES)} -H {ranks} sh -c '{test}'"


def run(cluster: Cluster, module: str, way: str, environment: tuple[str, ...]) -> Outcome:
    """Run a module, and gather the reports of its ranks."""
    outcome, begun = Outcome(), time.monotonic()
    nodes = NODES[:1] if way == "alone" else NODES
    for node in NODES:
        cluster.shell(node, "rm -f /tmp/horovod-tests.xml")
    whole = f"timeout -k 20 {MOST_S} bash -lc {quoted(command(module, way, environment))}"
    done = cluster.shell("node-1", f"cd {PLACE} && runuser -u trainer -- {whole} 2>&1 | tail -c 200000")
    for node in nodes:
        report = cluster.shell(node, "cat /tmp/horovod-tests.xml 2>/dev/null").stdout
        if report:
            outcome.add(report)
        else:
            last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or ["nothing"]
            outcome.failed[f"(no report of {node})"] = one_line(last[0])
    outcome.settle()
    outcome.seconds = time.monotonic() - begun
    return outcome


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@dataclass(frozen=True)
class Known:
    """A failure that is no news: tests by a pattern, where, and why."""

    test: str
    why: str
    ways: tuple[str, ...] = ()

    def fits(self, module: str, test: str, way: str) -> bool:
        return bool(re.fullmatch(self.test, f"{module}::{test}")) and (not self.ways or way in self.ways)


def known() -> list[Known]:
    listed = yaml.safe_load((HERE / "known.yml").read_text())
    return [Known(one["test"], one["why"], tuple(one.get("ways", ()))) for one in listed]


def modules(tests: Path, words: list[str]) -> Iterator[tuple[Group, str, str]]:
    """Each module with each way of running it, or only those that have all words in them."""
    for group in GROUPS:
        for pattern in group.modules:
            folder = HERE if pattern.startswith("ours/") else tests
            found = sorted(folder.glob(pattern.removeprefix("ours/")))
            assert found, f"{folder} has no {pattern}"
            for path in found:
                module = f"{pattern.split('/')[0]}/{path.name}"
                for way in group.ways:
                    if all(word in f"{module} {way} {group.name}" for word in words):
                        yield group, module, way


def send(cluster: Cluster, tests: Path) -> None:
    """Copy the tests to all nodes."""
    for node in NODES:
        target = f"{cluster.ssh(node, 'mktemp', '-d').stdout.strip()}"
        for source, name in ((tests, ""), (HERE, "ours/")):
            shell = f"ssh -F {cluster.inventory}/.ssh/config"
            subprocess.run(["rsync", "-a", "-e", shell, f"{source}/", f"{node}:{target}/{name}"], check=True)
        cluster.shell(node, f"rm -rf {PLACE} && mv {target} {PLACE} && chown -R trainer: {PLACE}")


def main() -> int:
    """Run what is wanted, and print one table and each failure."""
    folder, *words = sys.argv[1:]
    tests = Path(folder).resolve()
    if not (tests / "parallel").is_dir():
        sys.exit(f"{tests} has no folder parallel: pass the folder test of Horovod's sources")
    cluster = Cluster("test-horovod")
    if cluster.running() < len(NODES):
        cluster.reset(len(NODES))
    cluster.play_ok("--extra-vars", f'{{"stack_packages": {PACKAGES}}}'.replace("'", '"'))
    send(cluster, tests)
    table = Table("module", "way", "passed", "failed", "known", "skipped", "seconds")
    reasons, listed, used, news = list[str](), known(), set[Known](), 0
    for group, module, way in modules(tests, words):
        outcome = run(cluster, module, way, group.environment)
        expected = 0
        for test, why in outcome.failed.items():
            excuse = next((one for one in listed if one.fits(module, test, way)), None)
            used |= {excuse} if excuse else set()
            expected += bool(excuse)
            reasons.append(
                f"{'known ' if excuse else 'FAILED'} {way:<5} {module}::{test}: {excuse.why if excuse else why}"
            )
        news += len(outcome.failed) - expected
        counts = (len(outcome.passed), len(outcome.failed) - expected, expected, len(outcome.skipped))
        name = f"{module} ({group.name})" if group.name else module
        table.add_row(name, way, *map(str, counts), f"{outcome.seconds:.0f}")
        console.print(f"{name:<52} {way:<5} {counts[0]:>4} passed {counts[1]:>3} failed {counts[2]:>3} known "
                      f"{counts[3]:>4} skipped {outcome.seconds:>5.0f} s", markup=False)  # fmt: skip
    console.print(table)
    for line in reasons:
        console.print(line, markup=False)
    if not words:
        for one in listed:
            if one not in used:
                console.print(f"{one.test} in known.yml did not fail: remove it", markup=False)
    console.print(f"{news} failed that known.yml does not name")
    return int(news > 0)


if __name__ == "__main__":
    sys.exit(main())
