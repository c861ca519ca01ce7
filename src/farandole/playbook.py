"""Run a playbook as a user would."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "ansible.cfg"
# Seconds that an interrupted playbook has to end by itself.
GRACE_S = 10
PR_SET_CHILD_SUBREAPER = 36

# The options have the same names as in ansible-playbook.
User = Annotated[str, typer.Option("--user", "-u", help="Log in to the nodes as this user.")]
PrivateKey = Annotated[Path | None, typer.Option(help="Log in to the nodes with this key.")]
AskPass = Annotated[bool, typer.Option("--ask-pass", "-k", help="Ask for the login password.")]
AskBecomePass = Annotated[bool, typer.Option("--ask-become-pass", "-K", help="Ask for the sudo password.")]


@dataclass(frozen=True)
class Login:
    """How to log in to the nodes, where the inventory does not define it."""

    user: str = ""
    private_key: Path | None = None
    ask_pass: bool = False
    ask_become_pass: bool = False

    def arguments(self) -> list[str]:
        """The options for ansible-playbook."""
        return [
            *(["--user", self.user] if self.user else []),
            *(["--private-key", str(self.private_key.absolute())] if self.private_key else []),
            *(["--ask-pass"] if self.ask_pass else []),
            *(["--ask-become-pass"] if self.ask_become_pass else []),
        ]


def play(playbook: str, inventory: Path, login: Login, *arguments: str) -> int:
    """Run a playbook on this terminal and return its exit status; an interrupt ends all its processes."""
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", str(inventory.absolute()), playbook, *login.arguments(), *arguments]
    environment = {"ANSIBLE_CONFIG": str(CONFIG), **os.environ}
    # Its workers have their own sessions, so an interrupt can leave them behind; they then become our children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            # Ctrl-C in a terminal has reached it already; a second one does no harm.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            end_children()
            raise


def end_children() -> None:
    """Kill all children of this process, including those that it inherits from them."""
    while children := [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
