"""The network of jobs, for the role that writes it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from farandole.fabric import choose, hostfile
from farandole.findings import report


def fabric(addresses: Mapping[str, str], hostvars: Mapping[str, Any], wanted: str = "") -> dict[str, Any]:
    """Network, interface by node, and what to say when there is none."""
    chosen = choose(addresses, hostvars, wanted)
    return {**asdict(chosen), "refusal": report(chosen.findings) if chosen.findings else ""}


class FilterModule:
    """Gives Ansible the filters."""

    def filters(self) -> dict[str, Any]:
        """By name."""
        return {"fabric": fabric, "hostfile": hostfile}
