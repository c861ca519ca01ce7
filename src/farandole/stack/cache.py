"""Files kept on the control machine: downloads pinned by locks, for all clusters, and builds, per cluster."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256

Lock = dict[str, Any]
# The wheels that Horovod's extensions are compiled against.
COMPILED_AGAINST = ("tensorflow", "tensorflow-cpu", "torch")


def cache_root(home: str | None) -> Path:
    """The default download cache, given the value of XDG_CACHE_HOME."""
    return Path(home or Path.home() / ".cache") / "farandole"


def default_root() -> Path:
    """The download cache, shared by all clusters of this control machine; every file is checked by its sha256."""
    return cache_root(os.environ.get("XDG_CACHE_HOME"))


def digest(*values: Any) -> str:
    """A short digest of any JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def openmpi_key(lock: Lock) -> str:
    """Locks with the same key get the same OpenMPI, including its path."""
    openmpi = lock["openmpi"]
    # Locks of earlier versions have no patches or no recipe, and keep their key.
    made = [*openmpi.get("patches", []), *filter(None, [openmpi.get("recipe")])]
    return digest(lock["platform"], lock["versions"]["gxx"], openmpi["version"], openmpi["configure"], *made)


def horovod_key(lock: Lock) -> str:
    """Locks with the same key get the same Horovod: everything that it is compiled against is in the key."""
    against = [wheel for wheel in lock["wheels"] if wheel["name"] in COMPILED_AGAINST]
    return digest(openmpi_key(lock), lock["horovod"], against, lock["nccl"], lock["versions"]["cuda"])


@dataclass(frozen=True)
class Built:
    """An archive with its digest and description."""

    path: Path
    sha256: str
    about: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """The file's description, for playbooks."""
        size = self.path.stat().st_size
        return {**self.about, "path": str(self.path), "name": self.path.name, "sha256": self.sha256, "size": size}


def record_path(path: Path) -> Path:
    """The path of a file's record, beside the file."""
    return path.with_name(f"{path.name}.json")


def record(built: Built) -> None:
    """Write the record of a new file; without it the file is ignored."""
    files.write(record_path(built.path), json.dumps({**built.about, "sha256": built.sha256}, indent=1))


def recall(path: Path) -> Built | None:
    """Return a recorded file; None if the file or its record is missing."""
    try:
        about = json.loads(record_path(path).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Built(path, about.pop("sha256"), about) if path.is_file() else None


def recall_whole(path: Path) -> Built | None:
    """Like recall, but delete a damaged file, so that it is built again."""
    built = recall(path)
    if built and sha256(path) != built.sha256:
        path.unlink()
        return None
    return built


def lab_builds() -> Path:
    """The builds shared by all labs, which are all built on this machine."""
    return default_root() / "lab-builds"


class Builds:
    """A cluster's folder of builds, which are as trustworthy as root on its builder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parts, self.stacks, self.changes = root / "parts", root / "stacks", root / "changes"

    def stack(self, lock: Lock) -> Path:
        """The path of a lock's packed stack."""
        platform = lock["platform"]
        return self.stacks / f"{lock['id']}.{platform['os']}-{platform['arch']}.tar.zst"

    def changed(self, lock: Lock) -> Path:
        """The path of what of a lock's packed stack differs from the one before it."""
        return self.changes / self.stack(lock).name

    def openmpi(self, lock: Lock) -> Path:
        return self.parts / f"openmpi-{lock['openmpi']['version']}-{openmpi_key(lock)}.tar.zst"

    def horovod(self, lock: Lock) -> Path:
        return self.parts / f"horovod-{lock['horovod']['version']}-{horovod_key(lock)}.tar.zst"

    def wheel(self, lock: Lock, source: dict[str, Any]) -> Path:
        """The path of a wheel that was made of sources in a lock, perhaps against the frameworks."""
        linked = [openmpi_key(lock), *(file for file in lock["wheels"] if file["name"] in ("numpy", *COMPILED_AGAINST))]
        key = digest(lock["platform"], source["sha256"], source["tools"], linked)
        return self.parts / f"wheel-{source['name']}-{source['version']}-{key}.tar.zst"

    def packed(self) -> list[Built]:
        """All packed stacks, with their locks."""
        records = sorted(self.stacks.glob("*.tar.zst.json"))
        return [built for path in records if (built := listed(recall(path.with_suffix(""))))]

    def known(self) -> dict[str, list[str]]:
        """Digests of contents lists by tree; a tree has several if it was built more than once."""
        known: dict[str, list[str]] = {}
        for built in self.packed():
            for tree, contents in built.about["contents"].items():
                known.setdefault(tree, []).append(contents)
        return known


def listed(built: Built | None) -> Built | None:
    """Ignore a stack without a contents list, because it cannot be verified on a node."""
    return built if built and "contents" in built.about else None


# Files

DRAFTS, ABANDONED_S = ".part-", 86_400


def keep(draft: Path, target: Path, wanted: str, source: str) -> None:
    """Move a downloaded file into place if its sha256 is right."""
    if (got := sha256(draft)) != wanted:
        raise FarandoleError(
            f"{target.name} from {source} is not the expected file: its sha256 is {got}, expected {wanted}. "
            "It was not kept: check that source and run again"
        )
    draft.chmod(0o644)
    draft.replace(target)


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the target; folders that killed runs left are deleted after a day."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{DRAFTS}*"):
        if time.time() - old.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=DRAFTS, dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def no_space(cache: Path) -> Iterator[None]:
    """Turn errors of the disk into messages that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FarandoleError(full(cache)) from None
        where = error.filename or cache
        raise FarandoleError(f"{where} on this machine cannot be written: {error.strerror or error}") from None


def full(cache: Path) -> str:
    """The message for a full disk."""
    free = shutil.disk_usage(cache).free // 2**20
    return f"no space left on this machine for {cache} ({free} MiB free): free some, or set XDG_CACHE_HOME"
