"""What the control machine keeps: what locks pin, for all clusters, and what a builder made, for each of them."""

from __future__ import annotations

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

from farandole.errors import FarandoleError

Lock = dict[str, Any]
# What Horovod's extensions are compiled against.
COMPILED_AGAINST = ("tensorflow", "tensorflow-cpu", "torch")


def default_root() -> Path:
    """Where every cluster of this control machine finds what a lock pins by its sha256."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "farandole"


def sha256(path: Path) -> str:
    """Of a file that may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*told: Any) -> str:
    """A short name for whatever was told."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def openmpi_key(lock: Lock) -> str:
    """Two locks with the same key get the same OpenMPI, to the byte of its path."""
    openmpi = lock["openmpi"]
    return digest(lock["platform"], lock["versions"]["gxx"], openmpi["version"], openmpi["configure"])


def horovod_key(lock: Lock) -> str:
    """Two locks with the same key get the same Horovod: it is compiled against nothing else."""
    against = [wheel for wheel in lock["wheels"] if wheel["name"] in COMPILED_AGAINST]
    return digest(openmpi_key(lock), lock["horovod"], against, lock["nccl"], lock["versions"]["cuda"])


@dataclass(frozen=True)
class Built:
    """Something that a builder packed."""

    path: Path
    sha256: str
    about: dict[str, Any]

    def told(self) -> dict[str, Any]:
        """For a playbook."""
        size = self.path.stat().st_size
        return {**self.about, "path": str(self.path), "name": self.path.name, "sha256": self.sha256, "size": size}


def record_path(path: Path) -> Path:
    """What is known of a file lies beside it."""
    return path.with_name(f"{path.name}.json")


def record(built: Built) -> None:
    """Write down what a file is that has just arrived; this makes it count."""
    draft = built.path.with_name(f".{built.path.name}.json.part")
    draft.write_text(json.dumps({**built.about, "sha256": built.sha256}, indent=1))
    draft.replace(record_path(built.path))


def recall(path: Path) -> Built | None:
    """What was packed before, unless it is not there."""
    try:
        about = json.loads(record_path(path).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Built(path, about.pop("sha256"), about) if path.is_file() else None


def recall_whole(path: Path) -> Built | None:
    """The same; but a damaged file is thrown away, so that it is built again."""
    built = recall(path)
    if built and sha256(path) != built.sha256:
        path.unlink()
        return None
    return built


def lab_builds() -> Path:
    """What labs share, as their builders are all this machine."""
    return default_root() / "lab-builds"


class Builds:
    """What a builder made, which is worth as much as that builder's root: a folder for each cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parts, self.stacks = root / "parts", root / "stacks"

    def stack(self, lock: Lock) -> Path:
        """The packed stack of a lock."""
        platform = lock["platform"]
        return self.stacks / f"{lock['id']}.{platform['os']}-{platform['arch']}.tar.zst"

    def openmpi(self, lock: Lock) -> Path:
        """Its OpenMPI."""
        return self.parts / f"openmpi-{lock['openmpi']['version']}-{openmpi_key(lock)}.tar.zst"

    def horovod(self, lock: Lock) -> Path:
        """Its Horovod."""
        return self.parts / f"horovod-{lock['horovod']['version']}-{horovod_key(lock)}.tar.zst"

    def packed(self) -> list[Built]:
        """Every stack that is packed here, each with its lock."""
        records = sorted(self.stacks.glob("*.tar.zst.json"))
        return [built for path in records if (built := listed(recall(path.with_suffix(""))))]

    def known(self) -> dict[str, list[str]]:
        """The sha256 of each list of contents by the tree that it describes; an OpenMPI may have been built again."""
        known: dict[str, list[str]] = {}
        for built in self.packed():
            for tree, contents in built.about["contents"].items():
                known.setdefault(tree, []).append(contents)
        return known


def listed(built: Built | None) -> Built | None:
    """A stack counts as packed when its contents can be proven on a node."""
    return built if built and "contents" in built.about else None


# Files

DRAFTS, ABANDONED_S = ".part-", 86_400


def keep(draft: Path, target: Path, wanted: str, source: str) -> None:
    """Give a file that has arrived its name, if it is the right one."""
    if (got := sha256(draft)) != wanted:
        raise FarandoleError(
            f"{target.name} from {source} is not the file that is wanted: its sha256 is {got}, wanted is {wanted}. "
            "Nothing was kept of it: check that source and run again"
        )
    draft.chmod(0o644)
    draft.replace(target)


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """A place beside the final one that is gone afterwards; what a killed run left is swept out the day after."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{DRAFTS}*"):
        if time.time() - old.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=DRAFTS, dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def no_space(cache: Path) -> Iterator[None]:
    """Say what is wrong with the disk in words that help."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FarandoleError(full(cache)) from None
        where = error.filename or cache
        raise FarandoleError(f"{where} on this machine cannot be written: {error.strerror or error}") from None


def full(cache: Path) -> str:
    """What to say of a disk without room."""
    free = shutil.disk_usage(cache).free // 2**20
    return f"no space left on this machine for {cache} ({free} MiB free): make room there, or set XDG_CACHE_HOME"
