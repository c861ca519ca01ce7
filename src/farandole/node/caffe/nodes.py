"""Ask the nodes of a training, and judge what they say."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farandole.node.caffe import probe
from farandole.node.caffe.options import plain

# Seconds for a node to answer.
ANSWER = 60
# What a node says, or why it says nothing.
Answer = dict[str, Any] | str


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
        with contextlib.suppress(ValueError):
            if isinstance(answer := json.loads(line), dict):
                return answer
    lines = (asked.stderr or asked.stdout).strip().splitlines()
    return plain(lines[-1]) if lines else f"exit status {asked.returncode}"


def ask_all(nodes: list[str], request: Mapping[str, Any], in_slurm: bool) -> dict[str, Answer]:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(nodes, pool.map(lambda node: ask(node, request, in_slurm), nodes), strict=True))


def has_omni_path(answer: Answer) -> bool:
    return isinstance(answer, dict) and any(str(name).startswith("hfi1") for name in answer.get("adapters", ()))


def judge(answers: Mapping[str, Answer], files: Mapping[str, str], network: str) -> Iterator[str]:
    """What stands against starting, each with its host; all files have to be the same as on the first node."""
    machines: dict[str, str] = {}
    digests: dict[str, tuple[str, str]] = {}
    for node, answer in answers.items():
        if isinstance(answer, str):
            yield f"{node} cannot be asked: {answer}. Mend `ssh {node}`, or take it out of the hostfile"
            continue
        yield from (f"{node}: {plain(problem, 1000)}" for problem in answer["problems"])
        for path, digest in answer.get("digests", {}).items():
            first, seen = digests.setdefault(path, (node, digest))
            if seen != digest:
                yield f"{node}: {files[path]} {path} differs from that of {first}. Copy it again, or run site.yml"
        if "machine" not in answer:
            continue
        if network == "opa" and not has_omni_path(answer):
            yield f"{node}: there is no Omni-Path adapter (/sys/class/infiniband/hfi1*): use --network tcp"
        if (other := machines.setdefault(answer["machine"], node)) != node:
            yield f"{node}: it is the same machine as {other} (/etc/machine-id): name each machine once"
