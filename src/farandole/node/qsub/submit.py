"""Submit a translated job to Slurm, or show what would be submitted."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from farandole.core.text import visible
from farandole.node.mounts import REMOTE
from farandole.node.qsub.options import Submission
from farandole.node.qsub.pbs_job import VARIABLE

SBATCH = "/usr/bin/sbatch"
# Runs a job's script in the environment that PBS would give it.
PBS_JOB = "/usr/local/libexec/farandole/pbs-job"
# On the head: whose homes all nodes mount from here.
SHARED = Path("/etc/farandole/storage/home")


def say(text: str) -> None:
    # What a script says may hold sequences that change the terminal.
    lines = visible(text, keep="\n").splitlines()
    print("\n".join(f"qsub: {line}" for line in lines), file=sys.stderr, flush=True)


def environment_of(job: Submission) -> dict[str, str]:
    """What the job's program starts with."""
    me, here = pwd.getpwuid(os.getuid()), job.environment
    if "V" in job.given:
        ours = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PBS_")
        values = {name: value for name, value in here.items() if not name.startswith(ours)}
    else:
        values = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": me.pw_dir, "SHELL": me.pw_shell,
            "LOGNAME": me.pw_name, "USER": me.pw_name,
        } | {name: here[name] for name in ("LANG", "TZ") if name in here}  # fmt: skip
    values |= {name: here[name] for name in ("SLURM_CONF", "SLURM_CONF_SERVER") if name in here}
    submitter = ("HOME", "LOGNAME", "PATH", "SHELL", "LANG", "TZ", "MAIL")
    values |= {f"PBS_O_{name}": here[name] for name in submitter if name in here}
    values |= {"PBS_O_WORKDIR": job.folder, "PBS_O_HOST": socket.gethostname(), **job.variables}
    if "q" in job.given:
        values["PBS_O_QUEUE"] = job.given["q"].value
    knowledge = {
        "interpreter": interpreter_of(job, me.pw_shell),
        "keep": "all" if "V" in job.given else sorted(job.variables),
        "start": me.pw_dir,
    }
    return {**values, VARIABLE: json.dumps(knowledge)}


def interpreter_of(job: Submission, login: str) -> list[str]:
    known = login if Path(login).name in ("bash", "ksh", "zsh", "tcsh", "csh", "fish") else "/bin/bash"
    return job.interpreter or [known]


def command_of(job: Submission, path: str) -> list[str]:
    """The command that submits it; the script lies at a path."""
    return [SBATCH, "--parsable", "--ignore-pbs", f"--job-name={job.name}", *job.options, path, *job.arguments]


def submitted(script: bytes) -> bytes:
    """The script that Slurm gets: the same lines, with the first one changed."""
    rest = script.partition(b"\n")[2] if script.startswith(b"#!") else script
    return f"#!{PBS_JOB}\n".encode() + rest


def only_here(folder: str) -> bool:
    """Whether a folder is on a disk of this machine that other nodes do not mount."""
    homes = [f"/home/{name}" for name in SHARED.read_text().split()] if SHARED.exists() else []
    if any(Path(folder).is_relative_to(shared) for shared in ("/dev", *homes)):
        return False
    command = ["findmnt", "--noheadings", "--output=FSTYPE", f"--target={folder}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return not any(REMOTE.match(kind) for kind in shown.stdout.split())


def warn_of_own_disk(job: Submission) -> None:
    """Slurm ends a job without a word if its first node cannot write its output."""
    written = [text for text in job.options if text.startswith(("--output=", "--error="))]
    paths = [text.partition("=")[2].replace("%%", "%") for text in written]
    folders = dict.fromkeys(os.path.realpath(os.path.dirname(path)) for path in paths)  # noqa: PTH120
    if here := [folder for folder in folders if only_here(folder)]:
        job.note(
            "output",
            f"{' and '.join(here)} is on this machine's own disk; a node that lacks this folder cannot start the job, "
            "and on another one its output stays there",
        )


def submit(job: Submission) -> int:
    """Submit it, and print its number."""
    handle = os.memfd_create("script", 0)
    with os.fdopen(handle, "wb") as file:
        file.write(submitted(job.script))
        file.flush()
        os.lseek(handle, 0, os.SEEK_SET)
        command, environment = command_of(job, f"/dev/fd/{handle}"), environment_of(job)
        done = subprocess.run(command, env=environment, pass_fds=[handle], stdin=subprocess.DEVNULL, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def show(job: Submission) -> int:
    """Print what would be submitted."""
    for name, value in sorted(environment_of(job).items()):
        if name in job.variables or name.startswith("PBS_O_"):
            print(f"# {name}={shlex.quote(value)}")
    print(f"# run by: {shlex.join(interpreter_of(job, pwd.getpwuid(os.getuid()).pw_shell))}")
    print(shlex.join(command_of(job, "SCRIPT")))
    return 0
