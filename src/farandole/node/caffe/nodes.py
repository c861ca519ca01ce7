"""The nodes of a training: how many processes each gets, what each says, and what stands against starting there."""

import json
import re
import shlex
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line
from farandole.node.caffe import probe
from farandole.node.caffe.plan import Solver

HOSTFILE = "/etc/farandole/hostfile"
# A name, its slots, and a comment, all of which may be missing.
LINE = re.compile(r"\s*(?:([A-Za-z0-9][A-Za-z0-9.-]*)(?:\s+(?:max_)?slots=\d+)*)?\s*(?:#.*)?")
# Seconds for a node to answer.
ANSWER = 60
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10")
# It reaches nodes on which the user may not log in.
SRUN = ("srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mpi=none")


def read_hosts(path: str) -> dict[str, int]:
    """Each host's number of processes: its lines in a PBS nodefile. Slots are places, of which one is used."""
    hosts: Counter[str] = Counter()
    for number, line in enumerate(Path(path).read_text(errors="replace").splitlines(), 1):
        if not (host := LINE.fullmatch(line)):
            raise FarandoleError(f"line {number} of {path} is not NAME or NAME slots=N: {one_line(line, 60)!r}")
        hosts.update([host[1]] if host[1] else [])
    if not hosts:
        raise FarandoleError(f"the hostfile {path} names no host")
    return dict(hosts)


def find_hosts(path: str | None, ppn: int | None, allocated: dict[str, int]) -> tuple[list[str], int]:
    """The nodes, and the processes of each, which are as many everywhere."""
    hosts = read_hosts(path or HOSTFILE) if path or not allocated else allocated
    if outside := [name for name in hosts if allocated and name not in allocated]:
        seen = f"{path} names {', '.join(outside)}, which this job does not have: Slurm gave it {', '.join(allocated)}"
        raise FarandoleError(f"{seen}. Leave --hostfile out")
    if not ppn and len(set(hosts.values())) > 1:
        seen = ", ".join(f"{name} {number}" for name, number in hosts.items())
        raise FarandoleError(f"hosts are named in different numbers ({seen}), but every node gets as many: say --ppn 1")
    return list(hosts), ppn or next(iter(hosts.values()))


def request_of(caffe: str, folders: str, launcher: str, solver: Solver) -> dict[str, Any]:
    """What every node is asked: for files, with a digest of those that have to be the same as here."""
    here = Path.cwd()
    files = {path: sha256(Path(path).read_bytes()).hexdigest() for path in (caffe, solver.path, *solver.nets)}
    files |= dict.fromkeys([*solver.data, launcher, ""], "")
    return {
        "host": socket.gethostname(), "caffe": caffe, "folders": folders, "model": str(here / solver.model),
        "files": {str(here / path): digest for path, digest in files.items()},
    }  # fmt: skip


def ask(node: str, request: Mapping[str, Any], in_slurm: bool) -> dict[str, Any]:
    """What a node says; only problems, if it does not answer."""
    command = ["/usr/bin/python3", "-I", "-", json.dumps(request)]
    if node not in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        command = [*SRUN, f"--nodelist={node}", *command] if in_slurm else [*SSH, node, shlex.join(command)]
    try:
        asked = subprocess.run(
            command, input=Path(probe.__file__).read_text(), capture_output=True, text=True, errors="replace",
            timeout=ANSWER, check=False,
        )  # fmt: skip
        # A shell that greets adds lines before it.
        for line in reversed(asked.stdout.splitlines()):
            with suppress(ValueError):
                if isinstance(answer := json.loads(line), dict):
                    return answer
        why = one_line(asked.stderr or asked.stdout) or f"exit status {asked.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = one_line(error)
    return {"problems": [f"it cannot be asked: {why}. Fix `ssh {node}`, or take it out of the hostfile"]}


def ask_all(nodes: list[str], request: Mapping[str, Any], in_slurm: bool) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(nodes, pool.map(partial(ask, request=request, in_slurm=in_slurm), nodes), strict=True))


def judge(answers: dict[str, dict[str, Any]], network: str) -> Iterator[str]:
    """What stands against starting, each with its host."""
    machines: dict[str, str] = {}
    for node, answer in answers.items():
        yield from (f"{node}: {one_line(problem, 1000)}" for problem in answer["problems"])
        if network == "opa" and not answer.get("omni_path", True):
            yield f"{node}: there is no Omni-Path adapter (/sys/class/infiniband/hfi1*): use --network tcp"
        if (other := machines.setdefault(answer.get("machine", node), node)) != node:
            yield f"{node}: it is the same machine as {other} (/etc/machine-id): name each machine once"
