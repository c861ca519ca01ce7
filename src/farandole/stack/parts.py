"""Parts of a lock in the forms that the roles' tasks need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Wheel = dict[str, str]


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
