"""Test MPI without Horovod, and compare it with plain TCP.

mpirun -np 2 -H node-1:1,node-2:1 --bind-to none python mpi.py --expect 2

Every rank prints its description and results as a line of JSON, rank 0 also how fast MPI and plain TCP are between it
and rank 1. A rank that finds an error reports it as another line, and the job exits with a status other than 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from farandole.node.probes import ranks
from farandole.node.probes.openmpi import MPI
from farandole.node.probes.ranks import Error
from farandole.node.probes.rounds import measure

LIBRARY = ranks.CURRENT / "mpi" / "lib" / "libmpi.so"
SIZES = (1, 1000, 1_000_000)
# Python's letter and Open MPI's name for each.
TYPES = {"float32": ("f", "float"), "float64": ("d", "double"), "int64": ("q", "int64_t")}


def ring(mpi: MPI) -> int:
    """Pass a token round the ranks, each adding its number, and return its value when this rank last has it."""
    token = array("q", [0])
    if mpi.rank:
        mpi.receive(token, mpi.rank - 1)
    token[0] += mpi.rank + 1
    if mpi.size > 1:
        mpi.send(token, (mpi.rank + 1) % mpi.size)
        if not mpi.rank:
            mpi.receive(token, mpi.size - 1)
    return token[0]


def misled(worth: int, rank: int, size: int) -> Iterator[Error]:
    """Yield what is wrong with the token."""
    # Rank 0 has it again at the end, the others pass it on.
    added = rank + 1 if rank else size
    if worth != (wanted := added * (added + 1) // 2):
        yield ranks.error(
            "wrong-values", f"the token that goes round the ranks is {worth} after {added} of {size}, not {wanted}"
        )


def sums(mpi: MPI) -> Iterator[dict[str, Any]]:
    """Sum arrays over all ranks, and yield each sum and whether it is exact."""
    wanted = mpi.size * (mpi.size + 1) // 2
    for name, (letter, kind) in TYPES.items():
        for size in SIZES:
            # Ranks count from 1 here, so that none adds nothing.
            total = mpi.reduce(array(letter, [mpi.rank + 1]) * size, kind, "sum")
            found = sorted({min(total), max(total)})
            yield {"type": name, "elements": size, "sum": found[-1], "exact": found == [wanted]}


def missed(results: Iterable[dict[str, Any]], size: int) -> Iterator[Error]:
    """Yield what is wrong with the sums."""
    wanted = size * (size + 1) // 2
    for one in results:
        if not one["exact"]:
            seen = f"the sum of {one['elements']} {one['type']} is {one['sum']}, not {wanted}"
            yield ranks.error("wrong-values", seen)


def prove(mpi: MPI, options: argparse.Namespace) -> int:
    """Compute, compare, measure and print the results."""
    own = {**ranks.describe(mpi.rank, mpi.size), "version": mpi.version()}
    every = mpi.gather(own)
    worth, results = ring(mpi), list(sums(mpi))
    measured, mine = measure(mpi, os.environ.get("HOROVOD_NETWORK"))
    mine = [*misled(worth, mpi.rank, mpi.size), *missed(results, mpi.size), *mine]
    speed = measured if mpi.rank == 0 and measured else {}
    ranks.show({**own, "ring": worth, "sums": results, **speed})
    status = ranks.report(mpi.rank, list(ranks.judge(every, options)), mine)
    # No rank leaves while another still computes, or the launcher would end that one before it has printed anything.
    mpi.call("Barrier", mpi.world)
    return status


def main() -> int:
    """Join the job, test it, leave it."""
    options = ranks.expectations(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    try:
        mpi = MPI(LIBRARY)
    except OSError as error:
        ranks.fail("mpi-missing", str(error))
    try:
        code = prove(mpi, options)
    except Exception:
        traceback.print_exc()
        # MPI_Finalize would wait for ranks that wait for this one.
        mpi.call("Abort", mpi.world, 1)
    mpi.call("Finalize")
    return code


if __name__ == "__main__":
    sys.exit(main())
