"""The choice of the network for jobs, and the findings when there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from farandole.links import fabric

from .loading import load

probing = load("modules", "node_probe")
DOCKER = {"name": "docker0", "address": "172.17.0.1", "prefix": 16}
LOOPBACK = {"name": "lo", "address": "127.0.0.1", "prefix": 8}


def link(address: str, name: str = "eth0") -> dict[str, Any]:
    own, _, prefix = address.partition("/")
    return {"name": name, "address": own, "prefix": int(prefix)}


def node(*links: dict[str, Any], gpus: int = 0, **variables: Any) -> dict[str, Any]:
    return {"_preflight_probe": {"probe": {"interfaces": [LOOPBACK, DOCKER, *links], "gpus": gpus}}, **variables}


def arguments(wanted: str, nodes: Mapping[str, tuple[str, dict[str, Any]]]) -> tuple[list[str], dict[str, Any], str]:
    """The nodes, given by address and probe, as a role gives them."""
    return [*nodes], {name: {"cluster_ip": address, **own} for name, (address, own) in nodes.items()}, wanted


def choose(wanted: str = "", **nodes: tuple[str, dict[str, Any]]) -> fabric.Fabric:
    return fabric.choose(*arguments(wanted, nodes))


def test_the_network_depends_on_addresses_not_on_interface_names() -> None:
    assert choose(
        a=("10.0.0.1", node(link("192.0.2.1/24"), link("10.0.0.1/16", "ens3"))),
        b=("10.0.7.2", node(link("192.0.2.2/24"), link("10.0.7.2/16", "ib0"))),
    ) == fabric.Fabric("10.0.0.0/16", {"a": "ens3", "b": "ib0"})


def test_the_smallest_common_network_is_chosen() -> None:
    found = choose(a=("10.0.0.1", node(link("10.0.0.1/8"))), b=("10.0.0.2", node(link("10.0.0.2/24"))))
    assert found.network == "10.0.0.0/24"
    found = choose(a=("10.0.0.1", node(link("10.0.0.1/8"))), b=("10.9.0.2", node(link("10.9.0.2/24"))))
    assert found.network == "10.0.0.0/8"


def test_a_configured_network_takes_precedence() -> None:
    routed = {
        "a": ("10.0.0.1", node(link("10.0.0.1/32"), link("198.51.100.1/24", "ib0"))),
        "b": ("10.0.1.2", node(link("10.0.1.2/32"), link("198.51.100.2/24", "ib0"))),
    }
    assert choose("10.0.0.0/23", **routed).interfaces == {"a": "eth0", "b": "eth0"}
    assert choose("198.51.100.7/24", **routed) == fabric.Fabric("198.51.100.0/24", {"a": "ib0", "b": "ib0"})


def test_the_interface_with_the_cluster_address_comes_first() -> None:
    two = node(link("10.0.0.9/24", "eth1"), link("10.0.0.1/24"))
    (finding,) = choose("10.0.0.0/24", a=("10.0.0.1", two)).findings
    assert finding.code == "interfaces-ambiguous"
    assert "eth0 and eth1" in finding.cause


def test_the_network_contains_nodes_outside_limit() -> None:
    near = ("10.0.0.1", node(link("10.0.0.1/24")))
    assert choose(a=near, b=("10.0.0.2", {})).interfaces == {"a": "eth0"}
    (finding,) = choose(a=near, b=("10.0.9.2", {})).findings
    assert (finding.host, finding.code) == ("all", "network-not-shared")
    assert finding.cause.endswith(": a in 10.0.0.0/24; b in 10.0.9.2")
    far = ("192.0.2.3", node(link("192.0.2.3/24")))
    (finding,) = choose(a=near, b=("10.0.0.2", {}), c=far).findings
    assert finding.cause.endswith(": a, b in 10.0.0.0/24; c in 192.0.2.0/24")


REFUSED = {
    "two networks": (
        "",
        {
            "a": ("10.0.0.1", node(link("10.0.0.1/24"))),
            "b": ("10.0.0.2", node(link("10.0.0.2/24"))),
            "c": ("192.0.2.3", node(link("192.0.2.3/24"))),
        },
        {"all": "network-not-shared"},
    ),
    "an address that the node does not have": (
        "",
        {"a": ("203.0.113.1", node(link("10.0.0.1/24")))},
        {"a": "address-absent"},
    ),
    "IPv6": ("", {"a": ("2001:db8::1", node(link("2001:db8::1/64")))}, {"a": "address-not-ipv4"}),
    "no address": ("", {"a": ("", node(link("10.0.0.1/24")))}, {"a": "address-not-ipv4"}),
    "a bridge in the network": (
        "",
        {name: (f"172.16.5.{n}", node(link(f"172.16.5.{n}/12"))) for n, name in enumerate("abc", 1)},
        dict.fromkeys("abc", "interfaces-ambiguous"),
    ),
    "the decoy by hand": (
        "172.17.0.0/16",
        {name: (f"10.0.0.{n}", node(link(f"10.0.0.{n}/24"))) for n, name in enumerate("ab", 1)},
        dict.fromkeys("ab", "address-shared"),
    ),
    "a network that is none": ("ib0", {"a": ("10.0.0.1", node(link("10.0.0.1/24")))}, {"all": "network-malformed"}),
    "a network where a node is not": (
        "10.0.0.0/24",
        {"a": ("10.0.0.1", node(link("10.0.0.1/24"))), "b": ("10.0.9.2", node(link("10.0.9.2/24")))},
        {"b": "network-not-on-node"},
    ),
}


@pytest.mark.parametrize(("wanted", "nodes", "codes"), REFUSED.values(), ids=REFUSED)
def test_a_problem_is_a_finding(wanted: str, nodes: Any, codes: dict[str, str]) -> None:
    found = choose(wanted, **nodes)
    assert [(one.host, one.code) for one in found.findings] == [*codes.items()]
    assert (found.network, found.interfaces) == ("", {})


def test_a_bridge_is_excluded_by_the_smallest_network_of_the_nodes() -> None:
    _, nodes, _ = REFUSED["a bridge in the network"]
    (cure,) = {one.cure for one in choose("", **nodes).findings}
    assert cure.endswith("172.16.5.0/30")


def test_nodes_that_nobody_asked_are_reported_only_to_a_role() -> None:
    nodes = {"a": ("10.0.0.1", dict[str, Any]())}
    assert choose("", **nodes) == fabric.Fabric()
    assert "[nodes-unknown]" in fabric.choice(*arguments("", nodes))["refusal"]


def test_a_role_gets_the_choice_or_a_refusal() -> None:
    nodes = {"a": ("10.0.0.1", node(link("10.0.0.1/24")))}
    choice = {"network": "10.0.0.0/24", "interfaces": {"a": "eth0"}, "refusal": ""}
    assert fabric.choice(*arguments("", nodes)) == choice
    assert fabric.choice(*arguments("10.9.0.0/16", nodes))["refusal"] == (
        "found 1 problem with the network for jobs; the settings of jobs were not changed.\n\n"
        "1. a: none of its interfaces has an address in 10.9.0.0/16 [network-not-on-node]\n"
        "   cure: correct fabric_network, or give it an address there"
    )


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
