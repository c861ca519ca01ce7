"""The choice of the network for jobs, and the findings when there is none."""

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
    chosen = choose(a=("10.0.0.1", node(link("10.0.0.1/8"))), b=("10.0.0.2", node(link("10.0.0.2/24"))))
    assert chosen.network == "10.0.0.0/24"
    chosen = choose(a=("10.0.0.1", node(link("10.0.0.1/8"))), b=("10.9.0.2", node(link("10.9.0.2/24"))))
    assert chosen.network == "10.0.0.0/8"


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


@pytest.mark.parametrize(
    ("wanted", "links", "codes"),
    [
        ("", ["10.0.0.1/24", "10.0.0.2/24", "192.0.2.3/24"], {"all": "network-not-shared"}),
        ("", ["203.0.113.1 10.0.0.1/24"], {"a": "address-absent"}),
        ("", ["2001:db8::1/64"], {"a": "address-not-ipv4"}),
        ("", [" 10.0.0.1/24"], {"a": "address-not-ipv4"}),
        # The bridge of Docker is in this network, and its own one is named by hand.
        ("", ["172.16.5.1/12", "172.16.5.2/12", "172.16.5.3/12"], dict.fromkeys("abc", "interfaces-ambiguous")),
        ("172.17.0.0/16", ["10.0.0.1/24", "10.0.0.2/24"], dict.fromkeys("ab", "address-shared")),
        ("ib0", ["10.0.0.1/24"], {"all": "network-malformed"}),
        ("10.0.0.0/24", ["10.0.0.1/24", "10.0.9.2/24"], {"b": "network-not-on-node"}),
    ],
)
def test_a_problem_is_a_finding(wanted: str, links: list[str], codes: dict[str, str]) -> None:
    nodes = {}
    for name, text in zip("abc", links, strict=False):
        address, _, other = text.partition(" ")
        nodes[name] = (address.partition("/")[0], node(link(other or address)))
    chosen = choose(wanted, **nodes)
    assert [(each.host, each.code) for each in chosen.findings] == [*codes.items()]
    assert (chosen.network, chosen.interfaces) == ("", {})
    if "interfaces-ambiguous" in codes.values():
        # The smallest network of the nodes has no bridge in it.
        assert {each.cure.split()[-1] for each in chosen.findings} == {"172.16.5.0/30"}


def test_nodes_that_nobody_asked_are_reported_only_to_a_role() -> None:
    nodes = {"a": ("10.0.0.1", dict[str, Any]())}
    assert choose("", **nodes) == fabric.Fabric()
    assert "[nodes-unknown]" in fabric.choice(*arguments("", nodes))["refusal"]


def test_a_role_gets_the_choice_or_a_refusal() -> None:
    nodes = {"a": ("10.0.0.1", node(link("10.0.0.1/24")))}
    choice = {"network": "10.0.0.0/24", "interfaces": {"a": "eth0"}, "refusal": ""}
    assert fabric.choice(*arguments("", nodes)) == choice
    assert "[network-not-on-node]" in fabric.choice(*arguments("10.9.0.0/16", nodes))["refusal"]


def test_the_hostfile_has_a_line_per_node_in_inventory_order() -> None:
    hostvars = {"b": node(gpus=8), "a": node(), "c": node(gpus=4, fabric_slots=2), "d": {}}
    assert fabric.hostfile(["b", "a", "c", "d"], hostvars) == "b slots=8\na slots=1\nc slots=2\nd slots=8\n"
    assert fabric.hostfile(["d"], hostvars) == "d slots=1\n"


def test_nodes_outside_limit_stay_as_last_known() -> None:
    head, other = node(link("10.0.0.1/24")), node(link("10.0.0.2/24", "ens3"), gpus=4)
    names, every, _ = arguments("", {"head": ("10.0.0.1", head), "node-2": ("10.0.0.2", other)})
    last = {name: own["_preflight_probe"]["probe"] for name, own in every.items()}
    limited = {**every, "node-2": {"cluster_ip": "10.0.0.2"}}
    assert fabric.hostfile(names, limited, last) == fabric.hostfile(names, every) == "head slots=1\nnode-2 slots=4\n"
    assert fabric.choice(names, limited, "", last) == fabric.choice(names, every)
    # What this run has seen counts more.
    assert fabric.hostfile(names, every, {"node-2": {**last["node-2"], "gpus": 8}}) == fabric.hostfile(names, every)
    # What is outdated refuses nothing.
    moved = {**every, "node-2": {"cluster_ip": "10.0.0.3"}}
    choice = {"network": "10.0.0.0/24", "interfaces": {"head": "eth0"}, "refusal": ""}
    assert fabric.choice(names, moved, "", last) == choice
    nobody: dict[str, dict[str, Any]] = {name: {} for name in names}
    assert "[nodes-unknown]" in fabric.choice(names, nobody, "", last)["refusal"]


def test_the_probe_reads_the_interfaces() -> None:
    said = [
        {"ifname": "lo", "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
        {"ifname": "eth0", "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}]},
        {"ifname": "eth0", "addr_info": [{"local": "fe80::1", "prefixlen": 64}]},
        {"ifname": "eth1", "addr_info": []},
        {},
    ]
    assert probing.interfaces(json.dumps(said)) == [LOOPBACK, link("10.0.0.1/24"), link("fe80::1/64")]
