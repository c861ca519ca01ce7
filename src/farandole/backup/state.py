"""What a backup has of the state folder, and how it is put back: what was revoked stays revoked."""

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from farandole.backup.file import About, lines
from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.text import visible
from farandole.inventory.excluded import FILE, FORMER
from farandole.inventory.state import OWNER, WRITER
from farandole.queue import key
from farandole.trust.authority import AUTHORITIES, LEDGER, RESTORED, REVOKED
from farandole.trust.rules import key_of

# What is this machine's own, and what can be compiled again.
LEFT_OUT = (OWNER, WRITER, "run", "builds")
# A new key is made instead, as nodes that were revoked since may know this one.
QUEUE_KEYS = f"slurm/{key.KEYS}"
# Lists of which no line is ever lost.
GROWING = tuple(f"ca/{name}" for name in (REVOKED, LEDGER, AUTHORITIES))
MARK, KNOWN = f"ca/{RESTORED}", "ca/known_hosts"


def refuse_empty(state: Path) -> None:
    """Refuse to back up a cluster that does not exist."""
    if not (state / "ca").is_dir():
        raise FarandoleError(f"there is nothing to back up in {state}, as no run has set this cluster up yet")


def save(state: Path, folder: Path) -> None:
    """Copy what a backup has of a state folder."""
    for path in _files(state):
        beside = path.is_symlink() and "/" not in str(path.readlink())
        if path.is_symlink() and not beside:
            raise FarandoleError(
                f"{path} is a link to {path.readlink()}, and what is elsewhere is not saved; nothing was backed up: "
                "move it to that place, or back up that folder yourself"
            )
        if beside or path.is_file():
            target = folder / "state" / path.relative_to(state)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target, follow_symlinks=False)


def _files(state: Path) -> Iterator[Path]:
    """What a backup has of a state folder; other folders are not read, as other commands may be removing theirs."""
    for place, folders, files in os.walk(state, onerror=_refuse):
        here = Path(place).relative_to(state)
        folders[:] = [name for name in folders if _wanted(here / name)]
        yield from (state / here / name for name in (*folders, *files) if _wanted(here / name))


def _refuse(error: OSError) -> None:
    """Refuse a folder that this account cannot read, as after a run with sudo."""
    raise FarandoleError(
        f"{error.filename} cannot be read ({error.strerror}); nothing was backed up: make this account its owner"
    )


def _wanted(name: Path) -> bool:
    """Whether a file is neither left out nor a draft or a lock."""
    hidden = any(part.startswith(".") for part in name.parts)
    return not (hidden or name.parts[0] in LEFT_OUT or name.match(QUEUE_KEYS))


def describe(cluster: str, folder: Path) -> About:
    """Of which cluster something is that was saved now."""
    return About(cluster, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", [*lines(folder / "state/ca" / AUTHORITIES)])


def refuse_planted(file: Path, folder: Path) -> None:
    """Refuse a file with what no backup has: somebody has changed it."""
    for path in sorted((folder / "state").rglob("*")):
        name = path.relative_to(folder / "state")
        if (path.is_symlink() or path.is_file()) and (
            not _wanted(name) or (path.is_symlink() and name.parts[0] == "ca")
        ):
            raise FarandoleError(
                f"{file} has {visible(str(name))}, which farandole backup does not write, so somebody has changed it; "
                "nothing was restored: use another copy or backup"
            )


def refuse_other(file: Path, about: About, state: Path, *, replace: bool) -> None:
    """Refuse the backup of another cluster; where no CA can tell, its name does."""
    present = lines(state / "ca" / AUTHORITIES)
    if present and about.authorities and not present.keys() & {*about.authorities}:
        raise FarandoleError(
            f"{file} is the backup of another cluster, {visible(about.cluster)}: none of its CAs is in {state}; "
            f"nothing was restored. If that folder is not needed any more, move it away: mv {state} {state}.before"
        )
    if not (present and about.authorities) and about.cluster != state.name and not replace:
        raise FarandoleError(
            f"{file} is the backup of a cluster called {visible(about.cluster)}, and this one is {state.name}; nothing "
            "was restored. If it is the same under another name: --replace"
        )


def refuse_newer(file: Path, about: About, folder: Path, state: Path, *, replace: bool) -> None:
    """Refuse to replace a state that knows more than the backup."""
    more = {name: lines(state / name).keys() - lines(folder / "state" / name).keys() for name in GROWING}
    if any(more.values()) and not replace:
        named = ", ".join(f"{name} ({len(extra)} more)" for name, extra in more.items() if extra)
        raise FarandoleError(
            f"{state} is newer than {file}, of {about.made}: {named}; nothing was restored. To go back nevertheless: "
            "--replace; what is revoked stays revoked"
        )


def place(folder: Path, state: Path, about: About) -> None:
    """Put a saved state in place of the present one, whose excluded nodes stay. If interrupted, it can be done again.

    The first file makes the next run ask all nodes what they know to be revoked, and replace the CA.
    """
    write_private(state / MARK, f"{about.made}\n", durable=True)
    key.forget(state / "slurm")
    for name in GROWING:
        if any(path.exists() for path in (folder / "state" / name, state / name)):
            merged = {**lines(folder / "state" / name), **lines(state / name)}
            write_private(state / name, "".join(f"{line}\n" for line in merged), durable=True)
    for path in sorted((folder / "state").rglob("*")):
        name = str(path.relative_to(folder / "state"))
        target = state / name
        if path.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(path.readlink())
        elif name == KNOWN and path.is_file():
            # Until a run has written it anew.
            revoked = dict.fromkeys(f"@revoked * {key_of(line)}" for line in lines(state / "ca" / REVOKED))
            known = {**lines(path), **revoked}
            write_private(target, "".join(f"{line}\n" for line in known), durable=True)
        # A backup has the mark if it was made between a restore and the next run.
        elif path.is_file() and name not in (*GROWING, MARK) and not (name in (FILE, FORMER) and target.exists()):
            write_private(target, path.read_bytes(), durable=True)
