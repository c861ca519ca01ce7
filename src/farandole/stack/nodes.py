"""What the nodes of a cluster are, from what preflight found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from farandole.errors import FarandoleError
from farandole.findings import some
from farandole.stack.catalogue import NONE, Platform, order

Probe = Mapping[str, Any]


@dataclass(frozen=True)
class Nodes:
    """The one platform of all nodes, and what they have of NVIDIA's."""

    hosts: tuple[str, ...]
    platform: Platform
    drivers: Mapping[str, str]
    toolkits: Mapping[str, str]

    @property
    def driver(self) -> str:
        """The oldest driver; `none` when not all nodes have one."""
        return min(self.drivers.values(), key=order) if self.drivers.keys() == set(self.hosts) else NONE

    def accelerator(self, wanted: str) -> str:
        """cpu or cuda: what was wanted, or for auto what the nodes have."""
        if wanted == "auto":
            self._refuse_half("set stack_accelerator: cpu to leave the GPUs alone")
            return "cuda" if self.drivers and self.toolkits else "cpu"
        if wanted == "cuda":
            self._refuse_half("take the others out of group cluster")
            if not self.drivers:
                raise FarandoleError(
                    f"{some(self.hosts)}: no NVIDIA driver is loaded: install it, or set stack_accelerator: cpu"
                )
            if not self.toolkits:
                raise FarandoleError(
                    f"{some(self.hosts)}: an NVIDIA driver ({self.driver}) but no CUDA toolkit, and Horovod's CUDA "
                    "part is compiled with nvcc: install the toolkit on the builder, or set stack_accelerator: cpu"
                )
        return wanted

    def _refuse_half(self, cure: str) -> None:
        if self.drivers and (without := [host for host in self.hosts if host not in self.drivers]):
            raise FarandoleError(
                f"{some([*self.drivers])} with an NVIDIA driver, {some(without)} without one: "
                f"the ranks of a job are alike. Install the driver there, {cure}"
            )


def grouped(probes: Mapping[str, Probe], key: Callable[[Probe], str]) -> dict[str, list[str]]:
    """Hosts by what they have."""
    found: dict[str, list[str]] = {}
    for host, probe in probes.items():
        if value := key(probe):
            found.setdefault(value, []).append(host)
    return found


def platform(probe: Probe) -> Platform:
    """What one node is."""
    return Platform(f"{probe['os_id']}-{probe['os_version']}", probe["arch"], probe["python"], probe["glibc"])


def read(probes: Mapping[str, Probe]) -> Nodes:
    """The nodes, or a refusal of a cluster of several platforms."""
    if not probes:
        raise FarandoleError("preflight knows no node yet: run  ansible-playbook -i INVENTORY playbooks/preflight.yml")
    kinds = grouped(probes, lambda probe: str(platform(probe)))
    if len(kinds) > 1:
        parts = "; ".join(f"{some(hosts)}: {kind}" for kind, hosts in kinds.items())
        fewest = min(kinds.values(), key=len)
        raise FarandoleError(
            f"the nodes are of {len(kinds)} platforms ({parts}), and a cluster is of one: the ranks of a job send "
            f"Python objects to one another and start the same Python at the same path. Take {some(fewest)} out "
            "of group cluster, into an inventory of its own"
        )
    toolkits = {host: probe["cuda"] for host, probe in probes.items() if probe["cuda"]}
    majors = grouped(probes, lambda probe: str(probe["cuda"]).split(".")[0])
    if len(majors) > 1:
        parts = "; ".join(f"{some(hosts)}: CUDA {major}" for major, hosts in majors.items())
        raise FarandoleError(f"the nodes have CUDA toolkits of different majors ({parts}): install the same on each")
    oldest = min(probes.values(), key=lambda probe: order(probe["glibc"]))
    drivers = {host: probe["nvidia_driver"] for host, probe in probes.items() if probe["nvidia_driver"]}
    return Nodes(tuple(probes), platform(oldest), drivers, toolkits)
