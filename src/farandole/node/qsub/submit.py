"""Submit a translated job to Slurm, or show what would be submitted."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from farandole.node.qsub.pbs_job import VARIABLE
from farandole.node.qsub.script import Job

SBATCH, SCONTROL = "/usr/bin/sbatch", "/usr/bin/scontrol"
# Runs a job's script in the environment that PBS would give it.
PBS_JOB = "/usr/local/libexec/farandole/pbs-job"
# On the head: whose homes all nodes mount from here.
SHARED = Path("/etc/farandole/storage/home")
# What is mounted on first use is autofs until then.
REMOTE = re.compile("nfs|cifs|smb|fuse|autofs|lustre|ceph|gluster|beegfs|gpfs|afs|ocfs2|gfs2|9p|virtiofs")


def say(text: str) -> None:
    # Words of a script may hold sequences that change the terminal.
    safe = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    print("\n".join(f"qsub: {line}" for line in safe.splitlines()), file=sys.stderr, flush=True)


def environment_of(job: Job) -> dict[str, str]:
    """What the job's program starts with."""
    me = pwd.getpwuid(os.getuid())
    here = job.environment
    ours = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PBS_")
    if "V" in job.given:
        found = {name: value for name, value in here.items() if not name.startswith(ours)}
    else:
        found = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": me.pw_dir, "SHELL": me.pw_shell}
        found |= {"LOGNAME": me.pw_name, "USER": me.pw_name}
        found |= {name: here[name] for name in ("LANG", "TZ") if name in here}
    found |= {name: here[name] for name in ("SLURM_CONF", "SLURM_CONF_SERVER") if name in here}
    found |= job.variables
    for name in ("HOME", "LOGNAME", "PATH", "SHELL", "LANG", "TZ", "MAIL"):
        if name in here:
            found[f"PBS_O_{name}"] = here[name]
    found |= {"PBS_O_WORKDIR": job.folder, "PBS_O_HOST": socket.gethostname()}
    if "q" in job.given:
        found["PBS_O_QUEUE"] = job.given["q"].value
    knowledge = {
        "interpreter": runs_it(job, me.pw_shell),
        "keep": "all" if "V" in job.given else sorted(job.variables),
        "start": me.pw_dir,
    }
    found[VARIABLE] = json.dumps(knowledge)
    return found


def runs_it(job: Job, login: str) -> list[str]:
    known = login if Path(login).name in ("bash", "ksh", "zsh", "tcsh", "csh", "fish") else "/bin/bash"
    return job.interpreter or [known]


def command_of(job: Job, path: str) -> list[str]:
    """The command that submits it; the script lies at a path."""
    return [SBATCH, "--parsable", "--ignore-pbs", f"--job-name={job.name}", *job.arguments, path, *job.words]


def submitted(script: bytes) -> bytes:
    """The script that Slurm gets: the same lines, with the first one changed."""
    rest = script.partition(b"\n")[2] if script.startswith(b"#!") else script
    return f"#!{PBS_JOB}\n".encode() + rest


def warn_of_unknown_jobs(job: Job) -> None:
    """Slurm takes a job that it does not know for one that has ended well."""
    given = job.given.get("depend")
    for name in dict.fromkeys(re.findall(r":(\d+)", given.assigned)) if given else ():
        asked = subprocess.run([SCONTROL, "show", "job", name], capture_output=True, text=True, check=False)
        if "Invalid job id" in asked.stderr:
            say(f"{given}: the queue does not know job {name}, so nothing waits for it; see sacct -j {name}")


def only_here(folder: str) -> bool:
    """Whether a folder is on a disk of this machine that other nodes do not mount."""
    homes = [f"/home/{name}" for name in SHARED.read_text().split()] if SHARED.exists() else []
    if any(Path(folder).is_relative_to(one) for one in ("/dev", *homes)):
        return False
    words = ["findmnt", "--noheadings", "--output=FSTYPE", f"--target={folder}"]
    shown = subprocess.run(words, capture_output=True, text=True, check=False)
    return not any(REMOTE.match(kind) for kind in shown.stdout.split())


def warn_of_own_disk(job: Job) -> None:
    """Slurm ends a job without a word if its first node cannot write its output."""
    written = [text for text in job.arguments if text.startswith(("--output=", "--error="))]
    paths = [text.partition("=")[2].replace("%%", "%") for text in written]
    folders = dict.fromkeys(os.path.realpath(os.path.dirname(path)) for path in paths)  # noqa: PTH120
    if here := [folder for folder in folders if only_here(folder)]:
        job.note(
            "output",
            f"{' and '.join(here)} is on this machine's own disk; a node that lacks this folder cannot start the job, "
            "and on another one its output stays there",
        )


def submit(job: Job) -> int:
    """Submit it, and print its number."""
    environment = environment_of(job)
    warn_of_unknown_jobs(job)
    handle = os.memfd_create("script", 0)
    with os.fdopen(handle, "wb") as file:
        file.write(submitted(job.script))
        file.flush()
        os.lseek(handle, 0, os.SEEK_SET)
        command = command_of(job, f"/dev/fd/{handle}")
        done = subprocess.run(command, env=environment, pass_fds=[handle], stdin=subprocess.DEVNULL, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def show(job: Job) -> int:
    """Print what would be submitted."""
    for name, value in sorted(environment_of(job).items()):
        if name in job.variables or name.startswith("PBS_O_"):
            print(f"# {name}={shlex.quote(value)}")
    print(f"# run by: {shlex.join(runs_it(job, pwd.getpwuid(os.getuid()).pw_shell))}")
    print(shlex.join(command_of(job, "SCRIPT")))
    return 0
