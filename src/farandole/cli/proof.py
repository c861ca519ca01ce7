"""What `farandole apply` proves at its end."""

from collections.abc import Sequence
from pathlib import Path

import typer

from farandole.cli.change import Change, alone
from farandole.cli.node import cluster_of
from farandole.cli.options import as_given
from farandole.core.errors import FarandoleError
from farandole.core.findings import several
from farandole.inventory import excluded
from farandole.plays.playbook import Login


def prove_mended(inventory: Path, login: Login, more: Sequence[str], *, as_json: bool) -> None:
    """Take nodes back that pass again what they had failed, if jobs on them and another one pass."""
    cluster = cluster_of(inventory, write=True)
    same = as_given(inventory, login)
    change = Change(inventory, login, cluster, f"farandole apply {same}", more, as_json, everyone=True)
    entries = {name: entry for name, entry in excluded.read(cluster.state).items() if name in cluster.trusted}
    mended = {name: entry for name, entry in entries.items() if entry.mended and not entry.held}
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
