"""The network by which the nodes of a job talk, and each node's interface in it."""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Any

HostVars = Mapping[str, Mapping[str, Any]]
Links = Sequence[Mapping[str, Any]]
SHOWN = 5


def fabric(addresses: Mapping[str, str], hostvars: HostVars, wanted: str = "") -> dict[str, Any]:
    """Network, interface by node, and in words what stands against them.

    Only nodes that were probed have interfaces to judge, but the network has to hold the address of every node.
    """
    probed = {name: links for name in addresses if (links := _links(hostvars[name]))}
    if not probed:
        network, finding = None, "nothing is known of the nodes\n   cure: run role preflight in a play before"
    else:
        network, finding = _given(wanted) if wanted else _shared(addresses, probed)
    if network is None:
        return {"network": "", "interfaces": {}, "findings": [finding]}
    chosen = {name: _within(network, links, addresses[name]) for name, links in probed.items()}
    findings = [*_outside(network, chosen), *_ambiguous(network, chosen, addresses), *_repeated(network, chosen)]
    interfaces = {name: inside[0]["name"] for name, inside in chosen.items() if inside}
    return {"network": str(network), "interfaces": interfaces, "findings": findings}


def hostfile(names: Sequence[str], hostvars: HostVars) -> str:
    """A line per node for mpirun and horovodrun. A node outside of --limit counts like the largest inside."""
    asked = {name: _slots(hostvars[name]) for name in names}
    most = max([slots for slots in asked.values() if slots], default=1)
    return "".join(f"{name} slots={slots or most}\n" for name, slots in asked.items())


def _slots(variables: Mapping[str, Any]) -> int:
    """As many as the inventory says, else as the node has GPUs; 0 when it was not asked."""
    probe = _probe(variables)
    return int(variables.get("fabric_slots") or (max(1, probe.get("gpus", 0)) if probe else 0))


def _probe(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    return (variables.get("_preflight_probe") or {}).get("probe") or {}


def _links(variables: Mapping[str, Any]) -> Links:
    return _probe(variables).get("interfaces") or ()


def _given(wanted: str) -> tuple[IPv4Network | None, str]:
    try:
        return IPv4Network(wanted, strict=False), ""
    except ValueError:
        return None, f"fabric_network {wanted} is no IPv4 network\n   cure: write it as 192.0.2.0/24, or leave it empty"


def _shared(addresses: Mapping[str, str], probed: Mapping[str, Links]) -> tuple[IPv4Network | None, str]:
    """The smallest of the nodes' own networks that holds every node's address."""
    # What OpenMPI takes as a network, and what Horovod's launcher binds to, is IPv4.
    strange = [f"{name} ({address or 'none'})" for name, address in addresses.items() if not _ipv4(address)]
    if strange:
        cure = "set cluster_ip of each to the IPv4 address other nodes reach it by"
        return None, f"{_some(strange)}: a job needs an IPv4 address\n   cure: {cure}"
    homes = {name: _home(addresses[name], links) for name, links in probed.items()}
    if lost := [f"{name} ({addresses[name]})" for name, home in homes.items() if home is None]:
        cure = "set cluster_ip of each to an address that it has"
        return None, f"{_some(lost)}: the address is on none of the node's interfaces\n   cure: {cure}"
    places = {IPv4Address(address) for address in addresses.values()}
    networks = {home for home in homes.values() if home}
    if fitting := [network for network in networks if all(place in network for place in places)]:
        return max(fitting, key=lambda network: network.prefixlen), ""
    return None, _apart(addresses, homes)


def _apart(addresses: Mapping[str, str], homes: Mapping[str, IPv4Network | None]) -> str:
    members: dict[str, list[str]] = {}
    for name, address in addresses.items():
        # A node that was not probed lies in a network of another, or nobody knows where.
        near = (home for home in homes.values() if home and IPv4Address(address) in home)
        members.setdefault(str(homes.get(name) or next(near, address)), []).append(name)
    where = "; ".join(f"{_some(names)} in {network}" for network, names in members.items())
    return (
        f"the nodes share no network: {where}\n"
        "   cure: set cluster_ip of each to its address in the network that joins them; if that is routed, "
        "set fabric_network to the CIDR that holds them all"
    )


def _within(network: IPv4Network, links: Links, address: str) -> Links:
    """A node's links in the network, that of its own address first."""
    inside = [link for link in links if _ipv4(link["address"]) and IPv4Address(link["address"]) in network]
    return sorted(inside, key=lambda link: link["address"] != address)


def _outside(network: IPv4Network, chosen: Mapping[str, Links]) -> list[str]:
    names = [name for name, inside in chosen.items() if not inside]
    cure = "correct fabric_network, or give each an address in it"
    return [f"{_some(names)}: no interface has an address in {network}\n   cure: {cure}"] if names else []


def _ambiguous(network: IPv4Network, chosen: Mapping[str, Links], addresses: Mapping[str, str]) -> list[str]:
    """OpenMPI would take every interface in the network, a docker0 too."""
    doubts: dict[str, list[str]] = {}
    for name, inside in chosen.items():
        if others := {link["name"] for link in inside[1:]} - {link["name"] for link in inside[:1]}:
            doubts.setdefault(" and ".join([inside[0]["name"], *sorted(others)]), []).append(name)
    cure = f"set fabric_network to a smaller one that holds the nodes alone, for example {_hull(addresses)}"
    return [f"{_some(names)}: {links} lie both in {network}\n   cure: {cure}" for links, names in doubts.items()]


def _repeated(network: IPv4Network, chosen: Mapping[str, Links]) -> list[str]:
    """A network that every machine has of its own leads nowhere."""
    owners: dict[str, list[str]] = {}
    for name, inside in chosen.items():
        for link in inside[:1]:
            owners.setdefault(link["address"], []).append(name)
    cure = "set fabric_network to the network between the nodes, or leave it empty"
    return [
        f"{_some(names)}: all have {address} in {network}, so it does not join them\n   cure: {cure}"
        for address, names in owners.items()
        if len(names) > 1
    ]


def _hull(addresses: Mapping[str, str]) -> IPv4Network:
    """The smallest network that holds all addresses."""
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


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


class FilterModule:
    """Gives Ansible the filters."""

    def filters(self) -> dict[str, Any]:
        """By name."""
        return {"fabric": fabric, "hostfile": hostfile}
