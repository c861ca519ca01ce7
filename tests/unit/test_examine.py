"""What preflight makes of the connections between nodes: what it keeps, and what it says that it did not try."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

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
) -> Examined:
    """What is found on these nodes, which are programs on this machine; the cluster has all of NODES."""
    hostvars: dict[str, dict[str, Any]] = {name: {} for name in NODES}
    for name in names:
        seen = probe(name, accounts={"trainer": {"user_id": 2000}} if name in accounts else {})
        answer = {"probe": seen, "login": {**login(), "shared": [*shared]}}
        hostvars[name] = {"_preflight_probe": answer, "ansible_python_interpreter": sys.executable}
    # Whatever the rates are, none is too slow.
    wanted = Wanted(what, Bars(0), "node-1", "trainer", Fabric("127.0.0.0/8", addresses=ADDRESSES), NODES)
    return examine([Node(name, ADDRESSES[name]) for name in names], hostvars, wanted, former or {}, print)


def measured(delay: float = 5.0, rate: float = 100.0) -> dict[str, float]:
    return {"delay_us": delay, "mb_per_s": rate}


def test_a_run_with_some_nodes_keeps_what_was_measured_of_the_others() -> None:
    then = "2020-01-02T03:04:05Z"
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


def untried(found: Examined) -> list[tuple[str, str]]:
    return [(item.host, item.cause) for item in found.findings if item.code == "pair-untried"]


def refused(found: Examined) -> set[str]:
    """Where nobody could log in: here, these names mean nothing."""
    return {item.host for item in found.findings if item.code == "pair-login-failed"}


def test_it_is_said_which_connections_were_not_tried() -> None:
    for names, shared in ((NODES[1:2], ("sh", "-c")), (NODES, ())):
        hosts = [
            (host, "its connections were not tried" in cause)
            for host, cause in untried(examined(names, "all", shared=shared))
        ]
        assert hosts == [(name, True) for name in names]
    assert examined(NODES[1:2], "auto").findings == []
    assert untried(examined(NODES, "all")) == []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts programs of our own in the place of those that change the user, on all nodes."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    # Nobody knows the names of the nodes, which is to be said soon.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")

    def write(**scripts: str) -> None:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return write


def test_it_is_said_which_logins_were_not_tried(programs: Callable[..., None]) -> None:
    programs(id="echo 0", runuser='shift 3; exec "$@"')
    everywhere = examined(NODES, "all", accounts=NODES)
    assert (untried(everywhere), refused(everywhere)) == ([], {*NODES})
    # One node does not have the job user yet, which says nothing about the others.
    two = examined(NODES, "all", accounts=NODES[:2])
    assert untried(two) == [("node-3", "logins to it as trainer were not tried: it has no account trainer")]
    assert refused(two) == {*NODES[:2]}
    assert {item.host for item in two.findings if item.code == "pair-name-wrong"} == {*NODES[:2]}
    (headless,) = untried(examined(NODES[1:], "all", accounts=NODES))
    assert headless == ("node-1", "logins from it as trainer were not tried: this run leaves it out")


def test_a_sudo_that_asks_for_a_password_is_named(programs: Callable[..., None]) -> None:
    programs(id="echo 1000", sudo="exit 1")
    found = examined(NODES, "all", accounts=NODES)
    (only,) = untried(found)
    assert only == (
        "node-1",
        "logins from it as trainer were not tried: that needs root there, or sudo without a password",
    )
    assert refused(found) == set()
