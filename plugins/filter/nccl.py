"""NCCL's debs, for the role that installs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farandole.nccl import nccl_misfit


def depot_debs(files: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Files of the control machine, with the name that each has on the depot, and their size."""
    return [{**file, "name": f"debs/{Path(file['path']).name}", "size": size(Path(file["path"]))} for file in files]


def size(path: Path) -> int:
    """Nothing for one that is not there, which the task that sends it says."""
    return path.stat().st_size if path.is_file() else 0


class FilterModule:
    """Gives Ansible the filters."""

    def filters(self) -> dict[str, Any]:
        """By name."""
        return {"depot_debs": depot_debs, "nccl_misfit": nccl_misfit}
