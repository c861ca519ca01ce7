"""Choose the network for jobs, and each node's interface in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Any

from farandole.findings import Finding, report, some

HostVars = Mapping[str, Mapping[str, Any]]
Links = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Fabric:
    """The chosen network, each node's interface in it, and the problems found."""

    network: str = ""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()


def choose(addresses: Mapping[str, str], hostvars: HostVars, wanted: str = "") -> Fabric:
    """Choose a network that contains every node's address; only probed nodes have interfaces to check."""
    probed = {name: links for name in addresses if (links := _links(hostvars[name]))}
    if not probed:
        finding = Finding(
            "all", "nodes-unknown", "nothing is known about the nodes", "run role preflight in an earlier play"
        )
        return Fabric(findings=[finding])
    network, findings = _given(wanted) if wanted else _shared(addresses, probed)
    if network is None:
        return Fabric(findings=findings)
    chosen = {name: _within(network, links, addresses[name]) for name, links in probed.items()}
    findings = [*_outside(network, chosen), *_ambiguous(network, chosen, addresses), *_repeated(network, chosen)]
    interfaces = {name: inside[0]["name"] for name, inside in chosen.items() if inside}
    return Fabric(str(network), interfaces, findings)


def choice(addresses: Mapping[str, str], hostvars: HostVars, wanted: str = "") -> dict[str, Any]:
    """The choice as a dictionary, and the message of the refusal if there are findings."""
    chosen = choose(addresses, hostvars, wanted)
    return {**asdict(chosen), "refusal": report(chosen.findings) if chosen.findings else ""}


def hostfile(names: Sequence[str], hostvars: HostVars) -> str:
    """A line per node for mpirun and horovodrun. A node outside --limit gets as many slots as the largest inside."""
    known = {name: _slots(hostvars[name]) for name in names}
    most = max([slots for slots in known.values() if slots], default=1)
    return "".join(f"{name} slots={slots or most}\n" for name, slots in known.items())


def _slots(variables: Mapping[str, Any]) -> int:
    """Slots from the inventory, else the number of GPUs, at least 1; 0 if the node was not probed."""
    probe = _probe(variables)
    return int(variables.get("fabric_slots") or (max(1, probe.get("gpus", 0)) if probe else 0))


def _probe(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    return (variables.get("_preflight_probe") or {}).get("probe") or {}


def _links(variables: Mapping[str, Any]) -> Links:
    return _probe(variables).get("interfaces") or ()


def _given(wanted: str) -> tuple[IPv4Network | None, list[Finding]]:
    try:
        return IPv4Network(wanted, strict=False), []
    except ValueError:
        cure = "write it as 192.0.2.0/24, or leave it empty"
        return None, [Finding("all", "network-malformed", f"fabric_network {wanted} is not an IPv4 network", cure)]


def _shared(addresses: Mapping[str, str], probed: Mapping[str, Links]) -> tuple[IPv4Network | None, list[Finding]]:
    """The smallest of the nodes' own networks that contains every node's address."""
    # OpenMPI's network settings and Horovod's launcher are limited to IPv4.
    cure = "set cluster_ip to the IPv4 address at which other nodes reach it"
    unusable = {name: address or "none" for name, address in addresses.items() if not _ipv4(address)}
    if unusable:
        return None, [
            Finding(name, "address-not-ipv4", f"its address is {own}, and jobs need IPv4", cure)
            for name, own in unusable.items()
        ]
    homes = {name: _home(addresses[name], links) for name, links in probed.items()}
    if lost := [name for name, home in homes.items() if home is None]:
        cure = "set cluster_ip to an address that it has"
        return None, [
            Finding(name, "address-absent", f"its cluster address {addresses[name]} is on none of its interfaces", cure)
            for name in lost
        ]
    places = {IPv4Address(address) for address in addresses.values()}
    networks = {home for home in homes.values() if home}
    if fitting := [network for network in networks if all(place in network for place in places)]:
        return max(fitting, key=lambda network: network.prefixlen), []
    return None, [_not_shared(addresses, homes)]


def _not_shared(addresses: Mapping[str, str], homes: Mapping[str, IPv4Network | None]) -> Finding:
    members: dict[str, list[str]] = {}
    for name, address in addresses.items():
        # A node that was not probed is in another node's network, or in an unknown one.
        near = (home for home in homes.values() if home and IPv4Address(address) in home)
        members.setdefault(str(homes.get(name) or next(near, address)), []).append(name)
    where = "; ".join(f"{some(names)} in {network}" for network, names in members.items())
    return Finding(
        "all",
        "network-not-shared",
        f"the nodes share no network: {where}",
        "set cluster_ip of each to its address in the network that connects them; if that is routed, "
        "set fabric_network to a CIDR that contains them all",
    )


def _within(network: IPv4Network, links: Links, address: str) -> Links:
    """A node's interfaces in the network, the one with its cluster address first."""
    inside = [link for link in links if _ipv4(link["address"]) and IPv4Address(link["address"]) in network]
    return sorted(inside, key=lambda link: link["address"] != address)


def _outside(network: IPv4Network, chosen: Mapping[str, Links]) -> list[Finding]:
    cause = f"none of its interfaces has an address in {network}"
    cure = "correct fabric_network, or give it an address there"
    return [Finding(name, "network-not-on-node", cause, cure) for name, inside in chosen.items() if not inside]


def _ambiguous(network: IPv4Network, chosen: Mapping[str, Links], addresses: Mapping[str, str]) -> list[Finding]:
    """OpenMPI would use every interface in the network, including a docker0."""
    cure = f"set fabric_network to a smaller one that contains only the nodes, for example {_hull(addresses)}"
    findings = []
    for name, inside in chosen.items():
        if others := {link["name"] for link in inside[1:]} - {link["name"] for link in inside[:1]}:
            links = " and ".join([inside[0]["name"], *sorted(others)])
            findings.append(
                Finding(name, "interfaces-ambiguous", f"its interfaces {links} are both in {network}", cure)
            )
    return findings


def _repeated(network: IPv4Network, chosen: Mapping[str, Links]) -> list[Finding]:
    """A network that is private to each machine, such as docker0's, connects nothing."""
    owners: dict[str, list[str]] = {}
    for name, inside in chosen.items():
        for link in inside[:1]:
            owners.setdefault(link["address"], []).append(name)
    cure = "set fabric_network to the network between the nodes, or leave it empty"
    return [
        Finding(
            name,
            "address-shared",
            f"it shares its address {address} in {network} with others, so it does not connect them",
            cure,
        )
        for address, names in owners.items()
        if len(names) > 1
        for name in names
    ]


def _hull(addresses: Mapping[str, str]) -> IPv4Network:
    """The smallest network that contains all addresses."""
    numbers = [int(IPv4Address(address)) for address in addresses.values() if _ipv4(address)]
    spread = (min(numbers) ^ max(numbers)).bit_length()
    return IPv4Network((min(numbers), 32 - spread), strict=False)


def _home(address: str, links: Links) -> IPv4Network | None:
    own = (link for link in links if link["address"] == address)
    return next((IPv4Network((link["address"], link["prefix"]), strict=False) for link in own), None)


def _ipv4(text: str) -> bool:
    try:
        return ip_address(text).version == 4
    except ValueError:
        return False
