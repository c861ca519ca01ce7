"""Which files may be sent to a node, and where they land there."""

import os
import re
import secrets
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.core.text import one_line

# Not /tmp, which is in memory on many machines: a stack is large.
LANDING = "/var/tmp/farandole-landing"  # noqa: S108, a random suffix is added
# Removes folders that killed runs left behind and that nothing was written to for an hour; ignores symlinks.
CLEAN_UP = (
    f'for old in {LANDING}[-.]*; do [ -d "$old" ] && [ ! -L "$old" ] && [ -O "$old" ] && '
    '[ -z "$(find "$old" -mmin -60)" ] && rm -rf "$old"; done'
)


def check(file: Mapping[str, str]) -> None:
    """Refuse to send a file whose sha256 is not the expected one."""
    path = Path(file["path"])
    if not path.is_file():
        raise FarandoleError(f"{path} does not exist on the control machine")
    if (got := sha256(path)) != file["sha256"]:
        raise FarandoleError(
            f"{path} on the control machine is damaged: its sha256 is {got}, expected {file['sha256']}; "
            "delete it and run again"
        )


def bundle(files: Iterable[Mapping[str, str]], archive: Path) -> None:
    """Put all files into one tar, without compression because they are compressed already."""
    with tarfile.open(archive, "w", dereference=True) as tar:
        for file in files:
            tar.add(file["path"], arcname=file["name"])


def sent(archive: Path, size: int) -> str:
    """How far the transfer of a bundle is, as far as this machine knows; no node is asked."""
    at = read_by_children(archive.resolve(), os.getpid())
    return f"sent {at / 1e6:.0f} of {size / 1e6:.0f} MB" if at else ""


def read_by_children(path: Path, pid: int) -> int:
    """The bytes of a file that the programs started by a process have read, such as sftp; 0 if none has it open."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        # It may have ended in the meantime.
        with suppress(OSError):
            for handle in Path(f"/proc/{child}/fd").iterdir():
                if handle.readlink() == path:
                    return int(Path(f"/proc/{child}/fdinfo/{handle.name}").read_text().split()[1])
            if sent := read_by_children(path, int(child)):
                return sent
    return 0


@dataclass(frozen=True)
class Landing:
    """A temporary folder on a node that only the login user can enter."""

    host: str
    folder: str = field(default_factory=lambda: f"{LANDING}.{secrets.token_hex(8)}")

    @property
    def create(self) -> str:
        """The script that creates the folder and prints the free space there."""
        return f"{CLEAN_UP}; mkdir -m 0700 {self.folder} && df --output=avail -B1 {self.folder}"

    def check(self, answer: Mapping[str, Any], size: int) -> None:
        """Refuse a node on which the folder cannot be created, or has no space for the bundle and its contents."""
        free = re.findall(r"\d{1,18}$", answer["stdout"].strip())
        if answer["rc"] or not free:
            reason = one_line(answer["stderr"] or answer["stdout"])[-300:] or f"exit status {answer['rc']}"
            raise FarandoleError(
                f"no files can be sent to {self.host}, because {self.folder} cannot be created there: {reason}. The "
                "login user must be able to write to /var/tmp: chmod 1777 /var/tmp, and make sure that the disk is not "
                "full or read-only"
            )
        if int(free[0]) < 2 * size:
            raise FarandoleError(
                f"{self.host} has {int(free[0]) >> 20} MiB free in /var/tmp, but sending the files needs "
                f"{2 * size >> 20} MiB: free some space"
            )
