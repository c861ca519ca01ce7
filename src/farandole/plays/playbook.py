"""Run a playbook as a user would."""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from farandole.core.errors import Interrupted
from farandole.core.project import CONFIG, ROOT, environment
from farandole.inventory.cluster import KEY_VARIABLES, USER_VARIABLES
from farandole.watch.events import LOG, VARIABLE, new_folder
from farandole.watch.viewer import LOOK, Viewer

# Seconds that an interrupted playbook has to end by itself.
GRACE_S = 10
# Ctrl-C, kill, and a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Login:
    """How to log in to the nodes, whatever the inventory says, and how to read the inventory."""

    user: str = ""
    private_key: Path | None = None
    ask_pass: bool = False
    ask_become_pass: bool = False
    ask_vault_pass: bool = False
    vault_password_file: Path | None = None

    def arguments(self) -> list[str]:
        """The options for ansible-playbook."""
        return [
            *self._variables(),
            *(["--ask-pass"] if self.ask_pass else []),
            *(["--ask-become-pass"] if self.ask_become_pass else []),
            *(["--ask-vault-pass"] if self.ask_vault_pass else []),
            *(["--vault-password-file", str(self.vault_password_file.absolute())] if self.vault_password_file else []),
        ]

    def _variables(self) -> list[str]:
        """The user and the key: the inventory's own variables override Ansible's options --user and --private-key."""
        variables = dict.fromkeys(USER_VARIABLES, self.user) if self.user else {}
        if self.private_key:
            key = str(self.private_key.absolute())
            variables |= dict.fromkeys(KEY_VARIABLES, key)
            # A connection that another key has opened would be used without looking at this one.
            variables["ansible_control_path_dir"] = f"~/.ansible/cp/{hashlib.sha256(key.encode()).hexdigest()[:8]}"
            # Otherwise ssh tries those of an agent, too.
            config = ConfigParser(interpolation=None)
            config.read(CONFIG)
            variables["ansible_ssh_args"] = f"{config['ssh_connection']['ssh_args']} -o IdentitiesOnly=yes"
        # As they are, even if they look like templates.
        plain = [f"{json.dumps(name)}: !unsafe {json.dumps(value)}" for name, value in variables.items()]
        return ["--extra-vars", f"{{{', '.join(plain)}}}"] if plain else []


def play(
    playbook: str,
    inventory: Path,
    login: Login,
    *arguments: str,
    as_json: bool = False,
    interrupted: str = "run the same command again to continue",
) -> int:
    """Run a playbook, show what it does, and return its exit status."""
    viewer = Viewer(new_folder(inventory), as_json=as_json)
    return viewed(viewer, playbook, inventory, login, *arguments, interrupted=interrupted)


def viewed(viewer: Viewer, playbook: str, inventory: Path, login: Login, *arguments: str, interrupted: str) -> int:
    """Run a playbook in the folder of a viewer, and return its exit status; an interrupt ends all its processes.

    What Ansible prints goes to a log. It asks for passwords on the terminal itself.
    """
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", str(inventory.absolute()), str(ROOT / playbook), *login.arguments(), *arguments]
    try:
        with viewer, _terminal_restored():
            status = _follow(command, viewer.folder, viewer)
    except Interrupted:
        viewer.close(interrupted=True)
        raise Interrupted(interrupted) from None
    viewer.close()
    return status


def _follow(command: Sequence[str], folder: Path, viewer: Viewer) -> int:
    """Run a command with its output in a log, and look at its events until it ends."""
    # Otherwise the log would lag behind.
    own = {VARIABLE: str(folder), "PYTHONUNBUFFERED": "1"}
    # Its workers have their own sessions, so an interrupt can leave them behind; they then become our children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    handle = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with (
        os.fdopen(handle, "ab") as log,
        subprocess.Popen(command, env=environment() | own, stdout=log, stderr=subprocess.STDOUT) as process,
        _interrupts(process) as interrupts,
    ):
        try:
            while not interrupts:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                    break
                # The terminal may be closed by now.
                if not interrupts:
                    viewer.look()
            if interrupts:
                raise Interrupted
        except BaseException:
            # Ctrl-C in a terminal has reached it already; a second one does no harm.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            end_children()
            raise
    if process.returncode < 0:
        # Somebody killed it, and its workers work on.
        end_children()
    # As a shell says it.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def _interrupts(process: subprocess.Popen[bytes]) -> Iterator[Sequence[int]]:
    """Note the first interrupt. Later ones only make the process end faster, so that none of its children is left.

    An exception instead could leave the lock in Popen.wait locked for good.
    """
    noted: list[int] = []

    def first(number: int, _: object) -> None:
        noted.append(number)
        for later in before:
            signal.signal(later, lambda *_: process.kill())
        # What was done is still to be shown.
        before[signal.SIGINT] = signal.SIG_IGN

    # nohup has SIGHUP ignored.
    before = {number: old for number in SIGNALS if (old := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, first)
    try:
        yield noted
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Undo what a program that was killed while it asked for a password has left: a terminal that shows no typing."""
    try:
        handle = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        yield
        return
    before = termios.tcgetattr(handle)
    try:
        yield
    finally:
        # The terminal may be closed.
        with suppress(termios.error):
            if termios.tcgetattr(handle) != before:
                termios.tcsetattr(handle, termios.TCSADRAIN, before)
        os.close(handle)


def end_children() -> None:
    """Kill all children of this process, including those that it inherits from them."""
    while children := [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
