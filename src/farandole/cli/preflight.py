"""`farandole preflight`."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.inventory.variables import refuse_unknown
from farandole.plays.playbook import (
    AsJson,
    AskBecomePass,
    AskPass,
    AskVaultPass,
    Inventory,
    Login,
    PrivateKey,
    User,
    VaultPasswordFile,
    play,
)


def preflight(
    inventory: Inventory,
    hosts: Annotated[str, typer.Option(help="Only these nodes, separated by commas.")] = "",
    *,
    user: User = "",
    private_key: PrivateKey = None,
    ask_pass: AskPass = False,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_file: VaultPasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Check the nodes and the connections between them without changing anything; exit with 1 on any problem."""
    refuse_unknown(inventory.absolute(), "--hosts", hosts)
    arguments = ["--extra-vars", "preflight_network=all", *(["--limit", hosts] if hosts else [])]
    login = Login(user, private_key, ask_pass, ask_become_pass, ask_vault_pass, vault_password_file)
    status = play(
        "playbooks/preflight.yml", inventory, login, *arguments, as_json=as_json, interrupted="nothing was changed"
    )
    if status:
        raise typer.Exit(1)
