"""Run a job's script in the environment that PBS would give it.

qsub makes this the interpreter of the script that Slurm gets. It writes the node file, sets the variables of PBS, and
becomes a login shell, which sets the rest and becomes the script's own interpreter.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from farandole.node.allocation import tasks

VARIABLE = "FARANDOLE_PBS"
# Everybody may write their own files there; the epilog removes them.
NODE_FILES = Path("/run/farandole/pbs")
# Functions such as module are for the shells that the job starts, too.
LOGIN = """
for name in module ml _module_raw; do
  if declare -F "$name" > /dev/null; then export -f "$name"; fi
done
. "$1"
/bin/rm -f -- "$1"
cd -- "$2" || exit
shift 2
exec "$@"
"""
# What belongs to the shell itself, or cannot be set in it.
OF_SHELL = {"_", "SHLVL", "PWD", "OLDPWD", "BASHOPTS", "SHELLOPTS", "EUID", "PPID", "UID"}
SAME = {
    "PBS_JOBID": "SLURM_JOB_ID",
    "PBS_JOBNAME": "SLURM_JOB_NAME",
    "PBS_QUEUE": "SLURM_JOB_PARTITION",
    "PBS_NUM_NODES": "SLURM_JOB_NUM_NODES",
}


def variables(environment: Mapping[str, str], nodes: list[str], path: str) -> dict[str, str]:
    """The variables of PBS."""
    return {
        **{name: environment[slurm] for name, slurm in SAME.items() if slurm in environment},
        "PBS_NODEFILE": path,
        "PBS_NP": str(len(nodes)),
        "PBS_NUM_PPN": str(nodes.count(nodes[0])),
        "PBS_ENVIRONMENT": "PBS_BATCH",
    }


def kept(environment: Mapping[str, str], keep: str | list[str]) -> str:
    """Lines of shell that set again what a login must not change."""
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in environment.items()
        if name not in OF_SHELL
        and (keep == "all" or name in keep or name.startswith(("SLURM_", "PBS_", "SRUN_", "SPANK_")))
        and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
    )


def written(text: str) -> str:
    """The path of a new file of the job, which only its user can read."""
    handle, path = tempfile.mkstemp(prefix=f"{int(os.environ['SLURM_JOB_ID'])}.", dir=NODE_FILES)
    with os.fdopen(handle, "w", errors="surrogateescape") as file:
        file.write(text)
    return path


def main() -> NoReturn:
    """Become the job's program."""
    try:
        knowledge = json.loads(os.environ.pop(VARIABLE))
        # Each host once for each of its tasks.
        nodes = [host for host, count in tasks(os.environ).items() for _ in range(count)]
        path = written("".join(f"{host}\n" for host in nodes))
        os.environ.update(variables(os.environ, nodes, path))
        # Not as arguments, which everybody on this node could read.
        values = written(kept(os.environ, knowledge["keep"]))
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: the job was not started, because its node file could not be written: {error!r}")
    # Python has changed these, and programs would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # The first argument is the script.
    program = [*knowledge["interpreter"], *sys.argv[1:]]
    os.execv("/bin/bash", ["bash", "-l", "-c", LOGIN, "pbs-job", values, knowledge["start"], *program])  # noqa: S606
