"""The filters for names and addresses of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.inventory import cluster

LOOPBACK = ["127.0.0.1", "::1"]


def node(**variables: Any) -> dict[str, Any]:
    return {
        "_ssh_trust_identity": {"host_key": "ssh-ed25519 host", "job_keys": {"trainer": "ssh-ed25519 job"}},
        **variables,
    }


def asked_for(name: str, **variables: Any) -> dict[str, Any]:
    (found,) = cluster.ssh_nodes([name], {name: node(**variables)})
    return found


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


def test_the_host_table_has_a_line_per_requested_node_in_order() -> None:
    hostvars = {
        "node-1": node(ansible_host="192.0.2.1"),
        "node-2": node(ansible_host="gpu2", cluster_ip="2001:db8::2"),
        "node-3": node(ansible_host="192.0.2.3"),
    }
    assert cluster.node_addresses(["node-2", "node-1"], hostvars) == {"node-2": "2001:db8::2", "node-1": "192.0.2.1"}
    assert cluster.host_table(["node-2", "node-1"], hostvars) == "2001:db8::2 node-2\n192.0.2.1 node-1"


def test_a_host_certificate_has_all_names_of_the_node() -> None:
    aliases = ["gpu1.example.org", "198.51.100.1"]
    found = asked_for("node-1", ansible_host="gpu1", cluster_ip="192.0.2.1", ssh_trust_aliases=aliases)
    assert found["names"] == ["node-1", "192.0.2.1", "gpu1", *aliases, "localhost"]


def test_names_and_sources_are_unique() -> None:
    found = asked_for("node-1", ansible_host="192.0.2.1", ssh_trust_aliases=["node-1", "localhost", "192.0.2.1", "::1"])
    assert found["names"] == ["node-1", "192.0.2.1", "localhost", "::1"]
    assert found["sources"] == ["192.0.2.1", "::1", "127.0.0.1"]


def test_a_node_without_an_address_has_no_empty_name() -> None:
    assert asked_for("node-1")["names"] == ["node-1", "localhost"]


# sshd refuses every certificate whose source-address holds a name.
@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({"ansible_host": "192.0.2.1"}, ["192.0.2.1"]),
        ({"ansible_host": "gpu1", "ssh_trust_aliases": None}, []),
        ({"ansible_host": "gpu1", "cluster_ip": "2001:db8::1"}, ["2001:db8::1"]),
        (
            {"cluster_ip": "192.0.2.1", "ssh_trust_aliases": ["gpu1.example.org", "198.51.100.1", "10.0.0.0/8"]},
            ["192.0.2.1", "198.51.100.1"],
        ),
    ],
)
def test_sources_are_only_addresses(variables: dict[str, Any], own: list[str]) -> None:
    assert asked_for("node-1", **variables)["sources"] == own + LOOPBACK


def test_the_ca_gets_only_the_requested_nodes_keys() -> None:
    hostvars = {name: node(ansible_host=name) for name in ("node-1", "node-2", "node-3")}
    found = cluster.ssh_nodes(["node-3", "node-1"], hostvars)
    assert [(one["name"], one["host_key"], one["job_keys"]) for one in found] == [
        (name, "ssh-ed25519 host", {"trainer": "ssh-ed25519 job"}) for name in ("node-3", "node-1")
    ]


@pytest.mark.parametrize("groups", [{}, {"builders": []}], ids=["missing", "empty"])
def test_the_head_builds_without_builders(groups: dict[str, list[str]]) -> None:
    assert cluster.builders({**groups, "head": ["node-1"]}) == ["node-1"]


def test_builders_are_in_the_order_of_the_inventory() -> None:
    assert cluster.builders({"builders": ["node-3", "node-2"], "head": ["node-1"]}) == ["node-3", "node-2"]
