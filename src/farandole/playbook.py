"""One of our playbooks, run as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "ansible.cfg"

# The same options, under the same names, as ansible-playbook has them.
User = Annotated[str, typer.Option("--user", "-u", help="Log in to the nodes as this user.")]
PrivateKey = Annotated[Path | None, typer.Option(help="Log in to the nodes with this key.")]
AskPass = Annotated[bool, typer.Option("--ask-pass", "-k", help="Ask for the password of the login.")]
AskBecomePass = Annotated[bool, typer.Option("--ask-become-pass", "-K", help="Ask for the password of sudo.")]


@dataclass(frozen=True)
class Login:
    """How the nodes are reached, where the inventory does not say it."""

    user: str = ""
    private_key: Path | None = None
    ask_pass: bool = False
    ask_become_pass: bool = False

    def arguments(self) -> list[str]:
        """For ansible-playbook."""
        return [
            *(["--user", self.user] if self.user else []),
            *(["--private-key", str(self.private_key.absolute())] if self.private_key else []),
            *(["--ask-pass"] if self.ask_pass else []),
            *(["--ask-become-pass"] if self.ask_become_pass else []),
        ]


def play(playbook: str, inventory: Path, login: Login, *arguments: str) -> int:
    """Its exit status; it writes to the terminal itself."""
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", str(inventory.absolute()), playbook, *login.arguments(), *arguments]
    environment = {"ANSIBLE_CONFIG": str(CONFIG), **os.environ}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
