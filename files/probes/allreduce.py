"""A job that proves itself: horovodrun -np 2 -H node-1:1,node-2:1 python allreduce.py torch --expect 2

Every rank prints what it is and what it computed as a line of JSON; one that finds something wrong says what, where and
what mends it, and the job ends with a status other than 0.
"""

import argparse
import json
import os
import socket
import sys
from pathlib import Path

SIZES = (1, 1000, 1_000_000)
TYPES = ("float32", "float64", "int64")
CURRENT = Path("/opt/farandole/current")


def arguments():
    """What is to be proven."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=["torch", "tensorflow"])
    parser.add_argument("--expect", type=int, metavar="N", help="fail unless the job has N ranks")
    parser.add_argument("--expect-hosts", type=int, metavar="M", help="fail unless they are on M machines; default: N")
    options = parser.parse_args()
    if options.expect_hosts is None:
        options.expect_hosts = options.expect
    return options


def load(name):
    """Horovod for a framework, the framework's version, and how it makes a tensor that holds one value only."""
    if name == "torch":
        import horovod.torch as hvd
        import torch

        return hvd, torch.__version__, lambda size, value, kind: torch.full((size,), value, dtype=getattr(torch, kind))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return hvd, tf.__version__, lambda size, value, kind: tf.fill([size], tf.constant(value, kind))


def describe(hvd):
    """What this rank is."""
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": CURRENT.resolve().name if CURRENT.is_symlink() else "",
        "controller": "mpi" if hvd.mpi_enabled() else "gloo" if hvd.gloo_enabled() else "",
        "built": [name for name in ("mpi", "gloo", "nccl") if getattr(hvd, f"{name}_built")()],
    }


def reduce(hvd, tensor, wanted):
    """The sums of this rank's tensors and the others', each beside what it must be."""
    for kind in TYPES:
        for size in SIZES:
            # Ranks count from 1 here, so that none adds nothing.
            total = hvd.allreduce(tensor(size, hvd.rank() + 1, kind), op=hvd.Sum, name=f"{kind}.{size}").numpy()
            found = sorted({total.min().item(), total.max().item()})
            yield {"type": kind, "elements": size, "sum": found[-1], "exact": found == [wanted]}


def judge(ranks, options):
    """What is wrong with the job as a whole; every rank comes to the same."""
    if options.expect not in (None, len(ranks)):
        alone = ", a job of its own" if len(ranks) == 1 else ""
        yield (
            f"{len(ranks)} of {options.expect} ranks are in this job{alone}; "
            "launch it with /usr/local/bin/horovodrun or /usr/local/bin/mpirun, and give -np"
        )
    machines = by(ranks, "machine")
    if options.expect_hosts not in (None, len(machines)):
        yield (
            f"the ranks are on {len(machines)} of {options.expect_hosts} machines: {' and '.join(machines.values())}; "
            "correct -H; hosts with the same /etc/machine-id count as one, preflight.yml tells what to do about them"
        )
    for what in ("stack", "python", "version"):
        if len(found := by(ranks, what)) > 1:
            where = "; ".join(f"{value or 'none'} on {hosts}" for value, hosts in found.items())
            yield f"not the same {what} on all ranks: {where}; run site.yml for all nodes"


def by(ranks, what):
    """Names of hosts by a value that their ranks have."""
    hosts = {}
    for one in ranks:
        hosts.setdefault(one[what], []).append(one["host"])
    return {value: ", ".join(dict.fromkeys(names)) for value, names in hosts.items()}


def main():
    """Join the job, compute, compare, say."""
    options = arguments()
    hvd, version, tensor = load(options.framework)
    hvd.init()
    own = {**describe(hvd), "framework": options.framework, "version": version}
    wanted = hvd.size() * (hvd.size() + 1) // 2
    common = list(judge(hvd.allgather_object(own, name="ranks"), options))
    sums = list(reduce(hvd, tensor, wanted))
    mine = [
        f"the sum of {one['elements']} {one['type']} is {one['sum']}, not {wanted}" for one in sums if not one["exact"]
    ]
    wrong = common + mine
    print(json.dumps({**own, "wanted": wanted, "sums": sums, "wrong": wrong}), flush=True)
    # What all of them see one says.
    for words in wrong if own["rank"] == 0 else mine:
        print(f"{own['host']}, rank {own['rank']}: {words}", file=sys.stderr, flush=True)
    # Nobody leaves while another still computes: the launcher would end the others before they have spoken.
    hvd.allgather_object(bool(wrong), name="end")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
