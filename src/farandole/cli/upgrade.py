"""`farandole upgrade`: the stack, and the operating systems of the nodes a few at a time, while jobs go on."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.node import cluster_of, refuse_stranger
from farandole.cli.options import Hosts, Inventory, as_given, with_login
from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import several
from farandole.core.text import on_terminal
from farandole.inventory import excluded
from farandole.inventory.facts import ClusterFacts
from farandole.inventory.run_lock import person, refuse_another, this_run
from farandole.plays.playbook import Login, play, viewed
from farandole.plays.upgrade import Due, noted, plain, shown, waves
from farandole.stack.lock import id_of
from farandole.watch.events import new_folder
from farandole.watch.viewer import Glance

# In the state folder, the nodes whose upgrade has begun and has not come to its end.
BEGUN = ".upgrade.begun"
PLAYBOOK = "playbooks/upgrade.yml"
DAY_M = 24 * 60
# Seconds between two looks whether another run has ended.
LOOK_S = 2


class Reboot(StrEnum):
    """When to reboot."""

    needed = "needed"
    always = "always"
    never = "never"


@dataclass(frozen=True)
class Change:
    """A change of nodes that are left out of jobs meanwhile."""

    inventory: Path
    login: Login
    cluster: ClusterFacts
    # The command that continues it.
    again: str
    # What its runs are told besides.
    more: Sequence[str] = ()
    as_json: bool = False
    # Whether all nodes learn who takes part, as from apply, and not only the head.
    everyone: bool = False
    # Those that were left out when the others switched to another stack.
    late: Collection[str] = ()

    @property
    def needed(self) -> list[str]:
        """The nodes that are not left out, as all depend on them, in the order in which they are changed."""
        return [*dict.fromkeys([*self.cluster.builders[:1], self.cluster.head])]

    @property
    def apply(self) -> str:
        """The command that tells all nodes who takes part."""
        return f"farandole apply {as_given(self.inventory, self.login)}"

    def wait_for_others(self) -> None:
        """Let a run end that somebody has started on this machine between two steps."""
        told = False
        while True:
            try:
                return refuse_another(self.cluster.state, this_run(os.getpid()))
            except FarandoleError as refused:
                if not told:
                    typer.echo(f"waiting: {refused}", err=True)
                told = True
                time.sleep(LOOK_S)

    def run(self, playbook: str, *arguments: str) -> bool:
        """Run a playbook; returns whether it succeeded."""
        self.wait_for_others()
        interrupted = (
            f"nodes that are not proven yet stay left out; to continue: {self.again}; if not, so that the head knows "
            f"who takes part: {self.apply}"
        )
        more, login = (*self.more, *arguments), self.login
        return play(playbook, self.inventory, login, *more, as_json=self.as_json, interrupted=interrupted) == 0

    def leave_out(self, names: Sequence[str], why: str) -> None:
        """Leave nodes out of jobs, if they can be."""
        with excluded.changing(self.cluster.state) as entries:
            for name in names:
                if name not in self.needed and (name not in entries or entries[name].by_upgrade):
                    entries[name] = replace(excluded.by_person(person(), why), code=excluded.UPGRADE)

    def take_back(self, names: Sequence[str]) -> None:
        """Let nodes take part again that nobody else has left out meanwhile."""
        with excluded.changing(self.cluster.state) as entries:
            for name in names:
                if name in entries and entries[name].by_upgrade:
                    entries.pop(name)

    def partner(self, names: Sequence[str]) -> str:
        """A node that takes part in jobs, with which these are proven: the head if possible."""
        out = excluded.read(self.cluster.state)
        others = [name for name in self.cluster.trusted if name not in names and name not in out]
        if not others:
            raise FarandoleError("a changed node is proven with one that takes part in jobs, and there is none")
        return self.cluster.head if self.cluster.head in others else others[0]

    def have_stack(self, names: Sequence[str]) -> bool:
        """Set those up that lack the present stack; they stay left out."""
        out = excluded.read(self.cluster.state)
        late = {name: out[name] for name in names if name in self.late and name in out}
        for name, entry in late.items():
            excluded.begin_proof(self.cluster.state, name, entry)
        try:
            return not late or self.run("site.yml", "--limit", ",".join(late), "--skip-tags", "slurm")
        finally:
            for name, entry in late.items():
                excluded.end_proof(self.cluster.state, name, entry, good=False)

    def is_proven(self, names: Sequence[str]) -> bool:
        """Run jobs on these nodes and another one."""
        hosts = [self.partner(names), *names]
        pair = json.dumps({"validation_hosts": ",".join(hosts)})
        return self.run("playbooks/validate.yml", "--tags", "quick", "--extra-vars", pair) and self.are_in(hosts)

    def are_in(self, names: Sequence[str]) -> bool:
        """Whether no check has left one of these out in the last run, which with on_bad_node went on without it."""
        out = excluded.read(self.cluster.state)
        return not any(name in out and out[name].by == "check" for name in names)

    def tell_head(self, *back: str) -> bool:
        """Let the queue, those who start jobs on the head, and nodes that are back know who takes part; jobs go on."""
        limit = [] if self.everyone else ["--limit", ",".join(dict.fromkeys([self.cluster.head, *back]))]
        return self.run("site.yml", *limit, "--tags", "fabric,slurm,monitoring")

    def brought_back(self, entries: Mapping[str, excluded.Entry], steps: Callable[[], str]) -> str:
        """Let nodes take part while they are set up and proven, and leave them out again if it fails; returns why."""
        state, why = self.cluster.state, "it was interrupted"
        for name, entry in entries.items():
            excluded.begin_proof(state, name, entry)
        try:
            why = steps()
        finally:
            for name, entry in entries.items():
                excluded.end_proof(state, name, entry, good=not why)
        if not why and (out := entries.keys() & excluded.read(state).keys()):
            why = f"somebody has left out {several(sorted(out))} meanwhile"
        return why

    def untold(self) -> str:
        """Tell the head that a node is left out again; returns what follows if it cannot be told."""
        return "" if self.tell_head() else f", and the head may give it jobs until this succeeds: {self.apply}"

    def unlocked(self) -> str:
        """Let runs begin on the head, as Ansible itself does not where the node could not be reached."""
        if self.run("site.yml", "--limit", self.cluster.head, "--tags", "jobs"):
            return ""
        return f", and runs may be refused until this succeeds: {self.apply}"

    def returning(self, names: Sequence[str]) -> str:
        """Set nodes up that were left out, and prove them before the head gives them jobs; returns what failed."""
        # Of the queue later, as slurmd does not start on a node that the head's slurmctld has never heard of.
        if not self.run("site.yml", "--limit", ",".join(names), "--skip-tags", "slurm"):
            return "site.yml failed"
        if not self.is_proven(names):
            return "its validation is red"
        if not self.tell_head(*names):
            return f"the head could not be told, and may give it jobs until {self.apply} succeeds"
        return "" if self.are_in(names) else "preflight has left it out again"

    def upgrade(self, names: Sequence[str], settings: str) -> str:
        """Upgrade a few nodes and prove them before they take part again; returns what failed, if anything did."""
        head, limit = self.cluster.head, ",".join(names)
        self.leave_out(names, "it is being upgraded")
        out = excluded.read(self.cluster.state)
        if others := [name for name in names if name in out and not out[name].by_upgrade and name not in self.needed]:
            return f"somebody has left out {several(others)} meanwhile"
        self.note_begun({*self.begun(), *names})
        if names != [head] and not self.tell_head():
            return "the head could not be told to leave it out"
        if not self.run(PLAYBOOK, "--limit", limit, "--extra-vars", settings):
            return "its upgrade failed"
        if not self.have_stack(names):
            return "site.yml failed"
        if not self.is_proven(names):
            return "its validation is red after its upgrade"
        self.take_back(names)
        if not self.run("site.yml", "--limit", ",".join(dict.fromkeys([*names, head]))):
            return "site.yml failed after its upgrade"
        if not self.are_in(names):
            return "preflight has left it out after its upgrade"
        self.note_begun(self.begun() - {*names})
        return ""

    def begun(self) -> set[str]:
        """The nodes whose upgrade has begun and has not come to its end."""
        path = self.cluster.state / BEGUN
        return {*path.read_text().split()} if path.exists() else set()

    def note_begun(self, names: Collection[str]) -> None:
        """Record which these are, so that a power cut does not make them forgotten."""
        write_private(self.cluster.state / BEGUN, "".join(f"{name}\n" for name in sorted(names)), durable=True)


@with_login("user", "private_key", "vault_password_file")
def upgrade(
    inventory: Inventory,
    hosts: Hosts = "",
    *,
    wave: Annotated[int, typer.Option(min=1, help="So many nodes at a time, after the first one.")] = 1,
    canary: Annotated[str, typer.Option(metavar="NODE", help="The node to begin with.")] = "",
    reboot: Annotated[Reboot, typer.Option(help="needed: where another kernel would start.")] = Reboot.needed,
    wait: Annotated[int, typer.Option(min=1, help="Minutes that a node's jobs have to end.")] = DAY_M,
    check: Annotated[bool, typer.Option("--check", "-C", help="Change nothing, say what would be upgraded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print one object of JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    login: Login,
) -> None:
    """Upgrade the nodes' operating systems, a few at a time: no new job, packages, reboot, proof, jobs again.

    If the lock has another stack than the nodes, that comes first: as by `farandole apply`, on all of them.
    It begins with one node, ends with the head, and stops at the first wave that fails, which then stays left out. Run
    it again to continue.
    If sudo needs a password, set ansible_become_password: nobody is asked for it.
    """
    if as_json and not check:
        raise FarandoleError("--json changes nothing and goes with --check: add that, or leave --json out")
    cluster = cluster_of(inventory, write=True)
    settings = json.dumps({"base_upgrade_wait": wait * 60, "base_upgrade_reboot": str(reboot)})
    more = {
        "--hosts": hosts,
        "--wave": wave if wave > 1 else "",
        "--canary": canary,
        "--reboot": reboot if reboot != "needed" else "",
        "--wait": wait if wait != DAY_M else "",
    }
    change = Change(inventory, login, cluster, f"farandole upgrade {as_given(inventory, login, more)}")
    names = chosen(change, hosts, canary)
    with alone(cluster.state):
        out = [name for name, entry in excluded.read(cluster.state).items() if not entry.by_upgrade and name in names]
        names = [name for name in names if name not in out]
        if not (names or as_json):
            raise FarandoleError(
                f"left out, and so not upgraded: {several(out)}; to take one back first: "
                f"farandole node include {out[0]} --prove {as_given(inventory, login)}"
            )
        locked = id_of(inventory)
        every = asked(change, names, as_json=as_json)
        due = {name: one for name, one in every.items() if name in names}
        if as_json:
            typer.echo(json.dumps({"format": 1, "stack": locked, "left_out": out, "nodes": plain(due)}))
            raise typer.Exit
        typer.echo(on_terminal("\n".join(shown(due))))
        if out:
            typer.echo(f"left out, and so not upgraded: {several(out)}")
        # What is left out and not in `out` is so by an upgrade, maybe of a state that was restored.
        left_out = {*excluded.read(cluster.state)}
        begun = change.begun() | left_out
        todo = [
            name
            for name, one in due.items()
            if one.packages or name in begun or reboot is Reboot.always or (one.reboot and reboot is Reboot.needed)
        ]
        behind = {name for name, one in every.items() if locked and one.stack != locked}
        if switch := behind - left_out:
            typer.echo(
                f"stack {locked} on {several(switch)}: before all else, on all nodes, once jobs on two of them pass"
            )
        if check or not (todo or switch):
            raise typer.Exit
        parts = waves(todo, change.needed, canary, wave)
        if parts:
            typer.echo(f"in this order: {'; '.join(several(part) for part in parts)}")
        confirm(yes)
        if switch:
            switch_all(change, locked)
        go(replace(change, late=behind & left_out), parts, settings)
        typer.echo(f"upgraded: {several([*todo, *switch])}")


def chosen(change: Change, hosts: str, canary: str) -> list[str]:
    """The nodes that the user means, one of which may be the one to begin with."""
    names = [name.strip() for name in hosts.split(",")] if hosts else [*change.cluster.trusted]
    for name in [*names, *([canary] if canary else [])]:
        refuse_stranger(name, change.cluster)
        if name in change.cluster.revoked:
            raise FarandoleError(f"{name} is revoked, so it is not upgraded: take it out of ssh_trust_revoked first")
    if canary in change.needed:
        raise FarandoleError(f"--canary: all nodes depend on {canary}, so it comes last")
    if canary and canary not in names:
        raise FarandoleError(f"--canary: {canary} is none of the nodes that --hosts names")
    entry = excluded.read(change.cluster.state).get(canary)
    if entry and not entry.by_upgrade:
        raise FarandoleError(f"--canary: {canary} is {on_terminal(entry.words)}")
    return names


def prove_mended(inventory: Path, login: Login, more: Sequence[str], *, as_json: bool) -> None:
    """Take nodes back that pass again what they had failed, if jobs on them and another one pass."""
    cluster = cluster_of(inventory, write=True)
    same = as_given(inventory, login)
    change = Change(inventory, login, cluster, f"farandole apply {same}", more, as_json, everyone=True)
    entries = {name: entry for name, entry in excluded.read(cluster.state).items() if name in cluster.trusted}
    mended = {name: entry for name, entry in entries.items() if entry.mended and not entry.person}
    # A password would be asked for again and again.
    if not mended or login.ask_pass or login.ask_become_pass or login.ask_vault_pass:
        return
    names = [*mended]
    typer.echo(f"proven now, before they take part again: {several(names)}", err=as_json)
    with alone(cluster.state):
        why = change.brought_back(mended, lambda: change.returning(names))
        why += change.untold() if why else ""
    still = excluded.read(cluster.state)
    if back := [name for name in names if name not in still]:
        typer.echo(f"taking part again: {several(back)}", err=as_json)
    if out := [name for name in names if name in still]:
        one = f"; to prove one alone: farandole node include {out[0]} --prove {same}" if out[1:] else ""
        raise FarandoleError(f"left out as before, {several(out)}: {why}; when that is mended: {change.again}{one}")


def asked(change: Change, names: Sequence[str], *, as_json: bool) -> dict[str, Due]:
    """What is due on these nodes and on the head, as they say; as JSON, nothing else is printed but errors."""
    # An empty limit would be none.
    if not names:
        return {}
    # What waits for jobs would not be seen in a moment. Jobs begin with the stack of the head.
    asks = [*dict.fromkeys([*names, change.cluster.head])]
    limit = ("--check", "--limit", ",".join(asks))
    if as_json:
        change.wait_for_others()
        viewer = Glance(new_folder(change.inventory))
        failed = viewed(viewer, PLAYBOOK, change.inventory, change.login, *limit, interrupted="nothing was changed")
        viewer.lines(viewer.watched.closing() if failed else [])
    else:
        failed = not change.run(PLAYBOOK, *limit)
    if failed:
        raise typer.Exit(1)
    return {name: one for name, one in noted(change.cluster.state).items() if name in asks}


def switch_all(change: Change, stack: str) -> None:
    """Let all nodes that take part have the stack of the lock."""
    if not change.run("site.yml"):
        raise FarandoleError(
            f"stack {stack} is not on all nodes, and no system was upgraded; when that is mended, to continue: "
            f"{change.again}; to stay with the present stack, put the former stack.lock.yml back first"
        )


def go(change: Change, parts: Sequence[Sequence[str]], settings: str) -> None:
    """Upgrade one wave after the other, until one fails."""
    for number, part in enumerate(parts, 1):
        typer.echo(f"wave {number} of {len(parts)}: {several(part)}, proven with {change.partner(part)}")
        if why := change.upgrade(part, settings):
            change.leave_out(part, why)
            state = "It is" if len(part) == 1 else "They are"
            if part[0] not in change.needed:
                why += change.untold()
            else:
                why += change.unlocked()
                queue = (
                    f"The queue may give it no jobs until {change.apply} has run; as" if change.cluster.queue else "As"
                )
                state = f"{queue} all depend on it, it is not"
            raise FarandoleError(
                f"{several(part)}: {why}. {state} left out, and nothing else was begun; when that is "
                f"mended, to continue: {change.again}"
            )


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Refuse a second upgrade of the same cluster on this machine."""
    with (state / excluded.AT_WORK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FarandoleError("another upgrade of this cluster is running on this machine") from None
        excluded.end_proofs(state)
        yield


def confirm(yes: bool) -> None:
    """Ask before anything is changed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise FarandoleError("nothing was upgraded; to do it: --yes")
    typer.confirm("Upgrade them?", abort=True)
