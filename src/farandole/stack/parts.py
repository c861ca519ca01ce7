"""Parts of a lock in the forms that the roles' tasks need."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

from farandole.errors import FarandoleError
from farandole.form import fields, load, whole, within, words
from farandole.words import one_line

Wheel = dict[str, str]
SHA256 = words("[0-9a-f]{64}")
PACKED = fields({"sha256": SHA256, "unpacked": whole(1 << 40), "stack": SHA256, "mpi": SHA256})


def stack_wheels(wheels: list[Wheel], cache: str) -> list[dict[str, str]]:
    """The wheels, as the action send_files takes them."""
    folder = Path(cache).expanduser() / "wheels"
    return [{"path": str(folder / one["file"]), "name": one["file"], "sha256": one["sha256"]} for one in wheels]


def stack_patches(patches: list[dict[str, str]], folder: str) -> list[dict[str, str]]:
    """The patches, as the action send_files takes them."""
    return [{"path": f"{folder}/{one['file']}", "name": one["file"], "sha256": one["sha256"]} for one in patches]


def stack_requirements(wheels: list[Wheel]) -> str:
    """The wheels as a requirements file with hashes."""
    return "\n".join(f"{one['name']}=={one['version']} --hash=sha256:{one['sha256']}" for one in wheels)


def stack_modules(lock: dict[str, Any]) -> list[str]:
    """Horovod's modules for the frameworks of a stack."""
    by_framework = {"pytorch": "horovod.torch", "tensorflow": "horovod.tensorflow"}
    return [by_framework[name] for name in lock.get("wanted", {}).get("frameworks", [])]


def stack_packed(answer: str, stack: str, mpi: str) -> dict[str, Any]:
    """The sha256 of the archive that the builder packed, and what is recorded about it; the answer is base64."""
    try:
        packed = within("packed.json", PACKED, load(b64decode(str(answer)).decode(), 1 << 16))
    except (ValueError, FarandoleError) as error:
        raise FarandoleError(
            f"the builder gives no valid description of the stack that it packed: {one_line(error)}; inspect it"
        ) from None
    contents = {f"stacks/{stack}": packed["stack"], f"mpi/{mpi}": packed["mpi"]}
    return {"sha256": packed["sha256"], "about": {"unpacked": packed["unpacked"], "contents": contents}}
