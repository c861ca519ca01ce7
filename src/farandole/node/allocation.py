"""What Slurm says of a job's nodes; as a program, the options of horovodrun that describe them."""

import os
import re
import subprocess
from collections.abc import Mapping

SCONTROL = "/usr/bin/scontrol"


def counts(text: str) -> list[int]:
    """A number for each node, which Slurm writes as 2(x3),1."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def tasks(environment: Mapping[str, str]) -> dict[str, int]:
    """The nodes of the job with this environment, each with its number of tasks."""
    command = [SCONTROL, "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
    nodes = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return dict(zip(nodes, counts(environment["SLURM_TASKS_PER_NODE"]), strict=True))


def main() -> None:
    """Print the options of horovodrun."""
    ranks = tasks(os.environ)
    hosts = ",".join(f"{host}:{count}" for host, count in ranks.items())
    print(f"-np {os.environ.get('SLURM_NTASKS') or sum(ranks.values())} -H {hosts}")
