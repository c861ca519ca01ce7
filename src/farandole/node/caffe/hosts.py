"""The hosts of a training, and how many processes each gets."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

from farandole.node.allocation import tasks
from farandole.node.caffe.options import HOSTFILE, RefusedError, plain

LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*)((?:\s+(?:max_)?slots=\d+)*)")
Hosts = dict[str, int]


def read_hosts(text: str) -> Hosts:
    """Each host's number of processes: its lines in a PBS nodefile. Slots are places, of which one is used."""
    hosts: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        found = LINE.fullmatch(words)
        if words and not found:
            cure = "Write a host name, or NAME slots=N"
            raise RefusedError(f"line {number} of the hostfile is no host: {plain(line, 60)!r}. {cure}")
        if found:
            hosts[found[1]] += 1
    return dict(hosts)


def allocation() -> Hosts:
    """The nodes of the Slurm job in which this runs, each with its number of tasks; empty outside a job."""
    try:
        return tasks(os.environ) if "SLURM_JOB_NODELIST" in os.environ else {}
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        raise RefusedError(
            f"the nodes of this Slurm job are not known: {error!r}. Look at  scontrol show job"
        ) from None


def find_hosts(named: str | None, allocated: Hosts) -> tuple[Hosts, str]:
    """The hosts, and where they were read."""
    path = named or os.environ.get("PBS_NODEFILE")
    if not path and allocated:
        return allocated, f"Slurm job {os.environ.get('SLURM_JOB_ID')}"
    path = path or HOSTFILE
    try:
        hosts = read_hosts(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise RefusedError(f"the hostfile {path} cannot be read: {error.strerror}. Name one with --hostfile") from None
    if not hosts:
        raise RefusedError(f"the hostfile {path} names no host")
    if outside := [name for name in hosts if allocated and name not in allocated]:
        raise RefusedError(
            f"{path} names {', '.join(outside)}, which this job does not have: Slurm gave it {', '.join(allocated)}. "
            "Leave --hostfile out"
        )
    return hosts, path


def per_node(hosts: Hosts, path: str) -> int:
    """Processes per node, which is the same everywhere."""
    if len(set(hosts.values())) > 1:
        seen = ", ".join(f"{name} {number}" for name, number in hosts.items())
        raise RefusedError(f"{path} has hosts in different numbers ({seen}), but every node gets as many: say --ppn 1")
    return next(iter(hosts.values()))
