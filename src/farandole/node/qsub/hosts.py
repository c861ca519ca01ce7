"""Print the options of horovodrun that describe the allocation of this job of Slurm's."""

from __future__ import annotations

import os

from farandole.node.allocation import tasks


def main() -> None:
    """Print them."""
    ranks = tasks(os.environ)
    hosts = ",".join(f"{host}:{count}" for host, count in ranks.items())
    print(f"-np {os.environ.get('SLURM_NTASKS') or sum(ranks.values())} -H {hosts}")
