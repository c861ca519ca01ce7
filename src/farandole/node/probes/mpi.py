"""Test MPI without Horovod, and compare it with plain TCP.

mpirun -np 2 -H node-1:1,node-2:1 --bind-to none python mpi.py --expect 2

Every rank prints its description and results as a line of JSON, rank 0 also how fast MPI and plain TCP are between it
and rank 1. A rank that finds an error reports it as another line, and the job exits with a status other than 0.
"""

import argparse
import os
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

from farandole.node.probes import ranks, rdma
from farandole.node.probes.ranks import Error, waiting
from farandole.node.probes.ways import LARGE, MPI, OverMPI, OverTCP, Way, meet

LIBRARY = ranks.STACK / "mpi" / "lib" / "libmpi.so"
SIZES = (1, 1000, 1_000_000)
# Python's letter and Open MPI's name for each.
TYPES = {"float32": ("f", "float"), "float64": ("d", "double"), "int64": ("q", "int64_t")}
# Seconds for each job in a round, and for all rounds at most.
ENOUGH_SECONDS = 0.02
ALL_SECONDS = 12
# This many undisturbed rounds are enough; FEWEST rounds are made in any case.
QUIET = 20
FEWEST = 7
# A rank that exchanges small messages over MPI never sleeps. Beside a single busy program it waits for a processor at
# least a quarter of the time, on an idle machine less than a tenth.
WAITED = 0.1
# Messages whose time is measured besides, for how long at most, and for how long each.
SWEPT = (8, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20)
SWEEP_SECONDS, SWEEP_STEP = 0.8, 0.003
# Sends so many messages.
Job = Callable[[int], None]
# Whether it was quiet, and how many seconds a message took in each way.
Round = tuple[bool, list[float]]


def ring(mpi: MPI) -> Iterator[Error]:
    """Pass a token round the ranks, each adding its number, and yield what is wrong with it in the end."""
    token = array("q", [0])
    if mpi.rank:
        mpi.receive(token, mpi.rank - 1)
    token[0] += mpi.rank + 1
    if mpi.size > 1:
        mpi.send(token, (mpi.rank + 1) % mpi.size)
        if not mpi.rank:
            mpi.receive(token, mpi.size - 1)
    # Rank 0 has it again at the end, the others pass it on.
    added = mpi.rank + 1 if mpi.rank else mpi.size
    if token[0] != (wanted := added * (added + 1) // 2):
        seen = f"the token that goes round the ranks is {token[0]} after {added} of {mpi.size}, not {wanted}"
        yield ranks.error("wrong-values", seen)


def sums(mpi: MPI) -> Iterator[Error]:
    """Sum arrays over all ranks, and yield what is wrong with the sums."""
    for name, (letter, kind) in TYPES.items():
        for size in SIZES:
            # Ranks count from 1 here, so that none adds nothing.
            total = mpi.reduce(array(letter, [mpi.rank + 1]) * size, kind, "sum")
            yield from ranks.wrong_sum((min(total), max(total)), size, name, mpi.size)


def often(seconds: float, count: int) -> int:
    """How often to do a job so that it takes long enough, given how long a number of times took."""
    return max(1, min(10_000, round(count * ENOUGH_SECONDS / max(seconds, 1e-9))))


def plan(mpi: MPI, way: Way, job: Job, tried: int) -> int:
    """How often to do a job in each round; both ranks try it, and rank 0 decides."""
    fastest = min(way.timed(job, tried) for _ in range(3))
    return share(mpi, often(fastest, tried))


def share(mpi: MPI, number: int, giver: int = 0) -> int:
    """Give one rank's number to both."""
    shared = array("q", [number])
    (mpi.send if mpi.rank == giver else mpi.receive)(shared, 1 - mpi.rank)
    return shared[0]


def compare(mpi: MPI, ways: Sequence[Way]) -> list[Round]:
    """Do rounds of every job in every way until enough were quiet or time is up; say of each whether it was quiet."""
    jobs = []
    for way in ways:
        jobs.append((way, way.exchange, plan(mpi, way, way.exchange, 50)))
        jobs.append((way, way.push, plan(mpi, way, way.push, 1)))

    def average(way: Way, job: Job, count: int) -> float:
        return way.timed(job, count) / count

    # The small messages over MPI show whether other programs want the processors, before and after the rest of a round.
    # In the other jobs a rank waits on idle machines as well: for the kernel's own work, or because it sleeps.
    gauge, *others = jobs
    calm: list[bool] = []
    rounds: list[list[float]] = []
    until = time.perf_counter() + ALL_SECONDS
    while True:
        begun, waited = time.perf_counter(), waiting()
        took = average(*gauge)
        was_calm = waiting() - waited < WAITED * (time.perf_counter() - begun)
        calm.append(bool(share(mpi, was_calm) and share(mpi, was_calm, giver=1)))
        quiet = [before and after for before, after in pairwise(calm)]
        enough = sum(quiet) >= QUIET or time.perf_counter() > until
        if not share(mpi, len(rounds) < FEWEST or not enough):
            return list(zip(quiet, rounds, strict=True))
        # In turns, so that what disturbs one way disturbs the other.
        rounds.append([took, *(average(*job) for job in others)])


def sweep(mpi: MPI, ways: Sequence[Way]) -> list[list[float]]:
    """How many microseconds a message of each size takes one way, in each way; fewer sizes on a slow network.

    Rank 0 decides, so that both ranks do the same.
    """
    rows, until = [], time.perf_counter() + SWEEP_SECONDS
    for size in SWEPT:
        row: list[float] = [size]
        for way in ways:
            bounce = partial(way.bounce, way.message(size))
            once = max(way.timed(bounce, 1), 1e-6)
            count = share(mpi, max(1, min(100, round(SWEEP_STEP / once))))
            tries = share(mpi, max(2, min(10, round(10 * SWEEP_STEP / (count * once)))))
            # The best of several, as other programs disturb some.
            took = min(way.timed(bounce, count) for _ in range(tries))
            row.append(round(took / count / 2 * 1e6, 2))
        rows.append(row)
        if not share(mpi, time.perf_counter() < until):
            break
    return rows


def speeds(rounds: Sequence[Round]) -> dict[str, Any]:
    """The best latency (half a round trip) and bandwidth of each way in the quiet rounds."""
    quiet = [took for was_quiet, took in rounds if was_quiet]
    best = [min(times) for times in zip(*(quiet or [took for _, took in rounds]), strict=True)]
    figures: list[float | None] = []
    for round_trip, message in zip(best[::2], best[1::2], strict=True):
        figures += [round(round_trip / 2 * 1e6, 2), round(LARGE / message / 1e6, 1)]
    names = ("latency_us", "bandwidth_mbs", "tcp_latency_us", "tcp_mbs")
    return {**dict(zip_longest(names, figures)), "quiet": len(quiet), "rounds": len(rounds)}


def measure(mpi: MPI, network: str | None) -> tuple[dict[str, Any] | None, list[Error]]:
    """Measure MPI and plain TCP between rank 0 and rank 1; return the figures and what is wrong on this rank."""
    if mpi.size == 1:
        return speeds([]), []
    connection, wrong = meet(mpi, network)
    if mpi.rank > 1:
        sleep_until_told(mpi)
        return None, wrong

    ways: list[Way] = [OverMPI(mpi)]
    if connection:
        ways.append(OverTCP(mpi.rank == 0, connection))
    rounds = compare(mpi, ways)
    sizes = sweep(mpi, ways)
    if mpi.rank == 0:
        for rank in range(2, mpi.size):
            mpi.send(array("b", bytes(1)), rank)
    return {**speeds(rounds), "sizes": sizes}, wrong


def sleep_until_told(mpi: MPI) -> None:
    """Keep out of the way: a rank that waits in MPI takes a whole core."""
    while not mpi.waits(0):
        time.sleep(0.02)
    mpi.receive(array("b", bytes(1)), 0)


def prove(mpi: MPI, options: argparse.Namespace) -> int:
    """Compute, compare, measure and print the results."""
    own = {**ranks.describe(mpi.rank, mpi.size), "version": mpi.version()}
    every = mpi.gather(own)
    mine = [*ring(mpi), *sums(mpi)]
    network = os.environ.get("HOROVOD_NETWORK")
    measured, wrong = measure(mpi, network)
    remote = rdma.measure(mpi, network)
    ranks.show({**own, **({**(measured or {}), "rdma": remote} if mpi.rank == 0 else {})})
    status = ranks.report(mpi.rank, list(ranks.judge(every, options)), [*mine, *wrong])
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
