"""The state folder of a cluster on the control machine, and the inventory that owns it."""

from __future__ import annotations

import os
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.core.files import sync_folder
from farandole.core.project import ROOT

OWNER = "inventory"
STATES = ROOT / ".farandole"


def state_folder(inventory: str | Path) -> Path:
    """The state folder of an inventory that does not set another; a list of hosts has no folder and no name."""
    return STATES / Path(inventory or "inventory").name


def owner(state: Path) -> Path | None:
    """Return the inventory that owns a state folder; None if it is unclaimed."""
    try:
        return Path((state / OWNER).read_text().removesuffix("\n"))
    except FileNotFoundError:
        return None


def claim(state: Path, inventory: Path, *, write: bool = True) -> None:
    """Refuse the state of another inventory; claim an unclaimed one for this inventory."""
    mine = Path(os.path.realpath(inventory))
    try:
        if write and owner(state) is None:
            _sign(state, mine)
        theirs = owner(state)
    except OSError as error:
        raise FarandoleError(
            f"the state folder {state} cannot be used: {error.strerror} ({error.filename}); "
            "make this account its owner, or set base_state_dir in the inventory to another folder"
        ) from None
    if theirs not in (None, mine):
        raise FarandoleError(_refusal(state, str(theirs), mine))


def _refusal(state: Path, theirs: str, mine: Path) -> str:
    own = f"give this one its own: set base_state_dir for group cluster in {mine}, for example to {state}-2"
    conflict = f"the state folder {state} belongs to the inventory {theirs}, and this one is {mine}"
    if Path(theirs).exists():
        return (
            f"{conflict}: two clusters would share one certificate authority. To fix this, {own}; a cluster that has "
            "shared it until now gets its own authority from the next site.yml over all its nodes"
        )
    moved = f"printf '%s\\n' {shlex.quote(str(mine))} > {shlex.quote(str(state / OWNER))}"
    return f"{conflict}. The former does not exist: if it was moved here, run  {moved}  otherwise {own}"


def _sign(state: Path, mine: Path) -> None:
    """Record the owner atomically and durably; of two concurrent callers the first wins."""
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    handle, draft = tempfile.mkstemp(dir=state, prefix=f".{OWNER}")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"{mine}\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, state / OWNER)
    finally:
        Path(draft).unlink()
    sync_folder(state)
