"""What preflight makes of the connections between nodes: what it keeps, and what it says that it did not try."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.inventory.cluster import Node
from farandole.links.examine import Examined, Wanted, examine
from farandole.links.fabric import Fabric
from farandole.links.judge import Bars

from .machines import login, probe

# Others that run these tests at the same time have other addresses.
NET = os.getpid() % 200 + 20
NODES = ("node-1", "node-2", "node-3")
ADDRESSES = {name: f"127.0.{NET}.{place}" for place, name in enumerate(NODES, 10)}


def examined(
    names: Sequence[str],
    what: str = "auto",
    former: Mapping[str, Any] | None = None,
    accounts: Sequence[str] = (),
    shared: Sequence[str] = ("sh", "-c"),
    user: str = "root",
) -> Examined:
    """What is found on these nodes, which are programs on this machine; the cluster has all of NODES."""
    hostvars: dict[str, dict[str, Any]] = {name: {} for name in NODES}
    for name in names:
        seen = probe(name, accounts={user: {"user_id": 0}} if name in accounts else {})
        answer = {"probe": seen, "login": {**login(), "shared": [*shared]}}
        hostvars[name] = {"_preflight_probe": answer, "ansible_python_interpreter": sys.executable}
    # Whatever the rates are, none is too slow.
    wanted = Wanted(what, Bars(0), "node-1", user, Fabric("127.0.0.0/8", addresses=ADDRESSES), NODES)
    return examine([Node(name, ADDRESSES[name]) for name in names], hostvars, wanted, former or {}, print)


def measured(delay: float = 5.0, rate: float = 100.0) -> dict[str, float]:
    return {"delay_us": delay, "mb_per_s": rate}


def test_a_run_with_some_nodes_keeps_what_was_measured_of_the_others() -> None:
    then = "2026-01-02T03:04:05Z"
    pairs = [[*ends, 1.0, 1.0] for ends in (NODES[:2], NODES[1:], ("node-3", "gone"))]
    nodes = {**{name: measured() for name in NODES}, "node-3": measured(7.0, 3.0), "gone": measured()}
    former = {"nodes": nodes, "usual_mb_per_s": 100.0, "rates_measured": then, "pairs": pairs}
    links = examined(NODES[:2], former=former).links
    assert {name: own["mb_per_s"] for name, own in links["nodes"].items()} == {
        "node-1": 100.0, "node-2": 100.0, "node-3": 3.0,
    }  # fmt: skip
    assert links["nodes"]["node-3"] == measured(7.0, 3.0)
    assert (links["usual_mb_per_s"], links["rates_measured"], links["pairs"]) == (100.0, then, pairs[:2])
    # The two are measured again.
    links = examined(NODES[:2], "all", former).links
    assert links["nodes"]["node-3"] == measured(7.0, 3.0)
    assert links["nodes"]["node-1"]["mb_per_s"] > 3 < links["usual_mb_per_s"]
    assert links["rates_measured"] == then
    assert [pair for pair in links["pairs"] if "node-3" in pair] == pairs[1:2]
    assert pairs[0] not in links["pairs"]
    # Nothing is left of an earlier run if all are.
    links = examined(NODES, "all", former).links
    assert links["nodes"].keys() == {*NODES}
    assert links["nodes"]["node-3"]["mb_per_s"] != 3.0
    assert links["rates_measured"] > then
    assert not [pair for pair in pairs if pair in links["pairs"]]
