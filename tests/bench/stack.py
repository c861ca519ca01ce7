"""`make bench-stack`: what the stack costs, all of it measured in one run on one machine.

Ratios can be compared between machines; seconds cannot. It has a lab and a cache of its own.
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
Figures = dict[str, float]


def lab(verb: str, *arguments: str) -> None:
    """The lab command; it says why it fails."""
    command = [sys.executable, "-m", "farandole", "lab", verb, "--name", LAB, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def play(playbook: str, cache: Path, log: str) -> tuple[float, str]:
    """A playbook on the lab: seconds, and its log."""
    path = ROOT / ".farandole" / "bench" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "ANSIBLE_NOCOLOR": "1"}
    command = ["ansible-playbook", "-v", "-i", str(INVENTORY), playbook]
    command += ["--extra-vars", f"stack_builds={cache}/farandole/lab-builds"]
    begun = time.monotonic()
    with path.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        sys.exit(f"{playbook} failed, see {path}")
    return time.monotonic() - begun, path.read_text()


def two_nodes(cache: Path, log: str) -> tuple[float, str]:
    """From bare hosts, whose making is not counted, to four jobs that sum over both; and the log of site.yml."""
    lab("down")
    lab("up", "--nodes", "2")
    site, text = play("site.yml", cache, f"{log}-site")
    jobs, _ = play("playbooks/validate.yml", cache, f"{log}-validate")
    return site + jobs, text


def compiling(log: str) -> float:
    """Seconds of all build steps of a run."""
    return sum(map(float, re.findall(r"^ +seconds: ([\d.]+)$", log, re.MULTILINE)))


def installing(log: str) -> float:
    """Seconds in which one node fetched, unpacked and proved its stack."""
    return sum(map(float, re.findall(r"^ +(?:fetch|unpack|prove): ([\d.]+)$", log, re.MULTILINE)))


def built_by(node: str, cache: Path) -> float:
    """Seconds in which a node builds the stack itself, from sources and wheels that are downloaded already."""
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
    """Everything in turn."""
    print("cold: two bare nodes, an empty cache", flush=True)
    figures["cold, bare nodes to jobs, s"], log = two_nodes(cache, "cold")
    built = figures["of which building, s"] = compiling(log)
    archive = next((cache / "farandole" / "stacks").glob("*.zst"))
    about = json.loads(archive.with_name(f"{archive.name}.json").read_text())
    figures["packed, MB"], figures["unpacked, MB"] = archive.stat().st_size / 1e6, about["unpacked"] / 1e6
    once = {2: built + installing(log)}
    print("again: nothing to do", flush=True)
    figures["again, s"], _ = play("site.yml", cache, "again")
    for number in (3, 4):
        print(f"join: a node more, {number} in all", flush=True)
        lab("up", "--nodes", str(number))
        figures[f"node {number} joins, all of site.yml, s"], log = play("site.yml", cache, f"join-{number}")
        further = figures[f"node {number} fetches, unpacks, proves, s"] = installing(log)
        once[number] = once[number - 1] + further
    figures["building / a further node"] = built / further
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
    """A table at the end, and nothing left behind."""
    (ROOT / ".farandole").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / ".farandole"))
    figures: Figures = {}
    try:
        measure(scratch, figures)
    finally:
        # Of a run that ends early, what it measured.
        for name, value in figures.items():
            print(f"{name:<36}{value:>8.1f}")
        lab("down")
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
