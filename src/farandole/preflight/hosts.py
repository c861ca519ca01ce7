"""Decide what follows from what nodes report about themselves, and from what was measured between them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from farandole.core.files import write_private
from farandole.core.findings import Finding, refused, stopped
from farandole.inventory import excluded
from farandole.inventory.cluster import HostVars, Node, answer_of
from farandole.links import fabric
from farandole.links.examine import Examined, Wanted, carries, examine, links_in, login_of
from farandole.links.judge import Bars
from farandole.preflight import networks
from farandole.preflight.machines import former_record, judge_machines, judge_queues
from farandole.preflight.nodes import (
    Probe,
    about,
    judge_hostnames,
    judge_hosts,
    judge_machine_ids,
    last_known,
    probes_of,
    record,
)

Read = Callable[[Iterable[str]], tuple[list[Node], list[Finding]]]
JudgeStack = Callable[[str, Probe], Iterable[Finding]]


@dataclass(frozen=True)
class Request:
    """What to check, and what to do with bad nodes."""

    state: Path
    # Those who start jobs, the job user first.
    accounts: Mapping[str, int]
    head: str
    stack: bool
    queue: Sequence[str]
    # How much of the connections is measured, and the network that the user has set.
    measure: str
    network: str
    bars: Bars
    exclude: bool
    check_mode: bool

    @property
    def record(self) -> Path:
        """What later steps, and the next run, know of this one."""
        return self.state / "preflight.json"

    @property
    def job_user(self) -> str:
        return next(iter(self.accounts), "")


@dataclass(frozen=True)
class Outcome:
    """What the user is told, and who is left out from now on."""

    findings: Sequence[Finding]
    left_out: Mapping[str, str]
    about: str


@dataclass
class Seen:
    """The nodes that were asked, what they said, and what was found."""

    nodes: Sequence[Node]
    probes: Mapping[str, Probe]
    findings: list[Finding]

    def sound(self) -> list[Node]:
        """The nodes of which nothing bad is known."""
        bad = stopped(self.findings)
        return [node for node in self.nodes if node.name in self.probes and node.name not in bad]


def check(
    request: Request, checked: excluded.Checked, hostvars: HostVars,
    read: Read, judge_stack: JudgeStack, say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Judge the nodes and their connections, and decide who is left out."""
    with excluded.changing(request.state) as entries:
        asked = [name for name in checked.tested if name not in entries or not entries[name].held]
        seen = _look(request, read(asked), hostvars, judge_stack)
        # Like role fabric: all nodes, whatever --limit says.
        members = excluded.members(checked.cluster, entries)
        chosen, network, links = _measure(request, seen, members, checked.cluster, hostvars, say)
        # What follows from a comparison of nodes says nothing about one of them, as any of them may lie.
        compared = {*judge_machine_ids(seen.probes)}
        single = [finding for finding in seen.findings if finding not in compared]
        decision = excluded.decide(single, entries, replace(checked, tested=asked), exclude=request.exclude)
        probes = {name: probe for name, probe in seen.probes.items() if name not in decision.entries}
        network = fabric.choose(excluded.members(checked.cluster, decision.entries), hostvars, chosen.wanted)
        collected = [*decision.findings, *judge_machine_ids(probes), *network.findings, *chosen.findings]
        findings = [*dict.fromkeys(collected)]
        if not request.check_mode and not refused(findings):
            entries.clear()
            entries.update(decision.entries)
    known = last_known(request.state)
    elsewhere = {name: known[name] for name in checked.cluster if name in known and name not in probes}
    write_private(request.record, record(findings, probes, network, links.links, chosen.known(), elsewhere))
    left_out = {name: entry.words for name, entry in decision.entries.items()}
    return Outcome(findings, left_out, ", ".join(filter(None, [about(probes), links.about])))


def _look(
    request: Request, readable: tuple[list[Node], list[Finding]], hostvars: HostVars, judge_stack: JudgeStack
) -> Seen:
    """Judge each node by what it said."""
    nodes, broken = readable
    answers = {node.name: answer_of(hostvars[node.name]) for node in nodes}
    findings = [*broken, *judge_hosts(nodes, answers, request.accounts)]
    probes = probes_of(answers)
    findings += judge_hostnames(probes, hostvars)
    if request.stack:
        findings += [finding for name, probe in probes.items() for finding in judge_stack(name, probe)]
    return Seen(nodes, probes, findings)


def _measure(
    request: Request, seen: Seen, members: Sequence[str], trusted: Sequence[str], hostvars: HostVars,
    say: Callable[[str], None],
) -> tuple[networks.Networks, fabric.Fabric, Examined]:  # fmt: skip
    """Choose the network for jobs, and judge the machines and the connections in it."""
    last = networks.former_in(request.record)
    able = excluded.members(members, stopped(seen.findings))
    chosen = _choose(request, seen, able, trusted, hostvars, last)
    network = fabric.choose(members, hostvars, chosen.wanted)
    former = former_record(request.record, time.time())
    seen.findings += judge_machines(seen.probes, hostvars, network.interfaces, request.job_user, request.stack, former)
    seen.findings += judge_queues(seen.probes, request.queue)
    # What was measured in another network says nothing about this one.
    links = Examined([], links_in(request.record) if network.network == last["network"] else {})
    if network.network:
        wanted = Wanted(request.measure, request.bars, request.head, request.job_user, network, members)
        links = examine(seen.sound(), hostvars, wanted, links.links, say)
        seen.findings += links.findings
    return chosen, network, links


def _choose(
    request: Request, seen: Seen, names: Sequence[str], trusted: Sequence[str], hostvars: HostVars,
    last: Mapping[str, Any],
) -> networks.Networks:  # fmt: skip
    """The network for jobs; what several carry is measured only between all nodes."""
    able = [node for node in seen.sound() if node.name in names and login_of(hostvars, node.name).get("shared")]
    measurable = len(able) == len(names) and request.measure in ("auto", "all")
    measure = partial(carries, able, hostvars) if measurable else None
    again = request.measure == "all"
    others = excluded.members(trusted, names)
    return networks.choose(names, hostvars, request.network, last, measure, again=again, others=others)
