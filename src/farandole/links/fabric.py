"""Choose the network for jobs, and each node's interface in it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, ip_address
from types import MappingProxyType
from typing import Any

from farandole.core.findings import Finding, finding, report, some
from farandole.inventory.cluster import HostVars, node_addresses, parse_address, probe_of

Links = Sequence[Mapping[str, Any]]
# What was last known of nodes, by name; it counts for those that were not probed in this run.
Last = Mapping[str, Mapping[str, Any]]
# More networks than these besides the first are not compared.
COMPARED = 3


@dataclass(frozen=True)
class Fabric:
    """The chosen network and each node's interface in it, or the problems found."""

    network: str = ""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    # Each node's address there.
    addresses: Mapping[str, str] = field(default_factory=dict, compare=False)


def choose(names: Sequence[str], hostvars: HostVars, wanted: str = "", last: Last = MappingProxyType({})) -> Fabric:
    """Choose a network that contains every node's address; only nodes that are known have interfaces to check."""
    addresses = node_addresses(names, hostvars)
    probed = {name: links for name in names if (links := _links(hostvars[name]))}
    if not probed:
        return Fabric()
    probed |= {name: last[name]["interfaces"] for name in names if name in last and not probe_of(hostvars[name])}
    try:
        network = IPv4Network(wanted, strict=False) if wanted else _shared(addresses, probed)
    except ValueError:
        return Fabric(findings=[finding("network-malformed", "all", network=wanted)])
    if not isinstance(network, IPv4Network):
        return Fabric(findings=network)
    chosen = {name: _within(network, links, addresses[name]) for name, links in probed.items()}
    outside = [finding("network-not-on-node", name, network=network) for name, inside in chosen.items() if not inside]
    if findings := [*outside, *_ambiguous(network, chosen, addresses), *_repeated(network, chosen)]:
        return Fabric(findings=findings)
    own = {name: inside[0] for name, inside in chosen.items()}
    names_of, addresses_of = ({name: link[field] for name, link in own.items()} for field in ("name", "address"))
    return Fabric(str(network), names_of, addresses=addresses_of)


def others(names: Sequence[str], hostvars: HostVars, first: Fabric) -> list[Fabric]:
    """Further networks in which every node has an address; none unless all nodes were probed."""
    if not first.network or len(names) < 2:
        return []
    shared = set.intersection(*({*_networks(_links(hostvars[name]))} for name in names))
    away = sorted(network for network in shared if not network.overlaps(IPv4Network(first.network)))
    chosen = [choose(names, hostvars, str(network)) for network in away]
    return [fabric for fabric in chosen if fabric.network][:COMPARED]


def choice(
    names: Sequence[str], hostvars: HostVars, wanted: str = "", last: Last = MappingProxyType({})
) -> dict[str, Any]:
    """The network and interfaces for a role's templates, or the refusal for the user."""
    chosen = choose(names, hostvars, wanted, last)
    if chosen.findings:
        # What was last known may be outdated, and refuses nothing.
        chosen = choose(names, hostvars, wanted)
    findings = chosen.findings or ([] if chosen.network else [finding("nodes-unknown", "all")])
    heading = "found {problems} with the network for jobs; the settings of jobs were not changed."
    refusal = report(findings, heading) if findings else ""
    return {"network": chosen.network, "interfaces": chosen.interfaces, "refusal": refusal}


def address_absent(name: str, address: str, own: Iterable[str]) -> Finding:
    """The finding about a node that does not have its own cluster address."""
    usable = [text for text in own if not (ip_address(text).is_loopback or ip_address(text).is_link_local)]
    return finding("address-absent", name, address=address, seen=", ".join(usable) or "none")


def hostfile(names: Sequence[str], hostvars: HostVars, last: Last = MappingProxyType({})) -> str:
    """A line per node for mpirun and horovodrun. A node that was never probed gets as many slots as the largest."""
    known = {}
    for name in names:
        probe = probe_of(hostvars[name]) or last.get(name, {})
        # From the inventory, else the number of GPUs, at least 1; 0 if the node was never probed.
        known[name] = int(hostvars[name].get("fabric_slots") or (max(1, probe.get("gpus", 0)) if probe else 0))
    most = max(known.values(), default=0) or 1
    return "".join(f"{name} slots={slots or most}\n" for name, slots in known.items())


def _links(variables: Mapping[str, Any]) -> Links:
    return probe_of(variables).get("interfaces") or ()


def _shared(addresses: Mapping[str, str], probed: Mapping[str, Links]) -> IPv4Network | list[Finding]:
    """The smallest of the nodes' own networks that contains every node's address, or why there is none."""
    # OpenMPI's network settings and Horovod's launcher are limited to IPv4.
    if unusable := {name: address or "none" for name, address in addresses.items() if not _ipv4(address)}:
        return [finding("address-not-ipv4", name, address=own) for name, own in unusable.items()]
    own = {name: [link for link in links if link["address"] == addresses[name]] for name, links in probed.items()}
    homes = {
        name: IPv4Network((links[0]["address"], links[0]["prefix"]), strict=False) if links else None
        for name, links in own.items()
    }
    if lost := [name for name, home in homes.items() if home is None]:
        return [address_absent(name, addresses[name], [link["address"] for link in probed[name]]) for name in lost]
    places = {IPv4Address(address) for address in addresses.values()}
    networks = {home for home in homes.values() if home}
    if fitting := [network for network in networks if all(place in network for place in places)]:
        return max(fitting, key=lambda network: network.prefixlen)
    return [_not_shared(addresses, homes)]


def _not_shared(addresses: Mapping[str, str], homes: Mapping[str, IPv4Network | None]) -> Finding:
    members: dict[str, list[str]] = {}
    for name, address in addresses.items():
        # A node that was not probed is in another node's network, or in an unknown one.
        near = (home for home in homes.values() if home and IPv4Address(address) in home)
        members.setdefault(str(homes.get(name) or next(near, address)), []).append(name)
    where = "; ".join(f"{some(names)} in {network}" for network, names in members.items())
    return finding("network-not-shared", "all", seen=where)


def _within(network: IPv4Network, links: Links, address: str) -> Links:
    """A node's interfaces in the network, the one with its cluster address first."""
    inside = [link for link in links if _ipv4(link["address"]) and IPv4Address(link["address"]) in network]
    return sorted(inside, key=lambda link: link["address"] != address)


def _ambiguous(network: IPv4Network, chosen: Mapping[str, Links], addresses: Mapping[str, str]) -> list[Finding]:
    """OpenMPI would use every interface in the network, including a docker0."""
    findings = []
    for name, inside in chosen.items():
        if others := {link["name"] for link in inside[1:]} - {link["name"] for link in inside[:1]}:
            links = " and ".join([inside[0]["name"], *sorted(others)])
            findings.append(finding("interfaces-ambiguous", name, seen=links, network=network, subnet=_hull(addresses)))
    return findings


def _repeated(network: IPv4Network, chosen: Mapping[str, Links]) -> list[Finding]:
    """A network that is private to each machine, such as docker0's, connects nothing."""
    owners: dict[str, list[str]] = {}
    for name, inside in chosen.items():
        for link in inside[:1]:
            owners.setdefault(link["address"], []).append(name)
    return [
        finding("address-shared", name, address=address, network=network)
        for address, names in owners.items()
        if len(names) > 1
        for name in names
    ]


def _hull(addresses: Mapping[str, str]) -> IPv4Network:
    """The smallest network that contains all addresses."""
    numbers = [int(IPv4Address(address)) for address in addresses.values() if _ipv4(address)]
    spread = (min(numbers) ^ max(numbers)).bit_length()
    return IPv4Network((min(numbers), 32 - spread), strict=False)


def _networks(links: Links) -> Iterator[IPv4Network]:
    """The networks that a node is connected to."""
    for link in links:
        if _ipv4(link["address"]):
            network = IPv4Network((link["address"], link["prefix"]), strict=False)
            if not (network.is_loopback or network.is_link_local or network.prefixlen == network.max_prefixlen):
                yield network


def _ipv4(text: str) -> bool:
    return isinstance(parse_address(text), IPv4Address)
