"""Judge the inventory, then the nodes, before anything is touched.

Everything above ActionModule takes data and returns data; nothing here opens a connection.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ansible import constants
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import become_loader, connection_loader

from farandole.errors import FarandoleError
from farandole.state import claim
from farandole.words import one_line

Probe = Mapping[str, Any]
Answer = Mapping[str, Any]
Fault = tuple[str, str]  # cause, cure
Groups = Mapping[str, Sequence[str]]
Declared = Mapping[str, frozenset[str]]
Options = Mapping[str, Mapping[str, Any]]

SCHEMA = 1
SKEW_LIMIT_S = 300
SUPPORTED = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}
ARCHITECTURES = ("x86_64", "aarch64")
OUR_VARIABLES = frozenset({"cluster_ip"})
# An RFC 1123 label in small letters; one of digits only would be read as an IPv4 address.
LABEL = re.compile(r"(?!\d+$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
NEW_MACHINE_ID = "rm /etc/machine-id && systemd-machine-id-setup, then reboot"
SHOWN_HOSTS = 5
EXAMPLE = "inventory/example/hosts.yml"


@dataclass(frozen=True)
class Finding:
    """One thing that must be mended: where, what is wrong, what mends it."""

    host: str
    cause: str
    cure: str


@dataclass(frozen=True)
class Node:
    """What the inventory says of one host."""

    name: str
    ansible_host: str
    port: str = "22"
    cluster_ip: str | None = None
    variables: frozenset[str] = frozenset()

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address at which the other nodes reach it."""
        return parse_address(self.cluster_ip or self.ansible_host)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


# The inventory


def judge_inventory(
    groups: Groups, nodes: Sequence[Node], declared: Declared, ansibles: frozenset[str] = frozenset()
) -> list[Finding]:
    return [
        *judge_groups(groups),
        *judge_names(groups.get("cluster", ())),
        # A misspelt variable is why an address is wrong.
        *judge_variables(nodes, declared, ansibles),
        *judge_addresses(nodes),
    ]


def judge_groups(groups: Groups) -> list[Finding]:
    cluster = groups.get("cluster", ())
    if not cluster:
        return [missing_cluster(groups)]
    head = judge_head(groups.get("head", ()), cluster)
    return [*head, *strangers(groups, "head"), *strangers(groups, "builders")]


def missing_cluster(groups: Groups) -> Finding:
    if not groups.get("all"):
        return Finding("inventory", "it names no host", f"name the right one with -i; {EXAMPLE} is a model")
    near = difflib.get_close_matches("cluster", [name for name in groups if name != "cluster"], n=1)
    cure = f"rename group {near[0]} to cluster" if near else "put the nodes into group cluster"
    return Finding("inventory", "group cluster is missing or empty", f"{cure}, as in {EXAMPLE}")


def judge_head(head: Sequence[str], cluster: Sequence[str]) -> list[Finding]:
    if len(head) == 1:
        return []
    cause = f"group head has {len(head)} hosts: {some(head)}" if head else "group head is missing or empty"
    cure = f"put one host of group cluster into group head, for example {cluster[0]}"
    return [Finding("inventory", cause, cure)]


def judge_revoked(groups: Groups, revoked: Sequence[str]) -> list[Finding]:
    """What serves all nodes, or builds for them, is not a node that nobody trusts."""
    cure = "put another node into group {}; SECURITY.md says what else to do when a builder has fallen"
    return [
        Finding(groups[group][0], f"it is revoked and first in group {group}", cure.format(group))
        for group in ("head", "builders")
        if groups.get(group) and groups[group][0] in revoked
    ]


def strangers(groups: Groups, group: str) -> list[Finding]:
    members = set(groups["cluster"])
    cure = f"add it to group cluster, or take it out of group {group}"
    return [
        Finding(host, f"it is in group {group} but not in group cluster", cure)
        for host in groups.get(group, ())
        if host not in members
    ]


def judge_names(names: Sequence[str]) -> list[Finding]:
    twins = Counter(name.lower() for name in names)
    return [Finding(name, *fault) for name in names if (fault := name_fault(name, alone=twins[name.lower()] == 1))]


def name_fault(name: str, alone: bool) -> Fault | None:
    cure = f"rename it in the inventory, for example to {suggest_label(name)}"
    if not alone and name != name.lower():
        return f"its name and {name.lower()} are one name, as case does not count", "rename one of them"
    if name == "localhost":
        return "every node takes the name localhost for itself", cure
    if not LABEL.fullmatch(name):
        return "its name is no host name: a-z, 0-9 and - are allowed, at most 63, a letter among them", cure
    return None


def suggest_label(name: str) -> str:
    label = re.sub(r"[^a-z0-9]+", "-", name.lower().partition(".")[0])[:63].strip("-")
    return label if LABEL.fullmatch(label) and label != "localhost" else "node-1"


def judge_addresses(nodes: Sequence[Node]) -> list[Finding]:
    faults = [Finding(node.name, *fault) for node in nodes if (fault := address_fault(node))]
    same_machine = judge_endpoints(nodes)
    told = {finding.host for finding in same_machine}
    addressed = [node for node in nodes if node.address and node.name not in told]
    cure = "set cluster_ip of each to the address other nodes reach it by"
    same_address = [
        Finding(node.name, f"it has the cluster address of {first.name}: {node.address}", cure)
        for node, first in repeated(addressed, lambda node: node.address)
    ]
    return [*faults, *same_machine, *same_address]


def judge_endpoints(nodes: Sequence[Node]) -> list[Finding]:
    cure = "correct ansible_host or ansible_port of one of them"
    return [
        Finding(node.name, f"it is {first.name} again: both are {node.ansible_host} port {node.port}", cure)
        for node, first in repeated(nodes, lambda node: (node.ansible_host, node.port))
    ]


def address_fault(node: Node) -> Fault | None:
    """What keeps the other nodes from reaching it by what the inventory says."""
    cure = "set cluster_ip: <the address other nodes reach it by>"
    address = node.address
    if address is None and node.cluster_ip:
        return f"cluster_ip {node.cluster_ip} is not an IP address", cure
    if address is None:
        return f"it has no cluster_ip, and ansible_host {node.ansible_host} is not an IP address", cure
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return f"no other node can reach it by its cluster address {address}", cure
    if address.version != 4:
        return f"its cluster address {address} is IPv6, and jobs need IPv4", cure
    return None


def repeated(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> list[tuple[Node, Node]]:
    """Each node whose key an earlier one has already, with that one."""
    first: dict[Hashable, Node] = {}
    return [(node, found) for node in nodes if (found := first.setdefault(key(node), node)) is not node]


def judge_variables(nodes: Sequence[Node], declared: Declared, ansibles: frozenset[str] = frozenset()) -> list[Finding]:
    """Names that look like ours, or like Ansible's for reaching a host, and that nothing reads: misspelt ones."""
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
        Finding(host, f"nothing reads the variable {variable}", cures[variable])
        for variable, hosts in users.items()
        if cures[variable]
        for host in (["all"] if len(hosts) == len(nodes) else hosts)
    ]


def misspelt(variable: str, ansibles: frozenset[str]) -> str:
    """What mends a name that is nearly one of Ansible's; nothing for all others, which may be anybody's."""
    near = difflib.get_close_matches(variable, ansibles, n=1, cutoff=0.9)
    return f"write {near[0]}" if near and variable not in ansibles else ""


def owner_of(variable: str, ours: Iterable[str]) -> str | None:
    """The role to which a name of this form belongs: the longest, as ssh_trust_x may not be of a role ssh."""
    return max((role for role in ours if variable.startswith(f"{role}_")), key=len, default=None)


def variable_cure(variable: str, known: Sequence[str], like_it: Iterable[str]) -> str:
    # A shared prefix alone makes two names rather alike.
    if near := difflib.get_close_matches(variable, known, n=1, cutoff=0.8):
        return f"write {near[0]} if that is meant, else remove it"
    return f"remove or rename it; names of its kind are {some(sorted(like_it)) or 'not in use'}"


def judge_values(values: Mapping[str, Mapping[str, Any]], options: Options) -> list[Finding]:
    """What a role would refuse, said before the first role has begun."""
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
    # The validator would take a text for a list; a role would then look for parts of that text.
    if option.get("type") == "list" and isinstance(value, str):
        example = json.dumps({variable: [value]})
        return [
            (
                f"{variable} is a text and has to be a list",
                f"write it as a list, on the command line -e {shlex.quote(example)}",
            )
        ]
    described = option.get("description", "the README of its role says what it takes")
    cure = f"correct it; {described if isinstance(described, str) else ' '.join(described)}"
    # The validator would look for names in it.
    if option.get("type") == "dict" and not isinstance(value, Mapping):
        return [(f"{variable} is {value!r} and has to have a value for each of some names", cure)]
    judged = ArgumentSpecValidator({variable: dict(option)}).validate({variable: value})
    return [(f"{variable} is wrong: {message}", cure) for message in judged.error_messages]


def declared_options(specs: Mapping[str, Any]) -> Options:
    """All options in one meta/argument_specs.yml, whatever the entry point."""
    entries = (specs.get("argument_specs") or {}).values()
    return {name: option for entry in entries for name, option in (entry.get("options") or {}).items()}


def declared_names(specs: Mapping[str, Any]) -> frozenset[str]:
    """The names of those."""
    return frozenset(declared_options(specs))


# The nodes


def judge_hosts(nodes: Sequence[Node], answers: Mapping[str, Answer], check_mode: bool) -> list[Finding]:
    findings = []
    for node in nodes:
        answer = answers[node.name]
        if "probe" in answer:
            findings += [Finding(node.name, *fault) for fault in node_faults(node, answer, check_mode)]
        else:
            findings.append(judge_silence(node.name, answer))
    return [*findings, *judge_machine_ids(probes_of(answers))]


def probes_of(answers: Mapping[str, Answer]) -> dict[str, Probe]:
    return {host: answer["probe"] for host, answer in answers.items() if "probe" in answer}


def node_faults(node: Node, answer: Answer, check_mode: bool) -> Iterator[Fault]:
    probe = answer["probe"]
    yield from system_faults(probe)
    yield from interface_faults(node, probe)
    yield from account_faults(probe)
    yield from clock_faults(answer)
    yield from privilege_faults(probe)
    if check_mode and not probe["python_apt"]:
        yield "it has no python3-apt, which check mode needs", "apt-get install python3-apt"


def platform_of(probe: Probe) -> str:
    return f"{probe['os_id'].capitalize()} {probe['os_version']}".strip() or "no known system"


def system_faults(probe: Probe) -> Iterator[Fault]:
    if probe["os_version"] not in SUPPORTED.get(probe["os_id"], ()):
        wanted = "; ".join(f"{name.capitalize()} {' or '.join(v)}" for name, v in SUPPORTED.items())
        yield f"it runs {platform_of(probe)}", f"take it out of group cluster, or install {wanted}"
    if probe["arch"] not in ARCHITECTURES:
        yield f"its architecture is {probe['arch']}", f"take a machine with {' or '.join(ARCHITECTURES)}"
    if probe["init"] != "systemd":
        start = "start the container with /sbin/init" if probe["container"] else "reboot"
        yield f"process 1 is {probe['init']}, not systemd", f"apt-get install systemd-sysv, then {start}"


def interface_faults(node: Node, probe: Probe) -> Iterator[Fault]:
    if probe["addresses"] is None:
        yield "it has no command ip", "apt-get install iproute2"
        return
    own = [ip_address(text) for text in probe["addresses"]]
    if node.address not in own:
        usable = [str(address) for address in own if not (address.is_loopback or address.is_link_local)]
        cause = f"its cluster address {node.address} is on none of its interfaces"
        yield cause, f"set cluster_ip to one of {', '.join(usable) or 'its addresses; it has none yet'}"


def account_faults(probe: Probe) -> Iterator[Fault]:
    user, wanted = probe["user"], probe["id"]
    free = "set base_user_id to a number N for which getent passwd N and getent group N find nothing"
    for owner, kinds in alike(uid=probe["id_owner"], gid=probe["group_id_owner"]):
        if owner != user:
            yield f"{owner} already has {kinds} {wanted}, meant for {user}", free
    for number, kinds in alike(uid=probe["user_id"], gid=probe["group_id"]):
        if number != wanted:
            cure = f"set base_user_id: {number} if every node has that, or base_user to a new name"
            yield f"{user} already has {kinds} {number}, not {wanted}", cure


def alike(**values: Hashable) -> list[tuple[Hashable, str]]:
    """Each value that is there, with the names that share it."""
    names: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return [(value, " and ".join(sharing)) for value, sharing in names.items() if value is not None]


def clock_faults(answer: Answer) -> Iterator[Fault]:
    skew = answer["skew"]
    if abs(skew) > SKEW_LIMIT_S:
        side = "ahead of" if skew > 0 else "behind"
        cause = f"its clock is {abs(skew):.0f} s {side} that of this machine; {SKEW_LIMIT_S} s are allowed"
        command = f"{answer['login']['command']} date -s @$(date +%s)"
        yield cause, f"timedatectl set-ntp true, or from here as root: {command}"


def privilege_faults(probe: Probe) -> Iterator[Fault]:
    if not probe["root"]:
        yield "tasks do not run as root there", "set ansible_become: true, or ansible_user: root"
    # Without root the file may just be unreadable.
    elif not probe["sshd_drop_ins"]:
        cure = "add to the top of /etc/ssh/sshd_config: Include /etc/ssh/sshd_config.d/*.conf"
        yield "its sshd does not read /etc/ssh/sshd_config.d", cure


def judge_machine_ids(probes: Mapping[str, Probe]) -> list[Finding]:
    first: dict[str, str] = {}
    findings = []
    for host, probe in probes.items():
        owner = first.setdefault(probe["machine_id"], host)
        if probe["machine_id"] in ("", "uninitialized"):
            findings.append(Finding(host, "it has no machine id", NEW_MACHINE_ID))
        elif owner != host:
            findings.append(Finding(host, *twin_fault(owner, probes[owner], probe)))
    return findings


def twin_fault(owner: str, first: Probe, second: Probe) -> Fault:
    if first["addresses"] == second["addresses"]:
        return (
            f"it is {owner} again: same machine id, same addresses",
            "take one of them out of the inventory",
        )
    return f"it is a clone of {owner}: both have machine id {first['machine_id']}", NEW_MACHINE_ID


class Silence(NamedTuple):
    """A way of giving no answer: how it reads, what it means, what mends it."""

    pattern: str
    meaning: str
    cure: str


FINGERPRINT = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
SILENCES = (
    Silence(
        r"[Hh]ost key for \S+ was revoked",
        "its host key is revoked",
        "to keep it out, name it in ssh_trust_revoked; to take it back, make sure of it and on its console: "
        "rm /etc/ssh/ssh_host_ed25519_key* && ssh-keygen -A && systemctl restart ssh; then here: {forget} and {ssh}, "
        f"and say yes only to the fingerprint that its console shows for: {FINGERPRINT}",
    ),
    Silence(
        r"[Hh]ost key for \S+ has changed",
        "its host key is another than the known one: reinstalled, or another machine",
        f"compare on its console: {FINGERPRINT}; only if it is the new key: {{forget}}, then {{ssh}}",
    ),
    Silence(
        r"Host key verification failed",
        "its host key is not known here yet",
        f"{{ssh}} and say yes only to the fingerprint that its console shows for: {FINGERPRINT}",
    ),
    Silence(
        r"Permission denied \([\w,-]+\)|Too many authentication failures",
        "it does not let {user} in",
        "ssh-copy-id{port_option} {target}, or correct ansible_user or ansible_ssh_private_key_file, "
        "until this works: {ssh}",
    ),
    Silence(
        r"Could not resolve hostname [^:]+",
        "its name resolves to no address",
        "set ansible_host to its IP address",
    ),
    Silence(
        r"(connect to host \S+ port \d+: )?Connection refused",
        "nothing listens for ssh there",
        "systemctl enable --now ssh on it, or correct ansible_host or ansible_port, until this works: {ssh}",
    ),
    Silence(
        r"(connect to host \S+ port \d+: )?(No route to host|Network is unreachable)",
        "no way leads there",
        "correct ansible_host, or the network between, until this works: {ssh}",
    ),
    Silence(
        r"(connect to host \S+ port \d+: )?(Connection|Operation) timed out",
        "it does not answer",
        "start it, open its firewall, or correct ansible_host, until this works: {ssh}",
    ),
    Silence(
        r"Missing \w+ password|a (terminal|password) is required",
        "sudo wants a password of {user}",
        "run with --ask-become-pass, set ansible_become_password, or with visudo on it add: "
        "{user} ALL=(ALL) NOPASSWD: ALL",
    ),
    Silence(
        r"Incorrect \w+ password",
        "sudo refuses the password of {user}",
        "correct ansible_become_password, or run with --ask-become-pass",
    ),
    Silence(
        r"is not in the sudoers file|is not allowed to (execute|run)[^.]*",
        "sudo lets {user} do nothing",
        "set ansible_user: root, or with visudo on it add: {user} ALL=(ALL) NOPASSWD: ALL",
    ),
    Silence(
        r"sudo: (command )?not found",
        "it has no sudo",
        "apt-get install sudo on it, or set ansible_user: root",
    ),
    Silence(
        r"\S*python[\d.]*: (command )?not found|\S*python[\d.]*: No such file or directory",
        "it has no python3",
        "{ssh}, then apt-get update && apt-get install python3; or correct ansible_python_interpreter",
    ),
    Silence(
        r"requires a minimum of Python.*",
        "its python3 is too old",
        "install a supported system; preflight names them",
    ),
)
UNFIT_CURE = "look at that machine before anything is run on it, or take it out of group cluster"
OTHER_SILENCE = Silence("", "it gives no answer", "{verbose_ssh} shows where it stops")


def judge_silence(host: str, answer: Answer) -> Finding:
    if unfit := answer.get("unfit"):
        return Finding(host, f"its answer is none that a node gives: {one_line(unfit)}", UNFIT_CURE)
    reason = answer.get("unreachable_reason") or "it was not asked"
    login = answer.get("login") or {"host": host, "port": None, "user": None, "command": shlex.join(["ssh", host])}
    silence, words = classify(reason)
    fields = silence_fields(login)
    return Finding(host, f"{silence.meaning.format(**fields)} ({words})", silence.cure.format(**fields))


def classify(reason: str) -> tuple[Silence, str]:
    """The kind of silence and the words of the reason that show it."""
    for silence in SILENCES:
        if match := re.search(silence.pattern, reason):
            return silence, one_line(match[0])
    return OTHER_SILENCE, one_line(reason)


def silence_fields(login: Mapping[str, Any]) -> dict[str, str]:
    """All of it from the inventory, and quoted: what a node says enters no command."""
    host, port, user = login["host"], login["port"], login["user"]
    odd_port = port not in (None, 22, "22")
    known_as = f"[{host}]:{port}" if odd_port else str(host)
    return {
        "ssh": login["command"],
        "verbose_ssh": login["command"].replace("ssh", "ssh -v", 1),
        "user": user or "you",
        "target": shlex.quote(f"{user}@{host}" if user else str(host)),
        "port_option": f" -p {shlex.quote(str(port))}" if odd_port else "",
        "forget": shlex.join(["ssh-keygen", *known_hosts(login.get("common_args") or ""), "-R", known_as]),
    }


def known_hosts(ssh_arguments: str) -> list[str]:
    """The file in which ssh was told to keep host keys, for ssh-keygen; its own is the usual one."""
    told = re.findall(r"UserKnownHostsFile[= ](\S+)", " ".join(shlex.split(ssh_arguments)), re.IGNORECASE)
    return ["-f", str(Path(told[0]).expanduser())] if told else []


# The words


def report(findings: Sequence[Finding]) -> str:
    """The findings as a person reads them; hosts that share cause and cure share a number."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        hosts.setdefault((finding.cause, finding.cure), []).append(finding.host)
    items = [
        f"{number}. {some(names)}: {cause}\n   cure: {cure}"
        for number, ((cause, cure), names) in enumerate(hosts.items(), 1)
    ]
    return "\n\n".join([f"preflight found {count(len(hosts), 'problem')}; nothing was changed.", *items])


def some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN_HOSTS
    return ", ".join(names[:SHOWN_HOSTS]) + (f" and {rest} more" if rest > 0 else "")


def summary(probes: Mapping[str, Probe]) -> str:
    platforms = sorted({platform_of(probe) for probe in probes.values()})
    return f"{count(len(probes), 'node')}, {' and '.join(platforms)}: no finding"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def record(findings: Sequence[Finding], probes: Mapping[str, Probe]) -> str:
    content = {"schema": SCHEMA, "findings": [asdict(finding) for finding in findings], "hosts": probes}
    return json.dumps(content, indent=2) + "\n"


# The edges


def connection_variables() -> frozenset[str]:
    """Ansible's names for how a host is reached, as its plugins for that declare them."""
    names = {"ansible_become", "ansible_become_method", "ansible_connection", "ansible_timeout"}
    for kind, loader, name in (("connection", connection_loader, "ssh"), ("become", become_loader, "sudo")):
        loader.get(name, class_only=True)
        options = constants.config.get_configuration_definitions(kind, name).values()
        names |= {variable["name"] for option in options for variable in option.get("vars", ())}
    return frozenset(names | {"ansible_python_interpreter", "ansible_shell_executable", "ansible_shell_type"})


def read_node(name: str, variables: Mapping[str, Any]) -> Node:
    cluster_ip = variables.get("cluster_ip")
    return Node(
        name=name,
        ansible_host=str(variables.get("ansible_host", name)),
        port=str(variables.get("ansible_port", 22)),
        cluster_ip=None if cluster_ip is None else str(cluster_ip),
        variables=frozenset(variables),
    )


def read_nodes(names: Iterable[str], hostvars: Mapping[str, Any]) -> tuple[list[Node], list[Finding]]:
    """The nodes, and a finding for each whose variables cannot be worked out."""
    nodes, broken = [], []
    cure = "correct its cluster_ip, ansible_host or ansible_port"
    for name in names:
        try:
            nodes.append(read_node(name, hostvars[name]))
        except AnsibleError as error:
            broken.append(Finding(name, f"its address cannot be worked out: {error}", cure))
    return nodes, broken


def write_private(path: Path, content: str) -> None:
    """Replace a file as a whole; it and its directory are its owner's alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(content)
    Path(draft).replace(path)


class ActionModule(ActionBase):  # type: ignore[misc]
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            {
                "phase": {"type": "str", "choices": ["inventory", "hosts"], "required": True},
                "roles_dir": {"type": "path"},
                "state_dir": {"type": "path", "required": True},
            },
            required_if=[("phase", "inventory", ["roles_dir"])],
        )
        judge = self._inventory if args["phase"] == "inventory" else self._hosts
        findings, praise = judge(args, task_vars or {})
        # The verdict is what this task is for: shown without -v too.
        result = {**result, "changed": False, "_ansible_verbose_always": True}
        return {**result, "failed": True, "msg": report(findings)} if findings else {**result, "msg": praise}

    def _inventory(self, args: Mapping[str, Any], task_vars: Mapping[str, Any]) -> tuple[list[Finding], str]:
        self._claim(args, task_vars, write=False)
        groups, hostvars = task_vars["groups"], task_vars["hostvars"]
        specs = self._specs(Path(args["roles_dir"]))
        declared = {role: declared_names(spec) for role, spec in specs.items()}
        options = {name: option for spec in specs.values() for name, option in declared_options(spec).items()}
        nodes, broken = read_nodes(groups.get("cluster", ()), hostvars)
        findings = [*broken, *judge_inventory(groups, nodes, declared, connection_variables())]
        if not findings:
            values = {n.name: {name: hostvars[n.name][name] for name in n.variables & set(options)} for n in nodes}
            findings = judge_values(values, options)
        if not findings:
            findings = judge_revoked(groups, task_vars.get("ssh_trust_revoked") or ())
        if not findings:
            self._claim(args, task_vars, write=not self._task.check_mode)
        return findings, f"{count(len(nodes), 'node')} in the inventory: no finding"

    def _hosts(self, args: Mapping[str, Any], task_vars: Mapping[str, Any]) -> tuple[list[Finding], str]:
        hostvars = task_vars["hostvars"]
        revoked = task_vars.get("ssh_trust_revoked") or ()
        nodes, broken = read_nodes([n for n in task_vars["ansible_play_hosts_all"] if n not in revoked], hostvars)
        answers = {node.name: hostvars[node.name].get("_preflight_probe", {}) for node in nodes}
        findings = [*broken, *judge_hosts(nodes, answers, self._task.check_mode)]
        probes = probes_of(answers)
        write_private(Path(args["state_dir"]) / "preflight.json", record(findings, probes))
        return findings, summary(probes)

    def _claim(self, args: Mapping[str, Any], task_vars: Mapping[str, Any], *, write: bool) -> None:
        # Hosts on the command line are in no folder, and in no group cluster either.
        if folder := task_vars.get("inventory_dir"):
            try:
                claim(Path(args["state_dir"]), Path(folder), write=write)
            except FarandoleError as error:
                raise AnsibleActionFail(f"{error}; nothing was changed") from None

    def _specs(self, roles_dir: Path) -> dict[str, Mapping[str, Any]]:
        paths = sorted(roles_dir.glob("*/meta/argument_specs.yml"))
        return {path.parts[-3]: self._loader.load_from_file(str(path)) for path in paths}
