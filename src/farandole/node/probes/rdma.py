"""RDMA between every two ranks, which meet over MPI, by ibv_rc_pingpong of Debian's ibverbs-utils."""

import ipaddress
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from farandole.node.probes.ways import MPI, WayError, addresses, own_address

PINGPONG = "ibv_rc_pingpong"
DEVICES = Path("/sys/class/infiniband")
RATE = re.compile(r"= ([\d.]+) Mbit/sec")
# How often each pair sends 4 KiB there and back, and checks them. Soft-RoCE in Linux 6.1 can hang with larger ones.
TRAFFIC = ("--iters=500", "--chk")
# Seconds that one pair may take, within which the other end begins to listen; after how many no further pairs begin.
PAIR_SECONDS, LISTENS_SECONDS, ALL_SECONDS = 30, 5, 20
# How many failures are reported.
FEW = 8


def ports(network: str | None, folder: Path = DEVICES) -> dict[str, list[str]]:
    """The active ports of this host, and what ibv_rc_pingpong has to be told about each."""
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        device, number = port.parts[-3], port.name
        if not text(port / "state").endswith("ACTIVE"):
            continue
        options = [f"--ib-dev={device}", f"--ib-port={number}"]
        if text(port / "link_layer") == "Ethernet":
            place = address_of(port, network)
            if place is None:
                continue
            options.append(f"--gid-idx={place}")
        found[f"{device}/{number}"] = options
    return found


def address_of(port: Path, network: str | None) -> str | None:
    """The place of an IPv4 address among those of a port on Ethernet, in the cluster's network if it has one there."""
    try:
        subnet = ipaddress.ip_network(network or "0.0.0.0/0", strict=False)
    except ValueError:  # the test of TCP says so
        return None
    others = []
    for entry in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        address = ipaddress.IPv6Address(text(entry) or 0).ipv4_mapped
        if address and text(port / "gid_attrs" / "types" / entry.name) == "RoCE v2":
            if address in subnet:
                return entry.name
            others.append(entry.name)
    return others[0] if others else None


def text(path: Path) -> str:
    """A file of the kernel; empty without it, and for an address that is not set."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def pairs(size: int) -> Iterator[dict[int, int]]:
    """Rounds in which each rank has one partner, until every two have met; one rests if their number is odd."""
    turns = size - 1 + size % 2
    for turn in range(turns):
        partners = {}
        for rank in range(turns):
            other = (2 * turn - rank) % turns
            partners[rank] = turns if other == rank else other
        partners[turns] = turn
        yield {rank: other for rank, other in partners.items() if max(rank, other) < size}


def measure(mpi: MPI, network: str | None) -> dict[str, Any]:
    """Send data between every two ranks, from each port to the other's in the same place; what was seen.

    Every rank gets the same result, which is short: a longer line of one rank would be mixed up with others.
    """
    mine = ports(network)
    every = mpi.gather([list(mine), shutil.which(PINGPONG) is not None])
    without = [rank for rank, (names, _) in enumerate(every) if not names]
    toolless = [rank for rank, (names, has) in enumerate(every) if names and not has]
    most = max(len(names) for names, _ in every)
    fewer = [[rank, len(names)] for rank, (names, _) in enumerate(every) if len(names) < most][:FEW]
    seen = {
        "without": without, "toolless": toolless, "most": most, "fewer": fewer, "pairs": 0, "slowest": 0, "failed": [],
    }  # fmt: skip
    if without or toolless or mpi.size == 1:
        return seen
    all_rates, all_failed = list[list[float]](), list[dict[str, Any]]()
    until = time.monotonic() + ALL_SECONDS
    for partners in pairs(mpi.size):
        meeting = mpi.gather([meeting_point(network), free_port()])
        other = partners.get(mpi.rank)
        rates, failed = list[list[float]](), list[dict[str, Any]]()
        if other is not None:
            address, port = meeting[min(mpi.rank, other)]
            target = [] if mpi.rank < other else [address]
            for name, opposite in zip(every[mpi.rank][0], every[other][0], strict=False):
                rate, why = traffic([PINGPONG, *mine[name], *TRAFFIC, f"--port={port}", *target])
                if rate is None:
                    failed.append({"ranks": [mpi.rank, other], "seen": f"{name} with {opposite}: {why}"})
                elif not target:
                    rates.append([mpi.rank, other, rate])
        for more_rates, more_failed, goes_on in mpi.gather([rates, failed, time.monotonic() < until]):
            all_rates += more_rates
            all_failed += more_failed
            until = until if goes_on else 0
        if not until:
            break
    met = {(first, second) for first, second, _ in all_rates}
    slowest = min((rate for _, _, rate in all_rates), default=0)
    return {**seen, "pairs": len(met), "slowest": slowest, "failed": all_failed[:FEW]}


def meeting_point(network: str | None) -> str:
    """Where another rank finds this one."""
    try:
        return own_address(network, addresses())
    except WayError:
        return socket.gethostname()


def free_port() -> int:
    """A port of TCP on which nothing listens."""
    with socket.create_server(("", 0)) as listening:
        return int(listening.getsockname()[1])


def traffic(words: Sequence[str]) -> tuple[float | None, str]:
    """Run one end of ibv_rc_pingpong; return Mbit/s, or what it says about its failure."""
    until = time.monotonic() + LISTENS_SECONDS
    while True:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PAIR_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return None, f"nothing within {PAIR_SECONDS} s"
        if done.returncode and "connect to" in done.stderr and time.monotonic() < until:
            time.sleep(0.1)
            continue
        rate = RATE.search(done.stdout)
        if done.returncode or not rate or "invalid data" in done.stdout:
            said = [*done.stderr.splitlines(), *done.stdout.splitlines(), "no rate"]
            return None, next(line.strip() for line in said if line.strip() and "Warning" not in line)
        return float(rate[1]), ""
