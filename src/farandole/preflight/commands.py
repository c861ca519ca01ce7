"""`farandole preflight`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farandole.errors import FarandoleError, Interrupted
from farandole.playbook import AsJson, AskBecomePass, AskPass, Login, PrivateKey, User, play


def preflight(
    inventory: Annotated[Path, typer.Option("--inventory", "-i", help="The cluster's inventory, a folder or a file.")],
    hosts: Annotated[str, typer.Option(help="Only these nodes, separated by commas.")] = "",
    *,
    user: User = "",
    private_key: PrivateKey = None,
    ask_pass: AskPass = False,
    ask_become_pass: AskBecomePass = False,
    as_json: AsJson = False,
) -> None:
    """Check the nodes and the connections between them without changing anything; exit with 1 on any problem."""
    if not inventory.exists():
        raise FarandoleError(f"there is no inventory {inventory}; inventory/example is an example")
    arguments = ["--extra-vars", "preflight_network=all", *(["--limit", hosts] if hosts else [])]
    login = Login(user, private_key, ask_pass, ask_become_pass)
    try:
        status = play("playbooks/preflight.yml", inventory, login, *arguments, as_json=as_json)
    except Interrupted:
        raise Interrupted("nothing was changed") from None
    if status:
        raise typer.Exit(1)
