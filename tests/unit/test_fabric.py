"""The choice of the network for jobs, and the findings when there is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farandole import fabric

from .loading import load

probing = load("modules", "node_probe")
DOCKER = {"name": "docker0", "address": "172.17.0.1", "prefix": 16}
LOOPBACK = {"name": "lo", "address": "127.0.0.1", "prefix": 8}


def link(address: str, name: str = "eth0") -> dict[str, Any]:
    own, _, prefix = address.partition("/")
    return {"name": name, "address": own, "prefix": int(prefix)}


def node(*links: dict[str, Any], gpus: int = 0, **variables: Any) -> dict[str, Any]:
    return {"_preflight_probe": {"probe": {"interfaces": [LOOPBACK, DOCKER, *links], "gpus": gpus}}, **variables}


def choose(wanted: str = "", **nodes: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Choose a network for nodes given by address and probe."""
    addresses = {name: address for name, (address, _) in nodes.items()}
    hostvars = {name: variables for name, (_, variables) in nodes.items()}
    return fabric.choice(addresses, hostvars, wanted)


def chosen(network: str, **interfaces: str) -> dict[str, Any]:
    return {"network": network, "interfaces": interfaces, "findings": [], "refusal": ""}


def test_the_network_depends_on_addresses_not_on_interface_names() -> None:
    assert choose(
        a=("10.0.0.1", node(link("192.0.2.1/24"), link("10.0.0.1/16", "ens3"))),
        b=("10.0.7.2", node(link("192.0.2.2/24"), link("10.0.7.2/16", "ib0"))),
    ) == chosen("10.0.0.0/16", a="ens3", b="ib0")


def test_the_smallest_common_network_is_chosen() -> None:
    found = choose(a=("10.0.0.1", node(link("10.0.0.1/8"))), b=("10.0.0.2", node(link("10.0.0.2/24"))))
    assert found["network"] == "10.0.0.0/24"
    found = choose(a=("10.0.0.1", node(link("10.0.0.1/8"))), b=("10.9.0.2", node(link("10.9.0.2/24"))))
    assert found["network"] == "10.0.0.0/8"


def test_a_configured_network_takes_precedence() -> None:
    routed = {
        "a": ("10.0.0.1", node(link("10.0.0.1/32"), link("198.51.100.1/24", "ib0"))),
        "b": ("10.0.1.2", node(link("10.0.1.2/32"), link("198.51.100.2/24", "ib0"))),
    }
    assert choose("10.0.0.0/23", **routed)["interfaces"] == {"a": "eth0", "b": "eth0"}
    assert choose("198.51.100.7/24", **routed) == chosen("198.51.100.0/24", a="ib0", b="ib0")


def test_the_interface_with_the_cluster_address_is_preferred() -> None:
    two = node(link("10.0.0.9/24", "eth1"), link("10.0.0.1/24"))
    assert choose("10.0.0.0/24", a=("10.0.0.1", two))["interfaces"] == {"a": "eth0"}


def test_the_network_contains_nodes_outside_limit() -> None:
    near = ("10.0.0.1", node(link("10.0.0.1/24")))
    assert choose(a=near, b=("10.0.0.2", {}))["interfaces"] == {"a": "eth0"}
    assert "a in 10.0.0.0/24; b in 10.0.9.2" in choose(a=near, b=("10.0.9.2", {}))["refusal"]
    far = ("192.0.2.3", node(link("192.0.2.3/24")))
    assert "a, b in 10.0.0.0/24; c in 192.0.2.0/24" in choose(a=near, b=("10.0.0.2", {}), c=far)["refusal"]


REFUSED = {
    "two networks": (
        "",
        {
            "a": ("10.0.0.1", node(link("10.0.0.1/24"))),
            "b": ("10.0.0.2", node(link("10.0.0.2/24"))),
            "c": ("192.0.2.3", node(link("192.0.2.3/24"))),
        },
        ["share no network: a, b in 10.0.0.0/24; c in 192.0.2.0/24", "set cluster_ip", "fabric_network"],
    ),
    "an address that the node does not have": (
        "",
        {"a": ("203.0.113.1", node(link("10.0.0.1/24")))},
        ["1. a: its cluster address 203.0.113.1 is on none", "set cluster_ip"],
    ),
    "IPv6": (
        "",
        {"a": ("2001:db8::1", node(link("2001:db8::1/64")))},
        ["1. a: its address is 2001:db8::1", "IPv4", "set cluster_ip"],
    ),
    "no address": ("", {"a": ("", node(link("10.0.0.1/24")))}, ["1. a: its address is none", "set cluster_ip"]),
    "a bridge in the network": (
        "",
        {name: (f"172.16.5.{n}", node(link(f"172.16.5.{n}/12"))) for n, name in enumerate("abc", 1)},
        ["1. a, b, c: its interfaces eth0 and docker0 are both in 172.16.0.0/12", "for example 172.16.5.0/30"],
    ),
    "the decoy by hand": (
        "172.17.0.0/16",
        {name: (f"10.0.0.{n}", node(link(f"10.0.0.{n}/24"))) for n, name in enumerate("ab", 1)},
        ["1. a, b: it shares its address 172.17.0.1 in 172.17.0.0/16", "leave it empty"],
    ),
    "a network that is none": (
        "ib0",
        {"a": ("10.0.0.1", node(link("10.0.0.1/24")))},
        ["fabric_network ib0", "192.0.2.0/24"],
    ),
    "a network where a node is not": (
        "10.0.0.0/24",
        {"a": ("10.0.0.1", node(link("10.0.0.1/24"))), "b": ("10.0.9.2", node(link("10.0.9.2/24")))},
        ["1. b: none of its interfaces has an address in 10.0.0.0/24", "correct fabric_network"],
    ),
    "nodes that nobody asked": ("", {"a": ("10.0.0.1", {})}, ["nothing is known", "preflight"]),
}


@pytest.mark.parametrize(("wanted", "nodes", "words"), REFUSED.values(), ids=REFUSED)
def test_problems_are_reported_with_their_cure(wanted: str, nodes: Any, words: list[str]) -> None:
    refusal = choose(wanted, **nodes)["refusal"]
    assert refusal.startswith("preflight found 1 problem")
    assert "\n   cure: " in refusal
    assert [word for word in words if word not in refusal] == []


def test_many_hosts_are_abbreviated() -> None:
    nodes = {f"n{n}": (f"10.0.{n}.1", node(link(f"10.0.{n}.1/24"))) for n in range(9)}
    assert "n0, n1, n2, n3, n4 and 4 more" in choose("10.9.0.0/16", **nodes)["refusal"]


def test_the_hostfile_has_a_line_per_node_in_inventory_order() -> None:
    hostvars = {"b": node(gpus=8), "a": node(), "c": node(gpus=4, fabric_slots=2), "d": {}}
    assert fabric.hostfile(["b", "a", "c", "d"], hostvars) == "b slots=8\na slots=1\nc slots=2\nd slots=8\n"
    assert fabric.hostfile(["d"], hostvars) == "d slots=1\n"


def test_the_probe_reads_the_interfaces() -> None:
    said = [
        {"ifname": "lo", "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
        {
            "ifname": "eth0",
            "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}, {"local": "fe80::1", "prefixlen": 64}],
        },
        {"ifname": "eth1", "addr_info": []},
        {},
    ]
    assert probing.interfaces(json.dumps(said)) == [LOOPBACK, link("10.0.0.1/24"), link("fe80::1/64")]
