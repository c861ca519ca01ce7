"""`make bench-stack`: what the stack costs, all of it measured in one run on one machine.

Ratios can be compared between machines; seconds cannot. It has a lab and a cache of its own.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAB = "bench-stack"
INVENTORY = ROOT / "inventory" / LAB
BUILDS = "OpenMPI|Python environment|Horovod|pack the stack"


def say(words: str) -> None:
    """Progress, and what stays on the terminal."""
    print(words, flush=True)


def run(command: list[str], cache: Path, log: str) -> str:
    """A command with its output in a log; the log's text."""
    path = ROOT / ".farandole" / "bench" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    with path.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} failed, see {path}")
    return path.read_text()


def lab(*arguments: str) -> str:
    """The lab command."""
    command = [sys.executable, "-m", "farandole", "lab", *arguments, "--name", LAB]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout


def bare(nodes: int) -> None:
    """A lab of bare nodes; what it takes is not counted."""
    lab("down")
    lab("up", "--nodes", str(nodes))


def play(playbook: str, cache: Path, log: str, *arguments: str) -> str:
    """A playbook on the lab."""
    return run(["ansible-playbook", "-i", str(INVENTORY), *arguments, playbook], cache, log)


def processor(node: str) -> float:
    """Seconds of processor time that a node has used since it was switched on."""
    command = [
        sys.executable,
        "-m",
        "farandole",
        "lab",
        "ssh",
        "--name",
        LAB,
        node,
        "--",
        "cat",
        "/sys/fs/cgroup/cpu.stat",
    ]
    text = subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout
    return int(re.search(r"usage_usec (\d+)", text)[1]) / 1e6  # type: ignore[index]


def timed(work: Callable[[], object], *nodes: str) -> tuple[float, float]:
    """Wall and processor seconds, the latter summed over nodes."""
    before, begun = sum(map(processor, nodes)), time.monotonic()
    work()
    return time.monotonic() - begun, sum(map(processor, nodes)) - before


def two_nodes(cache: Path, log: str) -> float:
    """From bare hosts to jobs that sum over both."""
    bare(2)
    begun = time.monotonic()
    play("site.yml", cache, f"{log}-site")
    play("playbooks/validate.yml", cache, f"{log}-validate")
    return time.monotonic() - begun


def everywhere(nodes: int, cache: Path) -> tuple[float, float]:
    """Each node compiles for itself, all at once, from the same downloads."""
    bare(nodes)
    play("site.yml", cache, f"everywhere-{nodes}-ready")
    names = [f"node-{index + 1}" for index in range(nodes)]
    shells = [shell(node, cache) for node in names]

    def build(node: str, own: Path) -> None:
        builder = own / "builder.yml"
        builder.write_text(f"all: {{children: {{builders: {{hosts: {{{node}: }}}}}}}}\n")
        arguments = ["-i", str(builder), "--limit", node]
        log = f"everywhere-{nodes}-{node}"
        run(["ansible-playbook", "-i", str(INVENTORY), *arguments, "tests/bench/build_here.yml"], own, log)

    try:
        with ThreadPoolExecutor(nodes) as pool:
            return timed(lambda: list(pool.map(build, names, shells)), *names)
    finally:
        for own in shells:
            shutil.rmtree(own)


def shell(node: str, cache: Path) -> Path:
    """A cache with all downloads and nothing that was built."""
    own = Path(tempfile.mkdtemp(prefix=f"{node}-", dir=cache.parent))
    for folder in ("sources", "wheels"):
        shutil.copytree(cache / "farandole" / folder, own / "farandole" / folder, copy_function=os.link)
    return own


def main() -> None:
    """Everything in turn; a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--everywhere", type=int, nargs="*", default=[2, 4], metavar="N", help="nodes that all compile")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / ".farandole"))
    cache = scratch / "cache"
    figures: dict[str, object] = {}
    try:
        say("cold: two bare nodes, an empty cache")
        figures["cold_s"] = round(two_nodes(cache, "cold"), 1)
        archive = next((cache / "farandole" / "stacks").glob("*.zst"))
        about = json.loads(archive.with_name(f"{archive.name}.json").read_text())
        figures["packed_mb"] = round(archive.stat().st_size / 1e6)
        figures["unpacked_mb"] = round(about["unpacked"] / 1e6)
        say("no change: site.yml again")
        figures["no_change_s"] = round(timed(lambda: play("site.yml", cache, "again"))[0], 1)
        say("a third node")
        lab("up", "--nodes", "3")
        wall, work = timed(lambda: play("site.yml", cache, "join"), "node-3")
        figures["join_s"], figures["join_cpu_s"] = round(wall, 1), round(work, 1)
        say("warm: two bare nodes, a full cache")
        figures["warm_s"] = round(two_nodes(cache, "warm"), 1)
        for nodes in options.everywhere:
            say(f"everywhere: {nodes} nodes compile")
            wall, work = everywhere(nodes, cache)
            figures[f"everywhere_{nodes}_s"] = round(wall, 1)
            figures[f"everywhere_{nodes}_cpu_s"] = round(work, 1)
            figures["compile_cpu_s_per_node"] = round(work / nodes, 1)
            figures["times_less_work_per_further_node"] = round(work / nodes / float(str(figures["join_cpu_s"])), 1)
    finally:
        lab("down")
        shutil.rmtree(scratch, ignore_errors=True)
        for name, value in figures.items():
            say(f"{name:<36}{value}")


if __name__ == "__main__":
    main()
