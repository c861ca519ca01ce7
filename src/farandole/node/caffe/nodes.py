"""The nodes of a training: how many processes each gets, what each says, and what stands against starting there."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from farandole.node.allocation import tasks
from farandole.node.caffe import probe
from farandole.node.caffe.options import HOSTFILE, RefusedError, plain

LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*)((?:\s+(?:max_)?slots=\d+)*)")
# Seconds for a node to answer.
ANSWER = 60
# The number of processes of each host.
Hosts = dict[str, int]
# What a node says, or why it says nothing.
Answer = dict[str, Any] | str


def read_hosts(text: str) -> Hosts:
    """Each host's number of processes: its lines in a PBS nodefile. Slots are places, of which one is used."""
    hosts: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if bare := line.partition("#")[0].strip():
            if not (host := LINE.fullmatch(bare)):
                cure = "Write a host name, or NAME slots=N"
                raise RefusedError(f"line {number} of the hostfile is not a host: {plain(line, 60)!r}. {cure}")
            hosts[host[1]] += 1
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


def ask(node: str, request: Mapping[str, Any], in_slurm: bool) -> Answer:
    """Ask a node; srun reaches those on which the user may not log in."""
    command = ["/usr/bin/python3", "-I", "-", json.dumps(request)]
    if node not in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        if in_slurm:
            step = ["--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mpi=none", f"--nodelist={node}"]
            command = ["srun", "--quiet", *step, *command]
        else:
            careful = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
            command = ["ssh", *careful, node, shlex.join(command)]
    try:
        asked = subprocess.run(
            command, input=Path(probe.__file__).read_text(), capture_output=True, text=True, errors="replace",
            timeout=ANSWER, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER} seconds"
    except OSError as error:
        return str(error)
    # A shell that greets adds lines before it.
    for line in reversed(asked.stdout.splitlines()):
        with suppress(ValueError):
            if isinstance(answer := json.loads(line), dict):
                return answer
    lines = (asked.stderr or asked.stdout).strip().splitlines()
    return plain(lines[-1]) if lines else f"exit status {asked.returncode}"


def ask_all(nodes: list[str], request: Mapping[str, Any], in_slurm: bool) -> dict[str, Answer]:
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(nodes, pool.map(lambda node: ask(node, request, in_slurm), nodes), strict=True))


def has_omni_path(answer: Answer) -> bool:
    return isinstance(answer, dict) and any(str(name).startswith("hfi1") for name in answer.get("adapters", ()))


def judge(answers: Mapping[str, Answer], files: Mapping[str, str], network: str) -> Iterator[str]:
    """What stands against starting, each with its host; all files have to be the same as on the first node."""
    machines: dict[str, str] = {}
    digests: dict[str, tuple[str, str]] = {}
    for node, answer in answers.items():
        if isinstance(answer, str):
            yield f"{node} cannot be asked: {answer}. Fix `ssh {node}`, or take it out of the hostfile"
            continue
        yield from (f"{node}: {plain(problem, 1000)}" for problem in answer["problems"])
        if "machine" not in answer:
            continue
        for path, digest in answer["digests"].items():
            first, seen = digests.setdefault(path, (node, digest))
            if seen != digest:
                yield f"{node}: {files[path]} {path} differs from that of {first}. Copy it again, or run site.yml"
        if network == "opa" and not has_omni_path(answer):
            yield f"{node}: there is no Omni-Path adapter (/sys/class/infiniband/hfi1*): use --network tcp"
        if (other := machines.setdefault(answer["machine"], node)) != node:
            yield f"{node}: it is the same machine as {other} (/etc/machine-id): name each machine once"
