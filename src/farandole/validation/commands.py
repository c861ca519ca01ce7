"""`farandole validate`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from farandole.errors import FarandoleError

ROOT = Path(__file__).parents[3]


def validate(
    inventory: Annotated[Path, typer.Option("--inventory", "-i", help="Of the cluster: its folder or its file.")],
    hosts: Annotated[str, typer.Option(help="Only these nodes, with commas between them.")] = "",
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Without training and speed: half a minute.")] = False,
) -> None:
    """Prove a cluster by jobs on its nodes, and write the report; exit 1 when anything is red."""
    if not inventory.exists():
        raise FarandoleError(f"there is no inventory {inventory}; inventory/example is a model")
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory.absolute())]
    command += ["playbooks/validate.yml"]
    command += ["--tags", "quick"] if quick else []
    command += ["--extra-vars", f"validation_hosts={hosts}"] if hosts else []
    environment = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **os.environ}
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        raise typer.Exit(1)
