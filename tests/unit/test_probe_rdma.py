"""How the RDMA probe finds ports and partners; on hosts with Debian's own kernel it is run by `make test-kernels`."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from .loading import load_probe

rdma = load_probe("rdma")
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


def port(folder: Path, name: str, state: str, layer: str, *addresses: str) -> None:
    own = folder / name / "ports/1"
    (own / "gids").mkdir(parents=True)
    (own / "gid_attrs/types").mkdir(parents=True)
    (own / "state").write_text(f"{state}\n")
    (own / "link_layer").write_text(f"{layer}\n")
    for place, address in enumerate(addresses):
        (own / "gids" / str(place)).write_text(f"{address}\n")
        (own / "gid_attrs/types" / str(place)).write_text("RoCE v2\n")


def test_active_ports_are_found_with_their_address_in_the_clusters_network(tmp_path: Path) -> None:
    local, first, second = "fe80::aff:fe5e:b", "0000:0000:0000:0000:0000:ffff:0a5e:000b", "::ffff:192.0.2.7"
    port(tmp_path, "roce", "4: ACTIVE", "Ethernet", NONE, local, first, second)
    port(tmp_path, "plain", "4: ACTIVE", "Ethernet", local)
    port(tmp_path, "ib", "4: ACTIVE", "InfiniBand", local)
    port(tmp_path, "down", "1: DOWN", "InfiniBand", local)
    ways = {network: rdma.ports(network, tmp_path) for network in ("192.0.2.0/24", "10.94.0.0/22", None)}
    assert {network: found["roce/1"][-1] for network, found in ways.items()} == {
        "192.0.2.0/24": "--gid-idx=3", "10.94.0.0/22": "--gid-idx=2", None: "--gid-idx=2",
    }  # fmt: skip
    assert all(found.keys() == {"ib/1", "roce/1"} for found in ways.values())
    assert rdma.ports("eth0", tmp_path).keys() == {"ib/1"}
    assert ways[None]["ib/1"] == ["--ib-dev=ib", "--ib-port=1"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_two_ranks_meet_once_and_each_has_one_partner_at_a_time(size: int) -> None:
    met = []
    for partners in rdma.pairs(size):
        assert all(partners[other] == rank != other for rank, other in partners.items())
        met += [(rank, other) for rank, other in partners.items() if rank < other]
    assert sorted(met) == sorted(combinations(range(size), 2))


class Rank:
    """One of several ranks, each a thread, that only gather."""

    def __init__(self, rank: int, size: int, said: list[Any], meets: threading.Barrier) -> None:
        self.rank, self.size, self.said, self.meets = rank, size, said, meets

    def gather(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        self.meets.wait(10)
        every = list(self.said)
        self.meets.wait(10)
        return every


def test_the_result_is_the_same_on_all_ranks_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of ranks, as a long line of one rank would be mixed up with others."""
    size = 9
    monkeypatch.setattr(rdma, "ports", lambda network: {"rxe0/1": []} | ({"rxe1/1": []} if network else {}))
    monkeypatch.setattr(rdma, "meeting_point", lambda *_: "here")
    monkeypatch.setattr(shutil, "which", lambda program: program)

    def measured(fails: bool, one_port: range = range(size)) -> dict[str, Any]:
        monkeypatch.setattr(rdma, "traffic", lambda words: (None, "lost") if fails else (5.0 + len(words), ""))
        said, meets = [None] * size, threading.Barrier(size)
        with ThreadPoolExecutor(size) as pool:
            first, *others = pool.map(
                lambda rank: rdma.measure(rank, None if rank.rank in one_port else "192.0.2.0/24"),
                [Rank(rank, size, said, meets) for rank in range(size)],
            )
        assert all(other == first for other in others)
        assert len(json.dumps(first)) < 1000
        return dict(first)

    alike = {"without": [], "toolless": [], "most": 1, "fewer": [], "pairs": 36, "slowest": 9.0, "failed": []}
    assert measured(fails=False) == alike
    failed = measured(fails=True)["failed"]
    assert len(failed) == rdma.FEW
    assert failed[0]["seen"] == "rxe0/1 with rxe0/1: lost"
    # A port that is down has no partner.
    uneven = measured(fails=False, one_port=range(2, 4))
    assert (uneven["most"], uneven["fewer"], uneven["pairs"]) == (2, [[2, 1], [3, 1]], 36)
