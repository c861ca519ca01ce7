"""Checks of the inventory, made before any node is contacted."""

import difflib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import boolean

from farandole.core.findings import Finding, finding, some
from farandole.inventory import mounts as storage
from farandole.inventory.cluster import EXPORTER_PORT, KEY_VARIABLES, LABEL, USER_VARIABLES, Node, job_user
from farandole.preflight.people import judge_people

Groups = Mapping[str, Sequence[str]]
Declared = Mapping[str, frozenset[str]]
Options = Mapping[str, Mapping[str, Any]]

# Variables that several roles read; they have no default.
OUR_VARIABLES = frozenset({"cluster_ip", "cluster_users", "on_bad_node"})
# What playbooks know of the cluster, from playbooks/group_vars.
KNOWN_OF_CLUSTER = frozenset({"cluster_facts", "cluster_state", "node_facts"})
# The tags of the playbooks besides the names of the roles.
TAGS = frozenset({"quick"})
# What Ansible takes for a tag itself, and what Molecule skips in every playbook.
COMMON_TAGS = frozenset({"all", "always", "never", "tagged", "untagged", "notest", "molecule-notest"})
# Prometheus needs two measurements in the five minutes for which it looks back.
RAREST_S = 120
# From here on the firewall keeps strangers out, and below no account can listen.
CLOSED = 1024
PORTS = {"monitoring_node_port": (CLOSED, 65535), "monitoring_port": (1, CLOSED - 1)}
# Of these, the whole cluster has the value of one node.
UNIFORM = (
    *("base_state_dir", "base_user", "base_user_id", "cluster_users", "slurm_enabled"),
    *("ssh_trust_mesh", "ssh_trust_revoked", "storage_home"),
)
# A certificate of no day is never valid.
LEAST = {"ssh_trust_host_days": 1, "ssh_trust_user_days": 1}
# What overrides an option of ansible-playbook.
LOGIN_VARIABLES = {"--user": USER_VARIABLES, "--private-key": KEY_VARIABLES}
# What overrides a password that the user was asked for.
PASSWORD_VARIABLES = {
    "--ask-pass": ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
    "--ask-become-pass": ("ansible_become_password", "ansible_become_pass"),
}


def unreadable(name: str, error: Exception) -> Finding:
    """The finding about a host whose variables cannot be evaluated."""
    return finding("address-unknown", name, seen=error)


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
    return [*head, *(fault for group in ("head", "builders", "slurm") for fault in outsiders(groups, group))]


def missing_cluster(groups: Groups) -> Finding:
    if not groups.get("all"):
        return finding("inventory-empty", "inventory")
    if near := difflib.get_close_matches("cluster", [name for name in groups if name != "cluster"], n=1):
        return finding("cluster-misspelt", "inventory", group=near[0])
    return finding("cluster-missing", "inventory")


def judge_head(head: Sequence[str], cluster: Sequence[str]) -> list[Finding]:
    if len(head) == 1:
        return []
    hosts = f"{len(head)} hosts: {some(head)}" if head else "no host"
    return [finding("head-not-one", "inventory", seen=hosts, host=cluster[0])]


def judge_revoked(groups: Groups, revoked: Sequence[str]) -> list[Finding]:
    """Refuse a revoked node as head or as builder, as all nodes run what these serve or build."""
    return [
        finding("server-revoked", groups[group][0], group=group)
        for group in ("head", "builders")
        if groups.get(group) and groups[group][0] in revoked
    ]


def outsiders(groups: Groups, group: str) -> list[Finding]:
    """A finding for each host of a group that is not in group cluster."""
    members = set(groups["cluster"])
    return [finding("not-in-cluster", host, group=group) for host in groups.get(group, ()) if host not in members]


def judge_names(names: Sequence[str]) -> list[Finding]:
    twins = Counter(name.lower() for name in names)
    return [fault for name in names if (fault := judge_name(name, unique=twins[name.lower()] == 1))]


def judge_name(name: str, unique: bool) -> Finding | None:
    if not unique and name != name.lower():
        return finding("name-repeated", name, seen=name.lower())
    if name == "localhost":
        return finding("name-localhost", name, label=suggest_label(name))
    if not LABEL.fullmatch(name):
        return finding("name-malformed", name, label=suggest_label(name))
    return None


def suggest_label(name: str) -> str:
    label = re.sub(r"[^a-z0-9]+", "-", name.lower().partition(".")[0])[:63].strip("-")
    return label if LABEL.fullmatch(label) and label != "localhost" else "node-1"


def judge_addresses(nodes: Sequence[Node]) -> list[Finding]:
    faults = [fault for node in nodes if (fault := judge_address(node))]
    same_machine = [
        finding("node-repeated", node.name, other=first.name, seen=f"both are {node.ansible_host} port {node.port}")
        for node, first in repeated(nodes, lambda node: (node.ansible_host, node.port))
    ]
    reported = {fault.host for fault in same_machine}
    addressed = [node for node in nodes if node.address and node.name not in reported]
    same_address = [
        finding("address-repeated", node.name, other=first.name, address=node.address)
        for node, first in repeated(addressed, lambda node: node.address)
    ]
    return [*faults, *same_machine, *same_address]


def judge_address(node: Node) -> Finding | None:
    """Why the other nodes cannot reach a node by the address in the inventory."""
    address = node.address
    if address is None and node.cluster_ip:
        return finding("address-malformed", node.name, seen=node.cluster_ip)
    if address is None:
        return finding("address-missing", node.name, seen=node.ansible_host)
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return finding("address-local", node.name, address=address)
    if address.version != 4:
        return finding("address-not-ipv4", node.name, address=address)
    return None


def repeated(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> list[tuple[Node, Node]]:
    """Pairs of a node and the first earlier one with the same key."""
    first: dict[Hashable, Node] = {}
    return [(node, earlier) for node in nodes if (earlier := first.setdefault(key(node), node)) is not node]


def judge_variables(nodes: Sequence[Node], declared: Declared, ansibles: frozenset[str] = frozenset()) -> list[Finding]:
    """Find misspelt variables: named like ours, or like Ansible's connection variables, but read by nothing."""
    ours = {**declared, "cluster": OUR_VARIABLES}
    known = sorted(frozenset().union(*ours.values()))
    users: dict[str, list[str]] = {}
    for node in nodes:
        for variable in sorted(node.variables.difference(known, KNOWN_OF_CLUSTER)):
            users.setdefault(variable, []).append(node.name)
    hosts: dict[Finding, list[str]] = {}
    for variable, names in users.items():
        owner = owner_of(variable, ours)
        if fault := unknown_variable(variable, known, ours[owner]) if owner else misspelt(variable, ansibles):
            hosts[fault] = names
    return per_host(hosts, len(nodes))


def per_host(hosts: Mapping[Finding, Sequence[str]], number: int) -> list[Finding]:
    """A finding for each host that has it, or a single one if this number of hosts, which are all, have it."""
    return [
        replace(fault, host=host)
        for fault, names in hosts.items()
        for host in (["all"] if len(names) == number else names)
    ]


def misspelt(variable: str, ansibles: frozenset[str]) -> Finding | None:
    """The finding about a near miss of one of Ansible's names; any other name may be the user's own."""
    if variable not in ansibles and (near := difflib.get_close_matches(variable, ansibles, n=1, cutoff=0.9)):
        return finding("variable-misspelt", "all", seen=variable, known=near[0])
    return None


def owner_of(variable: str, ours: Iterable[str]) -> str | None:
    """The role whose prefix a name has, the longest one, as ssh_trust_x does not belong to a role ssh."""
    return max((role for role in ours if variable.startswith(f"{role}_")), key=len, default=None)


def unknown_variable(variable: str, known: Sequence[str], like_it: Iterable[str]) -> Finding:
    # A shared prefix alone makes two names fairly similar.
    if near := difflib.get_close_matches(variable, known, n=1, cutoff=0.8):
        return finding("variable-misspelt", "all", seen=variable, known=near[0])
    return finding("variable-unknown", "all", seen=variable, known=some(sorted(like_it)) or "none")


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
    return judge_values(values, options) or [
        *judge_uneven(groups, values, options),
        *judge_revoked(groups, revoked),
        *judge_people(hostvars, [node.name for node in nodes]),
        *judge_mounts(values),
        *judge_monitoring(values),
    ]


def judge_uneven(groups: Groups, values: Mapping[str, Mapping[str, Any]], options: Options) -> list[Finding]:
    """Report values that only some nodes have: the first node's would count for all, without a word."""
    first = next(iter(values))
    # A group names the nodes of the queue, whatever that variable says.
    names = [name for name in UNIFORM if name != "slurm_enabled" or "slurm" not in groups]
    return [
        finding("setting-uneven", host, variable=name, known=name, other=first)
        for name in names
        for host, own in values.items()
        if meant(name, own, options) != meant(name, values[first], options)
    ]


def meant(variable: str, values: Mapping[str, Any], options: Options) -> Any:
    """A value as a role takes it, for which "yes" and true are the same; nothing if it is none, zero or empty."""
    given = {variable: values[variable]} if values.get(variable) is not None else {}
    validated = ArgumentSpecValidator({variable: dict(options[variable])}).validate(given)
    return validated.validated_parameters.get(variable) or None


def judge_login(hostvars: Mapping[str, Mapping[str, Any]], typed: Mapping[str, str]) -> list[Finding]:
    """Report options of ansible-playbook that do nothing, as the inventory sets the same by variables."""
    return [
        finding(
            "option-ignored", name, seen=f"{option} {value}", variable=variable, value=own[variable],
            known=variable, label=option, example=shlex.quote(f"{variable}={value}"),
        )
        for option, value in typed.items()
        for name, own in hostvars.items()
        for variable in LOGIN_VARIABLES[option]
        if own.get("ansible_connection") != "local" and str(own.get(variable) or value) != value
    ]  # fmt: skip


def judge_passwords(hostvars: Mapping[str, Mapping[str, Any]], asked: Iterable[str]) -> list[Finding]:
    """Report passwords that the user was asked for needlessly, as every node has its own; shows none of them."""
    remote = [own for own in hostvars.values() if own.get("ansible_connection") != "local"]
    return [
        finding("password-ignored", "all", seen=option, label=option, known=ignored[0])
        for option in asked
        if (ignored := [variable for own in remote for variable in PASSWORD_VARIABLES[option] if variable in own])
        and all(any(variable in own for variable in PASSWORD_VARIABLES[option]) for own in remote)
    ]


def judge_tags(tags: Iterable[str], roles: Iterable[str]) -> list[Finding]:
    """Report tags that no playbook knows: a run would do nothing, or everything, without a word."""
    known = TAGS.union(roles)
    unknown = sorted({*tags} - known - COMMON_TAGS)
    return [finding("tag-unknown", "all", seen=tag, known=", ".join(sorted(known))) for tag in unknown]


def judge_mounts(values: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Report file systems that would hide something, or that no unit of systemd can describe."""
    hosts: dict[Finding, list[str]] = {}
    for host, own in values.items():
        shares = own.get("storage_home", "none") != "none"
        users = storage.shared_homes(own.get("cluster_users") or [], job_user(own))
        mounts = own.get("storage_mounts") or []
        for fault in storage.faults(mounts, users if shares else []):
            hosts.setdefault(finding("mount-wrong", "all", seen=fault), []).append(host)
        for place in storage.passwords(mounts):
            hosts.setdefault(finding("mount-password", "all", seen=place), []).append(host)
    return per_host(hosts, len(values))


def judge_monitoring(values: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Report what everybody could read, ports that the firewall or root has to keep, and measurements too rare."""
    hosts: dict[Finding, list[str]] = {}
    for host, own in values.items():
        closed = boolean(own.get("firewall_enabled", False))
        if closed and float(own.get("depot_port") or CLOSED) < CLOSED:
            hosts.setdefault(finding("depot-open", "all", seen=own["depot_port"]), []).append(host)
        if boolean(own.get("monitoring_enabled", False)) and not closed:
            hosts.setdefault(finding("monitoring-open", "all"), []).append(host)
        if float(own.get("monitoring_interval") or 0) > RAREST_S:
            hosts.setdefault(finding("monitoring-rare", "all", seen=own["monitoring_interval"]), []).append(host)
        for variable, (least, most) in PORTS.items():
            port = float(own.get(variable) or least)
            if not least <= port <= most or port == EXPORTER_PORT:
                wanted = f"{least} to {most}" + f" without {EXPORTER_PORT}" * (least < EXPORTER_PORT)
                wrong = finding("monitoring-port", "all", variable=variable, seen=own[variable], wanted=wanted)
                hosts.setdefault(wrong, []).append(host)
    return per_host(hosts, len(values))


def judge_values(values: Mapping[str, Mapping[str, Any]], options: Options) -> list[Finding]:
    """Report values that a role would refuse, before the first role runs."""
    hosts: dict[Finding, list[str]] = {}
    for host, own in values.items():
        for variable in sorted(own):
            for fault in judge_value(variable, own[variable], options[variable]):
                hosts.setdefault(fault, []).append(host)
    return per_host(hosts, len(values))


def judge_value(variable: str, value: Any, option: Mapping[str, Any]) -> list[Finding]:
    # The validator accepts a string as a list; a role would then search for substrings.
    if option.get("type") == "list" and isinstance(value, str):
        example = shlex.quote(json.dumps({variable: [value]}))
        return [finding("value-not-list", "all", variable=variable, example=example)]
    # The validator would search any other value for the names of suboptions.
    if option.get("type") == "dict" and not isinstance(value, Mapping):
        messages = [f"{value!r} is not a mapping of names to values"]
    else:
        messages = ArgumentSpecValidator({variable: dict(option)}).validate({variable: value}).error_messages
    if not messages and variable in LEAST and int(value) < LEAST[variable]:
        messages = [f"{value} is less than {LEAST[variable]}"]
    described = option.get("description", "the README of its role describes it")
    description = described if isinstance(described, str) else " ".join(described)
    return [finding("value-wrong", "all", variable=variable, seen=text, description=description) for text in messages]


def declared_options(specs: Mapping[str, Any]) -> Options:
    """All options in one meta/argument_specs.yml, of all entry points."""
    entries = (specs.get("argument_specs") or {}).values()
    return {name: option for entry in entries for name, option in (entry.get("options") or {}).items()}
