"""What Slurm says of a job's nodes."""

from __future__ import annotations

import re


def counts(text: str) -> list[int]:
    """A number for each node, which Slurm writes as 2(x3),1."""
    return [int(one) for one, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
