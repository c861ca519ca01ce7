"""How the MPI probe checks its ranks, and how it measures. playbooks/validate.yml runs it for real."""

from __future__ import annotations

import queue
import socket
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from farandole.core.causes import causes

from .loading import load_probe

mpi, ways = load_probe("mpi"), load_probe("ways")
HERE = socket.gethostname()


class Rank:
    """One of several ranks, each a thread; a message is put into the receiver's queue."""

    def __init__(self, rank: int, queues: list[queue.Queue[int]], loses: int | None) -> None:
        self.rank, self.size, self.queues, self.loses = rank, len(queues), queues, loses

    def send(self, values: array[int], to: int) -> None:
        self.queues[to].put(values[0] - (to == self.loses))

    def receive(self, values: array[int], of: int) -> None:
        assert of == (self.rank - 1) % self.size
        values[0] = self.queues[self.rank].get(timeout=5)


def ring(size: int, loses: int | None = None) -> list[str]:
    queues: list[queue.Queue[int]] = [queue.Queue() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        wrong = pool.map(lambda rank: list(mpi.ring(rank)), [Rank(number, queues, loses) for number in range(size)])
        return [error["seen"] for errors in wrong for error in errors]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_goes_round_once(size: int) -> None:
    assert ring(size) == []


@pytest.mark.parametrize(("loses", "seen"), [(0, ["5 after 3"]), (1, ["5 after 3", "2 after 2", "5 after 3"])])
def test_a_wrong_token_is_reported(loses: int, seen: list[str]) -> None:
    wanted = {"5 after 3": 6, "2 after 2": 3}
    assert ring(3, loses) == [
        f"the token that goes round the ranks is {order} of 3, not {wanted[order]}" for order in seen
    ]


class Summing:
    """Three ranks with equal data; one of a thousand elements may be wrong."""

    size, count = 3, 0

    def __init__(self, rank: int, wrong: float) -> None:
        self.rank, self.wrong = rank, wrong

    def reduce(self, values: array[Any], kind: str, how: str) -> array[Any]:
        assert how == "sum" and kind in ("float", "double", "int64_t")
        self.count += 1
        total: array[Any] = array(values.typecode, [6]) * len(values)
        if len(values) == 1000 and kind == "double":
            total[500] += self.wrong
        return total


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (0, []),
        (0.5, ["the sum of 1000 float64 is 6.0 to 6.5, not 6"]),
        (-0.5, ["the sum of 1000 float64 is 5.5 to 6.0, not 6"]),
    ],
)
def test_inexact_sums_are_reported(wrong: float, seen: list[str]) -> None:
    summing = Summing(1, wrong)
    assert list(mpi.sums(summing)) == [{"code": "wrong-values", "host": HERE, "seen": order} for order in seen]
    assert summing.count == 9


def test_the_address_in_the_network_of_the_cluster() -> None:
    addresses = ["127.0.0.1", "172.17.0.1", "10.94.0.11"]
    assert ways.own_address("10.94.0.0/24", addresses) == "10.94.0.11"
    assert ways.own_address("10.94.0.11/24", addresses) == "10.94.0.11"


@pytest.mark.parametrize(
    ("network", "code", "seen"),
    [
        (None, "network-unset", "HOROVOD_NETWORK is not set, so TCP was not measured"),
        ("", "network-unset", "HOROVOD_NETWORK is not set, so TCP was not measured"),
        ("eth0", "network-unfit", "HOROVOD_NETWORK is eth0, which is not a network"),
        ("10.95.0.0/24", "network-unfit", "none of 127.0.0.1, 10.94.0.11 is in HOROVOD_NETWORK, which is 10.95.0.0/24"),
    ],
)
def test_a_missing_address_is_reported(network: str | None, code: str, seen: str) -> None:
    with pytest.raises(ways.WayError) as reported:
        ways.own_address(network, ["127.0.0.1", "10.94.0.11"])
    assert reported.value.args == (code, seen)
    assert causes()[code].seen == "probe"


class Meeting:
    """One of two ranks, each a thread, that exchange what they gather."""

    def __init__(self, rank: int, boxes: list[queue.Queue[Any]]) -> None:
        self.rank, self.size, self.boxes = rank, 2, boxes

    def gather(self, value: Any) -> list[Any]:
        self.boxes[1 - self.rank].put(value)
        other = self.boxes[self.rank].get(timeout=5)
        return [value, other] if self.rank == 0 else [other, value]

    def send(self, values: array[int], to: int) -> None:
        self.boxes[to].put(values[0])

    def receive(self, values: array[int], of: int) -> None:
        assert of == 1 - self.rank
        values[0] = self.boxes[self.rank].get(timeout=5)


def both(job: Any) -> list[Any]:
    boxes: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(job, [Meeting(0, boxes), Meeting(1, boxes)]))


def met(monkeypatch: pytest.MonkeyPatch, network: str) -> list[Any]:
    monkeypatch.setattr(ways, "addresses", lambda: ["127.0.0.2"])
    return both(lambda rank: ways.meet(rank, network))


def test_plain_tcp_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "ENOUGH_SECONDS", 0.005)
    connections = [connection for connection, errors in met(monkeypatch, "127.0.0.0/8") if errors == []]
    assert [connection.gettimeout() for connection in connections] == [None, None]
    assert [connection.getpeername()[0] for connection in connections] == ["127.0.0.2", "127.0.0.2"]
    compare = partial(both, lambda rank: mpi.compare(rank, [ways.OverTCP(rank.rank == 0, connections[rank.rank])]))
    # TCP sleeps while it waits, so no round would count as quiet; the limit is lifted for this test.
    monkeypatch.setattr(mpi, "WAITED", 1000)
    first, second = compare()
    assert [quiet for quiet, _ in first] == [True] * mpi.QUIET == [quiet for quiet, _ in second]
    monkeypatch.setattr(mpi, "WAITED", 0)
    monkeypatch.setattr(mpi, "ALL_SECONDS", 0)
    disturbed, _ = compare()
    assert [quiet for quiet, _ in disturbed] == [False] * mpi.FEWEST
    # Each rank looks before and after every gauge. Another program disturbs the fourth, so both rounds beside it.
    looks: defaultdict[int, Iterator[int]] = defaultdict(lambda: iter([0] * 7 + [9] * 9))
    monkeypatch.setattr(mpi, "WAITED", 0.1)
    monkeypatch.setattr(mpi, "waiting", lambda: next(looks[threading.get_ident()]))
    disturbed, _ = compare()
    assert [quiet for quiet, _ in disturbed] == [True, True, False, False, True, True, True]
    reported = mpi.speeds(first)
    assert 1 < reported["latency_us"] < 10_000 and 10 < reported["bandwidth_mbs"] < 100_000
    for connection in connections:
        connection.close()


def test_a_closed_port_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "none of 127.0.0.2 is in HOROVOD_NETWORK, which is 10.95.0.0/24"
    error = {"code": "network-unfit", "host": HERE, "seen": seen}
    assert [wrong for _, wrong in met(monkeypatch, "10.95.0.0/24")] == [[error], []]
    # Bound, but not listening.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ways, "listen", lambda _: silent)
        (none, quiet), (nothing, wrong) = met(monkeypatch, "127.0.0.0/8")
        number = silent.getsockname()[1]
    assert (none, nothing, quiet) == (None, None, [])
    seen = f"127.0.0.2 cannot reach 127.0.0.1, port {number}: [Errno 111] Connection refused"
    assert wrong == [{"code": "port-unreachable", "host": HERE, "seen": seen}]
    assert causes()["port-unreachable"].seen == "probe"


def test_a_connection_that_breaks_ends_the_job() -> None:
    near, far = socket.socketpair()
    far.sendall(b"1234")
    far.close()
    way = ways.OverTCP.__new__(ways.OverTCP)
    way.connection = near
    with pytest.raises(ConnectionError):
        way.receive(way.message(8))
    near.close()


def test_batches_are_long_enough() -> None:
    assert mpi.often(seconds=mpi.ENOUGH_SECONDS / 6, count=50) == 300
    assert mpi.often(seconds=9, count=8) == 1
    assert mpi.often(seconds=0, count=8) == 10_000


def test_speeds_are_the_best_of_the_quiet_rounds() -> None:
    rounds = [(True, [22e-6, 0.001, 40e-6, 0.0005]), (True, [20e-6, 0.002, 44e-6, 0.0006]), (False, [1e-6] * 4)]
    both_ways = {"latency_us": 10.0, "bandwidth_mbs": 4194.3, "tcp_latency_us": 20.0, "tcp_mbs": 8388.6}
    assert mpi.speeds(rounds) == {**both_ways, "quiet": 2, "rounds": 3}
    without_tcp = {"tcp_latency_us": None, "tcp_mbs": None, "quiet": 2, "rounds": 2}
    assert mpi.speeds([(quiet, took[:2]) for quiet, took in rounds[:2]]) == {**both_ways, **without_tcp}
    assert mpi.speeds([(False, took) for _, took in rounds[:2]]) == {**both_ways, "quiet": 0, "rounds": 2}
    assert mpi.speeds([]) == {**dict.fromkeys(both_ways), "quiet": 0, "rounds": 0}
