"""What the probes of a job have in common: how a rank describes itself, what it expects, and how it reports an error.

The validation sends it along with them, as no node has it.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

CURRENT = Path("/opt/farandole/current")
# A job may have another stack than the current one.
OWN = Path(sys.prefix).resolve().parent
STACK = OWN if OWN.parent.name == "stacks" else CURRENT
# How a rank describes itself; a code, a host and what was seen.
Rank = Mapping[str, Any]
Error = dict[str, str]


def expectations(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with the options of every job."""
    parser.add_argument("--expect", type=int, metavar="N", help="fail unless the job has N ranks")
    parser.add_argument("--expect-hosts", type=int, metavar="M", help="fail unless it runs on M machines; default: N")
    options = parser.parse_args()
    if options.expect_hosts is None:
        options.expect_hosts = options.expect
    return options


def describe(rank: int, size: int) -> dict[str, Any]:
    """A description of this rank."""
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": STACK.resolve().name if STACK.exists() else "",
    }


def judge(ranks: Sequence[Rank], options: argparse.Namespace) -> Iterator[Error]:
    """Check the job as a whole; every rank comes to the same result."""
    if options.expect not in (None, len(ranks)):
        alone = ", a job of its own" if len(ranks) == 1 else ""
        yield error("ranks-missing", f"{len(ranks)} of {options.expect} ranks are in this job{alone}")
    machines = by(ranks, "machine")
    if options.expect_hosts not in (None, len(machines)):
        where = " and ".join(machines.values())
        yield error("machines-missing", f"the ranks are on {len(machines)} of {options.expect_hosts} machines: {where}")
    for field in ("stack", "python", "version"):
        if len(owners := by(ranks, field)) > 1:
            where = "; ".join(f"{value or 'none'} on {hosts}" for value, hosts in owners.items())
            yield error("nodes-differ", f"not the same {field} on all ranks: {where}")


def by(ranks: Sequence[Rank], field: str) -> dict[str, str]:
    """Host names by the value of a field of their ranks."""
    hosts: dict[str, list[str]] = {}
    for rank in ranks:
        hosts.setdefault(rank[field], []).append(rank["host"])
    return {value: ", ".join(dict.fromkeys(names)) for value, names in hosts.items()}


def show(record: Mapping[str, Any]) -> None:
    """Print a record as a line of JSON, in one piece: pieces of several ranks would be mixed up in the output."""
    os.write(sys.stdout.fileno(), f"{json.dumps(record)}\n".encode())


def error(code: str, seen: str, host: str = "") -> Error:
    """An error: a code, from which the control machine derives the cure, the host it is about, and what was seen."""
    return {"code": code, "host": host or socket.gethostname(), "seen": seen}


def wrong_sum(ends: tuple[float, float], elements: int, kind: str, count: int) -> Iterator[Error]:
    """Check the smallest and the largest element of a sum to which ranks, counted from 1, have added their numbers."""
    wanted = count * (count + 1) // 2
    if set(ends) != {wanted}:
        yield error("wrong-values", f"the sum of {elements} {kind} is {' to '.join(map(str, ends))}, not {wanted}")


def report(rank: int, common: Sequence[Error], mine: Sequence[Error]) -> int:
    """Print errors as lines of JSON, those that all ranks see on rank 0 alone; returns the exit status."""
    for problem in [*common, *mine] if rank == 0 else mine:
        show(problem)
    return int(bool(common or mine))


def fail(code: str, seen: str, host: str = "") -> NoReturn:
    """Report an error and exit."""
    sys.exit(report(0, [], [error(code, seen, host)]))


def processors() -> tuple[float, float, float]:
    """The seconds for which this machine's processors were busy (or stolen), were idle, and worked for this program."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, wait, _, _, steal, *_ = map(int, line.split()[1:])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + steal) / tick, (idle + wait) / tick, time.process_time()


def waiting() -> float:
    """The seconds for which this thread was ready to run but had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
