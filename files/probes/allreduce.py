"""A job that proves itself: horovodrun -np 2 -H node-1:1,node-2:1 python allreduce.py torch --expect 2

Every rank prints what it is and what it computed as a line of JSON; one that finds something wrong says what and where,
and the job ends with a status other than 0.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

SIZES = (1, 1000, 1_000_000)
TYPES = ("float32", "float64", "int64")
MOVED = ("float32", "float64", "int32", "int64", "uint8")
# Bytes whose sum is measured, and for how many seconds each.
MEASURED = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
SECONDS = 0.35
CURRENT = Path("/opt/farandole/current")


def arguments():
    """What is to be proven."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=["torch", "tensorflow"])
    parser.add_argument("--expect", type=int, metavar="N", help="fail unless the job has N ranks")
    parser.add_argument("--expect-hosts", type=int, metavar="M", help="fail unless they are on M machines; default: N")
    parser.add_argument("--gpu", action="store_true", help="with tensors on the GPU of each rank, which NCCL sums")
    parser.add_argument("--bandwidth", action="store_true", help="measure how fast sums of several sizes are")
    options = parser.parse_args()
    if options.expect_hosts is None:
        options.expect_hosts = options.expect
    return options


def load(name, gpu):
    """Horovod for a framework, the framework's version, and how it makes a tensor that holds one value only."""
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
    """That of this rank; there is one for each of a node's."""
    where = socket.gethostname()
    if not hvd.nccl_built():
        sys.exit(f"{where}: Horovod is built without NCCL; lock anew with --accelerator cuda, then run site.yml")
    if hvd.local_rank() >= len(found):
        sys.exit(f"{where}: {len(found)} GPUs are seen by rank {hvd.rank()}; nvidia-smi says what there is")
    return found[hvd.local_rank()]


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
            total = hvd.allreduce(tensor(size, hvd.rank() + 1, kind), op=hvd.Sum, name=f"{kind}.{size}").cpu().numpy()
            found = sorted({total.min().item(), total.max().item()})
            yield {"type": kind, "elements": size, "sum": found[-1], "exact": found == [wanted]}


def number(rank):
    """What a rank puts into what is moved: never the 0 of memory that nobody wrote, and small enough for a byte."""
    return rank % 250 + 1


def lengths(size, ranks):
    """What each rank gives to a gathering of about so many elements: of each another length."""
    return [max(1, size // ranks) + rank for rank in range(ranks)]


def extremes(values):
    """The least and the greatest."""
    return (values.min().item(), values.max().item()) if len(values) else ()


def gather(hvd, tensor, ranks):
    """What is wrong with arrays that are put one after another, by type."""
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
    """What is wrong with what was gathered, rank by rank."""
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
    """What is wrong with arrays that the first and the last rank give to all, by type."""
    wrong = {}
    for kind in MOVED:
        wrong[kind] = []
        for size in SIZES:
            for root in sorted({0, len(ranks) - 1}):
                own = tensor(size, number(root) if hvd.rank() == root else 0, kind)
                came = hvd.broadcast(own, root, name=f"broadcast.{kind}.{size}.{root}").cpu().numpy()
                wrong[kind] += mistaken(came, size, kind, root, ranks)
    return wrong


def mistaken(came, size, kind, root, ranks):
    """What is wrong with what a rank gave to all."""
    found, wanted = extremes(came), number(root)
    if len(came) != size:
        yield complaint(
            "wrong-values", f"{len(came)} {kind} came from rank {root} on {ranks[root]['host']}, not {size}"
        )
    elif set(found) != {wanted}:
        yield complaint(
            "wrong-values",
            f"the {size} {kind} broadcast by rank {root} on {ranks[root]['host']} "
            f"came as {found[0]} to {found[1]}, not {wanted}",
        )


def bandwidth(hvd, tensor):
    """How fast sums of float32 are, by size; all ranks take part."""
    for size in MEASURED:
        job = (hvd, tensor(size // 4, 1, "float32"), f"bandwidth.{size}")
        fastest = min(timed(*job) for _ in range(4))
        # Every rank has to do it as often.
        count = hvd.broadcast_object(often(fastest), root_rank=0, name=f"often.{size}")
        yield pace(size, statistics.median(timed(*job) for _ in range(count)), hvd.size())


def timed(hvd, own, name):
    """The seconds that a sum takes."""
    begun = time.perf_counter()
    hvd.allreduce(own, op=hvd.Sum, name=name).cpu().numpy()
    return time.perf_counter() - begun


def often(seconds):
    """How often to do what takes so long."""
    return max(3, min(200, round(SECONDS / seconds)))


def pace(size, seconds, ranks):
    """The bandwidth that the links between the ranks need for it, however many ranks there are."""
    moved = 2 * (ranks - 1) / ranks * size
    return {"bytes": size, "seconds": round(seconds, 6), "busbw_mbs": round(moved / seconds / 1e6, 1)}


def judge(ranks, options):
    """What is wrong with the job as a whole; every rank comes to the same."""
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
    """What is wrong: a code, by which the control machine knows what mends it, and what shows it."""
    return {"code": code, "seen": seen}


def by(ranks, what):
    """Names of hosts by a value that their ranks have."""
    hosts = {}
    for one in ranks:
        hosts.setdefault(one[what], []).append(one["host"])
    return {value: ", ".join(dict.fromkeys(names)) for value, names in hosts.items()}


def main():
    """Join the job, compute, compare, say."""
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
    told = {what: {kind: not found for kind, found in kinds.items()} for what, kinds in moved.items()}
    if options.bandwidth and (found := list(bandwidth(hvd, tensor))) and own["rank"] == 0:
        told["bandwidth"] = found
    print(json.dumps({**own, "wanted": wanted, "sums": sums, **told, "wrong": wrong}), flush=True)
    # What all of them see one says.
    for one in wrong if own["rank"] == 0 else mine:
        print(f"{own['host']}, rank {own['rank']}: {one['seen']}", file=sys.stderr, flush=True)
    # Nobody leaves while another still computes: the launcher would end the others before they have spoken.
    hvd.allgather_object(bool(wrong), name="end")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
