"""Which stack a node has; on the head also who uses which slots, and the queue.

The control machine sends this file to nodes that may have none of the others, so it imports none of them.
"""

import fcntl
import json
import os
import pwd
import re
import stat
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

HOSTFILE = Path("/etc/farandole/hostfile")
STACK = Path("/opt/farandole/current")
# A file for each run that uses slots, locked while it runs.
SLOTS_IN_USE = Path("/run/farandole/slots")
OF_SLOTS = re.compile(r"\d+-(\d{1,9})-\w+")
# Names the head or the builder while it is upgraded, and may reboot.
UPGRADING = SLOTS_IN_USE.with_name("upgrading")
# More slots than a node can have, characters than say which a run has, and runs and jobs than a person looks at.
MOST_SLOTS, MOST_SAID, SHOWN, LISTED = 1 << 16, 1 << 20, 100, 1000
# Exists where Slurm decides who gets which slots.
QUEUE = Path("/usr/local/lib/farandole/slurm/hosts")
# Seconds in which the queue has to say what it does, and the most that is told of a reason.
QUEUE_S, LONGEST = 3, 190
# Why it gives a node no jobs until that is proven.
LOST = re.compile(
    "Not responding|Node unexpectedly rebooted|farandole: it was down|farandole health: it (?:has booted|was mended)"
)
# The number of slots, or of ranks, of each node.
Slots = dict[str, int]
# Which slots of each node, counted from 0.
Numbers = Mapping[str, Collection[int]]


def hostfile() -> Slots:
    """The number of slots of each node."""
    lines = [line.split() for line in HOSTFILE.read_text().splitlines() if line.strip()]
    return {line[0]: int(line[1].partition("=")[2]) if line[1:] else 1 for line in lines}


def others() -> Iterator[tuple[str, str, float, Numbers]]:
    """The runs that use slots: whose, since when, and which of which node."""
    nodes = hostfile()
    for path in sorted(SLOTS_IN_USE.iterdir()):
        # Others could have put anything there.
        if not (name := OF_SLOTS.fullmatch(path.name)):
            continue
        with suppress(OSError, ValueError, RecursionError), only_a_file(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                status, content = os.fstat(file.fileno()), slots_in(file.read(MOST_SAID))
                uses = {node: numbers for node, numbers in content.items() if node in nodes}
                if any(uses.values()):
                    # Its owner can set its other times.
                    yield name[1], owner(status.st_uid), status.st_ctime, uses


def slots_in(text: str) -> Numbers:
    """What a file says that a run uses; empty if it says nothing that can be."""
    content = json.loads(text)
    said = content if isinstance(content, dict) else {}
    lists = [one if isinstance(one, list) else [one] for one in said.values()]
    valid = all(type(number) is int and 0 <= number <= MOST_SLOTS for number in chain.from_iterable(lists))
    # Runs that an earlier version has started say how many, and use the first ones.
    return {node: {*one} if isinstance(one, list) else range(one) for node, one in said.items() if valid}


def counted(numbers: Numbers) -> Slots:
    """How many slots of each node these are."""
    return {node: len(slots) for node, slots in numbers.items()}


def only_a_file(path: Path) -> TextIO:
    """Open a regular file, and nothing that would block or lead elsewhere."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a file")
    return os.fdopen(handle)


def owner(uid: int) -> str:
    """The name of an account."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def asked(*command: str) -> list[list[str]] | str:
    """What a command of the queue prints; why it does not."""
    try:
        done = subprocess.run(
            [*command, "--noheader"], capture_output=True, text=True, errors="replace", timeout=QUEUE_S, check=False
        )
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{command[0]} said nothing within {QUEUE_S} s"
    return done.stderr if done.returncode else [line.split("|") for line in done.stdout.splitlines()]


def in_queue() -> list[list[str]] | str:
    """The jobs of the queue, without what their owners call them; why it does not say."""
    return asked("squeue", "--format=%i|%u|%T|%M|%D")


def of_queue() -> list[list[str]] | str:
    """Name, processors, state and reason of each node, in each of its partitions; why the queue does not say."""
    rows = asked("sinfo", "--Node", "--format=%N|%C|%T|%E") if QUEUE.exists() else []
    # A reason of several lines makes rows that are none.
    return rows if isinstance(rows, str) else [row for row in rows if len(row) > 3 and re.match(r"\d+/", row[1])]


def used(nodes: list[list[str]] | str) -> Slots | None:
    """How many slots of which node runs and the queue's jobs use; nothing if the queue does not say."""
    if isinstance(nodes, str):
        return None
    total = Counter[str]()
    for _, _, _, uses in others() if SLOTS_IN_USE.is_dir() else ():
        total.update(counted(uses))
    for name, processors, *_ in nodes:
        # Allocated, idle, other and all of them.
        total[name] = max(total[name], int(processors.partition("/")[0]))
    return dict(total)


def no_jobs(nodes: list[list[str]] | str) -> dict[str, str]:
    """The nodes to which the queue gives no job, and why, in its own words."""
    reasons = {}
    for name, _, state, *reason in nodes if isinstance(nodes, list) else ():
        # A star means that its slurmd does not answer.
        if "*" in state or re.match("drain|down|fail|err|unk|inval", state):
            why = "|".join(reason)
            reasons[name] = (state if why in ("", "none") else f"{state}: {why}")[:LONGEST]
    return reasons


def lost(reasons: Mapping[str, str]) -> list[str]:
    """Those of them that get no jobs until they are proven."""
    return [name for name, why in reasons.items() if LOST.match(why.partition(": ")[2])]


def status() -> dict[str, Any]:
    """What the control machine asks any node."""
    answer: dict[str, Any] = {"stack": STACK.resolve().name if STACK.exists() else "", "slots": {}, "uses": []}
    if SLOTS_IN_USE.is_dir() and HOSTFILE.exists():
        answer["slots"] = hostfile()
        runs = islice(others(), SHOWN)
        answer["uses"] = [[int(number), who, since, counted(uses)] for number, who, since, uses in runs]
        jobs = in_queue() if QUEUE.exists() else None
        # It would be waited for twice.
        nodes = jobs if isinstance(jobs, str) else of_queue()
        answer["queue"], answer["unlisted"] = nodes if isinstance(nodes, str) else jobs, 0
        if isinstance(answer["queue"], list):
            answer["unlisted"] = max(0, len(answer["queue"]) - LISTED)
            del answer["queue"][LISTED:]
        answer["used"], answer["no_jobs"] = used(nodes), no_jobs(nodes)
        answer["lost"] = lost(answer["no_jobs"])
        answer["upgrading"] = UPGRADING.exists()
    return answer


if __name__ == "__main__":
    print(json.dumps(status()))
