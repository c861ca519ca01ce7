"""The firewall: its rules, the services that it closes, and the nodes that it does not know yet."""

from pathlib import Path

import pytest

from farandole.inventory.cluster import member_addresses
from farandole.links.examine import kept_out
from farandole.links.measure import Closed, Measured

from .loading import load

module = load("modules", "firewall")
probing = load("modules", "node_probe")
# As the kernel lists them: 0.0.0.0:8080, 127.0.0.1:5432, a connection; :::9100, ::1:6010, ::ffff:127.0.0.1:6011.
HEADER = "  sl  local_address rem_address   st\n"
TCP = HEADER + (
    "   0: 00000000:1F90 00000000:0000 0A x\n"
    "   1: 0100007F:1538 00000000:0000 0A x\n"
    "   2: 0B01A8C0:D431 0C01A8C0:1F90 01 x\n"
    "   3: 00000000:0050 00000000:0000 0A x\n"
)
TCP6 = HEADER + (
    "   0: 00000000000000000000000000000000:238C 00000000000000000000000000000000:0000 0A x\n"
    "   1: 00000000000000000000000001000000:177A 00000000000000000000000000000000:0000 0A x\n"
    "   2: 0000000000000000FFFF00000100007F:177B 00000000000000000000000000000000:0000 0A x\n"
)
UDP = HEADER + "   0: 00000000:CA6C 00000000:0000 07 x\n"


def test_the_rules_name_members_by_kind_and_open_ports_of_ssh_and_of_the_user() -> None:
    text = module.rules(["192.0.2.12", "2001:db8::1", "192.0.2.11"], {22, 2222}, ["6006", "30000-30010"])
    assert "members4 { type ipv4_addr; elements = { 192.0.2.11, 192.0.2.12 }; }" in text
    assert "members6 { type ipv6_addr; elements = { 2001:db8::1 }; }" in text
    assert "tcp dport { 22, 2222, 6006, 30000-30010 } accept" in text
    assert "udp dport { 6006, 30000-30010 } accept" in text
    bare = module.rules(["192.0.2.11"], {22}, [])
    assert "members6 { type ipv6_addr; }" in bare
    assert "tcp dport { 22 } accept" in bare
    assert "udp dport {" not in bare


def test_preflight_reads_the_members_from_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "firewall.nft"
    assert probing.let_in(file) is None
    file.write_text(module.rules(["192.0.2.12", "2001:db8::1", "192.0.2.11"], {22}, []))
    assert probing.let_in(file) == ["192.0.2.11", "192.0.2.12", "2001:db8::1"]


@pytest.mark.parametrize("text", ["80", "65536", "5000-4000", "1000-2000", "http", "6006;", "6006, 22", "-", ""])
def test_what_is_no_port_above_1023_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a port"):
        module.ports_of(text)


def test_services_for_others_are_named_unless_they_stay_open(tmp_path: Path) -> None:
    for name, text in (("tcp", TCP), ("tcp6", TCP6), ("udp", UDP)):
        (tmp_path / name).write_text(text)
    assert module.closed_services([], tmp_path) == [8080, 9100, 51820]
    assert module.closed_services([(9000, 9100), (51820, 51820)], tmp_path) == [8080]


def test_members_are_known_by_all_their_addresses_in_the_inventory() -> None:
    more = ["a.example.org", "10.1.0.1"]
    hostvars: dict[str, dict[str, object]] = {
        "a": {"ansible_host": "198.51.100.1", "cluster_ip": "10.0.0.1", "ssh_trust_aliases": more},
        "b": {"ansible_host": "b.example.org", "cluster_ip": "10.0.0.2"},
    }
    assert member_addresses(["a", "b"], hostvars) == ["10.0.0.1", "198.51.100.1", "10.1.0.1", "10.0.0.2"]


def test_only_a_node_that_our_firewall_does_not_know_is_excused() -> None:
    measured = Measured(["a", "b", "c"])
    measured.closed = [Closed(*ends, 5000, "no answer") for ends in (("c", "a"), ("b", "a"), ("c", "b"))]
    nodes = {name: f"192.0.2.{number}" for number, name in enumerate("abc", 1)}

    def hostvars(**firewalls: list[str] | None) -> dict[str, dict[str, object]]:
        return {name: {"_preflight_probe": {"probe": {"firewall": firewalls.get(name)}}} for name in nodes}

    assert kept_out(measured, nodes, hostvars()) == {}
    assert kept_out(measured, nodes, hostvars(a=["192.0.2.1", "192.0.2.2"])) == {"a": ["c"]}
