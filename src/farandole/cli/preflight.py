"""`farandole preflight`."""

import typer

from farandole.cli.options import AsJson, Hosts, Inventory, with_login
from farandole.inventory.variables import refuse_unknown
from farandole.plays.playbook import Login, play


@with_login()
def preflight(inventory: Inventory, hosts: Hosts = "", *, login: Login, as_json: AsJson = False) -> None:
    """Check the nodes and the connections between them without changing anything; exit with 1 on any problem."""
    refuse_unknown(inventory.absolute(), "--hosts", hosts)
    arguments = ["--extra-vars", "preflight_network=all", *(["--limit", hosts] if hosts else [])]
    status = play(
        "playbooks/preflight.yml", inventory, login, *arguments, as_json=as_json, interrupted="nothing was changed"
    )
    if status:
        raise typer.Exit(1)
