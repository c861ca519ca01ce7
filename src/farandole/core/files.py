"""Write files on the control machine, each as a whole, know them by their hash, and read YAML."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

# In C where PyYAML was built with it, which takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def from_yaml(text: str) -> Any:
    """The data in a text that we or the user wrote; deeply nested text from elsewhere may crash a parser in C."""
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe one


def write(path: Path, content: str | bytes, mode: int = 0o644, *, durable: bool = False) -> None:
    """Replace a file atomically; a durable one survives a power cut."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fchmod(handle, mode)
            if durable:
                os.fsync(handle)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        # The folder itself may be new.
        for folder in (path.parent, path.parent.parent):
            sync_folder(folder)


def write_private(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file atomically; it and its folder are accessible to their owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    write(path, content, 0o600, durable=durable)


def sync_folder(path: Path) -> None:
    """Flush what was created or renamed in a folder to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The sha256 of a file, which may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
