"""The filters for names and addresses of nodes."""

from typing import Any

import pytest

from farandole.inventory import cluster

LOOPBACK = ["127.0.0.1", "::1"]
KEYS = {"host_key": "ssh-ed25519 host", "job_keys": {"trainer": "ssh-ed25519 job"}}


def asked_for(names: list[str], hostvars: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What the authority gets of nodes that have shown their keys."""
    known = {name: {"_ssh_trust_identity": KEYS, **variables} for name, variables in hostvars.items()}
    return [dict(node) for node in cluster.ssh_nodes(names, known)]


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"ansible_host": "gpu1", "cluster_ip": "10.0.0.1"}, "10.0.0.1"),
        ({"ansible_host": "192.0.2.1"}, "192.0.2.1"),
        ({"ansible_host": "192.0.2.1", "cluster_ip": ""}, "192.0.2.1"),
        ({}, ""),
    ],
)
def test_cluster_ip_takes_precedence(variables: dict[str, str], address: str) -> None:
    assert cluster.node_address(variables) == address


def test_only_requested_nodes_are_in_the_host_table_and_known_to_the_authority_in_order() -> None:
    hostvars = {
        "node-1": {"ansible_host": "192.0.2.1"},
        "node-2": {"ansible_host": "gpu2", "cluster_ip": "2001:db8::2"},
        "node-3": {"ansible_host": "192.0.2.3"},
    }
    names = ["node-2", "node-1"]
    assert cluster.node_addresses(names, hostvars) == {"node-2": "2001:db8::2", "node-1": "192.0.2.1"}
    assert cluster.host_table(names, hostvars) == "2001:db8::2 node-2\n192.0.2.1 node-1"
    nodes = asked_for(names, hostvars)
    assert [(node["name"], node["host_key"], node["job_keys"]) for node in nodes] == [
        (name, *KEYS.values()) for name in names
    ]


# sshd refuses every certificate whose source-address holds a name.
@pytest.mark.parametrize(
    ("variables", "names", "sources"),
    [
        ({}, [], []),
        ({"ansible_host": "192.0.2.1"}, ["192.0.2.1"], ["192.0.2.1"]),
        ({"ansible_host": "gpu1", "ssh_trust_aliases": None}, ["gpu1"], []),
        ({"ansible_host": "gpu1", "cluster_ip": "2001:db8::1"}, ["2001:db8::1", "gpu1"], ["2001:db8::1"]),
        (
            {"cluster_ip": "192.0.2.1", "ssh_trust_aliases": ["gpu1.example.org", "198.51.100.1", "10.0.0.0/8"]},
            ["192.0.2.1", "gpu1.example.org", "198.51.100.1", "10.0.0.0/8"],
            ["192.0.2.1", "198.51.100.1"],
        ),
    ],
)
def test_names_and_source_addresses_of_a_node(variables: dict[str, Any], names: list[str], sources: list[str]) -> None:
    (node,) = asked_for(["node-1"], {"node-1": variables})
    assert (node["names"], node["sources"]) == (["node-1", *names, "localhost"], sources + LOOPBACK)


def test_names_and_sources_are_unique() -> None:
    aliases = ["node-1", "localhost", "192.0.2.1", "::1"]
    (node,) = asked_for(["node-1"], {"node-1": {"ansible_host": "192.0.2.1", "ssh_trust_aliases": aliases}})
    assert node["names"] == ["node-1", "192.0.2.1", "localhost", "::1"]
    assert node["sources"] == ["192.0.2.1", "::1", "127.0.0.1"]


def test_builders_are_in_the_order_of_the_inventory_or_the_head() -> None:
    assert cluster.builders({"builders": ["node-3", "node-2"], "head": ["node-1"]}) == ["node-3", "node-2"]
    assert (
        cluster.builders({"head": ["node-1"]}) == cluster.builders({"builders": [], "head": ["node-1"]}) == ["node-1"]
    )
