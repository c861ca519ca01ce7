"""`make bench-stack`: measure what the stack costs, in one run on one machine, with a lab and a cache of its own.

Ratios can be compared between machines; seconds cannot.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAB = "bench-stack"
INVENTORY = ROOT / "inventory" / LAB
BUILDS = "farandole/lab-builds"
Figures = dict[str, float]


def lab(verb: str, *arguments: str) -> None:
    """Run a `farandole lab` command on the benchmark's lab."""
    command = [sys.executable, "-m", "farandole", "lab", verb, "--name", LAB, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def play(playbook: str, cache: Path, log: str) -> tuple[float, str]:
    """Run a playbook on the lab; returns the seconds it took and its log."""
    path = ROOT / ".farandole" / "bench" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "ANSIBLE_NOCOLOR": "1"}
    command = ["ansible-playbook", "-v", "-i", str(INVENTORY), playbook]
    command += ["--extra-vars", f"stack_builds={cache / BUILDS}"]
    begun = time.monotonic()
    with path.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        sys.exit(f"{playbook} failed, see {path}")
    return time.monotonic() - begun, path.read_text()


def two_nodes(cache: Path, log: str) -> tuple[float, str]:
    """Seconds from two bare hosts, already started, to jobs that sum over both; and the log of site.yml."""
    lab("down")
    lab("up", "--nodes", "2")
    site, text = play("site.yml", cache, f"{log}-site")
    jobs, _ = play("playbooks/validate.yml", cache, f"{log}-validate")
    return site + jobs, text


def compiling(log: str) -> float:
    """Total seconds of all build steps in a run."""
    return sum(map(float, re.findall(r"^ +seconds: ([\d.]+)$", log, re.MULTILINE)))


def installing(log: str) -> float:
    """Seconds that one node spent fetching, unpacking and testing its stack."""
    return sum(map(float, re.findall(r"^ +(?:fetch|unpack|prove): ([\d.]+)$", log, re.MULTILINE)))


def built_by(node: str, cache: Path) -> float:
    """Seconds that a node needs to build the stack itself, from sources and wheels that are already downloaded."""
    own = cache / node
    for kind in ("sources", "wheels"):
        shutil.copytree(cache / "farandole" / kind, own / "farandole" / kind, copy_function=os.link)
    lab("ssh", node, "--", "rm", "-rf", "/opt/farandole")
    builders = INVENTORY / "builders.yml"
    builders.write_text(json.dumps({"builders": {"hosts": {node: {}}}}))
    try:
        _, log = play("site.yml", own, f"built-by-{node}")
    finally:
        builders.unlink()
    return compiling(log)


def measure(cache: Path, figures: Figures) -> None:
    """Take all measurements, in order."""
    print("cold: two bare nodes, an empty cache", flush=True)
    figures["cold, bare nodes to jobs, s"], log = two_nodes(cache, "cold")
    built = figures["of which building, s"] = compiling(log)
    archive = next((cache / BUILDS / "stacks").glob("*.zst"))
    about = json.loads(archive.with_name(f"{archive.name}.json").read_text())
    figures["packed, MB"], figures["unpacked, MB"] = archive.stat().st_size / 1e6, about["unpacked"] / 1e6
    once = {2: built + installing(log)}
    print("again: nothing to do", flush=True)
    figures["again, s"], _ = play("site.yml", cache, "again")
    for number in (3, 4):
        print(f"join: one more node, {number} in all", flush=True)
        lab("up", "--nodes", str(number))
        figures[f"node {number} joins, all of site.yml, s"], log = play("site.yml", cache, f"join-{number}")
        added = figures[f"node {number} fetches, unpacks, tests, s"] = installing(log)
        once[number] = once[number - 1] + added
    figures["building / an added node"] = built / added
    everywhere = built
    for number in (2, 3, 4):
        print(f"everywhere: node {number} builds for itself", flush=True)
        everywhere += built_by(f"node-{number}", cache)
        figures[f"built on {number} nodes, s"] = everywhere
        figures[f"built once for {number} nodes, s"] = once[number]
        figures[f"everywhere / once, {number} nodes"] = everywhere / once[number]
    print("warm: two bare nodes, a full cache", flush=True)
    figures["warm, bare nodes to jobs, s"], _ = two_nodes(cache, "warm")


def main() -> None:
    """Measure, print a table, and remove the lab and the cache."""
    (ROOT / ".farandole").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / ".farandole"))
    figures: Figures = {}
    try:
        measure(scratch, figures)
    finally:
        # A run that ends early prints what it has measured so far.
        for name, value in figures.items():
            print(f"{name:<36}{value:>8.1f}")
        lab("down")
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
