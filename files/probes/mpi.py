"""Test MPI without Horovod, and compare it with plain TCP.

mpirun -np 2 -H node-1:1,node-2:1 --bind-to none python mpi.py --expect 2

Every rank prints its description and results as a line of JSON, rank 0 also how fast MPI and plain TCP are between it
and rank 1. A rank that finds an error reports it as another line, and the job exits with a status other than 0.
"""

import argparse
import ctypes
import ipaddress
import json
import os
import socket
import sys
import time
import traceback
from array import array
from itertools import pairwise
from pathlib import Path

import ranks

LIBRARY = ranks.CURRENT / "mpi" / "lib" / "libmpi.so"
SIZES = (1, 1000, 1_000_000)
# Python's letter and Open MPI's name for each.
TYPES = {"float32": ("f", "float"), "float64": ("d", "double"), "int64": ("q", "int64_t")}
SMALL = 8
LARGE = 4 << 20
WINDOW = 4
# Seconds for each job in a round, and for all rounds at most.
ENOUGH_SECONDS = 0.02
ALL_SECONDS = 12
# This many undisturbed rounds are enough; FEWEST rounds are made in any case.
QUIET = 20
FEWEST = 7
# A rank that exchanges small messages over MPI never sleeps. Beside a single busy program it waits for a processor at
# least a quarter of the time, on an idle machine less than a tenth.
WAITED = 0.1
PATIENCE = 5
# Messages whose time is measured besides, for how long at most, and for how long each.
SWEPT = (8, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20)
SWEEP_SECONDS, SWEEP_STEP = 0.8, 0.003


class MPI:
    """The functions of Open MPI that the test needs. If one fails, Open MPI itself prints why and ends the job."""

    def __init__(self, path):
        # Open MPI's plugins look its symbols up among the global ones.
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self.world = self.handle("comm_world")
        self.byte = self.handle("byte")
        self.call("Init", None, None)
        self.rank = self.integer("Comm_rank", self.world)
        self.size = self.integer("Comm_size", self.world)

    def handle(self, name):
        """A predefined handle, which C calls MPI_COMM_WORLD, MPI_BYTE and so on."""
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.library, f"ompi_mpi_{name}")))

    def call(self, name, *arguments):
        """Call a function of MPI."""
        if code := getattr(self.library, f"MPI_{name}")(*arguments):
            raise RuntimeError(f"MPI_{name} returned {code}")

    def integer(self, name, *arguments):
        """Call a function and return the integer that it writes to its last argument."""
        answer = ctypes.c_int()
        self.call(name, *arguments, ctypes.byref(answer))
        return answer.value

    def version(self):
        """The version string of the library."""
        text = ctypes.create_string_buffer(256)
        self.integer("Get_library_version", text)
        return text.value.decode().partition(",")[0]

    def send(self, values, rank):
        """Send an array."""
        self.call("Send", place(values), length(values), self.byte, rank, 0, self.world)

    def receive(self, values, rank):
        """Receive an array."""
        self.call("Recv", place(values), length(values), self.byte, rank, 0, self.world, None)

    def waits(self, rank):
        """Whether a message from a rank is waiting to be received."""
        flag = ctypes.c_int()
        self.call("Iprobe", rank, 0, self.world, ctypes.byref(flag), None)
        return bool(flag.value)

    def reduce(self, values, kind, how):
        """Combine the arrays of all ranks element by element."""
        total = array(values.typecode, bytes(length(values)))
        kind, how = self.handle(kind), self.handle(f"op_{how}")
        self.call("Allreduce", place(values), place(total), len(values), kind, how, self.world)
        return total

    def gather(self, thing):
        """Collect an object from every rank, in the order of ranks."""
        text = json.dumps(thing).encode()
        width = self.reduce(array("q", [len(text)]), "int64_t", "max")[0]
        own, every = array("b", text.ljust(width)), array("b", bytes(width * self.size))
        self.call("Allgather", place(own), width, self.byte, place(every), width, self.byte, self.world)
        whole = every.tobytes()
        return [json.loads(whole[start : start + width]) for start in range(0, len(whole), width)]


def place(values):
    """The address of an array's memory."""
    return ctypes.c_void_p(values.buffer_info()[0])


def length(values):
    """The size of an array in bytes."""
    return len(values) * values.itemsize


class WayError(Exception):
    """The reason why plain TCP cannot be measured: a code, and what was seen."""


class Way:
    """A way for two ranks to exchange messages: one leads, the other responds."""

    def __init__(self, leads):
        self.leads = leads

    def exchange(self, count):
        """Send a small message there and back, repeatedly."""
        one, other = (self.send, self.receive) if self.leads else (self.receive, self.send)
        for _ in range(count):
            one()
            other()

    def push(self, count):
        """Send large messages there, and a small one back when all have arrived."""
        if self.leads:
            self.pour(count)
            self.receive()
        else:
            self.drain(count)
            self.send()

    def bounce(self, message, count):
        """Send a message of any size there and back, repeatedly."""
        one, other = (self.push_one, self.take_one) if self.leads else (self.take_one, self.push_one)
        for _ in range(count):
            one(message)
            other(message)

    def timed(self, job, count):
        """The seconds that a job takes once both ranks are ready."""
        self.exchange(1)
        begun = time.perf_counter()
        job(count)
        return time.perf_counter() - begun


class OverMPI(Way):
    """Messages over MPI."""

    def __init__(self, mpi):
        super().__init__(mpi.rank == 0)
        self.mpi = mpi
        self.small = array("b", bytes(SMALL))
        self.large = [array("b", bytes(LARGE)) for _ in range(WINDOW)]
        # Built once, as building them takes longer than a call.
        self.word = (place(self.small), SMALL, mpi.byte, 1 - mpi.rank, 0, mpi.world)
        self.parts = [(place(part), LARGE, mpi.byte, 1 - mpi.rank, 0, mpi.world) for part in self.large]
        self.requests = (ctypes.c_void_p * WINDOW)()
        self.slots = [ctypes.byref(self.requests, at * ctypes.sizeof(ctypes.c_void_p)) for at in range(WINDOW)]

    def send(self):
        """A small message."""
        self.mpi.call("Send", *self.word)

    def receive(self):
        """A small message."""
        self.mpi.call("Recv", *self.word, None)

    def message(self, size):
        """Memory for a message of a size."""
        return array("b", bytes(size))

    def push_one(self, message):
        """Send a message of any size."""
        self.mpi.send(message, 1 - self.mpi.rank)

    def take_one(self, message):
        """Receive a message of any size."""
        self.mpi.receive(message, 1 - self.mpi.rank)

    def pour(self, count):
        """Send large messages, a window of them at a time."""
        self.windows("Isend", count)

    def drain(self, count):
        """Receive the messages that the other rank pours."""
        self.windows("Irecv", count)

    def windows(self, name, count):
        """Start a window of messages, then wait for all of them."""
        while count > 0:
            now = min(count, WINDOW)
            for part, slot in zip(self.parts[:now], self.slots[:now], strict=True):
                self.mpi.call(name, *part, slot)
            self.mpi.call("Waitall", now, self.requests, None)
            count -= now


class OverTCP(Way):
    """Messages over a TCP socket, without MPI."""

    def __init__(self, leads, connection):
        super().__init__(leads)
        # The buffer sizes are left to the kernel, which makes them larger than a program may request.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.small = memoryview(bytearray(SMALL))
        self.large = memoryview(bytearray(LARGE))

    def send(self):
        """A small message."""
        self.connection.sendall(self.small)

    def receive(self):
        """A small message."""
        self.take(self.small, SMALL)

    def message(self, size):
        """Memory for a message of a size."""
        return memoryview(bytearray(size))

    def push_one(self, message):
        """Send a message of any size."""
        self.connection.sendall(message)

    def take_one(self, message):
        """Receive a message of any size."""
        self.take(message, len(message))

    def pour(self, count):
        """Send large messages."""
        for _ in range(count):
            self.connection.sendall(self.large)

    def drain(self, count):
        """Receive the messages that the other rank pours."""
        self.take(self.large, count * LARGE)

    def take(self, into, left):
        """Receive bytes into a buffer, which later ones overwrite."""
        while left:
            came = self.connection.recv_into(into[: min(left, len(into))])
            if not came:
                raise ConnectionError("the other rank has closed the connection")
            left -= came


def ring(mpi):
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


def misled(worth, rank, size):
    """Yield what is wrong with the token."""
    # Rank 0 has it again at the end, the others pass it on.
    added = rank + 1 if rank else size
    if worth != (wanted := added * (added + 1) // 2):
        yield ranks.error(
            "wrong-values", f"the token that goes round the ranks is {worth} after {added} of {size}, not {wanted}"
        )


def sums(mpi):
    """Sum arrays over all ranks, and yield each sum and whether it is exact."""
    wanted = mpi.size * (mpi.size + 1) // 2
    for name, (letter, kind) in TYPES.items():
        for size in SIZES:
            # Ranks count from 1 here, so that none adds nothing.
            total = mpi.reduce(array(letter, [mpi.rank + 1]) * size, kind, "sum")
            found = sorted({min(total), max(total)})
            yield {"type": name, "elements": size, "sum": found[-1], "exact": found == [wanted]}


def missed(results, size):
    """Yield what is wrong with the sums."""
    wanted = size * (size + 1) // 2
    for one in results:
        if not one["exact"]:
            seen = f"the sum of {one['elements']} {one['type']} is {one['sum']}, not {wanted}"
            yield ranks.error("wrong-values", seen)


def addresses():
    """The IPv4 addresses of this host."""
    # Horovod depends on it, to find its own interface.
    import psutil

    links = psutil.net_if_addrs().values()
    return [one.address for link in links for one in link if one.family == socket.AF_INET]


def own_address(network, found):
    """The address of this host in the cluster's network, or a WayError that says why there is none."""
    if not network:
        raise WayError("network-unset", "HOROVOD_NETWORK is not set, so TCP was not measured")
    try:
        inside = [one for one in found if ipaddress.ip_address(one) in ipaddress.ip_network(network, strict=False)]
    except ValueError:
        raise WayError("network-unfit", f"HOROVOD_NETWORK is {network}, which is no network") from None
    if not inside:
        raise WayError("network-unfit", f"none of {', '.join(found)} is in HOROVOD_NETWORK, which is {network}")
    return inside[0]


def listen(network):
    """Open the socket in the cluster's network on which rank 0 waits."""
    return socket.create_server((own_address(network, addresses()), 0))


def dial(network, offer):
    """Connect from this host's address in the cluster's network to the socket of rank 0."""
    own = own_address(network, addresses())
    try:
        return socket.create_connection(tuple(offer), timeout=PATIENCE, source_address=(own, 0))
    except OSError as error:
        raise WayError("port-unreachable", f"{own} cannot reach {offer[0]}, port {offer[1]}: {error}") from error


def meet(mpi, network):
    """Open a TCP connection between rank 0 and rank 1; return it or None, and what is wrong with it on this rank."""
    mine, wrong = None, []
    try:
        mine = listen(network) if mpi.rank == 0 else None
    except WayError as error:
        wrong = [ranks.error(*error.args)]
    offer = mpi.gather(mine.getsockname() if mine else None)[0]
    try:
        mine = dial(network, offer) if offer and mpi.rank == 1 else mine
    except WayError as error:
        wrong = [ranks.error(*error.args)]
    if not mpi.gather(mine is not None)[1]:
        return None, wrong
    if mpi.rank == 0:
        mine = mine.accept()[0]
    if mine:
        # The timeout was for connecting only; with one set, Python makes two system calls for every message.
        mine.settimeout(None)
    return mine, wrong


def often(seconds, count):
    """How often to do a job so that it takes long enough, given how long a number of times took."""
    return max(1, min(10_000, round(count * ENOUGH_SECONDS / max(seconds, 1e-9))))


def plan(mpi, way, job, tried):
    """How often to do a job in each round; both ranks try it, and rank 0 decides."""
    fastest = min(way.timed(job, tried) for _ in range(3))
    return decide(mpi, often(fastest, tried))


def decide(mpi, number):
    """Give rank 0's number to both ranks."""
    shared = array("q", [number])
    (mpi.receive if mpi.rank else mpi.send)(shared, 1 - mpi.rank)
    return shared[0]


def tell(mpi, number):
    """Give rank 1's number to both ranks."""
    shared = array("q", [number])
    (mpi.send if mpi.rank else mpi.receive)(shared, 1 - mpi.rank)
    return shared[0]


def waiting():
    """The seconds for which this thread was ready to run but had no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def compare(mpi, ways):
    """Do rounds of every job in every way until enough were quiet or time is up; say of each whether it was quiet."""
    jobs = []
    for way in ways:
        jobs.append((way, way.exchange, plan(mpi, way, way.exchange, 50)))
        jobs.append((way, way.push, plan(mpi, way, way.push, 1)))

    def average(way, job, count):
        return way.timed(job, count) / count

    # The small messages over MPI show whether other programs want the processors, before and after the rest of a round.
    # In the other jobs a rank waits on idle machines as well: for the kernel's own work, or because it sleeps.
    gauge, *others = jobs
    calm, rounds, until = [], [], time.perf_counter() + ALL_SECONDS
    while True:
        begun, waited = time.perf_counter(), waiting()
        took = average(*gauge)
        was_calm = waiting() - waited < WAITED * (time.perf_counter() - begun)
        calm.append(bool(decide(mpi, was_calm) and tell(mpi, was_calm)))
        quiet = [before and after for before, after in pairwise(calm)]
        enough = sum(quiet) >= QUIET or time.perf_counter() > until
        if not decide(mpi, len(rounds) < FEWEST or not enough):
            return list(zip(quiet, rounds, strict=True))
        # In turns, so that what disturbs one way disturbs the other.
        rounds.append([took, *(average(*job) for job in others)])


def sweep(mpi, ways):
    """How many microseconds a message of each size takes one way, in each way; fewer sizes on a slow network.

    Rank 0 decides, so that both ranks do the same.
    """
    found, until = [], time.perf_counter() + SWEEP_SECONDS
    for size in SWEPT:
        row = [size]
        for way in ways:
            message = way.message(size)

            def bounce(count, way=way, message=message):
                way.bounce(message, count)

            once = max(way.timed(bounce, 1), 1e-6)
            count = decide(mpi, max(1, min(100, round(SWEEP_STEP / once))))
            tries = decide(mpi, max(2, min(10, round(10 * SWEEP_STEP / (count * once)))))
            # The best of several, as other programs disturb some.
            took = min(way.timed(bounce, count) for _ in range(tries))
            row.append(round(took / count / 2 * 1e6, 2))
        found.append(row)
        if not decide(mpi, time.perf_counter() < until):
            break
    return found


def speeds(rounds):
    """The best latency (half a round trip) and bandwidth of each way in the quiet rounds."""
    quiet = [took for was_quiet, took in rounds if was_quiet]
    best = [min(times) for times in zip(*(quiet or [took for _, took in rounds]), strict=True)]
    found = []
    for round_trip, message in zip(best[::2], best[1::2], strict=True):
        found += [round(round_trip / 2 * 1e6, 2), round(LARGE / message / 1e6, 1)]
    names = ("latency_us", "bandwidth_mbs", "tcp_latency_us", "tcp_mbs")
    return {
        **dict(zip(names, [*found, None, None, None, None], strict=False)),
        "quiet": len(quiet),
        "rounds": len(rounds),
    }


def measure(mpi, network):
    """Measure MPI and plain TCP between rank 0 and rank 1; return the figures and what is wrong on this rank."""
    if mpi.size == 1:
        return speeds([]), []
    connection, wrong = meet(mpi, network)
    if mpi.rank > 1:
        sleep_until_told(mpi)
        return None, wrong

    ways = [OverMPI(mpi)]
    if connection:
        ways.append(OverTCP(mpi.rank == 0, connection))
    rounds = compare(mpi, ways)
    sizes = sweep(mpi, ways)
    if mpi.rank == 0:
        for rank in range(2, mpi.size):
            mpi.send(array("b", bytes(1)), rank)
    return {**speeds(rounds), "sizes": sizes}, wrong


def sleep_until_told(mpi):
    """Keep out of the way: a rank that waits in MPI takes a whole core."""
    while not mpi.waits(0):
        time.sleep(0.02)
    mpi.receive(array("b", bytes(1)), 0)


def prove(mpi, options):
    """Compute, compare, measure and print the results."""
    own = {**ranks.describe(mpi.rank, mpi.size), "version": mpi.version()}
    every = mpi.gather(own)
    worth, results = ring(mpi), list(sums(mpi))
    measured, mine = measure(mpi, os.environ.get("HOROVOD_NETWORK"))
    mine = [*misled(worth, mpi.rank, mpi.size), *missed(results, mpi.size), *mine]
    speed = measured if mpi.rank == 0 else {}
    ranks.show({**own, "ring": worth, "sums": results, **speed})
    status = ranks.report(mpi.rank, list(ranks.judge(every, options)), mine)
    # No rank leaves while another still computes, or the launcher would end that one before it has printed anything.
    mpi.call("Barrier", mpi.world)
    return status


def main():
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
