"""Compare and replace files, and handle folders that a killed run may leave incomplete."""

import fcntl
import glob
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ansible_collections.farandole.cluster.plugins.module_utils.contents import sha256


def checksum(path: Path) -> str:
    """The sha256 of a file; empty for anything else, such as a link."""
    return sha256(str(path)) if path.is_file() and not path.is_symlink() else ""


def checksums(folder: Path) -> dict[str, str]:
    """The sha256 of each file in a folder; empty for what is no file."""
    plain = folder.is_dir() and not folder.is_symlink()
    return {path.name: checksum(path) for path in folder.iterdir()} if plain else {}


def make(folder: Path) -> None:
    """Make a folder, and those above it, so that everybody can enter them, whatever umask the login has."""
    umask = os.umask(0o022)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(umask)


def opened(folders: Iterable[Path], *, check_mode: bool) -> list[Path]:
    """Let everybody enter folders of ours that earlier versions made by the login's umask; returns these."""
    present = {folder: folder.stat() for folder in folders if folder.is_dir()}
    closed = [path for path, about in present.items() if about.st_uid == os.geteuid() and not about.st_mode & 0o001]
    for folder in closed if not check_mode else ():
        folder.chmod(0o755)
    return closed


@contextmanager
def replacing(target: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Write a file that replaces the target as a whole; an error leaves the target as it is."""
    make(target.parent)
    # Drafts of killed runs; a module of theirs that is still writing fails, and the newer content stays.
    for old in target.parent.glob(f".{glob.escape(target.name)}.*.new"):
        old.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", suffix=".new", delete=False) as file:
        draft = Path(file.name)
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


def put(target: Path, text: str, mode: int = 0o644) -> None:
    """Replace a text file as a whole."""
    with replacing(target, mode) as draft:
        draft.write(text.encode())


def link(path: Path, target: str) -> None:
    """Let a link lead to a target, in one step."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a lock, because a module continues on the node after its control machine was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    # Only root can open it: whoever can read a file or a folder can lock it forever.
    opened = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def aside(root: Path, path: Path) -> None:
    """Move a path away for removal, so that a killed run leaves nothing incomplete under its name."""
    removing = root / "removing"
    removing.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.rename(Path(tempfile.mkdtemp(dir=removing)) / path.name)


def sweep(root: Path) -> None:
    """Remove what this run, or one that was killed, has moved away."""
    remove(root / "removing")


def flush(path: Path) -> None:
    """Write what is in memory to the disk on which a path lies, and to no other disk: that could take minutes."""
    subprocess.run(["/bin/sync", "--file-system", str(path)], check=True, stdout=subprocess.DEVNULL)


def remove(folder: Path) -> None:
    """Remove a folder with rm, which handles any depth."""
    subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=True, stdout=subprocess.DEVNULL)
