"""A job that verifies its own results: horovodrun -np 2 -H node-1:1,node-2:1 python allreduce.py torch --expect 2

Every rank prints its description and results as a line of JSON; a rank that finds an error reports it as another line,
and the job exits with a status other than 0.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from farandole.node.probes import ranks
from farandole.node.probes.ranks import Error, processors

SIZES = (1, 1000, 1_000_000)
TYPES = ("float32", "float64", "int64")
# What each rank multiplies by itself to show how fast its node is; of the rounds, the fastest counts.
ROUNDS, STEPS = 6, 20
SIDE = {"cpu": 512, "gpu": 4096}
# A rank had to share its machine if other programs used this many cores and left less than this share of all idle. The
# latter tells them from a quota, which leaves processors idle.
OTHERS, IDLE = 0.15, 0.1
MOVED = ("float32", "float64", "int32", "int64", "uint8")
# Makes a tensor of a size, filled with one value of a type.
Tensor = Callable[[Any, int, str], Any]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=["torch", "tensorflow"])
    parser.add_argument("--gpu", action="store_true", help="use tensors on each rank's GPU, summed by NCCL")
    parser.add_argument("--pace", action="store_true", help="measure how fast each rank computes by itself")
    return ranks.expectations(parser)


def load(name: str, *, gpu: bool) -> tuple[Any, str, Tensor]:
    """Return Horovod for a framework, its version, and a function that makes a tensor filled with one value."""
    if name == "torch":
        import horovod.torch as hvd
        import torch

        hvd.init()
        device = own_gpu(hvd, range(torch.cuda.device_count())) if gpu else "cpu"

        def tensor(size: Any, value: int, kind: str) -> Any:
            return torch.full(shape(size), value, dtype=getattr(torch, kind), device=device)

        return hvd, torch.__version__, tensor
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.config.set_visible_devices(own_gpu(hvd, tf.config.list_physical_devices("GPU")) if gpu else [], "GPU")
    return hvd, tf.__version__, lambda size, value, kind: tf.fill(shape(size), tf.constant(value, kind))


def shape(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a tensor: a number of elements, or of rows and columns."""
    return size if isinstance(size, tuple) else (size,)


def own_gpu(hvd: Any, gpus: Sequence[Any]) -> Any:
    """This rank's GPU; each rank of a node has its own."""
    if not hvd.nccl_built():
        ranks.fail("nccl-missing", "Horovod is built without NCCL")
    if hvd.local_rank() >= len(gpus):
        ranks.fail("gpus-missing", f"{len(gpus)} GPUs are visible, too few for rank {hvd.rank()}")
    return gpus[hvd.local_rank()]


def reduce(hvd: Any, tensor: Tensor, wanted: int) -> Iterator[dict[str, Any]]:
    """Sum tensors over all ranks, and compare each sum with the expected one."""
    for kind in TYPES:
        for size in SIZES:
            # Rank 0 contributes 1, so that every rank's contribution counts.
            total = hvd.allreduce(tensor(size, hvd.rank() + 1, kind), op=hvd.Sum, name=f"{kind}.{size}").cpu().numpy()
            ends = sorted({total.min().item(), total.max().item()})
            yield {"type": kind, "elements": size, "sum": ends[-1], "exact": ends == [wanted]}


def pace(hvd: Any, tensor: Tensor, side: int) -> dict[str, Any]:
    """How long a step takes that this rank computes by itself, and whether other programs were in its way.

    The ranks begin each round together.
    """
    matrix, best, seconds, used = tensor((side, side), 1, "float32"), math.inf, 0.0, [0.0, 0.0, 0.0]
    for turn in range(ROUNDS):
        hvd.allgather_object(turn, name=f"pace.{turn}")
        begun, before = time.perf_counter(), processors()
        for _ in range(STEPS):
            product = matrix @ matrix
        # A GPU would still be computing.
        float(product[0][0])
        took = time.perf_counter() - begun
        best, seconds = min(best, took), seconds + took
        used = [total + now - then for total, now, then in zip(used, processors(), before, strict=True)]
    busy, idle, own = used
    crowded = busy - own > OTHERS * seconds and idle < IDLE * (busy + idle)
    return {"step_ms": round(best / STEPS * 1000, 4), "crowded": crowded}


def number(rank: int) -> int:
    """The value that a rank sends: never 0, as in unwritten memory, and small enough for a byte."""
    return rank % 250 + 1


def lengths(size: int, ranks: int) -> list[int]:
    """The lengths that the ranks contribute to an allgather of about `size` elements, all different."""
    return [max(1, size // ranks) + rank for rank in range(ranks)]


def differing(values: Any, wanted: int, subject: str, host: str) -> Iterator[Error]:
    """Check that all values are the same."""
    ends = (values.min().item(), values.max().item()) if len(values) else ()
    if set(ends) != {wanted}:
        yield ranks.error("wrong-values", f"{subject} {' to '.join(map(str, ends))}, not {wanted}", host)


def gather(hvd: Any, tensor: Tensor, hosts: Sequence[str]) -> dict[str, list[Error]]:
    """Check allgather for every type; returns the errors by type."""

    def errors(kind: str, size: int) -> Iterator[Error]:
        parts, own = lengths(size, len(hosts)), hvd.rank()
        part = tensor(parts[own], number(own), kind)
        whole = hvd.allgather(part, name=f"gather.{kind}.{size}").cpu().numpy()
        return misplaced(whole, parts, kind, hosts)

    return {kind: [error for size in SIZES for error in errors(kind, size)] for kind in MOVED}


def misplaced(whole: Any, parts: Sequence[int], kind: str, hosts: Sequence[str]) -> Iterator[Error]:
    """Check a gathered array, rank by rank."""
    if len(whole) != sum(parts):
        yield ranks.error("wrong-values", f"{len(whole)} {kind} were gathered, not {sum(parts)}")
        return
    start = 0
    for rank, length in enumerate(parts):
        subject = f"of {sum(parts)} {kind} gathered, the {length} of rank {rank} on {hosts[rank]} are"
        yield from differing(whole[start : start + length], number(rank), subject, hosts[rank])
        start += length


def broadcast(hvd: Any, tensor: Tensor, hosts: Sequence[str]) -> dict[str, list[Error]]:
    """Check broadcasts from the first and the last rank; returns the errors by type."""

    def errors(kind: str, size: int) -> Iterator[Error]:
        for root in sorted({0, len(hosts) - 1}):
            own = tensor(size, number(root) if hvd.rank() == root else 0, kind)
            received = hvd.broadcast(own, root, name=f"broadcast.{kind}.{size}.{root}").cpu().numpy()
            yield from mistaken(received, size, kind, root, hosts)

    return {kind: [error for size in SIZES for error in errors(kind, size)] for kind in MOVED}


def mistaken(received: Any, size: int, kind: str, root: int, hosts: Sequence[str]) -> Iterator[Error]:
    """Check a broadcast array."""
    if len(received) != size:
        seen = f"{len(received)} {kind} came from rank {root} on {hosts[root]}, not {size}"
        yield ranks.error("wrong-values", seen, hosts[root])
    else:
        subject = f"the {size} {kind} broadcast by rank {root} on {hosts[root]} came as"
        yield from differing(received, number(root), subject, hosts[root])


def main() -> int:
    """Join the job, compute, compare and report."""
    options = arguments()
    hvd, version, tensor = load(options.framework, gpu=options.gpu)
    own = {
        **ranks.describe(hvd.rank(), hvd.size()),
        "controller": "mpi" if hvd.mpi_enabled() else "gloo" if hvd.gloo_enabled() else "",
        "built": [name for name in ("mpi", "gloo", "nccl") if getattr(hvd, f"{name}_built")()],
        "framework": options.framework,
        "version": version,
    }
    wanted = hvd.size() * (hvd.size() + 1) // 2
    every = hvd.allgather_object(own, name="ranks")
    hosts = [rank["host"] for rank in every]
    sums = list(reduce(hvd, tensor, wanted))
    moved = {"gathers": gather(hvd, tensor, hosts), "broadcasts": broadcast(hvd, tensor, hosts)}
    mine = [
        ranks.error("wrong-values", f"the sum of {total['elements']} {total['type']} is {total['sum']}, not {wanted}")
        for total in sums
        if not total["exact"]
    ]
    mine += [error for kinds in moved.values() for errors in kinds.values() for error in errors]
    results = {operation: {kind: not errors for kind, errors in kinds.items()} for operation, kinds in moved.items()}
    if options.pace:
        own |= pace(hvd, tensor, SIDE["gpu" if options.gpu else "cpu"])
    ranks.show({**own, "wanted": wanted, "sums": sums, **results})
    status = ranks.report(own["rank"], list(ranks.judge(every, options)), mine)
    # No rank exits while another still computes: the launcher would kill the others before they have reported.
    hvd.allgather_object(status, name="end")
    return status


if __name__ == "__main__":
    sys.exit(main())
