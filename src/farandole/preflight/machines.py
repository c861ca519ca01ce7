"""Checks of the nodes' hardware, disks, limits and links, and of what is in the way in the job user's shells."""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from farandole.core.findings import Finding, finding, some
from farandole.node.health import FULL, SHM_MIB

Probe = Mapping[str, Any]
Former = Mapping[str, Any]

# MiB and inodes below which something will soon fail; below FULL, nothing works.
LITTLE = (500, 10_000)
# The same for /opt before there is a stack.
BEFORE_STACK = (4_000, 100_000)
MEMORY_MIB, NOFILE, LINK_MBIT = 2_000, 1_024, 1_000
# Where programs of jobs may lie, besides /opt.
EXECUTED = ("/tmp", "home")  # noqa: S108
# Horovod is compiled with these, and TensorFlow's wheels need the first.
CPU_NEEDS = ("avx", "f16c", "fma")
# Role base's defaults.
BASE_NOFILE = 1_048_576
UNLIMITED = ("unlimited", "infinity", "-1")
# Hardware errors; the others are mostly those of a program.
BAD_XIDS = {48, 63, 64, 74, 79, 94, 95, 119, 120}
REBOOT_MARGIN_S = 60


def judge_machines(
    probes: Mapping[str, Probe], hostvars: Mapping[str, Mapping[str, Any]], interfaces: Mapping[str, str],
    user: str, stack: bool, former: Former,
) -> list[Finding]:  # fmt: skip
    """All findings; `former` is the record of the last run, and how many seconds ago that was."""
    findings: list[Finding] = []
    for name, probe in probes.items():
        machine = probe["machine"]
        findings += judge_places(name, machine, user, probe["accounts"], stack and not probe["stacks"]["installed"])
        findings += judge_memory(name, machine)
        findings += judge_limits(name, machine, hostvars[name])
        if stack and probe["arch"] == "x86_64" and machine["cpu"] is not None:
            findings += judge_cpu(name, machine)
        if probe["stacks"]["current"] and {name, probe["hostname"]} & {*machine["loopback_names"]}:
            findings.append(finding("name-loopback", name))
        findings += judge_gpus(name, probe)
        findings += judge_sshd(name, machine["sshd"], user)
        findings += judge_shells(name, machine["shells"], user)
        findings += judge_changes(name, probe, former)
    return [*findings, *judge_links(probes, interfaces), *judge_rdma(probes, interfaces)]


def judge_queues(probes: Mapping[str, Probe], queue: Container[str]) -> list[Finding]:
    """The nodes of the queue that have a Slurm of somebody else, whose settings Farandole would overwrite."""
    files = {name: probe["machine"]["own_queue"] for name, probe in probes.items() if name in queue}
    return [finding("queue-foreign", name, target=file) for name, file in files.items() if file]


def judge_places(
    name: str, machine: Mapping[str, Any], user: str, accounts: Mapping[str, Any], first: bool
) -> Iterator[Finding]:
    """Space, inodes and mount options; one finding for all folders on a file system."""
    mounts: dict[str, list[str]] = {}
    for place, facts in machine["places"].items():
        if place != "shm":
            mounts.setdefault(facts["mount"], []).append(place)
    home = f"~{user}" if (accounts.get(user) or {}).get("user_id") is not None else "/home"
    shown = {"home": home}
    for places in mounts.values():
        facts = machine["places"][places[0]]
        names, target = some([shown.get(place, place) for place in places]), shown.get(places[0], places[0])
        wanted = BEFORE_STACK if first and "/opt" in places else LITTLE
        yield from judge_space(name, facts, wanted, names, target)
        if facts["noexec"] and "/opt" in places:
            yield finding("stack-noexec", name)
        for place in [place for place in EXECUTED if place in places and facts["noexec"]]:
            yield finding("mount-noexec", name, target=shown.get(place, place))


def judge_space(
    name: str, facts: Mapping[str, Any], wanted: tuple[int, int], names: str, target: str
) -> Iterator[Finding]:
    if facts["read_only"]:
        yield finding("disk-read-only", name, places=names, target=target)
    elif facts["free_mb"] is not None:
        have = (facts["free_mb"], facts["free_inodes"])
        seen = f"{have[0]} MiB" + (f" and {have[1]} inodes" if have[1] is not None else "")
        if below(have, FULL):
            yield finding("node-disk-full", name, places=names, seen=seen, target=target)
        elif below(have, wanted):
            need = f"{wanted[0]} MiB and {wanted[1]} inodes"
            yield finding("disk-small", name, places=names, seen=seen, wanted=need, target=target)


def judge_memory(name: str, machine: Mapping[str, Any]) -> Iterator[Finding]:
    shm = machine["places"]["shm"]["free_mb"]
    if shm is not None and shm < SHM_MIB:
        yield finding("shm-small", name, seen=shm, wanted=SHM_MIB)
    if machine["memory_mb"] < MEMORY_MIB:
        yield finding("memory-small", name, seen=machine["memory_mb"], wanted=MEMORY_MIB)


def below(have: tuple[int, int | None], wanted: tuple[int, int]) -> bool:
    return have[0] < wanted[0] or (have[1] is not None and have[1] < wanted[1])


def judge_limits(name: str, machine: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    """Limits that sshd cannot set for the job user."""
    for limit, default in (("nofile", BASE_NOFILE), ("memlock", "unlimited")):
        most, wanted = machine["ceiling"][limit], str(own.get(f"base_{limit}", default))
        if most is not None and (wanted in UNLIMITED or (wanted.isdecimal() and int(wanted) > most)):
            yield finding("limit-refused", name, label=f"base_{limit}", seen=most, wanted=wanted)


def judge_cpu(name: str, machine: Mapping[str, Any]) -> Iterator[Finding]:
    if lacking := [flag for flag in CPU_NEEDS if flag not in machine["cpu"]]:
        yield finding("cpu-lacks", name, seen=", ".join(lacking))


def judge_gpus(name: str, probe: Probe) -> Iterator[Finding]:
    gpus, driver = probe["machine"]["gpus"], probe["nvidia_driver"]
    if gpus["found"] and not driver:
        yield finding("gpu-driverless", name, seen=gpus["found"])
    if driver and gpus["library"] and gpus["library"] != driver:
        yield finding("driver-differs", name, seen=driver, library=gpus["library"])
    for bus, errors in gpus["ecc"].items():
        yield finding("gpu-ecc", name, seen=f"{bus}: {errors}")
    for bus, code in gpus["xids"]:
        if code in BAD_XIDS:
            yield finding("gpu-xid", name, seen=f"Xid {code}", bus=bus)


def judge_rdma(probes: Mapping[str, Probe], interfaces: Mapping[str, str]) -> Iterator[Finding]:
    """Ports for RDMA that are down, that only some nodes have, or that are in another network than jobs."""
    all_ports = {name: probe["machine"]["rdma"] for name, probe in probes.items()}
    active = {name: [port for port in ports.values() if port["active"]] for name, ports in all_ports.items()}
    having = [name for name, ports in active.items() if ports]
    for name, ports in all_ports.items():
        cards = {port["card"] for port in active[name]} - {""}
        if not active[name] and (ports or having):
            if ports:
                fault = finding("rdma-down", name, seen=some(sorted(ports)))
            else:
                fault = finding("rdma-differs", name, seen=some(having))
            # NCCL is for jobs on GPUs.
            hangs = having and probes[name]["machine"]["gpus"]["found"]
            yield replace(fault, severity="warn") if hangs else fault
        elif cards and name in interfaces and interfaces[name] not in cards:
            yield finding("rdma-aside", name, seen=some(sorted(cards)), label=interfaces[name])


def judge_sshd(name: str, lists: Mapping[str, list[str]] | None, user: str) -> Iterator[Finding]:
    """Whether sshd keeps out the job user, as whom nodes log in to each other."""
    if not lists:
        return
    # Where somebody may come from is not looked at.
    admitted = [pattern.partition("@")[0] for pattern in lists["AllowUsers"]]
    refused = [pattern for pattern in lists["DenyUsers"] if "@" not in pattern]
    for keyword, names, patterns in (
        ("DenyUsers", [user], refused), ("AllowUsers", [user], admitted),
        ("DenyGroups", lists["own"], lists["DenyGroups"]), ("AllowGroups", lists["own"], lists["AllowGroups"]),
    ):  # fmt: skip
        matches = any(fnmatchcase(own, pattern) for own in names for pattern in patterns)
        if patterns and matches == keyword.startswith("Deny"):
            yield finding("sshd-keeps-out", name, user=user, seen=f"{keyword} {some(lists[keyword])}")


def judge_shells(name: str, shells: Mapping[str, Any], user: str) -> Iterator[Finding]:
    for kind, shell in shells.items():
        label = "a login shell" if kind == "login" else "a non-interactive ssh shell"
        if shell is None:
            yield finding("shell-silent", name, kind=label, user=user)
            continue
        if shell["commands"]:
            seen = some([f"{command} is {path}" for command, path in shell["commands"].items()])
            yield finding("command-shadowed", name, seen=seen, kind=label, user=user)
        if libraries := shell["libraries"] + shell["packages"]:
            yield finding("library-shadowed", name, seen=some(libraries), kind=label, user=user)
        if shell["variables"]:
            yield finding("variable-harmful", name, seen=some(shell["variables"]), kind=label, user=user)
        if shell["nofile"] is not None and shell["nofile"] < NOFILE:
            yield finding("limit-low", name, seen=shell["nofile"], wanted=NOFILE, kind=label, user=user)


def judge_changes(name: str, probe: Probe, former: Former) -> Iterator[Finding]:
    """What has happened since the last run: a reboot, other packages."""
    machine, before = probe["machine"], (former["hosts"].get(name) or {}).get("machine")
    if not before:
        return
    if machine["up_s"] < former["ago"] - REBOOT_MARGIN_S:
        yield finding("rebooted", name, seen=machine["up_s"] // 60)
    now = {**machine["packages"], "the kernel": machine["kernel"]}
    then = {**before["packages"], "the kernel": before["kernel"]}
    if changed := [f"{key} from {then[key]} to {now[key]}" for key in now if key in then and now[key] != then[key]]:
        yield finding("packages-changed", name, seen=some(changed))


def judge_links(probes: Mapping[str, Probe], interfaces: Mapping[str, str]) -> Iterator[Finding]:
    links = {
        name: link for name, interface in interfaces.items()
        if name in probes and (link := probes[name]["machine"]["links"].get(interface))
    }  # fmt: skip
    for name, link in links.items():
        if link["duplex"] == "half":
            yield finding("link-half-duplex", name, seen=interfaces[name])
        if link["speed"] and link["speed"] < LINK_MBIT:
            yield finding("link-slow", name, seen=f"{interfaces[name]} has {link['speed']}", wanted=LINK_MBIT)
    for label, fact in (("MTU", "mtu"), ("speed in Mb/s", "speed")):
        values = {name: link[fact] for name, link in links.items() if link[fact]}
        owners: dict[int, list[str]] = {}
        for name, value in values.items():
            owners.setdefault(value, []).append(name)
        most = max(owners, key=lambda value: len(owners[value]), default=0)
        # Without a majority nobody can tell which is the odd one.
        usual = most if owners and 2 * len(owners[most]) > len(values) else None
        seen = "; ".join(f"{value} on {some(names)}" for value, names in sorted(owners.items()))
        if len(owners) > 1:
            odd = (name for name, value in values.items() if value != usual)
            yield from (finding("link-differs", name, what=label, seen=seen) for name in odd)


def former_record(path: Path, now: float) -> Former:
    """What the last run recorded, and how long ago; nothing if there is no usable record."""
    try:
        hosts = json.loads(path.read_text())["hosts"]
        known = {name: probe for name, probe in hosts.items() if "kernel" in probe.get("machine", {})}
        return {"hosts": known, "ago": now - path.stat().st_mtime}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {"hosts": {}, "ago": 0}
