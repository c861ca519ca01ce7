"""A job that verifies its own results: horovodrun -np 2 -H node-1:1,node-2:1 python allreduce.py torch --expect 2

Every rank prints its description as a line of JSON; a rank that finds an error reports it as another line, and the job
exits with a status other than 0.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
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


def sums(hvd: Any, tensor: Tensor) -> Iterator[Error]:
    """Sum tensors over all ranks, and compare each sum with the expected one."""
    for kind in TYPES:
        for size in SIZES:
            # Rank 0 contributes 1, so that every rank's contribution counts.
            total = hvd.allreduce(tensor(size, hvd.rank() + 1, kind), op=hvd.Sum, name=f"{kind}.{size}").cpu().numpy()
            yield from ranks.wrong_sum((total.min().item(), total.max().item()), size, kind, hvd.size())


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


def moves(hvd: Any, tensor: Tensor, hosts: Sequence[str]) -> Iterator[Error]:
    """Check allgather, and broadcasts from the first and the last rank, for every type."""
    own = hvd.rank()
    for kind, size in product(MOVED, SIZES):
        parts = lengths(size, len(hosts))
        whole = hvd.allgather(tensor(parts[own], number(own), kind), name=f"gather.{kind}.{size}").cpu().numpy()
        yield from misplaced(whole, dict(enumerate(parts)), f"{kind} gathered", hosts)
        for root in sorted({0, len(hosts) - 1}):
            sent = tensor(size, number(root) if own == root else 0, kind)
            received = hvd.broadcast(sent, root, name=f"broadcast.{kind}.{size}.{root}").cpu().numpy()
            yield from misplaced(received, {root: size}, f"{kind} broadcast", hosts)


def misplaced(values: Any, parts: Mapping[int, int], subject: str, hosts: Sequence[str]) -> Iterator[Error]:
    """Check an array of parts with these lengths, rank by rank."""
    wanted, start = sum(parts.values()), 0
    if len(values) != wanted:
        senders = " and ".join(hosts[rank] for rank in parts)
        yield ranks.error("wrong-values", f"{len(values)} {subject} from {senders} arrived, not {wanted}")
        return
    for rank, length in parts.items():
        part = values[start : start + length]
        start += length
        ends = part.min().item(), part.max().item()
        if set(ends) != {number(rank)}:
            seen = f"of {wanted} {subject}, the {length} from rank {rank} on {hosts[rank]}"
            yield ranks.error("wrong-values", f"{seen} are {ends[0]} to {ends[1]}, not {number(rank)}", hosts[rank])


def main() -> int:
    """Join the job, compute, compare and report."""
    options = arguments()
    hvd, version, tensor = load(options.framework, gpu=options.gpu)
    own = {
        **ranks.describe(hvd.rank(), hvd.size()),
        "controller": "mpi" if hvd.mpi_enabled() else "gloo" if hvd.gloo_enabled() else "",
        "version": version,
    }
    every = hvd.allgather_object(own, name="ranks")
    mine = [*sums(hvd, tensor), *moves(hvd, tensor, [rank["host"] for rank in every])]
    if options.pace:
        own |= pace(hvd, tensor, SIDE["gpu" if options.gpu else "cpu"])
    ranks.show(own)
    status = ranks.report(own["rank"], list(ranks.judge(every, options)), mine)
    # No rank exits while another still computes: the launcher would kill the others before they have reported.
    hvd.allgather_object(status, name="end")
    return status


if __name__ == "__main__":
    sys.exit(main())
