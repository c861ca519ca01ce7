"""What the probes of a job have in common: how a rank describes itself, what it expects, and how it reports an error.

They import it when they run as files; the validation sends it along, as no node has it.
"""

import json
import os
import socket
import sys
from pathlib import Path

CURRENT = Path("/opt/farandole/current")


def expectations(parser):
    """Parse the command line, with the options of every job."""
    parser.add_argument("--expect", type=int, metavar="N", help="fail unless the job has N ranks")
    parser.add_argument("--expect-hosts", type=int, metavar="M", help="fail unless it runs on M machines; default: N")
    options = parser.parse_args()
    if options.expect_hosts is None:
        options.expect_hosts = options.expect
    return options


def describe(rank, size):
    """A description of this rank."""
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": CURRENT.resolve().name if CURRENT.is_symlink() else "",
    }


def judge(ranks, options):
    """Check the job as a whole; every rank comes to the same result."""
    if options.expect not in (None, len(ranks)):
        alone = ", a job of its own" if len(ranks) == 1 else ""
        yield error("ranks-missing", f"{len(ranks)} of {options.expect} ranks are in this job{alone}")
    machines = by(ranks, "machine")
    if options.expect_hosts not in (None, len(machines)):
        where = " and ".join(machines.values())
        yield error("machines-missing", f"the ranks are on {len(machines)} of {options.expect_hosts} machines: {where}")
    for what in ("stack", "python", "version"):
        if len(found := by(ranks, what)) > 1:
            where = "; ".join(f"{value or 'none'} on {hosts}" for value, hosts in found.items())
            yield error("nodes-differ", f"not the same {what} on all ranks: {where}")


def by(ranks, what):
    """Host names by the value of a field of their ranks."""
    hosts = {}
    for one in ranks:
        hosts.setdefault(one[what], []).append(one["host"])
    return {value: ", ".join(dict.fromkeys(names)) for value, names in hosts.items()}


def show(record):
    """Print a record as a line of JSON, in one piece: pieces of several ranks would be mixed up in the output."""
    os.write(sys.stdout.fileno(), f"{json.dumps(record)}\n".encode())


def error(code, seen, host=""):
    """An error: a code, from which the control machine derives the cure, the host it is about, and what was seen."""
    return {"code": code, "host": host or socket.gethostname(), "seen": seen}


def report(rank, common, mine):
    """Print errors as lines of JSON, those that all ranks see on rank 0 alone; returns the exit status."""
    for one in [*common, *mine] if rank == 0 else mine:
        show(one)
    return int(bool(common or mine))


def fail(code, seen, host=""):
    """Report an error and exit."""
    sys.exit(report(0, [], [error(code, seen, host)]))
