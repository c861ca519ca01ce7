"""A job that verifies its own results: horovodrun -np 2 -H node-1:1,node-2:1 python allreduce.py torch --expect 2

Every rank prints its description and results as a line of JSON; a rank that finds an error reports it, and the job
exits with a status other than 0.
"""

import argparse
import json
import os
import socket
import sys
from pathlib import Path

SIZES = (1, 1000, 1_000_000)
TYPES = ("float32", "float64", "int64")
MOVED = ("float32", "float64", "int32", "int64", "uint8")
CURRENT = Path("/opt/farandole/current")


def arguments():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=["torch", "tensorflow"])
    parser.add_argument("--expect", type=int, metavar="N", help="fail unless the job has N ranks")
    parser.add_argument("--expect-hosts", type=int, metavar="M", help="fail unless it runs on M machines; default: N")
    parser.add_argument("--gpu", action="store_true", help="use tensors on each rank's GPU, summed by NCCL")
    options = parser.parse_args()
    if options.expect_hosts is None:
        options.expect_hosts = options.expect
    return options


def load(name, gpu):
    """Return Horovod for a framework, its version, and a function that makes a tensor filled with one value."""
    if name == "torch":
        import horovod.torch as hvd
        import torch

        hvd.init()
        device = own_gpu(hvd, range(torch.cuda.device_count())) if gpu else "cpu"

        def tensor(size, value, kind):
            return torch.full((size,), value, dtype=getattr(torch, kind), device=device)

        return hvd, torch.__version__, tensor
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.config.set_visible_devices(own_gpu(hvd, tf.config.list_physical_devices("GPU")) if gpu else [], "GPU")
    return hvd, tf.__version__, lambda size, value, kind: tf.fill([size], tf.constant(value, kind))


def own_gpu(hvd, found):
    """This rank's GPU; each rank of a node has its own."""
    where = socket.gethostname()
    if not hvd.nccl_built():
        sys.exit(f"{where}: Horovod is built without NCCL; write a new lock with --accelerator cuda, then run site.yml")
    if hvd.local_rank() >= len(found):
        sys.exit(f"{where}: rank {hvd.rank()} sees {len(found)} GPUs; nvidia-smi lists the existing ones")
    return found[hvd.local_rank()]


def describe(hvd):
    """A description of this rank."""
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
    """Sum tensors over all ranks, and compare each sum with the expected one."""
    for kind in TYPES:
        for size in SIZES:
            # Rank 0 contributes 1, so that every rank's contribution counts.
            total = hvd.allreduce(tensor(size, hvd.rank() + 1, kind), op=hvd.Sum, name=f"{kind}.{size}").cpu().numpy()
            found = sorted({total.min().item(), total.max().item()})
            yield {"type": kind, "elements": size, "sum": found[-1], "exact": found == [wanted]}


def number(rank):
    """The value that a rank sends: never 0, as in unwritten memory, and small enough for a byte."""
    return rank % 250 + 1


def lengths(size, ranks):
    """The lengths that the ranks contribute to an allgather of about `size` elements, all different."""
    return [max(1, size // ranks) + rank for rank in range(ranks)]


def extremes(values):
    """The smallest and the largest value."""
    return (values.min().item(), values.max().item()) if len(values) else ()


def gather(hvd, tensor, ranks):
    """Check allgather for every type; returns the errors by type."""
    own = hvd.rank()
    wrong = {}
    for kind in MOVED:
        wrong[kind] = []
        for size in SIZES:
            parts = lengths(size, len(ranks))
            part = tensor(parts[own], number(own), kind)
            whole = hvd.allgather(part, name=f"gather.{kind}.{size}").cpu().numpy()
            wrong[kind] += misplaced(whole, parts, kind, ranks)
    return wrong


def misplaced(whole, parts, kind, ranks):
    """Check a gathered array, rank by rank."""
    if len(whole) != sum(parts):
        yield complaint("wrong-values", f"{len(whole)} {kind} were gathered, not {sum(parts)}")
        return
    start = 0
    for rank, length in enumerate(parts):
        found, wanted = extremes(whole[start : start + length]), number(rank)
        start += length
        if set(found) != {wanted}:
            yield complaint(
                "wrong-values",
                f"of {sum(parts)} {kind} gathered, the {length} of rank {rank} on {ranks[rank]['host']} "
                f"are {found[0]} to {found[1]}, not {wanted}",
            )


def broadcast(hvd, tensor, ranks):
    """Check broadcasts from the first and the last rank; returns the errors by type."""
    wrong = {}
    for kind in MOVED:
        wrong[kind] = []
        for size in SIZES:
            for root in sorted({0, len(ranks) - 1}):
                own = tensor(size, number(root) if hvd.rank() == root else 0, kind)
                received = hvd.broadcast(own, root, name=f"broadcast.{kind}.{size}.{root}").cpu().numpy()
                wrong[kind] += mistaken(received, size, kind, root, ranks)
    return wrong


def mistaken(received, size, kind, root, ranks):
    """Check a broadcast array."""
    found, wanted = extremes(received), number(root)
    if len(received) != size:
        yield complaint(
            "wrong-values", f"{len(received)} {kind} came from rank {root} on {ranks[root]['host']}, not {size}"
        )
    elif set(found) != {wanted}:
        yield complaint(
            "wrong-values",
            f"the {size} {kind} broadcast by rank {root} on {ranks[root]['host']} "
            f"came as {found[0]} to {found[1]}, not {wanted}",
        )


def judge(ranks, options):
    """Check the job as a whole; every rank comes to the same result."""
    if options.expect not in (None, len(ranks)):
        alone = ", a job of its own" if len(ranks) == 1 else ""
        yield complaint("ranks-missing", f"{len(ranks)} of {options.expect} ranks are in this job{alone}")
    machines = by(ranks, "machine")
    if options.expect_hosts not in (None, len(machines)):
        where = " and ".join(machines.values())
        yield complaint(
            "machines-missing", f"the ranks are on {len(machines)} of {options.expect_hosts} machines: {where}"
        )
    for what in ("stack", "python", "version"):
        if len(found := by(ranks, what)) > 1:
            where = "; ".join(f"{value or 'none'} on {hosts}" for value, hosts in found.items())
            yield complaint("nodes-differ", f"not the same {what} on all ranks: {where}")


def complaint(code, seen):
    """An error: a code from which the control machine derives the cure, and the evidence."""
    return {"code": code, "seen": seen}


def by(ranks, what):
    """Host names by the value of a field of their ranks."""
    hosts = {}
    for one in ranks:
        hosts.setdefault(one[what], []).append(one["host"])
    return {value: ", ".join(dict.fromkeys(names)) for value, names in hosts.items()}


def main():
    """Join the job, compute, compare and report."""
    options = arguments()
    hvd, version, tensor = load(options.framework, options.gpu)
    own = {**describe(hvd), "framework": options.framework, "version": version}
    wanted = hvd.size() * (hvd.size() + 1) // 2
    ranks = hvd.allgather_object(own, name="ranks")
    common = list(judge(ranks, options))
    sums = list(reduce(hvd, tensor, wanted))
    moved = {"gathers": gather(hvd, tensor, ranks), "broadcasts": broadcast(hvd, tensor, ranks)}
    mine = [
        complaint("wrong-values", f"the sum of {one['elements']} {one['type']} is {one['sum']}, not {wanted}")
        for one in sums
        if not one["exact"]
    ]
    mine += [one for kinds in moved.values() for complaints in kinds.values() for one in complaints]
    wrong = common + mine
    results = {what: {kind: not found for kind, found in kinds.items()} for what, kinds in moved.items()}
    print(json.dumps({**own, "wanted": wanted, "sums": sums, **results, "wrong": wrong}), flush=True)
    # Errors that all ranks see are printed by one.
    for one in wrong if own["rank"] == 0 else mine:
        print(f"{own['host']}, rank {own['rank']}: {one['seen']}", file=sys.stderr, flush=True)
    # No rank exits while another still computes: the launcher would kill the others before they have reported.
    hvd.allgather_object(bool(wrong), name="end")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
