"""The platform of a cluster's nodes, from preflight's probes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.findings import some, together
from farandole.stack.catalogue import NONE, Platform, order

Probe = Mapping[str, Any]


@dataclass(frozen=True)
class Nodes:
    """The common platform of all nodes, and their NVIDIA drivers and toolkits."""

    hosts: tuple[str, ...]
    platform: Platform
    drivers: Mapping[str, str]
    toolkits: Mapping[str, str]
    # Whether the toolkit is on a node that is not among these, as with --limit.
    toolkit_elsewhere: bool = False

    @property
    def driver(self) -> str:
        """The oldest driver; `none` unless all nodes have one."""
        return min(self.drivers.values(), key=order) if self.drivers.keys() == set(self.hosts) else NONE

    def accelerator(self, wanted: str) -> str:
        """Resolve auto to cpu or cuda; refuse cuda if the nodes lack what it needs."""
        toolkit = self.toolkits or self.toolkit_elsewhere
        if wanted == "auto":
            self._refuse_half("set stack_accelerator: cpu to leave the GPUs alone")
            return "cuda" if self.drivers and toolkit else "cpu"
        if wanted == "cuda":
            self._refuse_half("take the others out of group cluster")
            if not self.drivers:
                raise FarandoleError(
                    f"{some(self.hosts)}: no NVIDIA driver is loaded: install it, or set stack_accelerator: cpu"
                )
            if not toolkit:
                raise FarandoleError(
                    f"{some(self.hosts)}: an NVIDIA driver ({self.driver}) but no CUDA toolkit, and Horovod's CUDA "
                    "part is compiled with nvcc: install the toolkit on the builder, or set stack_accelerator: cpu"
                )
        return wanted

    def _refuse_half(self, cure: str) -> None:
        if self.drivers and (without := [host for host in self.hosts if host not in self.drivers]):
            raise FarandoleError(
                f"{some([*self.drivers])} with an NVIDIA driver, {some(without)} without one: "
                f"all ranks of a job must be of one kind. Install the driver there, {cure}"
            )


def grouped(probes: Mapping[str, Probe], key: Callable[[Probe], str]) -> dict[str, list[str]]:
    """Group hosts by a key; hosts with an empty key are left out."""
    groups = together(probes, lambda host: key(probes[host]))
    return {key(probes[hosts[0]]): hosts for hosts in groups if key(probes[hosts[0]])}


def platform(probe: Probe) -> Platform:
    return Platform(f"{probe['os_id']}-{probe['os_version']}", probe["arch"], probe["python"], probe["glibc"])


def read(probes: Mapping[str, Probe]) -> Nodes:
    """Combine the probes; refuse a cluster of several platforms."""
    if not probes:
        raise FarandoleError("preflight has not probed any node yet: run  farandole preflight -i INVENTORY")
    kinds = grouped(probes, lambda probe: str(platform(probe)))
    if len(kinds) > 1:
        parts = "; ".join(f"{some(hosts)}: {kind}" for kind, hosts in kinds.items())
        fewest = min(kinds.values(), key=len)
        raise FarandoleError(
            f"the nodes have {len(kinds)} platforms ({parts}), but a cluster must have one: the ranks of a job send "
            f"each other Python objects and start the same Python at the same path. Move {some(fewest)} out of group "
            "cluster, into a separate inventory"
        )
    toolkits = {host: probe["cuda"] for host, probe in probes.items() if probe["cuda"]}
    majors = grouped(probes, lambda probe: str(probe["cuda"]).split(".")[0])
    if len(majors) > 1:
        parts = "; ".join(f"{some(hosts)}: CUDA {major}" for major, hosts in majors.items())
        raise FarandoleError(
            f"the nodes have CUDA toolkits of different majors ({parts}): install the same one on each"
        )
    oldest = min(probes.values(), key=lambda probe: order(probe["glibc"]))
    drivers = {host: probe["nvidia_driver"] for host, probe in probes.items() if probe["nvidia_driver"]}
    return Nodes(tuple(probes), platform(oldest), drivers, toolkits)
