"""Submit a translated job to Slurm, or show what would be submitted."""

import json
import os
import pwd
import shlex
import socket
import subprocess
from pathlib import Path

from farandole.node.mounts import REMOTE, shared_homes
from farandole.node.qsub.options import Submission
from farandole.node.qsub.pbs_job import VARIABLE

SBATCH = "/usr/bin/sbatch"
# Runs a job's script in the environment that PBS would give it.
PBS_JOB = "/usr/local/libexec/farandole/pbs-job"
OF_QUEUES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PBS_")


def environment_of(job: Submission) -> dict[str, str]:
    """What the job's program starts with."""
    me, here = pwd.getpwuid(os.getuid()), job.environment
    passed = [name for name in here if not name.startswith(OF_QUEUES)] if "V" in job.given else ["LANG", "TZ"]
    passed += ["SLURM_CONF", "SLURM_CONF_SERVER"]
    values = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": me.pw_dir, "SHELL": me.pw_shell, "LOGNAME": me.pw_name,
        "USER": me.pw_name,
    } | {name: here[name] for name in passed if name in here}  # fmt: skip
    submitter = ("HOME", "LOGNAME", "PATH", "SHELL")
    values |= {f"PBS_O_{name}": here[name] for name in submitter if name in here}
    values |= {"PBS_O_WORKDIR": job.folder, "PBS_O_HOST": socket.gethostname(), **job.variables}
    if "q" in job.given:
        values["PBS_O_QUEUE"] = job.given["q"].value
    keep = "all" if "V" in job.given else sorted(job.variables)
    return {**values, VARIABLE: json.dumps({"interpreter": job.interpreter, "keep": keep, "start": me.pw_dir})}


def command_of(job: Submission) -> list[str]:
    """The command that submits it, with the script on its standard input."""
    options = [f"--{name}={value}" for name, value in job.options.items()]
    # The environment is one that it may have as a whole, and #SBATCH in the script says nothing else of it.
    return [SBATCH, "--parsable", "--ignore-pbs", "--export=ALL", *options, "/dev/stdin", *job.arguments]


def submitted(script: bytes) -> bytes:
    """The script that Slurm gets: the same lines, with the first one changed."""
    rest = script.partition(b"\n")[2] if script.startswith(b"#!") else script
    return f"#!{PBS_JOB}\n".encode() + rest


def only_here(folder: str) -> bool:
    """Whether a folder is on a disk of this machine that other nodes do not mount."""
    if any(Path(folder).is_relative_to(shared) for shared in ("/dev", *(f"/home/{name}" for name in shared_homes()))):
        return False
    command = ["findmnt", "--noheadings", "--output=FSTYPE", f"--target={folder}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return not any(REMOTE.match(kind) for kind in shown.stdout.split())


def warn_of_own_disk(job: Submission) -> None:
    """Slurm ends a job without a word if its first node cannot write its output."""
    if here := [folder for folder in dict.fromkeys(map(os.path.realpath, job.folders)) if only_here(folder)]:
        job.note(
            "output",
            f"{' and '.join(here)} is on this machine's own disk; a node that lacks this folder cannot start the job, "
            "and on another one its output stays there",
        )


def submit(job: Submission) -> int:
    """Submit it, which prints its number."""
    environment, script = environment_of(job), submitted(job.script)
    return subprocess.run(command_of(job), env=environment, input=script, check=False).returncode


def show(job: Submission) -> int:
    """Print what would be submitted."""
    for name, value in sorted(environment_of(job).items()):
        if name in job.variables or name.startswith("PBS_O_"):
            print(f"# {name}={shlex.quote(value)}")
    print(shlex.join(command_of(job)))
    return 0
