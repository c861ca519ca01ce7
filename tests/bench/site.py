"""`make bench-site`: measure what preflight, and `site.yml` without the stack, cost on 2 to 64 nodes, on one machine.

    site.py [NODES ...]

Compares this project's settings with Ansible's own, and with those of mitogen. Ratios can be compared between machines;
seconds cannot.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LAB = "bench-site"
SIZES = (2, 8, 16, 32, 64)
MITOGEN = "mitogen==0.3.54 --hash=sha256:ed7f209225069cbbe0c2f25ec5e4cd88e43bcb7ae0d55c61850083c96b81591d\n"
PLAIN = {"ANSIBLE_CALLBACKS_ENABLED": "farandole.cluster.plain_terminal"}
# What ansible.cfg sets for speed, at Ansible's defaults.
STOCK = {
    **PLAIN,
    "ANSIBLE_FORKS": "5",
    "ANSIBLE_PIPELINING": "false",
    "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o ControlPersist=60s",
    "ANSIBLE_PYTHON_INTERPRETER": "auto",
}


@dataclass
class Cost:
    """What a run has cost: seconds, and seconds of the processors of the control machine and of all nodes."""

    wall: float
    controller: float
    nodes: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} / {self.controller:.1f} / {self.nodes:.1f}"


def lab(verb: str, *arguments: str) -> None:
    """Run a `farandole lab` command on the benchmark's lab."""
    command = [sys.executable, "-m", "farandole", "lab", verb, "--name", LAB, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def ansible(command: str, *arguments: str, **settings: str) -> str:
    """Run an Ansible command on the lab."""
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", **settings}
    line = [command, "-i", f"inventory/{LAB}", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.stdout


def used() -> float:
    """Seconds that the nodes' processors have worked until now."""
    text = ansible("ansible", "cluster", "--module-name", "raw", "--args", "head -n 1 /sys/fs/cgroup/cpu.stat", **PLAIN)
    return sum(map(int, re.findall(r"^usage_usec (\d+)", text, re.MULTILINE))) / 1e6


def children() -> float:
    """Seconds that the processors have worked for children of this process."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def site(changed: int | None, playbook: str = "site.yml", *arguments: str, **settings: str) -> Cost:
    """Run site.yml, or another playbook, in which this number of nodes must report a change."""
    nodes, controller, begun = used(), children(), time.monotonic()
    text = ansible("ansible-playbook", playbook, "--skip-tags", "stack", *arguments, **settings)
    cost = Cost(time.monotonic() - begun, children() - controller, used() - nodes)
    differing = len(re.findall(r"changed=[1-9]", text))
    if changed not in (None, differing):
        sys.exit(f"{differing} nodes changed instead of {changed}:\n{text}")
    return cost


def mitogen(folder: Path) -> dict[str, str]:
    """Install mitogen to a folder of its own and return the settings that use it."""
    (folder / "requirements").write_text(MITOGEN)
    command = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", str(folder / "lib")]
    subprocess.run([sys.executable, "-m", *command, "--requirement", str(folder / "requirements")], check=True)
    return {
        **PLAIN,
        "ANSIBLE_STRATEGY_PLUGINS": str(folder / "lib/ansible_mitogen/plugins/strategy"),
        "ANSIBLE_STRATEGY": "mitogen_linear",
        "PYTHONPATH": str(folder / "lib"),
    }


def unlocked(folder: Path) -> str:
    """site.yml without the play that locks the cluster, which needs Ansible's own ssh connection."""
    playbooks = ROOT / "playbooks"
    plays = yaml.safe_load((playbooks / "site.yml").read_text())
    kept = [play for play in plays if play["name"] != "Lock the cluster"]
    assert len(kept) < len(plays)
    for play in kept:
        if imported := play.get("ansible.builtin.import_playbook"):
            play["ansible.builtin.import_playbook"] = str(playbooks / imported)
    (folder / "site.yml").write_text(yaml.safe_dump(kept))
    return str(folder / "site.yml")


def measure(size: int, folder: Path, with_mitogen: dict[str, str]) -> dict[str, Cost]:
    """All runs on a lab of this size."""
    lab("up", "--nodes", str(size))
    # Also measures how fast connections are; on bare nodes nobody can log in as the job user yet.
    preflight = ("playbooks/preflight.yml", "--extra-vars", "preflight_network=all")
    costs = {"preflight, bare": site(0, *preflight), "bare": site(size), "preflight": site(0, *preflight)}
    costs["nothing to do"] = site(0)
    last = f"node-{size}"
    ansible("ansible", last, "-m", "raw", "-a", "chmod 600 /etc/security/limits.d/90-farandole.conf", **PLAIN)
    costs["one node differs"] = site(1)
    costs["nothing to do, each task by itself"] = site(0, **PLAIN)
    costs["nothing to do, mitogen"] = site(0, unlocked(folder), **with_mitogen)
    costs["nothing to do, stock settings"] = site(0, **STOCK)
    lab("down")
    return costs


def main() -> None:
    """Measure, and print a row as soon as it is complete."""
    sizes = [int(word) for word in sys.argv[1:]] or SIZES
    print("seconds: wall / processors of the control machine / processors of all nodes")
    with tempfile.TemporaryDirectory() as folder:
        with_mitogen = mitogen(Path(folder))
        for size in sizes:
            try:
                costs = measure(size, Path(folder), with_mitogen)
            finally:
                lab("down")
            stock = costs["nothing to do, stock settings"].wall
            for name, cost in costs.items():
                ratio = f"{stock / cost.wall:5.2f} x" if name.startswith("nothing") else ""
                print(f"{size:>3} nodes  {name:<36} {cost!s:<28} {ratio}", flush=True)


if __name__ == "__main__":
    main()
