"""Checks of the nodes, by what they report about themselves."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean

from farandole.core.findings import Finding, count, finding, some
from farandole.core.schema import UnfitError, fields, many, named, whole, words
from farandole.inventory.cluster import HostVars, Node
from farandole.links.fabric import Fabric, address_absent
from farandole.preflight.answer import interface
from farandole.preflight.unreachable import judge_unreachable

Probe = Mapping[str, Any]
Answer = Mapping[str, Any]

SCHEMA = 1
SKEW_LIMIT_S = 300
SUPPORTED = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}
ARCHITECTURES = ("x86_64", "aarch64")
# What is read of probes in an earlier preflight.json, which may be of another version.
LAST = named(words(r"[a-z0-9-]{1,63}"), fields({"interfaces": many(interface), "gpus": whole(1024)}, {}))


def judge_hosts(nodes: Sequence[Node], answers: Mapping[str, Answer], accounts: Mapping[str, int]) -> list[Finding]:
    findings: list[Finding] = []
    for node in nodes:
        answer = answers[node.name]
        if "probe" in answer:
            findings += judge_node(node, answer, accounts)
        else:
            findings.append(judge_unreachable(node.name, answer))
    return [*findings, *judge_clocks(answers), *judge_machine_ids(probes_of(answers))]


def probes_of(answers: Mapping[str, Answer]) -> dict[str, Probe]:
    return {host: answer["probe"] for host, answer in answers.items() if "probe" in answer}


def judge_node(node: Node, answer: Answer, accounts: Mapping[str, int]) -> Iterator[Finding]:
    name, probe = node.name, answer["probe"]
    yield from judge_system(name, probe)
    yield from judge_address(node, probe)
    for account, wanted in accounts.items():
        yield from judge_account(name, account, wanted, probe["accounts"][account])
    if (login := answer["login"]["account"]) in accounts:
        yield finding("login-for-jobs", name, account=login)
    yield from judge_privileges(name, probe)


def platform_of(probe: Probe) -> str:
    return f"{probe['os_id'].capitalize()} {probe['os_version']}".strip() or "an unknown system"


def judge_system(name: str, probe: Probe) -> Iterator[Finding]:
    if probe["os_version"] not in SUPPORTED.get(probe["os_id"], ()):
        wanted = "; ".join(f"{system.capitalize()} {' or '.join(v)}" for system, v in SUPPORTED.items())
        yield finding("system-unsupported", name, seen=platform_of(probe), supported=wanted)
    if probe["arch"] not in ARCHITECTURES:
        yield finding("architecture-unsupported", name, seen=probe["arch"], supported=" or ".join(ARCHITECTURES))
    if probe["init"] != "systemd":
        yield finding("systemd-missing", name, seen=probe["init"])


def judge_address(node: Node, probe: Probe) -> Iterator[Finding]:
    if probe["addresses"] is None:
        yield finding("ip-missing", node.name)
    elif node.address not in [ip_address(text) for text in probe["addresses"]]:
        yield address_absent(node.name, str(node.address), probe["addresses"])


def judge_hostnames(probes: Mapping[str, Probe], hostvars: HostVars) -> Iterator[Finding]:
    """Report nodes that have another name than in the inventory, and are to keep it."""
    for name, probe in probes.items():
        if probe["hostname"] != name and not boolean(hostvars[name].get("base_set_hostname", True), strict=False):
            yield finding("hostname-differs", name, seen=probe["hostname"])


def judge_account(name: str, account: str, wanted: int, ids: Mapping[str, Any]) -> Iterator[Finding]:
    for owner, kinds in alike(uid=ids["id_owner"], gid=ids["group_id_owner"]):
        if owner != account:
            yield finding("id-taken", name, owner=owner, seen=f"{kinds} {wanted}", account=account)
    for number, kinds in alike(uid=ids["user_id"], gid=ids["group_id"]):
        if number != wanted:
            yield finding("id-differs", name, account=account, seen=f"{kinds} {number}", wanted=wanted)


def alike(**values: Hashable) -> list[tuple[Hashable, str]]:
    """Each value except None, with the names that share it."""
    names: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return [(value, " and ".join(sharing)) for value, sharing in names.items() if value is not None]


def judge_clocks(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """If all nodes agree with each other, it is the clock here that is wrong, or the head's, which they follow."""
    logins = {name: answer["login"]["command"] for name, answer in answers.items() if "probe" in answer}
    skews = {name: answers[name]["skew"] for name in logins}
    wrong = {name: skew for name, skew in skews.items() if abs(skew) > SKEW_LIMIT_S}
    if len(wrong) > 1 and wrong == skews and max(wrong.values()) - min(wrong.values()) <= SKEW_LIMIT_S:
        name, skew = min(wrong.items(), key=lambda item: abs(item[1]))
        seen, nodes = _difference(-skew), count(len(wrong), "node")
        yield finding("clock-wrong-here", "all", seen=seen, nodes=nodes, limit=SKEW_LIMIT_S, ssh=logins[name])
        return
    for name, skew in wrong.items():
        yield finding("clock-wrong", name, seen=_difference(skew), limit=SKEW_LIMIT_S, ssh=logins[name])


def _difference(skew: float) -> str:
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"


def judge_privileges(name: str, probe: Probe) -> Iterator[Finding]:
    if not probe["root"]:
        yield finding("not-root", name)
    # Without root the file may merely be unreadable.
    elif not probe["sshd_drop_ins"]:
        yield finding("drop-ins-unread", name)


def judge_machine_ids(probes: Mapping[str, Probe]) -> Iterator[Finding]:
    names: dict[str, list[str]] = {}
    for host, probe in probes.items():
        names.setdefault(probe["machine_id"], []).append(host)
    for host, probe in probes.items():
        sharing = names[probe["machine_id"]]
        if probe["machine_id"] in ("", "uninitialized"):
            yield finding("machine-id-missing", host)
        elif host != sharing[0] and probe["addresses"] == probes[sharing[0]]["addresses"]:
            yield finding("node-repeated", host, other=sharing[0], seen="same machine id, same addresses")
        elif host != sharing[0]:
            yield finding("machines-shared", host, seen=some(sharing))


def about(probes: Mapping[str, Probe]) -> str:
    """How many nodes answered, which systems they run, and what all of them have for RDMA."""
    platforms = sorted({platform_of(probe) for probe in probes.values()})
    active = [
        {f"{name} of {port['card']}" if port["card"] else name for name, port in ports.items() if port["active"]}
        for ports in (probe["machine"]["rdma"] for probe in probes.values())
    ]
    shared = sorted(set.intersection(*active)) if active else []
    rdma = f", RDMA by {some(shared)}" if shared else ""
    return f"{count(len(probes), 'node')}, {' and '.join(platforms)}{rdma}"


def record(
    findings: Sequence[Finding], probes: Mapping[str, Probe], network: Fabric, links: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None, elsewhere: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """The content of preflight.json: facts, the network for jobs, its connections, and findings.

    Of nodes elsewhere, which were not probed, it keeps what was last known.
    """
    known = [asdict(item) for item in findings]
    chosen = {"network": network.network, "interfaces": network.interfaces, **(others or {})} if network.network else {}
    content = {"schema": SCHEMA, "findings": known, "fabric": chosen, "links": links or {}, "hosts": probes}
    return json.dumps(content | ({"elsewhere": elsewhere} if elsewhere else {}), indent=2) + "\n"


def last_known(state: str | Path) -> dict[str, dict[str, Any]]:
    """The interfaces and GPUs of nodes, as preflight has last seen them, maybe in an earlier run."""
    try:
        content = json.loads((Path(state) / "preflight.json").read_text())
        known: dict[str, dict[str, Any]] = LAST({**content.get("elsewhere", {}), **content["hosts"]})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, UnfitError):
        return {}
    return known
