"""An allocation of Slurm's, in which a run's job is started."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from farandole.node.allocation import tasks
from farandole.node.head.reap import GRACE, end
from farandole.node.head.runs import RefusedError, Run, ran, say
from farandole.node.head.slots import Allocated, asked, fill
from farandole.node.head.status import Numbers, Slots, hostfile

# Prints the allocation that it runs in, and ends with the exit status that it reads.
HOLD = 'env | grep ^SLURM_; echo; read -r status; exit "${status:-1}"'
# Seconds in which the accounting knows how a job has ended.
ACCOUNTED_S = 10


class Allocation:
    """What the queue gives to a run, until the run gives it back."""

    def __init__(self, run: Run, wish: Any, taken: Callable[[str, str], None]) -> None:
        self.holder = subprocess.Popen(
            [*allocate(run, wish), "sh", "-c", HOLD],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, start_new_session=True,
        )  # fmt: skip
        try:
            self.variables = granted(self.holder)
        except BaseException:
            end(self.holder)
            raise
        # Launchers look for their allocation here.
        os.environ.update(self.variables)
        job = self.variables["SLURM_JOB_ID"]
        if not wish["seconds"]:
            say(f"the queue ends this run after {time_limit(job)}; --time asks for another limit")
        self.is_wanted, self.is_revoked = True, False
        self.watcher = threading.Thread(target=self.watch, args=(job, taken), daemon=True)
        self.watcher.start()

    def slots(self) -> Numbers:
        """One for each task, counted as Slurm does."""
        return {node: range(ranks) for node, ranks in tasks(self.variables).items()}

    def finish(self, status: int) -> None:
        """End it with an exit status, once."""
        if self.holder.stdin:
            with suppress(OSError):
                self.holder.stdin.write(b"%d\n" % status)

    def give_back(self) -> None:
        self.is_wanted = False
        self.finish(1)
        for name in self.variables:
            os.environ.pop(name, None)
        try:
            self.holder.wait(GRACE)
        except subprocess.TimeoutExpired:
            end(self.holder)

    def watch(self, job: str, taken: Callable[[str, str], None]) -> None:
        """Tell when the queue takes it away, and why."""
        self.is_revoked = any(b"revoked" in line for line in self.holder.stdout or ())
        if not self.is_revoked:
            return
        state, until = "", time.monotonic() + ACCOUNTED_S
        # The accounting may be behind.
        while state in ("", "RUNNING") and time.monotonic() < until:
            asked_for = ["--noheader", "--parsable2", "--allocations", "--format=state", f"--jobs={job}"]
            state = ran("sacct", *asked_for).stdout.strip()
            time.sleep(0.2)
        # It says the same of one whose node is gone when it is given back.
        if self.is_wanted:
            taken(state, f"ended by the queue ({state or 'unknown'}; scontrol show job {job})")


@contextmanager
def queued(run: Run, wish: Any, taken: Callable[[str, str], None]) -> Iterator[Allocated]:
    """An allocation of the queue's; if it takes one away, something gets the state of its job, and why."""
    current = Allocation(run, wish, taken)

    def others_instead(without: set[str], least: int) -> Numbers:
        nonlocal current
        if not (smaller := fewer(wish, without, least)):
            return {}
        if current.is_revoked or current.holder.poll() is not None:
            # It may be told to end the run.
            current.watcher.join(2 * ACCOUNTED_S)
        elif not without & {*current.slots()}:
            return current.slots()
        current.give_back()
        current = Allocation(run, smaller, taken)
        return current.slots()

    try:
        yield current.slots(), lambda status: current.finish(status), others_instead
    finally:
        current.give_back()


def fewer(wish: Any, without: set[str], least: int) -> dict[str, Any]:
    """The same, but without these nodes, and with fewer ranks if so few nodes are enough; empty if it cannot be."""
    count, slots = asked(wish)
    left = {node: ranks for node, ranks in slots.items() if node not in without}
    count = min(count, sum(left.values())) if least else count
    filled = fill(count, left)
    return {**wish, "np": count, "hosts": ",".join(left)} if filled and len(filled) >= least else {}


def allocate(run: Run, wish: Any) -> list[str]:
    """The command that asks Slurm for as many nodes as the ranks fill, and for a rank's share of each."""
    count, slots = asked(wish)
    filled = fill(count, slots)
    nodes = ran("sinfo", "--noheader", "--Node", "--format=%N|%c|%G").stdout
    most, (cores, gpus) = max(filled.values()), share(slots, nodes)
    command = ["salloc", f"--job-name=farandole-run-{run.number}", f"--nodes={len(filled)}", f"--ntasks={count}"]
    command += [f"--ntasks-per-node={most}", f"--cpus-per-task={cores}"]
    if gpus:
        # Of the node and not of each task, as ranks choose theirs among all of their node.
        command.append(f"--gres=gpu:{most * gpus}")
    if others := [node for node in hostfile() if node not in slots]:
        command.append(f"--exclude={','.join(others)}")
    if wish["seconds"]:
        command.append(f"--time={minutes(wish['seconds'], ran('sinfo', '--noheader', '--format=%P|%l').stdout)}")
    return command


def minutes(seconds: int, partitions: str) -> int:
    """The time to ask for: longer than the run, which then ends first, or the longest that the queue gives to one."""
    found = re.search(r"^\S+\*\|(?:(?:(\d+)-)?(\d+):)?(\d+):\d\d$", partitions, re.MULTILINE)
    days, hours, rest = (int(number or 0) for number in found.groups()) if found else (0, 0, 0)
    longest, wanted = (days * 24 + hours) * 60 + rest, seconds // 60 + 2
    return min(wanted, longest) if seconds <= longest * 60 else wanted


def share(slots: Slots, nodes: str) -> tuple[int, int]:
    """The cores and the GPUs that a slot has on each of its nodes, by what Slurm says of all; a core at least."""
    cores, gpus = set(), set()
    for node, has, devices in re.findall(r"^(\S+)\|(\d+)\|(.*)$", nodes, re.MULTILINE):
        if slots.get(node):
            cores.add(int(has) // slots[node])
            found = re.search(r"\bgpu(?::[^:,(]+)?:(\d+)", devices)
            gpus.add(int(found[1]) // slots[node] if found else 0)
    return max(1, min(cores, default=1)), min(gpus, default=0)


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
        # With this one, srun gives what mpirun starts on a node the share of one rank.
        if name.startswith("SLURM_") and mark and name != "SLURM_TRES_PER_TASK":
            variables[name] = value
        elif variables and not text:
            return variables
        elif text:
            messages.append(re.sub(r"^salloc: (error: )?", "", text))
            if waits := re.search(r"job (\d+) queued and waiting", text):
                say(f"waiting in the queue as job {waits[1]}; squeue shows it")
    why = "; ".join(messages) or "salloc says nothing"
    raise RefusedError(next((message for message in messages if "can never run" in message), why))
