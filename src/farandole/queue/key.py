"""The key with which the daemons of a queue authenticate each other, made on the control machine."""

import re
import secrets
import string
from collections.abc import Sequence
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import FindingsError, finding, several

LENGTH = 256
# A key has another name when other nodes are revoked.
KEYS = "munge*.key"
# Exists while nodes have a key that is to be replaced, and no new one was made.
FORMER = "former"
CHARACTERS = string.ascii_letters + string.digits


def keep(path: Path, absent: Sequence[str] = (), *, check_mode: bool) -> bool:
    """Make the key if there is none, or refuse one that is damaged; returns whether one was or would be made.

    There is no other one beside it, so that no former key, which somebody may know, is ever used again. No other one
    takes its place in a run without these nodes: they could no longer talk to the head, and their jobs would end."""
    others = [other for other in path.parent.glob(KEYS) if other != path]
    former = path.parent / FORMER
    if absent and not path.exists() and (others or former.exists()):
        raise FarandoleError(
            f"the queue gets a new key, which all its nodes need at once, and this run is without {several(absent)}: "
            "run site.yml without --limit"
        )
    if not check_mode:
        for other in others:
            other.unlink()
    if path.exists():
        text = path.read_text(errors="replace")
        if not re.fullmatch(f"[a-zA-Z0-9]{{{LENGTH}}}\n?", text):
            fault = finding("munge-key-damaged", "all", file=path, seen=len(text.rstrip("\n")), wanted=LENGTH)
            raise FindingsError([fault], "found {problems} with the queue's key; no node got it.")
        return False
    if not check_mode:
        write_private(path, "".join(secrets.choice(CHARACTERS) for _ in range(LENGTH)) + "\n", durable=True)
        former.unlink(missing_ok=True)
    return True


def forget(folder: Path) -> None:
    """Remove the key, so that the next run of all nodes makes a new one."""
    for path in folder.glob(KEYS):
        (folder / FORMER).touch()
        path.unlink()
