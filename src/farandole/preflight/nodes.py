"""Checks of the nodes, by what they report about themselves."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any

from farandole.findings import Fault, Finding, count
from farandole.preflight.inventory import Node
from farandole.preflight.unreachable import judge_unreachable

Probe = Mapping[str, Any]
Answer = Mapping[str, Any]

SCHEMA = 1
SKEW_LIMIT_S = 300
SUPPORTED = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}
ARCHITECTURES = ("x86_64", "aarch64")
NEW_MACHINE_ID = "rm /etc/machine-id && systemd-machine-id-setup, then reboot"


def judge_hosts(nodes: Sequence[Node], answers: Mapping[str, Answer], check_mode: bool) -> list[Finding]:
    findings = []
    for node in nodes:
        answer = answers[node.name]
        if "probe" in answer:
            findings += [Finding(node.name, *fault) for fault in node_faults(node, answer, check_mode)]
        else:
            findings.append(judge_unreachable(node.name, answer))
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
        yield "python-apt-missing", "it has no python3-apt, which check mode needs", "apt-get install python3-apt"


def platform_of(probe: Probe) -> str:
    return f"{probe['os_id'].capitalize()} {probe['os_version']}".strip() or "an unknown system"


def system_faults(probe: Probe) -> Iterator[Fault]:
    if probe["os_version"] not in SUPPORTED.get(probe["os_id"], ()):
        wanted = "; ".join(f"{name.capitalize()} {' or '.join(v)}" for name, v in SUPPORTED.items())
        yield (
            "system-unsupported",
            f"it runs {platform_of(probe)}",
            f"take it out of group cluster, or install {wanted}",
        )
    if probe["arch"] not in ARCHITECTURES:
        yield (
            "architecture-unsupported",
            f"its architecture is {probe['arch']}",
            f"use a machine with {' or '.join(ARCHITECTURES)}",
        )
    if probe["init"] != "systemd":
        start = "start the container with /sbin/init" if probe["container"] else "reboot"
        yield (
            "systemd-missing",
            f"process 1 is {probe['init']}, not systemd",
            f"apt-get install systemd-sysv, then {start}",
        )


def interface_faults(node: Node, probe: Probe) -> Iterator[Fault]:
    if probe["addresses"] is None:
        yield "ip-missing", "the ip command is missing", "apt-get install iproute2"
        return
    own = [ip_address(text) for text in probe["addresses"]]
    if node.address not in own:
        usable = [str(address) for address in own if not (address.is_loopback or address.is_link_local)]
        cause = f"its cluster address {node.address} is on none of its interfaces"
        yield (
            "address-absent",
            cause,
            f"set cluster_ip to one of {', '.join(usable) or 'its addresses, once it has any'}",
        )


def account_faults(probe: Probe) -> Iterator[Fault]:
    user, wanted = probe["user"], probe["id"]
    free = "set base_user_id to a number N for which neither getent passwd N nor getent group N finds anything"
    for owner, kinds in alike(uid=probe["id_owner"], gid=probe["group_id_owner"]):
        if owner != user:
            yield "id-taken", f"{owner} already has {kinds} {wanted}, meant for {user}", free
    for number, kinds in alike(uid=probe["user_id"], gid=probe["group_id"]):
        if number != wanted:
            cure = f"set base_user_id: {number} if every node has that one, or set base_user to a new name"
            yield "id-differs", f"{user} already has {kinds} {number}, not {wanted}", cure


def alike(**values: Hashable) -> list[tuple[Hashable, str]]:
    """Each value except None, with the names that share it."""
    names: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return [(value, " and ".join(sharing)) for value, sharing in names.items() if value is not None]


def clock_faults(answer: Answer) -> Iterator[Fault]:
    skew = answer["skew"]
    if abs(skew) > SKEW_LIMIT_S:
        side = "ahead of" if skew > 0 else "behind"
        cause = f"its clock is {abs(skew):.0f} s {side} this machine's; {SKEW_LIMIT_S} s are allowed"
        command = f"{answer['login']['command']} date -s @$(date +%s)"
        yield "clock-wrong", cause, f"timedatectl set-ntp true on it, or from here as root: {command}"


def privilege_faults(probe: Probe) -> Iterator[Fault]:
    if not probe["root"]:
        yield "not-root", "tasks do not run as root there", "set ansible_become: true, or ansible_user: root"
    # Without root the file may merely be unreadable.
    elif not probe["sshd_drop_ins"]:
        cure = "add to the top of /etc/ssh/sshd_config: Include /etc/ssh/sshd_config.d/*.conf"
        yield "drop-ins-unread", "its sshd does not read /etc/ssh/sshd_config.d", cure


def judge_machine_ids(probes: Mapping[str, Probe]) -> list[Finding]:
    first: dict[str, str] = {}
    findings = []
    for host, probe in probes.items():
        owner = first.setdefault(probe["machine_id"], host)
        if probe["machine_id"] in ("", "uninitialized"):
            findings.append(Finding(host, "machine-id-missing", "it has no machine id", NEW_MACHINE_ID))
        elif owner != host:
            findings.append(Finding(host, *duplicate_fault(owner, probes[owner], probe)))
    return findings


def duplicate_fault(owner: str, first: Probe, second: Probe) -> Fault:
    if first["addresses"] == second["addresses"]:
        return (
            "node-repeated",
            f"it is the same machine as {owner}: same machine id, same addresses",
            "take one of them out of the inventory",
        )
    return (
        "machine-id-repeated",
        f"it is a clone of {owner}: both have machine id {first['machine_id']}",
        NEW_MACHINE_ID,
    )


def summary(probes: Mapping[str, Probe]) -> str:
    platforms = sorted({platform_of(probe) for probe in probes.values()})
    return f"{count(len(probes), 'node')}, {' and '.join(platforms)}: no finding"


def record(findings: Sequence[Finding], probes: Mapping[str, Probe], network: Mapping[str, Any]) -> str:
    """The content of preflight.json: facts, the network for jobs, and findings."""
    known = [asdict(finding) for finding in findings]
    content = {"schema": SCHEMA, "findings": known, "fabric": network, "hosts": probes}
    return json.dumps(content, indent=2) + "\n"
