"""The key with which the daemons of a queue authenticate each other, made on the control machine."""

import re
import secrets
import string
from pathlib import Path

from farandole.core.files import write_private
from farandole.core.findings import FindingsError, finding

LENGTH = 256
# A key has another name when other nodes are revoked.
KEYS = "munge*.key"
CHARACTERS = string.ascii_letters + string.digits


def keep(path: Path, *, check_mode: bool) -> bool:
    """Make the key if there is none, or refuse one that is damaged; returns whether one was or would be made.

    There is no other one beside it, so that no former key, which somebody may know, is ever used again."""
    if not check_mode:
        forget(path.parent, but=path.name)
    if path.exists():
        text = path.read_text(errors="replace")
        if not re.fullmatch(f"[a-zA-Z0-9]{{{LENGTH}}}\n?", text):
            fault = finding("munge-key-damaged", "all", file=path, seen=len(text.rstrip("\n")), wanted=LENGTH)
            raise FindingsError([fault], "found {problems} with the queue's key; no node got it.")
        return False
    if not check_mode:
        write_private(path, "".join(secrets.choice(CHARACTERS) for _ in range(LENGTH)) + "\n", durable=True)
    return True


def forget(folder: Path, but: str = "") -> None:
    """Remove keys, so that the next run makes a new one."""
    for path in folder.glob(KEYS):
        if path.name != but:
            path.unlink()
