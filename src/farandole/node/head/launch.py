"""How the ranks of a run are started, and whether they met."""

import json
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from farandole.node.head import runs
from farandole.node.head.runs import RefusedError, ran
from farandole.node.head.status import Slots
from farandole.node.rank.place import OF_RUN, place, refused_option, starter, words_of_env

# What starts ranks, as it is shown.
LAUNCHERS = {"horovod": "Horovod", "mpi": "MPI", **{name: name for name in OF_RUN}, "each": "each by itself"}
# Shorter ways to choose one.
SHORT = (
    ("mpi", "mpi", "start the ranks with MPI"),
    ("gloo", "horovod", "start the ranks with Gloo, which is the default"),
    ("each", "each", "start independent programs, each of which finds its number in FARANDOLE_SLOT"),
)
# Programs of which a run needs one, if nothing else is asked for.
SINGLE = ("jupyter", "jupyter-lab", "jupyter-notebook", "tensorboard")
RANK = "/usr/local/libexec/farandole/rank"
# The port at which a rank has met others.
AT = re.compile(r"at \d{1,5}$")
# What ranks print, behind what horovodrun puts in front of it; and what they tell this program.
OF_RANK = re.compile(rb"(^|\r)\[(?:1,)?(\d+)\]<std(?:out|err)>: ?(?:\[rank\2\]: ?)?")
# OpenMPI starts no new line for a rank if another one has not ended its own.
IN_MIDDLE = re.compile(rb"(?<=[^\r])(?=\[1,\d+\]<std(?:out|err)>:)")
# In front of what a rank tells may be a bar that another one draws, or a line that it has not ended.
BEFORE_REPORT = re.compile(rb"(?<=.)(?=\[(?:1,)?\d+\]<std(?:out|err)>: ?(?:\[rank\d+\]: ?)?\x02farandole )", re.DOTALL)
SIGN = b"\x02farandole %s "
# Below those that connections get, so that none takes one between this and the start of a program.
PORTS = (20000, 29000)
# Seconds in which a node says which.
ANSWER_S = 20
FREE = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        continue
    print(port)
    break
"""
# What the name of a framework ends with, if ranks met through it on one node only.
HERE = "@node"
ALONE = "alone: the ranks never met"
MOST_STATUS = 255
# Seconds in which all ranks have met, if nothing else is said: as long as PyTorch's Gloo waits, longer than others.
MEET_S = 1800
# Ranks that one line names.
MOST_NAMED = 5
# The exit status of a run whose ranks did not meet.
OF_ALONE = 3


def recognized(program: Sequence[str], chosen: str) -> str:
    """The launcher for a program; refuses one that cannot start it."""
    found, _ = starter([*program])
    launcher = chosen or found or "horovod"
    if launcher in OF_RUN and launcher != found:
        raise RefusedError(f"--launcher {launcher} is for a program that begins with {launcher}")
    if launcher in OF_RUN and (why := refused_option([*program])):
        raise RefusedError(why)
    return launcher


def only(program: Sequence[str]) -> int:
    """How many ranks there are of a program that serves people; 0 if it is another one."""
    first = words_of_env([*program])
    return int(first < len(program) and Path(program[first]).name in SINGLE)


def shape(launcher: str, slots: Slots) -> str:
    """What is started, in a few words."""
    ranks = sum(slots.values())
    what = "program" if launcher == "each" else "rank"
    return f"{some(ranks, what)} on {some(len(slots), 'node')}, {LAUNCHERS[launcher]}"


def some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def free_port(node: str) -> int:
    """A port of a node that nothing uses, for the ranks to meet."""
    ports = [str(port) for port in random.sample(range(*PORTS), 20)]
    command = ["python3", "-I", "-c", FREE, *ports]
    if node != runs.HERE:
        command = [*runs.SSH.split(), node, shlex.join(command)]
    try:
        found = ran(*command, timeout=ANSWER_S).stdout.strip()
    except subprocess.TimeoutExpired:
        found = ""
    return int(found if found in ports else ports[0])


def starts(launcher: str, slots: Slots) -> Slots:
    """How often the program is started on each node: once, if it starts the ranks of a node itself."""
    if launcher == "accelerate" and len({*slots.values()}) > 1:
        raise RefusedError(f"accelerate starts as many ranks on each node, so it cannot use {slots}: add --hosts")
    return dict.fromkeys(slots, 1) if launcher in OF_RUN else slots


def command(launcher: str, slots: Slots) -> list[str]:
    """What starts the ranks on the nodes. They learn of the program elsewhere, as horovodrun would take its options."""
    each = starts(launcher, slots)
    where = ",".join(f"{node}:{ranks}" for node, ranks in each.items())
    through = "--mpi" if launcher == "mpi" else "--gloo"
    return ["horovodrun", through, "-np", str(sum(each.values())), "-H", where, RANK]


def named(framework: str) -> str:
    """The name of a framework, which a line shows."""
    if not re.fullmatch(r"[\w.]{1,100}", framework):
        raise ValueError
    return framework


@dataclass
class Reports:
    """What the ranks say of themselves when they end."""

    mark: str
    said: dict[int, dict[str, Any]]
    # By the number of what started them, the ranks that wait for others, through what and since when; and those that
    # have ever come to meet them.
    waits: dict[int, dict[tuple[int, str], float]] = field(default_factory=dict)
    came: set[tuple[int, str]] = field(default_factory=set)
    # When somebody was last waited for.
    awaited: float = 0.0
    # Those that a signal has ended, and which.
    killed: list[tuple[int, int]] = field(default_factory=list)

    def take(self, line: bytes) -> bytes:
        """Take a report out of a line of output; returns the rest."""
        printed, sign, report = line.partition(SIGN % self.mark.encode())
        if not sign:
            return line
        try:
            said = json.loads(report)
            number, status = said["number"], said.get("status", 0)
            told = [str(word)[:100] for word in said.get("told", ())]
            now, more = time.monotonic(), said.get("waits", ())
            waits = {(int(rank), named(framework)): now - int(seconds) for rank, framework, seconds in more}
            left = {(int(rank), named(framework)) for rank, framework in said.get("left", ())}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return line
        # A rank speaks for itself.
        own = re.match(rb"\[(\d{1,6})\] ", printed)
        if not own or number != int(own[1]) or type(status) is not int or abs(status) > MOST_STATUS:
            return line
        # Not changed in place, as another thread reads it.
        self.waits[number], self.came = waits, self.came | {*waits} | left
        if "told" in said:
            self.said[number] = {"told": told, "status": status}
            # With SIGTERM, launchers end the others.
            self.killed += [(number, -status)] if status < 0 and status != -signal.SIGTERM else []
        return b"" if re.fullmatch(rb"\[\d+\] ", printed) or not printed else printed + b"\n"

    def missing(self, slots: Slots, seconds: int) -> str:
        """Whom others have waited for so long; empty if nobody has."""
        now = time.monotonic()
        waiting = {who: now - since for waits in [*self.waits.values()] for who, since in waits.items()}
        (_, way), longest = max(waiting.items(), key=itemgetter(1), default=((0, ""), -1))
        return self.absent(slots, way) or f"all ranks wait for each other through {way}" if longest >= seconds else ""

    def still(self, late: str, slots: Slots, seconds: int) -> str:
        """Who was late, until nobody has waited for so long: what fails after that has another cause."""
        if self.missing(slots, 0):
            self.awaited = time.monotonic()
        return late if time.monotonic() - self.awaited < seconds else ""

    def absent(self, slots: Slots, way: str) -> str:
        """The ranks that have not come to meet the others; empty if there are none."""
        absent = [rank for rank in range(sum(slots.values())) if (rank, way) not in self.came]
        names = [f"rank {rank} on {[*slots][place(rank, slots).node]}" for rank in absent[:MOST_NAMED]]
        more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
        verb = "has" if len(absent) == 1 else "have"
        return f"{', '.join(names)}{more} {verb} not met the others through {way}" if absent else ""

    def failed(self) -> dict[int, int]:
        """The exit statuses of independent programs that failed."""
        statuses = {number: said["status"] for number, said in sorted(self.said.items())}
        return {number: 128 - status if status < 0 else status for number, status in statuses.items() if status}

    def verdict(self, size: int, started: int, nodes: int) -> tuple[str, str]:
        """Why so many ranks were alone, empty if they were not or nothing shows it; and what to do, or to know then."""
        told = {word for said in self.said.values() for word in said["told"]}
        met = sorted((int(count), name) for name, count in re.findall(r"^met (\S+) (\d{1,6})$", "\n".join(told), re.M))
        groups = {name: count for count, name in met if not name.endswith(HERE) or nodes == 1}
        local = [name.removesuffix(HERE) for _, name in met if name.endswith(HERE)]
        used = sorted(word.removeprefix("uses ") for word in told if word.startswith("uses "))
        ways: tuple[str, ...] = ("torch.distributed",)
        if {*used} > {"mpi4py"}:
            # Others import mpi4py only to see whether MPI has started them.
            used.remove("mpi4py")
            ways = ("torch.distributed", "MPI")
            groups = {name: count for name, count in groups.items() if (name, count) != ("MPI", 1)}
        in_accelerate = groups.pop("Accelerate", 0)
        largest = max(groups.values(), default=0)
        if size == 1 or len(self.said) < started:
            return "", ""
        if "wraps" in told and "reduces" not in told:
            why = "Keras 3 does not call the optimizer of this Horovod, so nothing was averaged"
            return why, "make a new lock, whose Horovod works with Keras 3, or import tf_keras as keras"
        if in_accelerate == 1 and groups.get("torch.distributed", 0) > 1:
            why = "Accelerate found no GPU and was not told in time to use processors, so nothing was averaged"
            return why, cure("Accelerate")
        if largest == 1:
            name = next(iter(groups))
            return f"in each of them {name} knew of one rank", cure(name)
        ports = [found for said in self.said.values() if (found := {*said["told"]} & {*filter(AT.match, told)})]
        other_ways = max((count for name, count in groups.items() if name not in ways), default=0)
        if other_ways < size and nodes > 1 and any(ports[0].isdisjoint(other) for other in ports[1:]):
            return "they met in groups that know nothing of each other", cure("torch.distributed")
        if not groups and local:
            return f"they met through {local[0]} at localhost, which is a different machine on each node", cure(HERE)
        if largest > 1:
            return "", f"only {largest} of {size} ranks met" if largest < size else ""
        if used and "reads" not in told:
            return f"they use {', '.join(used)}, and nothing through which they meet", cure("")
        return "", ""


def cure(framework: str) -> str:
    """What to type so that ranks meet."""
    calls = {
        "torch.distributed": "start it with  farandole run -- torchrun PROGRAM",
        "MPI": "start it with  farandole run --mpi",
        "Accelerate": "start it with  farandole run -- accelerate launch --cpu PROGRAM, and let a program that calls "
        "PartialState() first give it cpu=True",
        HERE: "let the program take MASTER_ADDR and MASTER_PORT from the environment",
        "": "let the program call hvd.init() of Horovod, torch.distributed.init_process_group() or Accelerator(), "
        "or give Lightning's Trainer or Fabric num_nodes=N",
    }
    call = calls.get(framework, "let the program take its rank and their number from the environment")
    return f"{call}; if each is meant to work by itself, add --each"
