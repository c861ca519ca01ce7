"""Scripts of root on a node that read or write a file of the control machine, whatever its size."""

import os
import select
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from ansible.module_utils.common.text.converters import to_text

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line
from farandole.inventory.run_lock import own_connection
from farandole.plays.action import Action

# sudo takes the password from the same stream, unless it does not ask for one.
BEGIN = "farandole-begin"
SKIP = f'while IFS= read -r line && [ "$line" != {BEGIN} ]; do :; done\n'
# What a node prints, unless it goes to a file.
LONGEST = 1 << 20
# A person's home may be one that never answers.
SILENCE_S = 300


class SilentError(Exception):
    """A node sends nothing."""


class Streaming(Action):
    """An action that does so, over the connection that an earlier task has opened."""

    def stream(
        self, script: str, *arguments: str, what: str, source: Path | None = None, target: Path | None = None
    ) -> str:
        """Run a script of bash as root; returns what it prints that does not go to the target."""
        connection = self._connection
        if connection.transport != "ssh":
            raise FarandoleError(f"the connection uses {connection.transport} instead of ssh")
        become, password = self._sudo()
        remote = shlex.join([*become, "bash", "--norc", "-euo", "pipefail", "-c", SKIP + script, "bash", *arguments])
        ssh = connection.get_option("ssh_executable")
        words = [to_text(word) for word in connection._build_command(ssh, "ssh", connection.host, remote)]
        begin = f"{password}\n{BEGIN}\n".encode()
        try:
            status, output, errors = transfer(own_connection(words, ssh), begin, source, target)
        except SilentError:
            raise FarandoleError(f"{what}: nothing came for {SILENCE_S} s; something there does not answer") from None
        except OSError as error:
            raise FarandoleError(
                f"{what} cannot be written here: {error.strerror} ({error.filename or target}); free some space "
                "there, and run again"
            ) from None
        if status:
            why = one_line(errors) or f"exit status {status}"
            raise FarandoleError(f"{what}: {why}")
        return one_line(output) or one_line(errors)

    def _sudo(self) -> tuple[list[str], str]:
        """What makes a command run as root, and the password for it."""
        become = self._connection.become
        if not become or self._get_remote_user() == self.get_become_option("become_user"):
            return [], ""
        password = to_text(become.get_option("become_pass", playcontext=self._play_context) or "")
        return ["sudo", *(["-S", "-p", ""] if password else ["-n"]), "--"], password


def transfer(command: Sequence[str], begin: bytes, source: Path | None, target: Path | None) -> tuple[int, str, str]:
    """Run a command whose input begins so; returns its status, output and errors.

    Then it reads the source, or writes the target; with both, each could wait for the other.
    """
    with (
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as short,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if target else short, stderr=errors
        ) as ssh,
    ):
        try:
            _send(cast(IO[bytes], ssh.stdin), begin, source)
            if target and ssh.stdout:
                _receive(ssh.stdout, target)
            status = ssh.wait()
        finally:
            ssh.kill()
        printed, said = (_text(file) for file in (short, errors))
    return status, printed, said


def _receive(pipe: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        while select.select([pipe], [], [], SILENCE_S)[0]:
            if not (block := os.read(pipe.fileno(), 1 << 20)):
                return
            file.write(block)
    raise SilentError


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(LONGEST).decode(errors="replace")


def _send(pipe: IO[bytes], begin: bytes, source: Path | None) -> None:
    # A program that ends early says why.
    with suppress(BrokenPipeError), pipe:
        pipe.write(begin)
        if source:
            with source.open("rb") as file:
                shutil.copyfileobj(file, pipe, 1 << 20)
