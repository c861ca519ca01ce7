"""The state folder of a cluster on the control machine, and the inventory that owns it."""

import os
import re
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.core.files import sync_folder, write_private
from farandole.core.project import INSTALLED, ROOT, version
from farandole.core.text import one_line

OWNER = "inventory"
# Which version of Farandole wrote a state folder; increased when an older one cannot use it any more.
WRITER, FORMAT = "version", 1
SETTING = "FARANDOLE_STATE"


def state_folder(inventory: str | Path, folder: str = "") -> Path:
    """The state folder of an inventory: what its base_state_dir gives, or else one by the name of its folder.

    A list of hosts on the command line has no folder and no name.
    """
    if not folder:
        return states(inventory) / Path(inventory or "inventory").name
    path = Path(folder)
    # It stays as it is if nobody has that name.
    with suppress(RuntimeError):
        path = path.expanduser()
    # Playbooks evaluate a template, and modules a variable of the environment; commands do neither.
    if not path.is_absolute() or re.search(r"[${]", folder):
        raise FarandoleError(
            f"base_state_dir is {folder!r}, which playbooks and commands would take for different folders: "
            "write an absolute path; it may begin with ~/"
        )
    return path


def states(inventory: str | Path = "") -> Path:
    """The folder of all state folders: the setting's, or a checkout's own, or one beside the inventory."""
    if setting := os.environ.get(SETTING):
        return Path(setting).expanduser().absolute()
    return beside(inventory) if INSTALLED else ROOT / ".farandole"


def beside(inventory: str | Path = "") -> Path:
    """The folder of state folders beside an inventory: .farandole, both for ./inventory/mine and for ./mine."""
    path = Path(os.path.realpath(inventory))
    place = (path.parent if path.is_file() else path).parent if inventory else Path.cwd()
    return (place.parent if place.name == "inventory" else place) / ".farandole"


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
        writer = _writer(state)
        if write and owner(state) is None:
            _refuse_second(state, mine)
            _sign(state, mine)
        theirs = owner(state)
        if write and theirs == mine and writer != (FORMAT, version()):
            write_private(state / WRITER, f"{FORMAT} {version()}\n")
    except OSError as error:
        raise FarandoleError(
            f"the state folder {state} cannot be used: {error.strerror} ({error.filename}); "
            "make this account its owner, or set base_state_dir in the inventory to another folder"
        ) from None
    if theirs not in (None, mine):
        raise FarandoleError(_refusal(state, str(theirs), mine))


def _writer(state: Path) -> tuple[int, str]:
    """The format and the version that wrote a state folder, none before 1.0.0; refuses a format that is not known."""
    with suppress(FileNotFoundError, ValueError):
        number, writer = (state / WRITER).read_text().split()
        if int(number) > FORMAT:
            raise FarandoleError(newer(state, writer))
        return int(number), writer
    return 0, ""


def newer(path: Path, writer: str) -> str:
    """What to say about a file or folder of a newer version."""
    return (
        f"{path} was written by farandole {one_line(writer, 40)}, a newer version than this one, {version()}, which "
        "does not know its format; nothing was done: use that version or a newer one"
    )


def _refuse_second(state: Path, mine: Path) -> None:
    """Refuse to make a second certificate authority in a checkout, for an inventory of an installed Farandole."""
    other = beside(mine) / mine.name
    if not INSTALLED and state == state_folder(mine) != other and owner(other) == mine:
        raise FarandoleError(
            f"{mine} has its state in {other}: to go on with it here, set {SETTING}={shlex.quote(str(other.parent))}"
        )


def _refusal(state: Path, theirs: str, mine: Path) -> str:
    own = f"give this one its own: set base_state_dir for group cluster in {mine}, for example to {state}-2"
    conflict = f"the state folder {state} belongs to the inventory {theirs}, and this one is {mine}"
    if Path(theirs).exists():
        return (
            f"{conflict}: two clusters would share one certificate authority. To fix this, {own}; a cluster that has "
            "shared it until now gets its own authority from site.yml over all its nodes with -e ssh_trust_rotate=true"
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
