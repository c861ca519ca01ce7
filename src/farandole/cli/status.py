"""`farandole status`."""

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from farandole.cli.node import cluster_of
from farandole.cli.options import BY_KEY, AsObject, Inventory, with_login
from farandole.core.findings import count, several
from farandole.core.table import table
from farandole.core.text import on_terminal
from farandole.inventory.variables import host_variables
from farandole.jobs.ask import Answer, ask_all
from farandole.jobs.login import login_to
from farandole.plays.playbook import Login
from farandole.report.verdict import last_verdict
from farandole.stack.lock import id_of
from farandole.watch.events import is_alive, latest

# Increased when a field gets another meaning.
FORMAT = 1
# Why a node is not as it should be, where that is not a cause in the catalogue: its ssh works, or is not tried.
LEFT_OUT, NOT_SET_UP, REVOKED, NO_JOBS = "node-left-out", "node-not-set-up", "node-revoked", "node-gets-no-jobs"
UNPROVEN, UPGRADING = "node-unproven", "head-upgrading"
# More lines than that about what runs would push the rest off the screen.
SHOWN = 10


@dataclass(frozen=True)
class NodeState:
    """How a node is, and what is not as it should be."""

    up: bool
    stack: str
    slots: int
    problems: tuple[str, ...]
    code: str = ""

    @property
    def good(self) -> bool:
        return self.up and not self.problems


@dataclass(frozen=True)
class Status:
    """How a cluster is."""

    inventory: str
    head: str
    lock: str
    nodes: Mapping[str, NodeState]
    runs: tuple[dict[str, Any], ...]
    # Its jobs, or why it does not tell them; nothing if there is none, or the head does not answer.
    queue: list[dict[str, str]] | str | None
    validation: Mapping[str, Any] | None
    applying: bool
    # Further jobs of the queue.
    unlisted: int = 0

    @property
    def good(self) -> bool:
        return all(node.good for node in self.nodes.values()) and not isinstance(self.queue, str)


@with_login(*BY_KEY)
def status(inventory: Inventory, *, as_json: AsObject = False, login: Login) -> None:
    """Show how the nodes are, what runs, and the last verdict, in seconds; nothing is changed.

    Exits with 0 if all nodes answer, take part and have the stack of the lock, and the queue, if there is one, answers
    and gives them jobs; else with 1.
    """
    seen = look(inventory, login)
    if as_json:
        typer.echo(json.dumps({"format": FORMAT, "good": seen.good, **asdict(seen)}))
    else:
        typer.echo(on_terminal("\n".join(told(seen, time.time()))))
    if not seen.good:
        raise typer.Exit(1)


def look(inventory: Path, login: Login) -> Status:
    """Ask all nodes, and read what this machine knows."""
    known, variables = cluster_of(inventory, write=False), host_variables(inventory.absolute())
    asked = {name: login_to(name, variables[name], login) for name in known.trusted}
    answers = ask_all(asked)
    lock = id_of(inventory)
    first = answers.get(known.head) or Answer(up=False)
    nodes = {name: judge(answers.get(name), known.excluded.get(name, ""), lock, first, name) for name in known.nodes}
    last = latest(inventory)
    return Status(
        str(inventory),
        known.head,
        lock,
        nodes,
        first.uses,
        first.queue,
        last_verdict(known.state),
        bool(last and is_alive(last)),
        first.unlisted,
    )


def judge(answer: Answer | None, out: str, lock: str, head: Answer, name: str) -> NodeState:
    """How a node is, by its answer, and by what this machine and the head know of it."""
    if not answer:
        return NodeState(False, "", 0, ("revoked, so it was not asked",), REVOKED)
    left_out = (f"left out: {out}",) if out else ()
    if not answer.up:
        return NodeState(False, "", 0, (answer.why, *left_out), answer.code)
    wrong = list(left_out)
    if not answer.stack:
        wrong.append("no stack yet")
    elif answer.stack != lock:
        wrong.append(f"the lock has stack {lock}" if lock else "there is no lock")
    if answer.stack and head.up and not head.slots.get(name) and not out:
        wrong.append("the head gives it no slots")
    code = LEFT_OUT if out else NOT_SET_UP if wrong else ""
    # One that is left out is drained for that.
    if not out and (why := head.no_jobs.get(name)):
        wrong.append(f"the queue gives it no jobs ({why})")
        code = code or (UNPROVEN if name in head.lost else NO_JOBS)
    if answer.upgrading:
        wrong.append("it starts no run while it or the builder is upgraded")
        code = code or UPGRADING
    return NodeState(True, answer.stack, head.slots.get(name, 0), tuple(wrong), code)


# What is shown


def told(seen: Status, now: float) -> list[str]:
    """The lines for a person."""
    again = f"-i {shlex.quote(seen.inventory)}"
    lines = [*rows(seen), ""]
    if seen.applying:
        lines.append(f"a run changes or checks the nodes now: farandole watch {again}")
    lines += [*jobs(seen, now), validation(seen, again)]
    codes = {node.code for node in seen.nodes.values()} - {""}
    if codes - {LEFT_OUT, NOT_SET_UP, REVOKED, NO_JOBS, UNPROVEN, UPGRADING}:
        lines.append(f"next, to find out why a node does not answer: farandole preflight {again}")
    elif UPGRADING in codes:
        lines.append(f"next, if no upgrade is at work: farandole apply {again}")
    elif NOT_SET_UP in codes:
        lines.append(f"next, to set the nodes up: farandole apply {again}")
    elif LEFT_OUT in codes:
        lines.append(f"next, once a node is fixed: farandole node include NAME --prove {again}")
    elif UNPROVEN in codes:
        lines.append(f"next, to take back what was down: farandole apply {again}")
    elif NO_JOBS in codes:
        lines.append("next, once a node is fixed, on the head: scontrol update nodename=NAME state=resume")
    return lines


def rows(seen: Status) -> list[str]:
    """A line for each group of nodes that are alike."""
    groups: dict[NodeState, list[str]] = {}
    for name, node in seen.nodes.items():
        groups.setdefault(node, []).append(name)
    lines = [["nodes", "", "stack", "slots", ""]]
    for node, names in groups.items():
        state = "up" if node.up else "unclear" if node.code == "answer-malformed" else "down"
        slots = f"{node.slots} each" if len(names) > 1 and node.slots else str(node.slots or "-")
        lines.append([several(names), state, node.stack or "-", slots, "; ".join(node.problems)])
    return table(lines).splitlines()


def jobs(seen: Status, now: float) -> list[str]:
    """What runs."""
    if not seen.nodes[seen.head].up:
        return [f"it is unknown what runs, because the head, {seen.head}, does not answer"]
    lines = [
        f"run {run['number']} of {run['owner']} on "
        f"{', '.join(f'{node} ({slots})' for node, slots in run['slots'].items())}, "
        f"for {max(0, now - run['since']) / 60:.0f} min"
        for run in seen.runs
    ]
    if isinstance(seen.queue, str):
        lines.append(f"queue: it does not answer ({seen.queue})")
    elif seen.queue is not None:
        lines += [
            f"job {job['id']} of {job['owner']}: {job['state'].lower()}, {job['time']}, "
            f"{count(int(job['nodes']), 'node')}"
            for job in seen.queue
        ] or ["queue: empty"]
    more = len(lines) - SHOWN + seen.unlisted
    rest = [f"and {more} more"] if more > 0 else []
    return lines[:SHOWN] + rest or ["nothing runs"]


def validation(seen: Status, again: str) -> str:
    """The last verdict, what it is about, and how old it is."""
    if not seen.validation:
        return f"never validated; to do that: farandole validate {again}"
    was = datetime.strptime(seen.validation["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    of = seen.validation.get("stack", "")
    other = f", of another stack, {of}" if of and of != seen.lock else ""
    part, all_of = len(seen.nodes.keys() & {*seen.validation.get("hosts", seen.nodes)}), len(seen.nodes)
    limits = ["quick"] * seen.validation.get("quick", False) + [f"{part} of {all_of} nodes"] * (part < all_of)
    about = f" ({', '.join(limits)})" if limits else ""
    return f"last validation: {seen.validation['verdict']}{about}, {was:%Y-%m-%d %H:%M} UTC{other}"
