"""Which slots a run gets, and how it claims them where there is no queue."""

import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from farandole.node.head import runs, status
from farandole.node.head.runs import RefusedError, Run, clock, say
from farandole.node.head.status import OF_SLOTS, Numbers, Slots, counted, hostfile, only_a_file, others, owner, slots_in

# Seconds that others may lock what all need.
PATIENCE = 10
# The slots of each node, one for each rank, what takes the exit status of what used them, and what gives others
# instead: without these nodes, on so many at least.
Allocated = tuple[Numbers, Callable[[int], None], Callable[[set[str], int], Numbers]]


def fill(count: int, free: Slots) -> Slots:
    """So many ranks on the nodes, in their order; empty if they have too few slots."""
    filled = {}
    for node, slots in free.items():
        if slots > 0 and count > 0:
            filled[node] = min(slots, count)
            count -= filled[node]
    return {} if count else filled


def asked(wish: Any) -> tuple[int, Slots]:
    """The number of ranks that a run asks for, and the slots of the nodes that it may use."""
    # The control machine may know better than the hostfile.
    known = {node: slots for node, slots in hostfile().items() if node not in wish.get("without", ())}
    names = [name.strip() for name in wish["hosts"].split(",")] if wish["hosts"] else list(known)
    if unknown := [name for name in names if name not in known]:
        raise RefusedError(f"--hosts: there is no node {', '.join(unknown)}; the nodes are {', '.join(known)}")
    slots = {name: known[name] for name in names}
    count = wish["np"] or sum(slots.values())
    if not fill(count, slots):
        have = f"{', '.join(slots)} have {sum(slots.values())} slots"
        raise RefusedError(f"-np {count}: {have}; a node's are fabric_slots in the inventory")
    return count, slots


@contextmanager
def claimed(run: Run, wish: Any) -> Iterator[Allocated]:
    """Slots of this run, which no other run gets meanwhile."""
    count, slots = asked(wish)
    told = False
    forget_ended()
    handle, path = tempfile.mkstemp(prefix=f"{os.getuid()}-{run.number}-", dir=status.SLOTS_IN_USE)
    try:
        with os.fdopen(handle, "w+") as file:
            # Before others can open and lock it.
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(handle, 0o644)
            while not (claim := claim_of(file, count, slots))[0]:
                if not wish["wait"]:
                    raise RefusedError(f"too few free slots for -np {count}: {claim[1]}. To wait for them, add --wait")
                if not told:
                    say(f"waiting for {count} slots: {claim[1]}")
                    told = True
                time.sleep(1)

            def others_instead(without: set[str], least: int) -> Numbers:
                return claim_again(file, count, {node: slots[node] for node in slots if node not in without}, least)

            yield claim[0], lambda _: None, others_instead
    finally:
        Path(path).unlink()


def claim_of(file: TextIO, count: int, slots: Slots) -> tuple[Numbers, str]:
    """The slots of each node; if there are too few free ones, what is in the way."""
    with (status.SLOTS_IN_USE / ".lock").open() as lock:
        if not is_locked(lock):
            return {}, holder(lock)
        if claim := filled(count, free_of(slots, {})):
            rewrite(file, claim)
            return claim, ""
        return {}, in_the_way(slots)


def claim_again(file: TextIO, count: int, slots: Slots, least: int) -> Numbers:
    """Other slots instead of those in a file: as many as can be had on so many nodes at least, or all. Or none."""
    with (status.SLOTS_IN_USE / ".lock").open() as lock:
        if not is_locked(lock):
            return {}
        file.seek(0)
        before = slots_in(file.read())
        free = free_of(slots, before)
        claim = filled(min(count, sum(counted(free).values())) if least else count, free)
        enough = bool(claim) and len(claim) >= least
        # Nobody else gets those that it still has, while it waits for others.
        rewrite(file, claim if enough else {node: before[node] for node in before if node in free})
        return claim if enough else {}


def rewrite(file: TextIO, claim: Numbers) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps({node: [*numbers] for node, numbers in claim.items()}))
    file.flush()


def upgraded() -> set[str]:
    """The builder while it is upgraded. The head is not before all runs have ended, also those that wait."""
    try:
        return {*status.UPGRADING.read_text().split()} - {runs.HERE}
    except FileNotFoundError:
        return set()


def filled(count: int, free: Mapping[str, list[int]]) -> Numbers:
    """So many slots of these, of the nodes in their order; empty if there are too few."""
    return {node: free[node][:ranks] for node, ranks in fill(count, counted(free)).items()}


def free_of(slots: Slots, own: Numbers) -> dict[str, list[int]]:
    """What other runs leave of these slots, on nodes that have not been left out since; a run's own are free to it."""
    known, closed, taken, free = hostfile(), upgraded() - own.keys(), [uses for *_, uses in others()], {}
    for node in (node for node in slots if node in known and node not in closed):
        used = [uses[node] for uses in taken if node in uses]
        if own.get(node) in used:
            used.remove(own[node])
        left = [number for number in range(slots[node]) if not any(number in numbers for numbers in used)]
        # Runs that an earlier version has started may use the same ones.
        free[node] = left[: max(0, slots[node] - sum(map(len, used)))]
    return free


def in_the_way(nodes: Iterable[str]) -> str:
    """The runs that use slots of these nodes, and which of the nodes are left out."""
    known = hostfile()
    reasons = [
        f"run {number} of {who}, since {clock(since)}, on {', '.join(uses)}"
        for number, who, since, uses in others()
        if uses.keys() & set(nodes)
    ]
    reasons += [f"{node} is left out" for node in nodes if node not in known]
    reasons += [f"{node} is being upgraded" for node in upgraded() & {*nodes}]
    return "; ".join(reasons) or "another run is just starting or ending"


def is_locked(lock: TextIO) -> bool:
    """Lock a file that anybody can lock, and keep locked."""
    until = time.monotonic() + PATIENCE
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def holder(lock: TextIO) -> str:
    """Who keeps a file locked, and what to do."""
    opened = os.fstat(lock.fileno())
    file = f"{os.major(opened.st_dev):02x}:{os.minor(opened.st_dev):02x}:{opened.st_ino}"
    entry = re.search(rf"^\d+: FLOCK +ADVISORY +\w+ (\d+) {file} ", Path("/proc/locks").read_text(), re.MULTILINE)
    who, end = "somebody", ""
    with suppress(OSError):
        # The folder belongs to root if the process cannot be dumped.
        if entry and (uid := re.search(r"^Uid:\t(\d+)", Path(f"/proc/{entry[1]}/status").read_text(), re.MULTILINE)):
            who, end = f"process {entry[1]} of {owner(int(uid[1]))}", f"kill {entry[1]}, or "
    return (
        f"{who} keeps {lock.name} locked, so that nobody gets slots; on the head: {end}as root, rm {lock.name}; "
        "systemd-tmpfiles --create /etc/tmpfiles.d/farandole.conf"
    )


def forget_ended() -> None:
    """Remove the files of own runs that were killed."""
    for path in status.SLOTS_IN_USE.glob(f"{os.getuid()}-*"):
        name = OF_SLOTS.fullmatch(path.name)
        # Others can give theirs such a name. A run that is just starting has not locked its file yet.
        if name and path.lstat().st_uid == os.getuid() and Run(int(name[1])).end():
            with suppress(OSError), only_a_file(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
