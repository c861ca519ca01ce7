"""The connections between this node and the others. The control machine sends this program through ssh and keeps its
standard input open; every line there is a request, every line of its output that begins with the secret an answer."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

# A connection that takes longer is one that a firewall drops.
CONNECT_S = 1.5
# Who connects has so long to prove that it belongs to this measurement, and so many connections at a time.
PROOF_S, EACH = 1, 12
IDLE_S = 10
BACK_OFF_S = 0.05
PINGS = 5
# Attempts of a node at a time, and of all nodes: where many share a processor, answers would come too late.
AT_A_TIME, LEAST, ALL = 32, 16, 800
# Failures of each kind that are reported, enough for three ports of 1,024 nodes; the rest counts as not tried.
REPORTED = 3072
# Hardware addresses, which every other node is told.
ADDRESSES = 64
BLOCK = memoryview(bytes(1 << 18))
BUFFER = 1 << 20
CHECK = 16
RESULT = struct.Struct("!QQ")
INTERFACES = Path("/sys/class/net")
# From linux/in.h: fragments are forbidden, whatever is known of the path.
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
IP_UDP_HEADERS = 28
DATAGRAM_S, DATAGRAMS = 0.2, 3
SIZES = (9000, 8900, 8000, 4000, 2000, 1500, 1492, 1480, 1450, 1430, 1400, 1300, 1280, 1000, 576)
MAC = re.compile("([0-9a-f]{2}:){5}[0-9a-f]{2}")
REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH), "no route"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "forbidden"),
}


def proof(secret: str, of: str) -> bytes:
    """What only those who know the secret can say of a node."""
    return hashlib.sha256(f"{secret} {of}".encode()).digest()[:CHECK]


def exactly(connection: socket.socket, number: int, seconds: float) -> bytes:
    """So many bytes, all of them within so many seconds."""
    got, until = b"", time.monotonic() + seconds
    while len(got) < number:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        more = connection.recv(number - len(got))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        got += more
    return got


def reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return REASONS.get(error.errno or 0, "failed")


class Endpoint:
    """This node's servers, and what it measures as a client."""

    def __init__(
        self, name: str, address: str, secret: str, ports: list[int], peers: list[str], interface: str
    ) -> None:
        self.name, self.address, self.secret = name, address, secret
        # Half of the descriptors are for what this node measures.
        each = min(EACH, max(len(ports), descriptors() // 2 // len(peers)))
        self.slots = {peer: threading.BoundedSemaphore(each) for peer in peers}
        # Peers from whose addresses too many connections came, be it from this program or from another one there.
        self.crowding: set[str] = set()
        self.listeners = [listener for port in ports if (listener := listen(address, port))]
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind((address, 0))
        self.interface = INTERFACES / interface
        self.mtu = number_in(self.interface / "mtu")
        for listener in self.listeners:
            background(self.accept, listener)
        background(self.echo)

    def about(self) -> dict[str, Any]:
        return {
            "ports": [listener.getsockname()[1] for listener in self.listeners],
            "datagrams": self.datagrams.getsockname()[1],
            "mtu": self.mtu,
            "speed": number_in(self.interface / "speed"),
            "hardware": hardware(self.interface),
        }

    def here(self) -> dict[str, Any]:
        """Say that this program still runs, and which peers it has turned away."""
        return {"crowding": sorted(self.crowding)}

    def accept(self, listener: socket.socket) -> None:
        """Let in the peers, a few times each, whatever goes wrong."""
        while True:
            try:
                connection, (address, _) = listener.accept()
            except OSError:
                time.sleep(BACK_OFF_S)
                continue
            slots = self.slots.get(address)
            if not slots or not slots.acquire(blocking=False):
                connection.close()
                if slots:
                    self.crowding.add(address)
                continue
            try:
                background(self.answer, connection, slots)
            except RuntimeError:  # There can be no more threads.
                connection.close()
                slots.release()

    def answer(self, connection: socket.socket, slots: threading.BoundedSemaphore) -> None:
        """Serve one client, if it knows the secret."""
        try:
            with connection, suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                asked = exactly(connection, CHECK + 1, PROOF_S)
                if not asked.startswith(proof(self.secret, "client")):
                    return
                connection.settimeout(IDLE_S)
                connection.sendall(proof(self.secret, self.name))
                if asked.endswith(b"e"):
                    for _ in range(PINGS):
                        connection.sendall(exactly(connection, 1, IDLE_S))
                else:
                    self.sink(connection)
        finally:
            slots.release()

    @staticmethod
    def sink(connection: socket.socket) -> None:
        buffer, count, begun, last = bytearray(BUFFER), 0, 0, 0
        while got := connection.recv_into(buffer):
            last = time.monotonic_ns()
            begun = begun or last
            count += got
        connection.sendall(RESULT.pack(count, last - begun))

    def echo(self) -> None:
        """Answer each datagram with one that is smaller."""
        hello, answer = proof(self.secret, "client"), proof(self.secret, self.name)
        while True:
            with suppress(OSError):
                got, sender = self.datagrams.recvfrom(1 << 16)
                if sender[0] in self.slots and got.startswith(hello):
                    self.datagrams.sendto(answer, sender)

    def connect(self, name: str, address: str, port: int, service: bytes) -> socket.socket:
        connection = socket.create_connection((address, port), CONNECT_S, source_address=(self.address, 0))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(proof(self.secret, "client") + service)
            if exactly(connection, CHECK, CONNECT_S) != proof(self.secret, name):
                raise OSError(errno.EADDRINUSE, "another machine has this address")
        except BaseException:
            connection.close()
            raise
        return connection

    def reach(
        self, peers: list[list[Any]], place: int, only: list[int] | None, seconds: float, *, names: bool
    ) -> dict[str, Any]:
        """Connect to these peers, or to all. Begin with the next one, so that none is asked by all at the same time."""
        number = len(peers)
        order = [(place + offset) % number for offset in range(1, number)]
        pool = ThreadPoolExecutor(max(LEAST, min(AT_A_TIME, ALL // number)))
        asked = [(peer, *peers[peer]) for peer in order if only is None or peer in only]
        tasks = []
        # A port of each first, as there may be time for no more if nobody answers.
        for peer, name, address, ports, *_ in asked:
            tasks += [pool.submit(self.try_port, peer, name, address, port, True) for port in ports[:1]]
        for peer, name, address, ports, datagrams, mtu, _, named in asked:
            tasks += [pool.submit(self.try_port, peer, name, address, port, False) for port in ports[1:]]
            tasks.append(pool.submit(self.try_path, peer, name, address, datagrams, mtu))
            if names:
                tasks.append(pool.submit(self.try_name, peer, name, named))
        done, late = wait(tasks, seconds)
        pool.shutdown(wait=False, cancel_futures=True)
        answer: dict[str, list[Any]] = {"closed": [], "path": [], "name": [], "delay": [], "well": []}
        for task in tasks:
            if task in done and not task.cancelled():
                kind, row = task.result()
                answer[kind].append(row)
        owned, seen = {peer[1]: peer[5] for peer in peers}, neighbours()
        for row in answer["closed"]:
            address = peers[row[0]][1]
            if is_mine(address) or stranger(address, owned, seen):
                row[2] = "another machine"
        failed = {kind: answer[kind] for kind in ("closed", "path", "name")}
        return {
            **{kind: rows[:REPORTED] for kind, rows in failed.items()},
            "untried": len(late) + sum(len(rows[REPORTED:]) for rows in failed.values()),
            "delay_us": round(statistics.median(answer["delay"])) if answer["delay"] else None,
        }

    def try_port(self, peer: int, name: str, address: str, port: int, timed: bool) -> tuple[str, Any]:
        try:
            with self.connect(name, address, port, b"e") as connection:
                return ("delay", ping(connection)) if timed else ("well", None)
        except OSError as error:
            return "closed", [peer, port, "another machine" if error.errno == errno.EADDRINUSE else reason(error)]

    def try_path(self, peer: int, name: str, address: str, port: int, peer_mtu: int) -> tuple[str, Any]:
        """The largest packet that gets through in one piece, if larger ones get lost without a word."""
        mtu = min(self.mtu, peer_mtu, 65535)
        sizes = iter((mtu, *(size for size in SIZES if size < mtu)))
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            sender.bind((self.address, 0))
            sender.connect((address, port))
            sender.settimeout(DATAGRAM_S)
            if not self.passes(sender, name, 128):
                return "well", None
            # Of a size that is refused, this node is told, and so are its connections: they send smaller ones.
            tried = ((size, self.passes(sender, name, size)) for size in sizes)
            sent, arrived = next((each for each in tried if each[1] is not None), (0, True))
            # If small ones get lost, too, it is not because of the size.
            if not arrived and all(self.passes(sender, name, 128, 1) for _ in range(DATAGRAMS)):
                return "path", [peer, next((size for size in sizes if self.passes(sender, name, size)), 0), sent]
        return "well", None

    def passes(self, sender: socket.socket, name: str, size: int, tries: int = DATAGRAMS) -> bool | None:
        """Whether a packet arrives; None if it is refused as too large, by the kernel or by a router."""
        packet = proof(self.secret, "client").ljust(max(size - IP_UDP_HEADERS, CHECK), b"\0")
        for _ in range(tries):
            try:
                sender.send(packet)
                if sender.recv(1 << 10) == proof(self.secret, name):
                    return True
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return None
        return False

    @staticmethod
    def try_name(peer: int, name: str, address: str) -> tuple[str, Any]:
        """What the name of a peer resolves to, if not to its address."""
        try:
            seen = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
        except OSError:
            seen = []
        return ("well", None) if seen == [address] else ("name", [peer, seen[:4]])

    def send(self, name: str, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Bytes in a second that arrive at a peer."""
        try:
            with self.connect(name, address, port, b"s") as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                connection.settimeout(seconds + IDLE_S)
                begun = time.monotonic()
                while time.monotonic() - begun < seconds:
                    connection.send(BLOCK)
                connection.shutdown(socket.SHUT_WR)
                count, _ = RESULT.unpack(exactly(connection, RESULT.size, seconds + IDLE_S))
                return {"rate": count / (time.monotonic() - begun)}
        except OSError as error:
            return {"rate": None, "why": reason(error)}


def ping(connection: socket.socket) -> float:
    """The shortest round trip, in microseconds."""
    times = []
    for _ in range(PINGS):
        begun = time.monotonic_ns()
        connection.sendall(b".")
        exactly(connection, 1, CONNECT_S)
        times.append((time.monotonic_ns() - begun) / 1000)
    return min(times)


def listen(address: str, port: int) -> socket.socket | None:
    """A server on this port, or on a near one if it is taken."""
    for near in range(port, port + 50):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, near))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    return None


def hardware(interface: Path) -> list[str]:
    """The hardware addresses of this node's interfaces, that of the one for jobs first, as containers may have many."""
    addresses: dict[str, None] = {}
    for path in (interface / "address", *sorted(INTERFACES.glob("*/address"))):
        with suppress(OSError):
            addresses[path.read_text().strip()] = None
    return [*filter(MAC.fullmatch, addresses)][:ADDRESSES]


def neighbours() -> dict[str, str]:
    """The hardware address that answers at each address that the kernel has asked for."""
    with suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/arp").read_text().splitlines()[1:]]
        return {row[0]: row[3] for row in rows if row[1] == "0x1" and int(row[2], 16) & 2}
    return {}


def stranger(address: str, owned: dict[str, list[str]], seen: dict[str, str]) -> bool:
    """Whether a machine answers at the address of a node that is not this node. A cloud's router answers for all."""
    mac = seen.get(address)
    others = [other for other in seen if seen[other] == mac and other != address]
    return bool(mac) and mac not in owned[address] and all(mac in owned.get(other, ()) for other in others)


def is_mine(address: str) -> bool:
    """Whether this node has that address, too; every machine has those of the loopback network."""
    if address.startswith("127."):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        asking.bind((address, 0))
        return True
    return False


def descriptors() -> int:
    """Raise the limit of open files as far as allowed, and return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def number_in(path: Path) -> int:
    """The number in a file of the kernel; 0 if there is none, or none that says anything."""
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0


def background(run: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=run, args=arguments, daemon=True).start()


def job_ports(lowest: int, highest: int, number: int) -> list[int]:
    """One random port in each part of the range that jobs use."""
    width = (highest - lowest) // number
    return [lowest + part * width + secrets.randbelow(width - 50) for part in range(number)]


def serve(requests: Any, say: Callable[[dict[str, Any]], None]) -> None:
    first = json.loads(requests.readline())
    # Whatever happens to the control machine, this program ends.
    timer = threading.Timer(first["seconds"], os._exit, [1])
    timer.daemon = True
    timer.start()
    try:
        ports, interface = job_ports(*first["ports"]), first["interface"]
        node = Endpoint(first["name"], first["address"], first["secret"], ports, first["peers"], interface)
    except OSError as error:
        say({"error": f"cannot listen on {first['address']}: {error.strerror}"})
        return
    say(node.about())
    answers: dict[str, Callable[..., dict[str, Any]]] = {"reach": node.reach, "send": node.send, "here": node.here}
    while line := requests.readline():
        request = json.loads(line)
        say(answers[request.pop("do")](**request))


def main() -> None:
    secret = sys.stdin.buffer.readline().decode().strip()

    def say(answer: dict[str, Any]) -> None:
        print(f"\n{secret} {json.dumps(answer)}", flush=True)

    serve(sys.stdin.buffer, say)
    # Threads may still wait for a peer.
    os._exit(0)


if __name__ == "__main__":
    main()
