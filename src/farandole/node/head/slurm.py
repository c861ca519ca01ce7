"""An allocation of Slurm's, in which a run's job is started."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from farandole.node.allocation import tasks
from farandole.node.head.reap import GRACE, end
from farandole.node.head.runs import RefusedError, Run, ran, say
from farandole.node.head.slots import Allocated, asked, fill
from farandole.node.head.status import hostfile

# Prints the allocation that it runs in, and ends with the exit status that it reads.
HOLD = 'env | grep ^SLURM_; echo; read -r status; exit "${status:-1}"'


@contextmanager
def queued(run: Run, wish: Any, lost: Callable[[str], None]) -> Iterator[Allocated]:
    """An allocation of the queue's."""
    if wish["restarts"]:
        raise RefusedError("--restarts does not work in the queue; sbatch --requeue starts a job of the queue again")
    holder = subprocess.Popen(
        [*allocate(run, wish), "sh", "-c", HOLD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, start_new_session=True,
    )  # fmt: skip

    def finish(status: int) -> None:
        if holder.stdin:
            with suppress(OSError):
                holder.stdin.write(b"%d\n" % status)

    try:
        variables = granted(holder)
    except BaseException:
        end(holder)
        raise
    try:
        # Launchers look for their allocation here.
        os.environ.update(variables)
        job = variables["SLURM_JOB_ID"]
        if not wish["seconds"]:
            say(f"the queue ends this run after {time_limit(job)}; --time asks for another limit")
        threading.Thread(target=watch, args=(holder, job, lost), daemon=True).start()
        yield tasks(variables), finish, lambda *_: {}
    finally:
        finish(1)
        try:
            holder.wait(GRACE)
        except subprocess.TimeoutExpired:
            end(holder)


def allocate(run: Run, wish: Any) -> list[str]:
    """The command that asks Slurm for as many nodes as the ranks fill."""
    count, slots = asked(wish)
    filled = fill(count, slots)
    command = ["salloc", f"--job-name=farandole-run-{run.number}", f"--nodes={len(filled)}", f"--ntasks={count}"]
    command.append(f"--ntasks-per-node={max(filled.values())}")
    if others := [node for node in hostfile() if node not in slots]:
        command.append(f"--exclude={','.join(others)}")
    if wish["seconds"]:
        # This program ends it before the queue does.
        command.append(f"--time={wish['seconds'] // 60 + 2}")
    return command


def time_limit(job: str) -> str:
    """The hours, minutes and seconds that an allocation lasts."""
    return ran("squeue", "--noheader", f"--jobs={job}", "--format=%l").stdout.strip() or "some time"


def granted(holder: subprocess.Popen[bytes]) -> dict[str, str]:
    """What describes the allocation, as soon as there is one."""
    variables: dict[str, str] = {}
    messages = []
    for line in holder.stdout or ():
        text = line.decode(errors="replace").strip()
        name, mark, value = text.partition("=")
        if name.startswith("SLURM_") and mark:
            variables[name] = value
        elif variables and not text:
            return variables
        elif text:
            messages.append(re.sub(r"^salloc: (error: )?", "", text))
            if waits := re.search(r"job (\d+) queued and waiting", text):
                say(f"waiting in the queue as job {waits[1]}; squeue shows it")
    why = "; ".join(messages) or "salloc says nothing"
    raise RefusedError(next((message for message in messages if "can never run" in message), why))


def watch(holder: subprocess.Popen[bytes], job: str, lost: Callable[[str], None]) -> None:
    """Tell when the queue takes the allocation away, and why."""
    if any(b"revoked" in line for line in holder.stdout or ()):
        state = ran("sacct", "--noheader", "--parsable2", "--allocations", "--format=state", f"--jobs={job}").stdout
        lost(f"ended by the queue ({state.strip() or 'unknown'}; scontrol show job {job})")
