"""`farandole node`: leave nodes out by hand, and take them back; only to prove one is it contacted."""

import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.options import Inventory, as_given, with_login
from farandole.core.errors import FarandoleError
from farandole.core.table import table
from farandole.core.text import on_terminal
from farandole.inventory import excluded
from farandole.inventory.facts import ClusterFacts, of_inventory
from farandole.inventory.run_lock import person
from farandole.inventory.state import claim
from farandole.inventory.variables import folder_of
from farandole.plays.playbook import Login

app = typer.Typer(no_args_is_help=True, help="Leave nodes out of runs and jobs, and take them back.")
# Whether it passes the checks.
AGAIN = {True: " (it passes again, and is not proven yet)", False: " (included again, and not proven yet)"}
Name = Annotated[str, typer.Argument(metavar="NAME", help="The node's name in the inventory.")]


def cluster_of(inventory: Path, *, write: bool) -> ClusterFacts:
    """The cluster of an inventory, whose state folder belongs to no other."""
    known = of_inventory(inventory)
    claim(known.state, folder_of(inventory), write=write)
    return known


def refuse_stranger(name: str, known: ClusterFacts) -> None:
    if name not in known.nodes:
        raise FarandoleError(f"there is no node {name}; the nodes are {', '.join(known.nodes)}")


def next_step(inventory: Path, why: str = "so that the head knows it too") -> None:
    """Say when the nodes know it: farandole run asks here, but those who start jobs on the head read its hostfile."""
    typer.echo(f"next, {why}: farandole apply -i {shlex.quote(str(inventory))}")


@app.command("list")
def show(inventory: Inventory) -> None:
    """List the nodes that are left out: since when, by whom, why."""
    known = cluster_of(inventory, write=False)
    rows = [["node", "since", "by", "confirmed by", "code", "why"]]
    for name, entry in excluded.read(known.state).items():
        hand = entry.by == "person"
        gone = "" if name in known.nodes else " (no longer in the inventory)"
        who = [entry.person, ""] if hand else [entry.measurement, entry.person]
        again = "" if entry.held else AGAIN[entry.mended] if entry.mended or entry.included else ""
        rows.append([f"{name}{gone}", entry.since, *who, entry.code, f"{entry.why}{again}"])
    typer.echo(on_terminal(table(rows)) if rows[1:] else "no node is left out")


@app.command()
def exclude(
    name: Name,
    inventory: Inventory,
    why: Annotated[str, typer.Option("--why", help="The reason, for whoever sees it later.")],
) -> None:
    """Leave a node out of all runs and jobs until a person includes it again."""
    known = cluster_of(inventory, write=True)
    refuse_stranger(name, known)
    servers = {known.builders[0]: "it builds the stack", known.head: "it is the head"}
    if name in servers:
        raise FarandoleError(f"{name} cannot be left out: {servers[name]}; give this to another node first")
    if not why.strip():
        raise FarandoleError("--why is empty")
    with excluded.changing(known.state) as entries:
        if (entry := entries.get(name)) and not (entry.by_upgrade or entry.included):
            more = "" if entry.held else f"; to keep it out until you include it: farandole node confirm {name}"
            raise FarandoleError(f"{name} is already {on_terminal(entry.words)}{more}")
        entries[name] = excluded.by_person(person(), why)
    typer.echo(f"{name} is left out")
    next_step(inventory)


@app.command()
@with_login("user", "private_key", "vault_password_file")
def include(
    name: Name,
    inventory: Inventory,
    *,
    prove: Annotated[bool, typer.Option("--prove", help="Set it up and run these jobs now.")] = False,
    unproven: Annotated[bool, typer.Option("--unproven", help="Take it back without them.")] = False,
    login: Login,
) -> None:
    """Take a node back, whoever excluded it: once farandole apply has set it up, and jobs on it and another node pass.

    If sudo needs a password, set ansible_become_password for --prove: nobody is asked for it.
    """
    if prove and unproven:
        raise FarandoleError("--prove and --unproven: give one of them")
    known = cluster_of(inventory, write=True)
    with excluded.changing(known.state) as entries:
        if prove or name not in entries:
            refuse_stranger(name, known)
        if name not in entries:
            raise FarandoleError(f"{name} is not left out")
        entry = entries[name]
        at_once = unproven or name not in known.nodes
        if at_once:
            del entries[name]
        elif not prove:
            entries[name] = replace(entry, included=True)
    if prove:
        prove_now(name, entry, known, inventory, login)
    typer.echo(
        on_terminal(f"{name} takes part again{'' if at_once or prove else ' once it is proven'}; it was {entry.words}")
    )
    if at_once:
        next_step(inventory)
    elif not prove:
        next_step(inventory, "to prove it")


def prove_now(name: str, entry: excluded.Entry, known: ClusterFacts, inventory: Path, login: Login) -> None:
    """Take a node back that is left out by this entry, if jobs on it and another one pass."""
    # It takes time to import.
    module = import_module("farandole.cli.change")
    change = module.Change(
        inventory, login, known, f"farandole node include {name} --prove {as_given(inventory, login)}"
    )
    with module.alone(known.state):
        why = "the head could not be told to leave it out"
        # It may not know yet.
        told = change.tell_head()
        if excluded.read(known.state).get(name) != entry:
            why = "somebody has said something else of it meanwhile"
        elif told:
            why = change.brought_back({name: entry}, lambda: change.returning([name]))
            why += change.untold() if why else ""
    if why:
        raise FarandoleError(f"{name}: {why}. It stays left out; when that is mended: {change.again}")


@app.command()
def confirm(name: Name, inventory: Inventory) -> None:
    """Keep a node out that a check excluded, even if it passes that check again."""
    known = cluster_of(inventory, write=True)
    with excluded.changing(known.state) as entries:
        entry = entries.get(name)
        if entry is None:
            refuse_stranger(name, known)
            raise FarandoleError(f"{name} is not left out; to do that: farandole node exclude {name} --why REASON")
        if entry.held and not entry.by_upgrade:
            raise FarandoleError(f"{name} already stays out until a person includes it: {on_terminal(entry.words)}")
        entries[name] = replace(entry, person=person(), included=False, code="" if entry.by_upgrade else entry.code)
    typer.echo(f"{name} stays out until a person includes it")
