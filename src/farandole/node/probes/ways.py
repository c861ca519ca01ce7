"""The two ways in which ranks exchange messages: over MPI, and over a TCP connection of their own."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farandole.node.probes import ranks

SMALL = 8
LARGE = 4 << 20
WINDOW = 4
# Seconds that a connection may take.
PATIENCE = 5


class WayError(Exception):
    """The reason why plain TCP cannot be measured: a code, and what was seen."""


class Way:
    """A way for two ranks to exchange messages: one leads, the other responds."""

    # Makes a message of a size; what one message is sent and received by, and many large ones.
    message: Callable[[int], Any]
    send: Callable[[Any], None]
    receive: Callable[[Any], None]
    pour: Callable[[int], None]
    drain: Callable[[int], None]

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self.small = self.message(SMALL)

    def bounce(self, message: Any, count: int) -> None:
        """Send a message there and back, repeatedly."""
        first, second = (self.send, self.receive) if self.leads else (self.receive, self.send)
        for _ in range(count):
            first(message)
            second(message)

    def exchange(self, count: int) -> None:
        """Send a small message there and back, repeatedly."""
        self.bounce(self.small, count)

    def push(self, count: int) -> None:
        """Send large messages there, and a small one back when all have arrived."""
        if self.leads:
            self.pour(count)
            self.receive(self.small)
        else:
            self.drain(count)
            self.send(self.small)

    def timed(self, job: Callable[[int], None], count: int) -> float:
        """The seconds that a job takes once both ranks are ready."""
        self.exchange(1)
        begun = time.perf_counter()
        job(count)
        return time.perf_counter() - begun


class OverMPI(Way):
    """Messages over MPI."""

    def __init__(self, mpi: MPI) -> None:
        self.mpi = mpi
        super().__init__(mpi.rank == 0)
        self.large = [self.message(LARGE) for _ in range(WINDOW)]
        self.requests = (ctypes.c_void_p * WINDOW)()
        self.slots = [ctypes.byref(self.requests, at * ctypes.sizeof(ctypes.c_void_p)) for at in range(WINDOW)]

    def message(self, size: int) -> Any:
        """The memory of a message, and the arguments of its calls, as building these takes longer than a call."""
        memory = array("b", bytes(size))
        return memory, (place(memory), size, self.mpi.byte, 1 - self.mpi.rank, 0, self.mpi.world)

    def send(self, message: Any) -> None:
        self.mpi.call("Send", *message[1])

    def receive(self, message: Any) -> None:
        self.mpi.call("Recv", *message[1], None)

    def pour(self, count: int) -> None:
        self.windows("Isend", count)

    def drain(self, count: int) -> None:
        self.windows("Irecv", count)

    def windows(self, name: str, count: int) -> None:
        """Start a window of messages, then wait for all of them."""
        while count > 0:
            now = min(count, WINDOW)
            for (_, arguments), slot in zip(self.large[:now], self.slots[:now], strict=True):
                self.mpi.call(name, *arguments, slot)
            self.mpi.call("Waitall", now, self.requests, None)
            count -= now


class OverTCP(Way):
    """Messages over a TCP socket, without MPI."""

    def __init__(self, leads: bool, connection: socket.socket) -> None:
        super().__init__(leads)
        # The buffer sizes are left to the kernel, which makes them larger than a program may request.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.large = connection, self.message(LARGE)

    def message(self, size: int) -> Any:
        return memoryview(bytearray(size))

    def send(self, message: Any) -> None:
        self.connection.sendall(message)

    def receive(self, message: Any) -> None:
        self.take(message, len(message))

    def pour(self, count: int) -> None:
        for _ in range(count):
            self.connection.sendall(self.large)

    def drain(self, count: int) -> None:
        self.take(self.large, count * LARGE)

    def take(self, into: memoryview, left: int) -> None:
        """Receive bytes into a buffer, which later ones overwrite."""
        while left:
            came = self.connection.recv_into(into[: min(left, len(into))])
            if not came:
                raise ConnectionError("the other rank has closed the connection")
            left -= came


def addresses() -> list[str]:
    """The IPv4 addresses of this host."""
    # Horovod depends on it, to find its own interface.
    import psutil

    links = psutil.net_if_addrs().values()
    return [address.address for link in links for address in link if address.family == socket.AF_INET]


def own_address(network: str | None, own: Sequence[str]) -> str:
    """The address of this host in the cluster's network, or a WayError that says why there is none."""
    if not network:
        raise WayError("network-unset", "HOROVOD_NETWORK is not set, so TCP was not measured")
    try:
        subnet = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise WayError("network-unfit", f"HOROVOD_NETWORK is {network}, which is not a network") from None
    inside = [address for address in own if ipaddress.ip_address(address) in subnet]
    if not inside:
        raise WayError("network-unfit", f"none of {', '.join(own)} is in HOROVOD_NETWORK, which is {network}")
    return inside[0]


def listen(network: str | None) -> socket.socket:
    """Open the socket in the cluster's network on which rank 0 waits."""
    return socket.create_server((own_address(network, addresses()), 0))


def dial(network: str | None, offer: Sequence[Any]) -> socket.socket:
    """Connect from this host's address in the cluster's network to the socket of rank 0."""
    own = own_address(network, addresses())
    try:
        return socket.create_connection(tuple(offer), timeout=PATIENCE, source_address=(own, 0))
    except OSError as error:
        raise WayError("port-unreachable", f"{own} cannot reach {offer[0]}, port {offer[1]}: {error}") from error


def meet(mpi: MPI, network: str | None) -> tuple[socket.socket | None, list[ranks.Error]]:
    """Open a TCP connection between rank 0 and rank 1; return it or None, and what is wrong with it on this rank."""
    mine: socket.socket | None = None
    wrong: list[ranks.Error] = []
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
    if mine and mpi.rank == 0:
        mine = mine.accept()[0]
    if mine:
        # The timeout was for connecting only; with one set, Python makes two system calls for every message.
        mine.settimeout(None)
    return mine, wrong


class MPI:
    """The functions of Open MPI that the test needs. If one fails, Open MPI itself prints why and ends the job."""

    def __init__(self, path: Path) -> None:
        # Open MPI's plugins look its symbols up among the global ones.
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self.world = self.handle("comm_world")
        self.byte = self.handle("byte")
        self.call("Init", None, None)
        self.rank = self.integer("Comm_rank", self.world)
        self.size = self.integer("Comm_size", self.world)

    def handle(self, name: str) -> ctypes.c_void_p:
        """A predefined handle, which C calls MPI_COMM_WORLD, MPI_BYTE and so on."""
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.library, f"ompi_mpi_{name}")))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of MPI."""
        if code := getattr(self.library, f"MPI_{name}")(*arguments):
            raise RuntimeError(f"MPI_{name} returned {code}")

    def integer(self, name: str, *arguments: Any) -> int:
        """Call a function and return the integer that it writes to its last argument."""
        answer = ctypes.c_int()
        self.call(name, *arguments, ctypes.byref(answer))
        return answer.value

    def version(self) -> str:
        """The version string of the library."""
        text = ctypes.create_string_buffer(256)
        self.integer("Get_library_version", text)
        return text.value.decode().partition(",")[0]

    def send(self, values: array[Any], rank: int) -> None:
        """Send an array."""
        self.call("Send", place(values), length(values), self.byte, rank, 0, self.world)

    def receive(self, values: array[Any], rank: int) -> None:
        """Receive an array."""
        self.call("Recv", place(values), length(values), self.byte, rank, 0, self.world, None)

    def waits(self, rank: int) -> bool:
        """Whether a message from a rank is waiting to be received."""
        flag = ctypes.c_int()
        self.call("Iprobe", rank, 0, self.world, ctypes.byref(flag), None)
        return bool(flag.value)

    def reduce(self, values: array[Any], kind: str, how: str) -> array[Any]:
        """Combine the arrays of all ranks element by element."""
        total = array(values.typecode, bytes(length(values)))
        handles = self.handle(kind), self.handle(f"op_{how}")
        self.call("Allreduce", place(values), place(total), len(values), *handles, self.world)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Collect an object from every rank, in the order of ranks."""
        text = json.dumps(value).encode()
        width = self.reduce(array("q", [len(text)]), "int64_t", "max")[0]
        own, every = array("b", text.ljust(width)), array("b", bytes(width * self.size))
        self.call("Allgather", place(own), width, self.byte, place(every), width, self.byte, self.world)
        whole = every.tobytes()
        return [json.loads(whole[start : start + width]) for start in range(0, len(whole), width)]


def place(values: array[Any]) -> ctypes.c_void_p:
    """The address of an array's memory."""
    return ctypes.c_void_p(values.buffer_info()[0])


def length(values: array[Any]) -> int:
    """The size of an array in bytes."""
    return len(values) * values.itemsize
