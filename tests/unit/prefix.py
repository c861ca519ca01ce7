"""What lies below /opt/farandole on a node, for tests of the modules that change it."""

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farandole.core.files import sha256

from .loading import load
from .stack import run_module, tree

contents = load("module_utils", "contents")
NEW, OLD = "aaaa00000000", "bbbb00000000"
MPI = "0123456789ab"
GOOD = "exit 0"
PYTHON = f'exec {shlex.quote(sys.executable)} "$@"'


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def installed(root: Path, stack: str, mpi: str = MPI, age: int = 0) -> Path:
    """A stack as installed by stack_install."""
    folder = root / "stacks" / stack
    folder.mkdir(parents=True, exist_ok=True)
    (root / "mpi" / mpi).mkdir(parents=True, exist_ok=True)
    (folder / "mpi").symlink_to(f"../../mpi/{mpi}")
    for path in (folder, root / "mpi" / mpi):
        contents.write(path)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder, (1_800_000_000 - age, 1_800_000_000 - age))
    return folder


def to(root: Path, stack: str, keep: int = 3, *, check_mode: bool = False, **more: Any) -> dict[str, Any]:
    return run_module("stack_switch", {"id": stack, "keep": keep, "root": str(root), **more}, check_mode=check_mode)


def links(root: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in root.iterdir() if path.is_symlink()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def archive(
    tmp_path: Path, mpirun: str = GOOD, python: str = PYTHON, spoil: Callable[[Path], object] = Path.exists
) -> Path:
    """A stack packed as by a builder, or as by a compromised builder."""
    made, packed = tmp_path / "made", tmp_path / "depot" / "stack.tar.zst"
    shutil.rmtree(made, ignore_errors=True)
    stack = made / "stacks" / NEW
    program(made / "mpi" / MPI / "bin/mpirun", mpirun)
    (stack / "venv/bin").mkdir(parents=True)
    if python:
        program(stack / "venv/bin/python", python)
    (stack / "mpi").symlink_to(f"../../mpi/{MPI}")
    for folder in (stack, made / "mpi" / MPI):
        contents.write(folder)
    (stack / "manifest.json").write_text("{}")
    spoil(made)
    subprocess.run(["tar", "-C", made, "--zstd", "-cf", packed, *names(made)], check=True)
    return packed


def request(packed: Path, depot: str, root: Path, **more: Any) -> dict[str, Any]:
    """The arguments of the role."""
    size = packed.stat().st_size
    asked = {"id": NEW, "url": f"{depot}/{packed.name}", "sha256": sha256(packed), "size": size, "unpacked": 10 * size}
    asked |= {"mpi": MPI, "user": getpass.getuser()}
    return {**asked, "modules": ["json", "tarfile"], "root": str(root), **more}


def refused(asked: dict[str, Any], root: Path) -> str:
    """The message of a refusal, which must leave nothing behind."""
    before = tree(root)
    answer = run_module("stack_install", asked)
    assert answer.get("failed")
    assert tree(root) == before
    assert not (root / "incoming").exists()
    return str(answer["msg"])
