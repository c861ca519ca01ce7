"""`farandole remove`."""

import json
import sys
from typing import Annotated

import typer

from farandole.cli.options import WITHOUT_VAULT, Hosts, Inventory, with_login
from farandole.core.errors import FarandoleError
from farandole.inventory.cluster import job_users
from farandole.inventory.variables import host_variables
from farandole.plays.playbook import Login, play
from farandole.plays.removal import loss


@with_login(*WITHOUT_VAULT)
def remove(
    inventory: Inventory,
    hosts: Hosts = "",
    *,
    accounts: Annotated[
        bool,
        typer.Option(
            "--accounts", help="Also the accounts of those who start jobs, and their homes with everything in them."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="End jobs and builds that are running.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    login: Login,
) -> None:
    """Take everything that Farandole made off the nodes, and say what stays."""
    known = host_variables(inventory.absolute())
    names = [name.strip() for name in hosts.split(",")] if hosts else list(known)
    if unknown := [name for name in names if name not in known]:
        raise FarandoleError(f"--hosts: there is no node {', '.join(unknown)}; the nodes are {', '.join(known)}")
    if not yes:
        typer.echo(loss(names, job_users(known[names[0]]), accounts))
        if not sys.stdin.isatty():
            raise FarandoleError("nothing was removed; to remove it: --yes")
        typer.confirm("Remove it?", abort=True)
    choice = json.dumps({"base_remove_accounts": accounts, "stack_remove_running": force})
    status = play(
        "playbooks/remove.yml",
        inventory,
        login,
        "--extra-vars",
        choice,
        *(["--limit", ",".join(names)] if hosts else []),
        interrupted="run the same command again to remove the rest",
    )
    if status:
        raise typer.Exit(1)
