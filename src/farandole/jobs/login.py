"""How to log in to the head of a cluster, or to another node, and become the job user there."""

import hashlib
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.text import on_terminal, one_line
from farandole.inventory.cluster import job_user, job_users, login_key, login_name
from farandole.inventory.variables import host_variables
from farandole.node.head.runs import reason as why
from farandole.plays.playbook import Login

# The exit status of a shell that does not find a command.
NO_COMMAND = 127
# Seconds after which both sides give up a copy that does not go on, as what is sent from here stays locked meanwhile.
SILENT_S = 300
# Options of ssh that name keys.
OF_KEY = re.compile(r"-i|-o\s*(IdentityFile|CertificateFile)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Head:
    """The node where jobs are started, and how to log in there."""

    name: str
    ssh: tuple[str, ...]
    target: str
    # What makes a command run as the job user there.
    become: tuple[str, ...]

    def command(self, *command: str) -> list[str]:
        """A command of the job user's on the head."""
        return [*self.ssh, self.target, shlex.join([*self.become, *command])]

    def ask(self, *command: str) -> str:
        """Run a command there and return what it prints."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise FarandoleError(self.reason(done.returncode, done.stderr))
        return done.stdout

    def rsync(
        self, through: Sequence[str], arguments: Sequence[str], remote: str, patterns: str = "", to: Path | None = None
    ) -> str:
        """Copy to or from a folder that the head's command enters; returns why it failed."""
        there = ["--rsync-path", f"cd / && {shlex.join([*self.become, 'farandole', *through])}"]
        places = [f"{self.target}:{remote}", *([f"{to}/"] if to else [])]
        done = subprocess.run(
            ["rsync", "--archive", f"--timeout={SILENT_S}", "--rsh", shlex.join(self.ssh), *there, *arguments, *places],
            input=patterns, capture_output=True, text=True, errors="surrogateescape", check=False,
        )  # fmt: skip
        if "sudo: " in done.stderr or self.lacks_command(done.returncode, done.stderr):
            raise FarandoleError(self.reason(NO_COMMAND, done.stderr))
        return one_line(why(done.stderr)) if done.returncode else ""

    @staticmethod
    def lacks_command(status: int, errors: str) -> bool:
        """Whether the head's own command is missing there."""
        messages = ("farandole: No such file", "farandole: command not found")
        return status == NO_COMMAND or any(message in errors for message in messages)

    def reason(self, status: int, errors: str) -> str:
        """Why a command failed there."""
        if errors.startswith("error: "):
            return on_terminal(errors.strip().removeprefix("error: "))
        if "sudo: " in errors:
            return (
                f"{self.name}: {one_line(errors)}; log in as root, as somebody who may use sudo without a password, "
                "or, with --user NAME, as somebody in cluster_users of this inventory"
            )
        if self.lacks_command(status, errors):
            return f"{self.name} has no command farandole: run site.yml, without --skip-tags stack"
        return f"{self.name}: {one_line(errors)}"


def head_of(inventory: Path, login: Login) -> Head:
    """The head of an inventory's cluster."""
    hosts = host_variables(inventory.absolute(), "head")
    return login_to(*next(iter(hosts.items())), login)


def login_to(name: str, known: dict[str, Any], login: Login) -> Head:
    """How to log in to a node, and become the job user there."""
    user = login.user or login_name(known)
    key = login.private_key or login_key(known)
    port = known.get("ansible_port") or known.get("ansible_ssh_port")
    # Where Ansible keeps its own connections, too.
    shared = Path.home() / ".ansible/cp"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"]
    ssh += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    address = str(known.get("ansible_host") or name)
    arguments = [
        *shlex.split(str(known.get("ansible_ssh_common_args") or "")),
        *shlex.split(str(known.get("ansible_ssh_extra_args") or "")),
    ]
    # Any other way to log in, as with somebody else's key, opens a connection of its own. ssh's own %C, and 17 more
    # characters while it makes the socket, do not fit into the 107 of a path below a long home.
    way = repr((platform.node(), os.getuid(), address, port, user, str(key), arguments))
    control = shared / hashlib.sha256(way.encode()).hexdigest()[:10]
    ssh += ["-o", "ControlMaster=auto", "-o", "ControlPersist=120", "-o", f"ControlPath={control}"]
    # ssh takes the first user that it is told, and tries every key.
    ssh += [*(["-p", str(port)] if port else []), *(["-o", f"User={user}"] if user else [])]
    ssh += ["-i", str(key)] if key else []
    ssh += ["-o", "IdentitiesOnly=yes", *without_keys(arguments)] if login.private_key else arguments
    # People with accounts of their own start jobs as themselves.
    account, themselves = job_user(known), dict.fromkeys(job_users(known), ())
    become = {"root": ("runuser", "-u", account, "--"), **themselves}.get(user, ("sudo", "-n", "-u", account, "--"))
    return Head(name, tuple(ssh), f"{user}@{address}" if user else address, become)


def without_keys(arguments: Sequence[str]) -> Iterator[str]:
    """Arguments for ssh, without the keys that they name."""
    rest = iter(arguments)
    for word in rest:
        # The value of these options may be a word of its own.
        option = f"{word} {next(rest, '')}" if word in ("-i", "-o") else word
        if not OF_KEY.match(option):
            yield from option.split(" ", 1) if word in ("-i", "-o") else [word]
