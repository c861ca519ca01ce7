#!/usr/bin/python
DOCUMENTATION = """
module: slurm_probe
short_description: Read the hardware of a node as Slurm sees it
description:
  - Asks slurmd for sockets, cores, threads and memory, counts the GPUs whose driver is loaded, and looks which cgroups
    can limit memory.
  - Says since which boot the node is proven, C(boot), and whether it has booted since, C(booted).
  - Where slurmctld is, looks which partitions have jobs; says whether it is ours.
options:
  node: {description: "Whether this machine takes jobs, and so has slurmd.", type: bool, default: true}
  proven: {description: Whether it is proven since this boot., type: bool, default: false}
  ours: {description: A file that is there on a head that role slurm has set up., type: path, required: true}
"""

import re
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

CGROUPS = Path("/sys/fs/cgroup")
SETTINGS = Path("/etc/slurm/slurm.conf")
# As node/health.py has them.
PROVEN, NOW, ANY = Path("/var/lib/farandole/boot"), Path("/proc/sys/kernel/random/boot_id"), "any"
PARTITION = re.compile(r"^PartitionName=(\S+) Nodes=(\S+) .*\bMaxTime=(\S+)", re.MULTILINE)
NAMES = {"sockets": "SocketsPerBoard", "cores": "CoresPerSocket", "threads": "ThreadsPerCore", "memory": "RealMemory"}


def proven(known: str, now: str, *, here: bool) -> dict[str, object]:
    """Since which boot a node is proven; it is when it is asked for the first time."""
    boot = now if here or known in ("", ANY) else known
    return {"boot": boot, "booted": boot != now}


def cgroups(root: Path) -> str:
    """The version of cgroups that can limit a job's memory and cores, or its memory only."""
    if (root / "cgroup.controllers").exists():
        controllers = {*(root / "cgroup.controllers").read_text().split()}
        return "none" if "memory" not in controllers else "v2" if "cpuset" in controllers else "v2-memory"
    return "v1" if all((root / name / "tasks").exists() for name in ("memory", "cpuset", "freezer")) else "none"


def hardware(printed: str) -> dict[str, object]:
    """The counts in what `slurmd -C` prints."""
    matches = {name: re.search(rf"\b{key}=(\d+)", printed) for name, key in NAMES.items()}
    counts: dict[str, object] = {name: int(match[1]) for name, match in matches.items() if match}
    boards = re.search(r"\bBoards=(\d+)", printed)
    if boards and matches["sockets"]:
        counts["sockets"] = int(boards[1]) * int(matches["sockets"][1])
    return counts


def partitions(settings: str, busy: set[str] | None) -> list[dict[str, object]]:
    """The partitions in slurm.conf that have jobs; all of them if nobody knows."""
    return [
        {"name": name, "nodes": nodes.split(","), "limit": limit}
        for name, nodes, limit in PARTITION.findall(settings)
        if busy is None or name in busy
    ]


def main() -> None:
    """Answer with what was read."""
    options = {
        "node": {"type": "bool", "default": True},
        "proven": {"type": "bool", "default": False},
        "ours": {"type": "path", "required": True},
    }
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    busy, head = [], Path(module.params["ours"]).exists()
    if SETTINGS.exists() and shutil.which("squeue"):
        code, jobs, _ = module.run_command(["timeout", "10", "squeue", "--all", "--noheader", "--format=%P"])
        busy = partitions(SETTINGS.read_text(), None if code else {*re.split(r"[\s,]+", jobs)})
    installed = shutil.which("slurmd")
    if module.params["node"] and not installed and not module.check_mode:
        module.fail_json(msg="slurmd is not installed")
    if not module.params["node"] or not installed:
        # In check mode, it would be installed before.
        module.exit_json(changed=False, partitions=busy, head=head)
    _, printed, _ = module.run_command(["slurmd", "-C"], check_rc=True)
    gpus = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    _, version, _ = module.run_command(["slurmd", "-V"], check_rc=True)
    facts = {
        "gpus": len(gpus),
        "cgroups": cgroups(CGROUPS),
        "version": "".join(re.findall(r"\b\d{2}\.\d{2}\b", version)[:1]),
    }
    # A file that a power cut has emptied says something else than one that is not there.
    known = (PROVEN.read_text().strip() or "unknown") if PROVEN.exists() else ""
    since = proven(known, NOW.read_text().strip(), here=module.params["proven"])
    module.exit_json(changed=False, hardware={**hardware(printed), **facts}, partitions=busy, head=head, **since)


if __name__ == "__main__":
    main()
