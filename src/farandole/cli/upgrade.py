"""`farandole upgrade`: the stack, and the operating systems of the nodes a few at a time, while jobs go on."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from typing import Annotated

import typer

from farandole.cli.change import PLAYBOOK, Change, alone
from farandole.cli.node import cluster_of, refuse_stranger
from farandole.cli.options import Hosts, Inventory, as_given, with_login
from farandole.core.errors import FarandoleError
from farandole.core.findings import several
from farandole.core.text import on_terminal
from farandole.inventory import excluded
from farandole.plays.playbook import Login, viewed
from farandole.plays.upgrade import Due, forget, noted, plain, shown, waves
from farandole.stack.lock import id_of
from farandole.watch.events import new_folder
from farandole.watch.viewer import Glance

DAY_M = 24 * 60


class Reboot(StrEnum):
    """When to reboot."""

    needed = "needed"
    always = "always"
    never = "never"


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

    def again(*left: str) -> str:
        # Those that have been rebooted already are not to be once more.
        rest = {"--hosts": ",".join(left), "--canary": canary if canary in left else ""}
        options = {**more, **rest} if left and reboot is Reboot.always else more
        return f"farandole upgrade {as_given(inventory, login, options)}"

    change = Change(inventory, login, cluster, again())
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
        due = {name: every[name] for name in names if name in every}
        silent = [name for name in names if name not in every]
        if as_json:
            known = {"format": 1, "stack": locked, "left_out": out, "silent": silent, "nodes": plain(due)}
            typer.echo(json.dumps(known))
            raise typer.Exit(bool(silent))
        show(due, out, silent)
        refuse_lost(change, silent, canary)
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
            raise typer.Exit(bool(silent))
        parts = waves(todo, change.needed, canary, wave)
        if parts:
            typer.echo(f"in this order: {'; '.join(several(part) for part in parts)}")
        confirm(yes)
        if switch:
            switch_all(change, locked)
        go(replace(change, late=behind & left_out), parts, settings, again)
        typer.echo(f"upgraded: {several([*todo, *switch])}")
        if silent:
            raise FarandoleError(f"not upgraded: {several(silent)}; once all answer, to continue: {change.again}")


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


def asked(change: Change, names: Sequence[str], *, as_json: bool) -> dict[str, Due]:
    """What is due on those of these nodes, and the head, that answer; as JSON, nothing else is printed but errors."""
    # An empty limit would be none.
    if not names:
        return {}
    # What waits for jobs would not be seen in a moment. Jobs begin with the stack of the head.
    asks = [*dict.fromkeys([*names, change.cluster.head])]
    limit = ("--check", "--limit", ",".join(asks))
    forget(change.cluster.state)
    if as_json:
        change.wait_for_others()
        viewer = Glance(new_folder(change.inventory))
        failed = viewed(viewer, PLAYBOOK, change.inventory, change.login, *limit, interrupted="nothing was changed")
        viewer.lines(viewer.watched.closing() if failed else [])
    else:
        failed = not change.run(PLAYBOOK, *limit)
    every = noted(change.cluster.state)
    if failed and (not every or (change.cluster.head in names and change.cluster.head not in every)):
        raise typer.Exit(1)
    return {name: every[name] for name in asks if name in every}


def show(due: Mapping[str, Due], out: Sequence[str], silent: Sequence[str]) -> None:
    """Show what is due, and of which nodes nothing is known."""
    typer.echo(on_terminal("\n".join(shown(due))))
    if out:
        typer.echo(f"left out, and so not upgraded: {several(out)}")
    if silent:
        typer.echo(f"could not be asked, and so not upgraded: {several(silent)}")


def refuse_lost(change: Change, silent: Sequence[str], canary: str) -> None:
    """Refuse to go on without a node that was to begin, or whose upgrade may be why it is silent."""
    if canary in silent:
        raise FarandoleError(f"--canary: {canary} could not be asked")
    if lost := [name for name in silent if name in change.begun()]:
        without = f"; to go on without it: farandole node confirm {lost[0]} {as_given(change.inventory, change.login)}"
        raise FarandoleError(
            f"{several(lost)}: the upgrade of others may end as this one has. Once it answers, to continue: "
            f"{change.again}{'' if lost[0] in change.needed else without}"
        )


def switch_all(change: Change, stack: str) -> None:
    """Let all nodes that take part have the stack of the lock."""
    if not change.run("site.yml"):
        raise FarandoleError(
            f"stack {stack} is not on all nodes, and no system was upgraded; when that is mended, to continue: "
            f"{change.again}; to stay with the present stack, put the former stack.lock.yml back first"
        )


def go(change: Change, parts: Sequence[Sequence[str]], settings: str, again: Callable[..., str]) -> None:
    """Upgrade one wave after the other, until one fails; what continues it depends on those that are left."""
    for number, part in enumerate(parts, 1):
        change = replace(change, again=again(*chain(*parts[number - 1 :])))
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


def confirm(yes: bool) -> None:
    """Ask before anything is changed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise FarandoleError("nothing was upgraded; to do it: --yes")
    typer.confirm("Upgrade them?", abort=True)
