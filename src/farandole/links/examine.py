"""Decide what to measure between the nodes, and judge it."""

import json
import shlex
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from farandole.core import bounds
from farandole.core.findings import Finding, finding, some
from farandole.core.schema import MANY as MANY_PAIRS
from farandole.core.schema import UnfitError, fields, many, named, number, optional, row, words
from farandole.core.text import one_line
from farandole.inventory.cluster import HostVars, Node, answer_of, probe_of
from farandole.inventory.excluded import now
from farandole.links.agents import Place
from farandole.links.fabric import Fabric
from farandole.links.judge import MEGA, Bars, judge, record, slow_ways
from farandole.links.measure import Measured, measure

PYTHON = "/usr/bin/python3"
# Seconds that a login may take, and how much it may say.
LOGIN_S, LONGEST = 20, 1 << 16
# The exit status of a shell that cannot become the job user.
UNABLE = 99
# Measuring so many takes long enough to say so.
MANY = 8
# What is read of an earlier preflight.json, which may be of another version.
LINK = fields({"delay_us": optional(number), "mb_per_s": optional(number)})
PAIR = row(words(r"[a-z0-9-]{1,63}"), words(r"[a-z0-9-]{1,63}"), optional(number), optional(number))
LINKS = fields(
    {"nodes": named(words(r"[a-z0-9-]{1,63}"), LINK), "usual_mb_per_s": optional(number)},
    {"rates_measured": optional(words(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")), "pairs": many(PAIR)},
)


@dataclass(frozen=True)
class Wanted:
    """What is measured, and what is too slow."""

    what: str
    bars: Bars
    head: str
    job_user: str
    network: Fabric
    # All nodes that take part in jobs, also those that are not in this run.
    members: Sequence[str]


@dataclass(frozen=True)
class Examined:
    """The findings about the connections, and what preflight.json keeps of them."""

    findings: Sequence[Finding]
    links: Mapping[str, Any]
    about: str = ""


def links_in(path: Path) -> dict[str, Any]:
    """The connections in an earlier preflight.json; empty if there are none."""
    try:
        links: dict[str, Any] = LINKS(json.loads(path.read_text()).get("links"))
    except (OSError, ValueError, AttributeError, UnfitError):
        return {}
    return links


def examine(
    nodes: Sequence[Node], hostvars: HostVars, wanted: Wanted, former: Mapping[str, Any], say: Callable[[str], None]
) -> Examined:
    """Measure the connections between these nodes, as far as wanted, and judge them."""
    nodes, asked = [node for node in nodes if login_of(hostvars, node.name).get("shared")], nodes
    names = [node.name for node in nodes]
    untried = [*without_connections([node.name for node in asked], names)] if wanted.what == "all" else []
    if wanted.what == "nothing" or len(nodes) < 2:
        return Examined(untried if len(wanted.members) > 1 else [], former)
    rates = wanted.what == "all" or (wanted.what == "auto" and not known(former, names))
    if rates and len(nodes) > MANY:
        say(f"measuring the connections between {len(nodes)} nodes")
    # site.yml repairs names and keys, so it is not kept from that.
    able = [name for name in names if wanted.what == "all" and has_account(hostvars, name, wanted.job_user)]
    slow = partial(slow_ways, bars=wanted.bars) if rates else None
    measured = measure([place(node, hostvars, wanted.network) for node in nodes], slow, names=bool(able))
    measured.misnamed = [wrong for wrong in measured.misnamed if {wrong.source, wrong.target} <= {*able}]
    unaware = kept_out(measured, wanted.network.addresses, hostvars)
    measured.closed = [link for link in measured.closed if link.source not in unaware.get(link.target, ())]
    findings = [*untried, *judge(measured, wanted.bars, wanted.network.network)]
    findings += [finding("firewall-unaware", name, other=some(sources)) for name, sources in unaware.items()]
    if able:
        findings += judge_logins(names, able, hostvars, wanted)
    # What was bad is measured again next time.
    bad = {name for fault in findings if fault.severity == "stop" for name in fault.host.split(", ")}
    elsewhere = [name for name in wanted.members if not answer_of(hostvars[name])]
    return Examined(findings, merged(record(measured, wanted.bars), former, bad, elsewhere), summary(measured))


def carries(nodes: Sequence[Node], hostvars: HostVars, network: Fabric) -> float | None:
    """The megabytes per second that connections of a network carry, all at once; None unless all of them work."""
    measured = measure([place(node, hostvars, network) for node in nodes], lambda _: [])
    if measured.silent or measured.closed or measured.untried:
        return None
    return round(statistics.median(max(rates) for rates in measured.rates.values()) / MEGA, 1)


def kept_out(measured: Measured, addresses: Mapping[str, str], hostvars: HostVars) -> dict[str, list[str]]:
    """The nodes that our own firewall on another one does not know yet, by that one: site.yml fixes that."""
    unknown: dict[str, list[str]] = {}
    for link in measured.closed:
        let_in = probe_of(hostvars[link.target]).get("firewall")
        known = unknown.setdefault(link.target, [])
        if let_in is not None and addresses.get(link.source) not in let_in and link.source not in known:
            known.append(link.source)
    return {name: sources for name, sources in unknown.items() if sources}


def login_of(hostvars: HostVars, name: str) -> Mapping[str, Any]:
    return answer_of(hostvars[name]).get("login") or {}


def has_account(hostvars: HostVars, name: str, account: str) -> bool:
    accounts = probe_of(hostvars[name])["accounts"]
    return account in accounts and accounts[account]["user_id"] is not None


def known(former: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether the rates of all these nodes were measured before."""
    nodes = former.get("nodes", {})
    return all(nodes.get(name, {}).get("mb_per_s") is not None for name in names)


def place(node: Node, hostvars: HostVars, network: Fabric) -> Place:
    python = hostvars[node.name].get("ansible_python_interpreter") or PYTHON
    # A node that was left out and is tested again is in no network yet.
    address = network.addresses.get(node.name, str(node.address))
    links = probe_of(hostvars[node.name]).get("interfaces") or ()
    return Place(
        node.name,
        address,
        tuple(login_of(hostvars, node.name)["shared"]),
        python if str(python).startswith("/") else PYTHON,
        str(node.address),
        next((link["name"] for link in links if link["address"] == address), ""),
    )


def merged(
    links: Mapping[str, Any], former: Mapping[str, Any], bad: Collection[str], elsewhere: Collection[str]
) -> dict[str, Any]:
    """Rates that were not measured this time are those of an earlier run; bad nodes have none.

    What was measured of the nodes elsewhere, which are not in this run, stays.
    """
    before = former.get("nodes", {})
    nodes: dict[str, Any] = {name: before[name] for name in elsewhere if name in before}
    theirs = [own["mb_per_s"] for own in nodes.values() if own["mb_per_s"] is not None]
    for name, own in links["nodes"].items():
        earlier, rate = before.get(name, {}).get("mb_per_s"), own["mb_per_s"]
        nodes[name] = {**own, "mb_per_s": None if name in bad else earlier if rate is None else rate}
    shut = {(pair[0], pair[1]) for pair in links["pairs"]}
    kept = [pair for pair in former.get("pairs", []) if {*pair[:2]} <= nodes.keys() and (pair[0], pair[1]) not in shut]
    usual = {name: former.get(name) for name in ("usual_mb_per_s", "rates_measured")}
    if links["usual_mb_per_s"] is not None:
        kept = [pair for pair in kept if not {*pair[:2]}.isdisjoint(elsewhere)]
        rates = [own["mb_per_s"] for own in links["nodes"].values() if own["mb_per_s"] is not None]
        usual["usual_mb_per_s"] = round(statistics.median([*theirs, *rates]), 1)
        # No rate is older than this.
        usual["rates_measured"] = usual["rates_measured"] if theirs else now()
    return {**links, "nodes": nodes, "pairs": [*links["pairs"], *kept][:MANY_PAIRS], **usual}


def summary(measured: Measured) -> str:
    """One phrase for the user."""
    usually = record(measured)["usual_mb_per_s"]
    tried = "not all connections tried" if measured.silent or measured.untried else "all connections tried"
    rate = f"connections carry {usually:.0f} MB/s" if usually is not None else tried
    return f"{rate} ({measured.seconds:.1f} s)"


def without_connections(asked: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    """The nodes of this run whose connections cannot be tried; the names are those to which Ansible logs in by ssh."""
    for name in asked:
        if name not in names:
            yield finding("pair-untried", name, kind="its connections", seen="Ansible does not reach it by ssh")
        elif len(names) == 1:
            yield finding("pair-untried", name, kind="its connections", seen="this run has no other node for that")


def judge_logins(names: Sequence[str], able: Sequence[str], hostvars: HostVars, wanted: Wanted) -> Iterator[Finding]:
    """Judge the logins as the job user, whom only some of these nodes may have, and say which were not tried."""
    user, head = wanted.job_user, wanted.head
    for name in names:
        if name not in able:
            why = f"it has no account {user}"
            yield finding("pair-untried", name, kind=f"logins to it as {user}", seen=why)
    if head not in able:
        why = f"it has no account {user}" if head in names else "this run leaves it out"
        yield finding("pair-untried", head, kind=f"logins from it as {user}", seen=why)
        return
    yield from logins(head, login_of(hostvars, head)["shared"], able, user)


def logins(head: str, command: Sequence[str], names: Sequence[str], job_user: str) -> Iterator[Finding]:
    """Log in from the head to every node as the job user, as jobs do; not if only a password makes that user of us."""

    def log_in(name: str) -> str | None:
        """Why it fails; empty if it works, nothing if it could not be tried."""
        ssh = f"ssh -n -o BatchMode=yes -o ConnectTimeout=10 {name} true"
        script = (
            f'cd / && if [ "$(id -u)" = 0 ]; then runuser -u {job_user} -- {ssh}; '
            f"elif sudo -n true 2>/dev/null; then sudo -n -u {job_user} -- {ssh}; else exit {UNABLE}; fi"
        )
        output, status = bounds.answer([*command, f"sh -c {shlex.quote(script)}"], LOGIN_S, LONGEST)
        if status < 0:
            return f"no answer within {LOGIN_S} s" if len(output) <= LONGEST else f"it says over {LONGEST >> 10} KiB"
        if status == UNABLE:
            return None
        return (one_line(output) or "no reason given") if status else ""

    # sshd allows ten sessions in a connection.
    with ThreadPoolExecutor(8) as pool:
        reasons = [*zip(names, pool.map(log_in, names), strict=True)]
    if any(why is None for _, why in reasons):
        seen = "that needs root there, or sudo without a password"
        yield finding("pair-untried", head, kind=f"logins from it as {job_user}", seen=seen)
    yield from (finding("pair-login-failed", name, seen=why) for name, why in reasons if why)
