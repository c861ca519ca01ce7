"""MPI alone proves itself, beside plain TCP: mpirun -np 2 -H node-1:1,node-2:1 --bind-to none python mpi.py --expect 2

Every rank prints what it is and what it found as a line of JSON, rank 0 also how fast MPI and plain TCP are between it
and rank 1; one that finds something wrong says what and where, and the job ends with a status not 0.
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
from pathlib import Path

CURRENT = Path("/opt/farandole/current")
LIBRARY = CURRENT / "mpi" / "lib" / "libmpi.so"
SIZES = (1, 1000, 1_000_000)
# Python's letter and Open MPI's name for each.
TYPES = {"float32": ("f", "float"), "float64": ("d", "double"), "int64": ("q", "int64_t")}
SMALL = 8
LARGE = 4 << 20
WINDOW = 4
# Seconds for each job in a round, and for all rounds at most.
SMALL_SECONDS = 0.005
LARGE_SECONDS = 0.02
ALL_SECONDS = 12
# So many rounds in which nothing disturbed the ranks are enough; so many there are in any case.
QUIET = 20
FEWEST = 7
# A rank that talks over MPI never sleeps, so one that waited for a processor this share of the time was disturbed.
WAITED = 0.02
PATIENCE = 5


class MPI:
    """As much of Open MPI as the proof needs. What fails within it ends the job in its own words."""

    def __init__(self, path):
        # Open MPI's plugins look for its names among the global ones.
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self.world = self.handle("comm_world")
        self.byte = self.handle("byte")
        self.call("Init", None, None)
        self.rank = self.integer("Comm_rank", self.world)
        self.size = self.integer("Comm_size", self.world)

    def handle(self, name):
        """What C calls MPI_COMM_WORLD, MPI_BYTE and so on."""
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.library, f"ompi_mpi_{name}")))

    def call(self, name, *arguments):
        """One function of MPI."""
        if code := getattr(self.library, f"MPI_{name}")(*arguments):
            raise RuntimeError(f"MPI_{name} ended with {code}")

    def integer(self, name, *arguments):
        """What a function answers in its last argument."""
        answer = ctypes.c_int()
        self.call(name, *arguments, ctypes.byref(answer))
        return answer.value

    def version(self):
        """What the library says of itself."""
        text = ctypes.create_string_buffer(256)
        self.integer("Get_library_version", text)
        return text.value.decode().partition(",")[0]

    def send(self, values, rank):
        """A whole array."""
        self.call("Send", place(values), length(values), self.byte, rank, 0, self.world)

    def receive(self, values, rank):
        """A whole array."""
        self.call("Recv", place(values), length(values), self.byte, rank, 0, self.world, None)

    def waits(self, rank):
        """Whether something of that rank waits to be received."""
        flag = ctypes.c_int()
        self.call("Iprobe", rank, 0, self.world, ctypes.byref(flag), None)
        return bool(flag.value)

    def reduce(self, values, kind, how):
        """The arrays of all ranks made one, element by element."""
        total = array(values.typecode, bytes(length(values)))
        kind, how = self.handle(kind), self.handle(f"op_{how}")
        self.call("Allreduce", place(values), place(total), len(values), kind, how, self.world)
        return total

    def gather(self, thing):
        """What every rank hands in, in their order."""
        text = json.dumps(thing).encode()
        width = self.reduce(array("q", [len(text)]), "int64_t", "max")[0]
        own, every = array("b", text.ljust(width)), array("b", bytes(width * self.size))
        self.call("Allgather", place(own), width, self.byte, place(every), width, self.byte, self.world)
        whole = every.tobytes()
        return [json.loads(whole[start : start + width]) for start in range(0, len(whole), width)]


def place(values):
    """Where an array lies."""
    return ctypes.c_void_p(values.buffer_info()[0])


def length(values):
    """Its bytes."""
    return len(values) * values.itemsize


class WayError(Exception):
    """Why there is no plain TCP: a code, and what shows it."""


class Way:
    """How two ranks talk. Of every job the one that leads does its half, and the other answers."""

    def __init__(self, leads):
        self.leads = leads

    def exchange(self, count):
        """A small message there and back, so often."""
        one, other = (self.send, self.receive) if self.leads else (self.receive, self.send)
        for _ in range(count):
            one()
            other()

    def push(self, count):
        """So many large messages there, and one small one back when all have come."""
        if self.leads:
            self.pour(count)
            self.receive()
        else:
            self.drain(count)
            self.send()

    def timed(self, job, count):
        """The seconds that a job takes, from when both are ready."""
        self.exchange(1)
        begun = time.perf_counter()
        job(count)
        return time.perf_counter() - begun


class OverMPI(Way):
    """By messages of MPI."""

    def __init__(self, mpi):
        super().__init__(mpi.rank == 0)
        self.mpi = mpi
        self.small = array("b", bytes(SMALL))
        self.large = [array("b", bytes(LARGE)) for _ in range(WINDOW)]
        # Made once, as making them takes longer than a call.
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

    def pour(self, count):
        """Large messages, a window of them at a time."""
        self.windows("Isend", count)

    def drain(self, count):
        """As many as are poured."""
        self.windows("Irecv", count)

    def windows(self, name, count):
        """Begin a window of messages, then wait for all of it."""
        while count > 0:
            now = min(count, WINDOW)
            for part, slot in zip(self.parts[:now], self.slots[:now], strict=True):
                self.mpi.call(name, *part, slot)
            self.mpi.call("Waitall", now, self.requests, None)
            count -= now


class OverTCP(Way):
    """By a socket of TCP, without MPI."""

    def __init__(self, leads, connection):
        super().__init__(leads)
        # The kernel's own choice of buffers stays, which grows larger than one may ask for.
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

    def pour(self, count):
        """Large messages."""
        for _ in range(count):
            self.connection.sendall(self.large)

    def drain(self, count):
        """As many as are poured."""
        self.take(self.large, count * LARGE)

    def take(self, into, left):
        """So many bytes, which overwrite each other."""
        while left:
            came = self.connection.recv_into(into[: min(left, len(into))])
            if not came:
                raise ConnectionError("the other rank has closed the connection")
            left -= came


def arguments():
    """What is to be proven."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expect", type=int, metavar="N", help="fail unless the job has N ranks")
    parser.add_argument("--expect-hosts", type=int, metavar="M", help="fail unless they are on M machines; default: N")
    options = parser.parse_args()
    if options.expect_hosts is None:
        options.expect_hosts = options.expect
    return options


def describe(mpi):
    """What this rank is."""
    return {
        "rank": mpi.rank,
        "size": mpi.size,
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": CURRENT.resolve().name if CURRENT.is_symlink() else "",
        "version": mpi.version(),
    }


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


def ring(mpi):
    """What a token that goes round the ranks is worth when this one last has it; each adds its number, from 1 on."""
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
    """What is wrong with the token."""
    # Rank 0 has it again at the end, the others pass it on.
    added = rank + 1 if rank else size
    if worth != (wanted := added * (added + 1) // 2):
        yield complaint(
            "wrong-values", f"the token that goes round the ranks is {worth} after {added} of {size}, not {wanted}"
        )


def sums(mpi):
    """The sums of this rank's arrays and the others', each beside what it must be."""
    wanted = mpi.size * (mpi.size + 1) // 2
    for name, (letter, kind) in TYPES.items():
        for size in SIZES:
            # Ranks count from 1 here, so that none adds nothing.
            total = mpi.reduce(array(letter, [mpi.rank + 1]) * size, kind, "sum")
            found = sorted({min(total), max(total)})
            yield {"type": name, "elements": size, "sum": found[-1], "exact": found == [wanted]}


def missed(results, size):
    """What is wrong with the sums."""
    wanted = size * (size + 1) // 2
    for one in results:
        if not one["exact"]:
            yield complaint("wrong-values", f"the sum of {one['elements']} {one['type']} is {one['sum']}, not {wanted}")


def addresses():
    """Of this host, IPv4."""
    # Horovod brings it, and finds its own interface with it.
    import psutil

    links = psutil.net_if_addrs().values()
    return [one.address for link in links for one in link if one.family == socket.AF_INET]


def own_address(network, found):
    """The address of this host in the cluster's network; WayError says why there is none."""
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
    """A socket in the cluster's network; rank 0 waits with it."""
    return socket.create_server((own_address(network, addresses()), 0))


def dial(network, offer):
    """A connection from this host's address in the cluster's network to where rank 0 listens."""
    own = own_address(network, addresses())
    try:
        return socket.create_connection(tuple(offer), timeout=PATIENCE, source_address=(own, 0))
    except OSError as error:
        raise WayError("port-unreachable", f"{own} cannot reach {offer[0]}, port {offer[1]}: {error}") from error


def meet(mpi, network):
    """A TCP connection between rank 0 and rank 1, None if there is none, and what is wrong with it here."""
    mine, wrong = None, []
    try:
        mine = listen(network) if mpi.rank == 0 else None
    except WayError as error:
        wrong = [complaint(*error.args)]
    offer = mpi.gather(mine.getsockname() if mine else None)[0]
    try:
        mine = dial(network, offer) if offer and mpi.rank == 1 else mine
    except WayError as error:
        wrong = [complaint(*error.args)]
    if not mpi.gather(mine is not None)[1]:
        return None, wrong
    if mpi.rank == 0:
        mine = mine.accept()[0]
    if mine:
        # The time to wait was for the beginning only; with one, Python asks the kernel twice for every message.
        mine.settimeout(None)
    return mine, wrong


def often(seconds, count, enough):
    """How often a job has to be done to take long enough, when so many times took so long."""
    return max(1, min(10_000, round(count * enough / max(seconds, 1e-9))))


def plan(mpi, way, job, tried, enough):
    """How often a job is done in each batch; both ranks try it, and rank 0 decides."""
    fastest = min(way.timed(job, tried) for _ in range(3))
    return decide(mpi, often(fastest, tried, enough))


def decide(mpi, number):
    """What rank 0 says, for both ranks."""
    shared = array("q", [number])
    (mpi.receive if mpi.rank else mpi.send)(shared, 1 - mpi.rank)
    return shared[0]


def tell(mpi, number):
    """What rank 1 says, for both ranks."""
    shared = array("q", [number])
    (mpi.send if mpi.rank else mpi.receive)(shared, 1 - mpi.rank)
    return shared[0]


def waiting():
    """For how many seconds this thread was ready to run and did not."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def compare(mpi, ways):
    """Rounds of every job in every way, and of each whether it was quiet: until there are enough, or time is up."""
    jobs = []
    for way in ways:
        jobs.append((way, way.exchange, plan(mpi, way, way.exchange, 50, SMALL_SECONDS)))
        jobs.append((way, way.push, plan(mpi, way, way.push, 1, LARGE_SECONDS)))
    rounds, until = [], time.perf_counter() + ALL_SECONDS
    more = True
    while more:
        # By turns, so that what disturbs one disturbs the other.
        took, quiet = [], True
        for way, job, count in jobs:
            waited = waiting()
            seconds = way.timed(job, count)
            quiet &= way is not ways[0] or waiting() - waited < WAITED * seconds
            took.append(seconds / count)
        quiet = bool(decide(mpi, quiet) and tell(mpi, quiet))
        rounds.append((quiet, took))
        enough = sum(quiet for quiet, _ in rounds) >= QUIET or time.perf_counter() > until
        more = decide(mpi, len(rounds) < FEWEST or not enough)
    return rounds


def speeds(rounds):
    """Half a round trip in microseconds and megabytes per second, in each way, at its best while it was quiet."""
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
    """How fast MPI and plain TCP are between rank 0 and rank 1, and what is wrong with that here."""
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
    if mpi.rank == 0:
        for rank in range(2, mpi.size):
            mpi.send(array("b", bytes(1)), rank)
    return speeds(rounds), wrong


def sleep_until_told(mpi):
    """Keep out of the way: a rank that waits in MPI takes a whole core."""
    while not mpi.waits(0):
        time.sleep(0.02)
    mpi.receive(array("b", bytes(1)), 0)


def prove(mpi, options):
    """Compute, compare, measure, say."""
    own = describe(mpi)
    common = list(judge(mpi.gather(own), options))
    worth, results = ring(mpi), list(sums(mpi))
    measured, mine = measure(mpi, os.environ.get("HOROVOD_NETWORK"))
    mine = [*misled(worth, mpi.rank, mpi.size), *missed(results, mpi.size), *mine]
    wrong = common + mine
    told = measured if mpi.rank == 0 else {}
    print(json.dumps({**own, "ring": worth, "sums": results, **told, "wrong": wrong}), flush=True)
    # What all of them see one says.
    for one in wrong if mpi.rank == 0 else mine:
        print(f"{own['host']}, rank {mpi.rank}: {one['seen']}", file=sys.stderr, flush=True)
    # Nobody leaves while another still computes: the launcher would end the others before they have spoken.
    mpi.call("Barrier", mpi.world)
    return int(bool(wrong))


def main():
    """Join the job, prove, leave it."""
    options = arguments()
    try:
        mpi = MPI(LIBRARY)
    except OSError as error:
        sys.exit(f"{socket.gethostname()}: no MPI in the stack: {error}; run site.yml")
    try:
        code = prove(mpi, options)
    except Exception:
        traceback.print_exc()
        # To finalise would be to wait for ranks that wait for this one.
        mpi.call("Abort", mpi.world, 1)
    mpi.call("Finalize")
    return code


if __name__ == "__main__":
    sys.exit(main())
