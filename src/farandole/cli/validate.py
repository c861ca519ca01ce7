"""`farandole validate`."""

from __future__ import annotations

from typing import Annotated

import typer

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


def validate(
    inventory: Inventory,
    hosts: Annotated[str, typer.Option(help="Only these nodes, separated by commas.")] = "",
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip training, speed and Horovod over MPI; takes half a minute.")
    ] = False,
    on_bad_node: Annotated[
        str, typer.Option(metavar="stop|exclude", help="Check the nodes first, and go on without the bad ones.")
    ] = "",
    user: User = "",
    private_key: PrivateKey = None,
    ask_pass: AskPass = False,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_file: VaultPasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Validate a cluster with jobs on its nodes and write a report; exit with 1 if anything is red."""
    arguments = ["--tags", "quick"] if quick else []
    arguments += ["--extra-vars", f"validation_hosts={hosts}"] if hosts else []
    arguments += ["--extra-vars", f"on_bad_node={on_bad_node}"] if on_bad_node else []
    login = Login(user, private_key, ask_pass, ask_become_pass, ask_vault_pass, vault_password_file)
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
