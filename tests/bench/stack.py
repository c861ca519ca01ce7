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


def lab(*arguments: str) -> str:
    """The lab command."""
    command = [sys.executable, "-m", "farandole", "lab", *arguments, "--name", LAB]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout


def play(playbook: str, cache: Path, log: str) -> tuple[float, str]:
    """A playbook on the lab: seconds, and its log."""
    path = ROOT / ".farandole" / "bench" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "ANSIBLE_NOCOLOR": "1"}
    command = ["ansible-playbook", "-v", "-i", str(INVENTORY), playbook]
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


def measure(cache: Path) -> Figures:
    """Everything in turn."""
    figures: Figures = {}
    print("cold: two bare nodes, an empty cache", flush=True)
    figures["cold, bare nodes to jobs, s"], log = two_nodes(cache, "cold")
    figures["of which building, s"] = compiling(log)
    archive = next((cache / "farandole" / "stacks").glob("*.zst"))
    about = json.loads(archive.with_name(f"{archive.name}.json").read_text())
    figures["packed, MB"], figures["unpacked, MB"] = archive.stat().st_size / 1e6, about["unpacked"] / 1e6
    print("again: nothing to do", flush=True)
    figures["again, s"], _ = play("site.yml", cache, "again")
    print("join: a third node", flush=True)
    lab("up", "--nodes", "3")
    figures["join, all of site.yml, s"], log = play("site.yml", cache, "join")
    figures["of which fetch, unpack, prove, s"] = installing(log)
    figures["building / installing"] = figures["of which building, s"] / installing(log)
    print("warm: two bare nodes, a full cache", flush=True)
    figures["warm, bare nodes to jobs, s"], log = two_nodes(cache, "warm")
    return figures


def main() -> None:
    """A table at the end, and nothing left behind."""
    (ROOT / ".farandole").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / ".farandole"))
    try:
        for name, value in measure(scratch).items():
            print(f"{name:<36}{value:>8.1f}")
    finally:
        lab("down")
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
