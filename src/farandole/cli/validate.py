"""`farandole validate`."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.options import AsJson, Hosts, Inventory, with_login
from farandole.plays.playbook import Login, play


@with_login()
def validate(
    inventory: Inventory,
    hosts: Hosts = "",
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip training, speed and Horovod over MPI; takes half a minute.")
    ] = False,
    on_bad_node: Annotated[
        str, typer.Option(metavar="stop|exclude", help="Check the nodes first, and go on without the bad ones.")
    ] = "",
    login: Login,
    as_json: AsJson = False,
) -> None:
    """Validate a cluster with jobs on its nodes and write a report; exit with 1 if anything is red."""
    arguments = ["--tags", "quick"] if quick else []
    arguments += ["--extra-vars", f"validation_hosts={hosts}"] if hosts else []
    arguments += ["--extra-vars", f"on_bad_node={on_bad_node}"] if on_bad_node else []
    status = play(
        "playbooks/validate.yml",
        inventory,
        login,
        *arguments,
        as_json=as_json,
        interrupted="the job on the nodes is being ended; there is no report of this run",
    )
    if status:
        raise typer.Exit(1)
