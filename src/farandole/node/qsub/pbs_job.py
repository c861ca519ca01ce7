"""Run a job's script in the environment that PBS would give it.

qsub makes this the interpreter of the script that Slurm gets. It writes the node file, sets the variables of PBS,
has a login shell set the rest, and becomes the script's own interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from farandole.node.allocation import counts

VARIABLE = "FARANDOLE_PBS"
# Everybody may write their own files there; the epilog removes them.
NODE_FILES = Path("/run/farandole/pbs")
SCONTROL = "/usr/bin/scontrol"
# Functions such as module are for the shells that the job starts, too.
LOGIN = """
for one in module ml _module_raw; do
  if declare -F "$one" > /dev/null; then export -f "$one"; fi
done
cd -- "$1" || exit
shift
exec "$@"
"""
# The program's second start, after that shell.
AGAIN = "--become"
# What belongs to the shell itself.
OF_SHELL = {"_", "SHLVL", "PWD", "OLDPWD", VARIABLE}
SAME = {
    "PBS_JOBID": "SLURM_JOB_ID",
    "PBS_JOBNAME": "SLURM_JOB_NAME",
    "PBS_QUEUE": "SLURM_JOB_PARTITION",
    "PBS_NUM_NODES": "SLURM_JOB_NUM_NODES",
    "PBS_ARRAY_INDEX": "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAYID": "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_ID": "SLURM_ARRAY_JOB_ID",
}


def node_file(hosts: list[str], text: str) -> str:
    """Each host once for each of its tasks."""
    return "".join(f"{host}\n" * count for host, count in zip(hosts, counts(text), strict=True))


def variables(environment: Mapping[str, str], nodes: str, path: str) -> dict[str, str]:
    """The variables of PBS."""
    found = {name: environment[slurm] for name, slurm in SAME.items() if slurm in environment}
    lines = nodes.split()
    return {
        **found,
        "PBS_NODEFILE": path,
        "PBS_NP": str(len(lines)),
        "PBS_NUM_PPN": str(lines.count(lines[0])),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "1",
        "PBS_JOBDIR": environment.get("HOME", "/"),
    }


def kept(environment: Mapping[str, str], keep: str | list[str]) -> dict[str, str]:
    """What a login shell must not change."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_SHELL
        and (keep == "all" or name in keep or name.startswith(("SLURM_", "PBS_", "SRUN_", "SPANK_")))
    }


def written(text: bytes) -> str:
    """The path of a new file of the job, which only its user can read."""
    handle, path = tempfile.mkstemp(prefix=f"{int(os.environ['SLURM_JOB_ID'])}.", dir=NODE_FILES)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return path


def as_before() -> None:
    """Undo what Python does to signals, which programs would inherit."""
    for one in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(one, signal.SIG_DFL)


def become(path: str, program: list[str]) -> NoReturn:
    """Become a program, with the variables of a file, which is removed."""
    try:
        values = Path(path).read_bytes().split(b"\0")
        Path(path).unlink()
        os.environb.update({name: value for name, _, value in (one.partition(b"=") for one in values) if name})
        as_before()
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        print(f"error: {program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def main() -> NoReturn:
    """Become the job's program."""
    if sys.argv[1:2] == [AGAIN]:
        become(sys.argv[2], sys.argv[3:])
    try:
        knowledge = json.loads(os.environ[VARIABLE])
        shown = subprocess.run(
            [SCONTROL, "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        nodes = node_file(shown.stdout.split(), os.environ["SLURM_TASKS_PER_NODE"])
        path = written(nodes.encode())
        os.environ.update(variables(os.environ, nodes, path))
        values = [os.fsencode(f"{name}={value}") for name, value in kept(os.environ, knowledge["keep"]).items()]
        # Not as arguments, which everybody on this node could read.
        values_file = written(b"\0".join(values))
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: the job was not started, for its node file could not be written: {error!r}")
    # The first argument is the script.
    program = [*knowledge["interpreter"], *sys.argv[1:]]
    del os.environ[VARIABLE]
    again = [sys.argv[0], AGAIN, values_file]
    as_before()
    os.execv("/bin/bash", ["bash", "-l", "-c", LOGIN, "pbs-job", knowledge["start"], *again, *program])  # noqa: S606
