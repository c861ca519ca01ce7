"""What `farandole apply` proves at its end: nodes that were mended, and those that the queue has lost."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import typer

from farandole.cli.change import Change, alone, proven
from farandole.cli.node import cluster_of
from farandole.cli.options import as_given
from farandole.core.errors import FarandoleError
from farandole.core.findings import several
from farandole.inventory import excluded
from farandole.plays.playbook import Login


def take_back(inventory: Path, login: Login, more: Sequence[str], lost: Collection[str], *, as_json: bool) -> None:
    """Prove nodes that were mended, and those that the queue has lost, and let them take part again."""
    if login.ask_pass or login.ask_become_pass or login.ask_vault_pass:
        why = "as a password would be asked for again and again; docs/nodes.md says where to set it"
        typer.echo(f"nodes are not proven here, {why}", err=as_json)
        return
    cluster = cluster_of(inventory, write=True)
    again = f"farandole apply {as_given(inventory, login)}"
    change = Change(inventory, login, cluster, again, more, as_json, everyone=True)
    failed = []
    # One that fails says nothing about the others.
    for prove in (prove_mended, partial(prove_lost, lost=lost)):
        try:
            prove(change)
        except FarandoleError as error:
            failed.append(str(error))
    if failed:
        raise FarandoleError("\n".join(failed))


def prove_mended(change: Change) -> None:
    """Take nodes back that pass the checks again, if jobs on them and another one pass."""
    cluster, as_json = change.cluster, change.as_json
    entries = {name: entry for name, entry in excluded.read(cluster.state).items() if name in cluster.trusted}
    mended = {name: entry for name, entry in entries.items() if entry.mended and not entry.held}
    if not mended:
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
        same = as_given(change.inventory, change.login)
        one = f"; to prove one alone: farandole node include {out[0]} --prove {same}" if out[1:] else ""
        raise FarandoleError(f"left out as before, {several(out)}: {why}; when that is mended: {change.again}{one}")


def prove_lost(change: Change, lost: Collection[str]) -> None:
    """Let the queue give jobs again to nodes that it has lost, if jobs on them and another one pass."""
    cluster, out = change.cluster, excluded.read(change.cluster.state)
    names = [name for name in cluster.trusted if name in lost and name not in out]
    if not names:
        return
    typer.echo(f"proven now, before the queue gives them jobs again: {several(names)}", err=change.as_json)
    limit = ",".join(dict.fromkeys([cluster.head, *names]))
    with alone(cluster.state):
        why = "" if change.is_proven(names) else "the validation is red"
        if not why and not change.run("site.yml", "--limit", limit, "--tags", "slurm", *proven(names)):
            why = "the head could not be told"
    if why:
        free = [name for name in names if name not in change.needed]
        one = f"; to go on without one: farandole node exclude {free[-1]} --why REASON" if names[1:] and free else ""
        raise FarandoleError(
            f"the queue gives {several(names)} no jobs: {why}; when that is mended: {change.again}{one}"
        )
    typer.echo(f"the queue gives them jobs again: {several(names)}", err=change.as_json)
