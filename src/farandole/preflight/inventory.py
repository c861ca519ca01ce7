"""Checks of the inventory, made before any node is contacted."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from farandole.findings import Fault, Finding, some

Groups = Mapping[str, Sequence[str]]
Declared = Mapping[str, frozenset[str]]
Options = Mapping[str, Mapping[str, Any]]

OUR_VARIABLES = frozenset({"cluster_ip"})
# An RFC 1123 label in lower case; one of digits only would be read as an IPv4 address.
LABEL = re.compile(r"(?!\d+$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
EXAMPLE = "inventory/example/hosts.yml"


@dataclass(frozen=True)
class Node:
    """What the inventory says about one host."""

    name: str
    ansible_host: str
    port: str = "22"
    cluster_ip: str | None = None
    variables: frozenset[str] = frozenset()

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address by which the other nodes reach it."""
        return parse_address(self.cluster_ip or self.ansible_host)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def read_node(name: str, variables: Mapping[str, Any]) -> Node:
    """Build a node from a host's variables."""
    cluster_ip = variables.get("cluster_ip")
    return Node(
        name=name,
        ansible_host=str(variables.get("ansible_host", name)),
        port=str(variables.get("ansible_port", 22)),
        cluster_ip=None if cluster_ip is None else str(cluster_ip),
        variables=frozenset(variables),
    )


def unreadable(name: str, error: Exception) -> Finding:
    """The finding about a host whose variables cannot be evaluated."""
    cure = "correct its cluster_ip, ansible_host or ansible_port"
    return Finding(name, "address-unknown", f"its address cannot be determined: {error}", cure)


def judge_inventory(
    groups: Groups, nodes: Sequence[Node], declared: Declared, ansibles: frozenset[str] = frozenset()
) -> list[Finding]:
    return [
        *judge_groups(groups),
        *judge_names(groups.get("cluster", ())),
        # Before addresses, as a misspelt variable is often why an address is wrong.
        *judge_variables(nodes, declared, ansibles),
        *judge_addresses(nodes),
    ]


def judge_groups(groups: Groups) -> list[Finding]:
    cluster = groups.get("cluster", ())
    if not cluster:
        return [missing_cluster(groups)]
    head = judge_head(groups.get("head", ()), cluster)
    return [*head, *outsiders(groups, "head"), *outsiders(groups, "builders")]


def missing_cluster(groups: Groups) -> Finding:
    if not groups.get("all"):
        return Finding(
            "inventory", "inventory-empty", "it has no hosts", f"name the right one with -i; {EXAMPLE} is an example"
        )
    near = difflib.get_close_matches("cluster", [name for name in groups if name != "cluster"], n=1)
    cure = f"rename group {near[0]} to cluster" if near else "put the nodes into group cluster"
    return Finding("inventory", "cluster-missing", "group cluster is missing or empty", f"{cure}, as in {EXAMPLE}")


def judge_head(head: Sequence[str], cluster: Sequence[str]) -> list[Finding]:
    if len(head) == 1:
        return []
    cause = f"group head has {len(head)} hosts: {some(head)}" if head else "group head is missing or empty"
    cure = f"put one host of group cluster into group head, for example {cluster[0]}"
    return [Finding("inventory", "head-not-one", cause, cure)]


def judge_revoked(groups: Groups, revoked: Sequence[str]) -> list[Finding]:
    """Refuse a revoked node as head or as builder, as all nodes run what these serve or build."""
    cure = "put another node into group {}; SECURITY.md says what else to do about a compromised builder"
    return [
        Finding(groups[group][0], "server-revoked", f"it is revoked and first in group {group}", cure.format(group))
        for group in ("head", "builders")
        if groups.get(group) and groups[group][0] in revoked
    ]


def outsiders(groups: Groups, group: str) -> list[Finding]:
    """A finding for each host of a group that is not in group cluster."""
    members = set(groups["cluster"])
    cure = f"add it to group cluster, or take it out of group {group}"
    return [
        Finding(host, "not-in-cluster", f"it is in group {group} but not in group cluster", cure)
        for host in groups.get(group, ())
        if host not in members
    ]


def judge_names(names: Sequence[str]) -> list[Finding]:
    twins = Counter(name.lower() for name in names)
    return [Finding(name, *fault) for name in names if (fault := name_fault(name, unique=twins[name.lower()] == 1))]


def name_fault(name: str, unique: bool) -> Fault | None:
    cure = f"rename it in the inventory, for example to {suggest_label(name)}"
    if not unique and name != name.lower():
        return (
            "name-repeated",
            f"its name differs from {name.lower()} only in case, which host names ignore",
            "rename one of them",
        )
    if name == "localhost":
        return "name-localhost", "on every node, localhost means that node itself", cure
    if not LABEL.fullmatch(name):
        return (
            "name-malformed",
            "its name is not a valid host name: at most 63 characters of a-z, 0-9 and -, at least one of them a letter",
            cure,
        )
    return None


def suggest_label(name: str) -> str:
    label = re.sub(r"[^a-z0-9]+", "-", name.lower().partition(".")[0])[:63].strip("-")
    return label if LABEL.fullmatch(label) and label != "localhost" else "node-1"


def judge_addresses(nodes: Sequence[Node]) -> list[Finding]:
    faults = [Finding(node.name, *fault) for node in nodes if (fault := address_fault(node))]
    same_machine = judge_endpoints(nodes)
    reported = {finding.host for finding in same_machine}
    addressed = [node for node in nodes if node.address and node.name not in reported]
    cure = "set cluster_ip of each to the address by which other nodes reach it"
    same_address = [
        Finding(node.name, "address-repeated", f"it has the same cluster address as {first.name}: {node.address}", cure)
        for node, first in repeated(addressed, lambda node: node.address)
    ]
    return [*faults, *same_machine, *same_address]


def judge_endpoints(nodes: Sequence[Node]) -> list[Finding]:
    cure = "correct ansible_host or ansible_port of one of them"
    return [
        Finding(
            node.name,
            "node-repeated",
            f"it is the same machine as {first.name}: both are {node.ansible_host} port {node.port}",
            cure,
        )
        for node, first in repeated(nodes, lambda node: (node.ansible_host, node.port))
    ]


def address_fault(node: Node) -> Fault | None:
    """Why the other nodes cannot reach a node by the address in the inventory."""
    cure = "set cluster_ip: <the address by which other nodes reach it>"
    address = node.address
    if address is None and node.cluster_ip:
        return "address-malformed", f"cluster_ip {node.cluster_ip} is not an IP address", cure
    if address is None:
        return (
            "address-missing",
            f"it has no cluster_ip, and ansible_host {node.ansible_host} is not an IP address",
            cure,
        )
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return "address-local", f"no other node can reach it at its cluster address {address}", cure
    if address.version != 4:
        return "address-not-ipv4", f"its cluster address {address} is IPv6, and jobs need IPv4", cure
    return None


def repeated(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> list[tuple[Node, Node]]:
    """Pairs of a node and the first earlier one with the same key."""
    first: dict[Hashable, Node] = {}
    return [(node, found) for node in nodes if (found := first.setdefault(key(node), node)) is not node]


def judge_variables(nodes: Sequence[Node], declared: Declared, ansibles: frozenset[str] = frozenset()) -> list[Finding]:
    """Find misspelt variables: named like ours, or like Ansible's connection variables, but read by nothing."""
    ours = {**declared, "cluster": OUR_VARIABLES}
    known = sorted(frozenset().union(*ours.values()))
    users: dict[str, list[str]] = {}
    for node in nodes:
        for variable in sorted(node.variables.difference(known)):
            users.setdefault(variable, []).append(node.name)
    cures = {
        variable: variable_cure(variable, known, ours[owner])
        if (owner := owner_of(variable, ours))
        else misspelt(variable, ansibles)
        for variable in users
    }
    return [
        Finding(host, "variable-unknown", f"nothing reads the variable {variable}", cures[variable])
        for variable, hosts in users.items()
        if cures[variable]
        for host in (["all"] if len(hosts) == len(nodes) else hosts)
    ]


def misspelt(variable: str, ansibles: frozenset[str]) -> str:
    """The cure for a near miss of one of Ansible's names; empty for any other name, which may be the user's own."""
    near = difflib.get_close_matches(variable, ansibles, n=1, cutoff=0.9)
    return f"write {near[0]}" if near and variable not in ansibles else ""


def owner_of(variable: str, ours: Iterable[str]) -> str | None:
    """The role whose prefix a name has, the longest one, as ssh_trust_x does not belong to a role ssh."""
    return max((role for role in ours if variable.startswith(f"{role}_")), key=len, default=None)


def variable_cure(variable: str, known: Sequence[str], like_it: Iterable[str]) -> str:
    # A shared prefix alone makes two names fairly similar.
    if near := difflib.get_close_matches(variable, known, n=1, cutoff=0.8):
        return f"write {near[0]} if that is what you mean, otherwise remove it"
    return f"remove or rename it; variables with this prefix: {some(sorted(like_it)) or 'none'}"


def judge_settings(
    groups: Groups,
    nodes: Sequence[Node],
    hostvars: Mapping[str, Mapping[str, Any]],
    specs: Iterable[Mapping[str, Any]],
    revoked: Sequence[str],
) -> list[Finding]:
    """Check the values of the roles' variables and the revoked nodes of an otherwise correct inventory."""
    options = {name: option for spec in specs for name, option in declared_options(spec).items()}
    values = {node.name: {name: hostvars[node.name][name] for name in node.variables & set(options)} for node in nodes}
    return judge_values(values, options) or judge_revoked(groups, revoked)


def judge_values(values: Mapping[str, Mapping[str, Any]], options: Options) -> list[Finding]:
    """Report values that a role would refuse, before the first role runs."""
    hosts: dict[Fault, list[str]] = {}
    for host, own in values.items():
        for variable in sorted(own):
            for fault in value_faults(variable, own[variable], options[variable]):
                hosts.setdefault(fault, []).append(host)
    return [
        Finding(host, *fault)
        for fault, wrong in hosts.items()
        for host in (["all"] if len(wrong) == len(values) else wrong)
    ]


def value_faults(variable: str, value: Any, option: Mapping[str, Any]) -> list[Fault]:
    # The validator accepts a string as a list; a role would then search for substrings.
    if option.get("type") == "list" and isinstance(value, str):
        example = json.dumps({variable: [value]})
        return [
            (
                "value-wrong",
                f"{variable} is a string but must be a list",
                f"write it as a list, on the command line as -e {shlex.quote(example)}",
            )
        ]
    described = option.get("description", "the README of its role describes it")
    cure = f"correct it; {described if isinstance(described, str) else ' '.join(described)}"
    # The validator would search any other value for the names of suboptions.
    if option.get("type") == "dict" and not isinstance(value, Mapping):
        return [("value-wrong", f"{variable} is {value!r} but must be a mapping of names to values", cure)]
    judged = ArgumentSpecValidator({variable: dict(option)}).validate({variable: value})
    return [("value-wrong", f"{variable} is wrong: {message}", cure) for message in judged.error_messages]


def declared_options(specs: Mapping[str, Any]) -> Options:
    """All options in one meta/argument_specs.yml, of all entry points."""
    entries = (specs.get("argument_specs") or {}).values()
    return {name: option for entry in entries for name, option in (entry.get("options") or {}).items()}


def declared_names(specs: Mapping[str, Any]) -> frozenset[str]:
    """The names of the variables in one meta/argument_specs.yml."""
    return frozenset(declared_options(specs))
