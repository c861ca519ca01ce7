"""Choose, among the networks that all nodes share, the one that carries most."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.core.findings import Finding, finding
from farandole.core.schema import UnfitError, address, fields, many, named, number, optional, words
from farandole.inventory.cluster import HostVars, probe_of
from farandole.links import fabric
from farandole.links.fabric import Fabric

# Another network takes over only if it is clearly faster.
CLEARLY = 1.5
# Megabytes per second above which one connection measures the processor and its load, not the network.
FILLED = 1000.0
Rate = float | None
Measure = Callable[[Fabric], Rate]
NETWORK = words(r"[0-9./]{0,18}")
# What is read of an earlier preflight.json, which may be of another version.
FORMER = fields(
    {"network": NETWORK},
    {
        "first": NETWORK,
        "networks": named(NETWORK, optional(number)),
        "addresses": named(words(r"[a-z0-9-]{1,63}"), many(address)),
    },
)


@dataclass(frozen=True)
class Networks:
    """The network for jobs, empty for that of the nodes' cluster addresses, and what is known if there are several."""

    wanted: str = ""
    # That of the cluster addresses, or the one that the user has set.
    first: str = ""
    # Megabytes per second that each carries; null if not measured, or not between all nodes.
    rates: Mapping[str, Rate] = field(default_factory=dict)
    # Each node's addresses in all of them.
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    def known(self) -> dict[str, Any]:
        """What preflight.json keeps."""
        return {"first": self.first, "networks": self.rates, "addresses": self.addresses} if self.rates else {}


def former_in(path: Path) -> dict[str, Any]:
    """The network for jobs in an earlier preflight.json, and what was known of the others."""
    empty = {"network": "", "first": "", "networks": {}, "addresses": {}}
    try:
        return {**empty, **FORMER(json.loads(path.read_text()).get("fabric"))}
    except (OSError, ValueError, AttributeError, UnfitError):
        return empty


def shared_in(state_dir: str) -> dict[str, Any]:
    """What preflight has written: the network for jobs, if not that of the cluster addresses, and all addresses."""
    former = former_in(Path(state_dir) / "preflight.json")
    return {"network": chosen(former), "addresses": former["addresses"]}


def choose(
    names: Sequence[str], hostvars: HostVars, pinned: str, former: Mapping[str, Any], measure: Measure | None,
    *, again: bool, others: Sequence[str] = (),
) -> Networks:  # fmt: skip
    """Choose the network for these nodes; what each carries is measured if that is not known, or is wanted again.

    Others are left out, but their addresses are known, too, so that firewalls let them in when they are proven."""
    first = fabric.choose(names, hostvars, pinned)
    shared = {candidate.network: candidate for candidate in (first, *fabric.others(names, hostvars, first))}
    # With --limit, the networks of the other nodes are not known.
    if lacking(names, hostvars, former) or not all(probe_of(hostvars[name]) for name in names):
        return Networks(pinned or chosen(former), former["first"], former["networks"], former["addresses"])
    if len(shared) == 1:
        return Networks(pinned)
    same = former["networks"].keys() == shared.keys()
    rates: dict[str, Rate] = dict(former["networks"]) if same else dict.fromkeys(shared)
    addresses = {name: [candidate.addresses[name] for candidate in shared.values()] for name in names}
    addresses |= {name: former["addresses"][name] for name in others if same and name in former["addresses"]}
    for name in others:
        own = [fabric.choose([name], hostvars, network).addresses.get(name, "") for network in shared]
        addresses |= {name: own} if all(own) else {}
    if pinned:
        return Networks(pinned, first.network, rates, addresses)
    speeds = {network: speed(candidate, hostvars) for network, candidate in shared.items()}
    stays = former["network"] in shared and former["first"] == first.network
    now = former["network"] if stays else first.network
    if measure and (again or not any(rates.values())):
        rates = {network: measure(candidate) for network, candidate in shared.items()}
        if rates[now] is None:
            # Other checks say which node cannot connect there.
            speeds = dict.fromkeys(shared, 0)
        elif (other := fastest(now, rates, speeds)) != now:
            # Something else may have been busy there.
            rates |= {network: greater(rates[network], measure(shared[network])) for network in (now, other)}
    now = fastest(now, rates, speeds)
    seen = "; ".join(f"{network} {carries(rates[network], speeds[network])}" for network in shared)
    note = finding("network-chosen", "all", network=now, seen=seen)
    return Networks("" if now == first.network else now, first.network, rates, addresses, [note])


def chosen(former: Mapping[str, Any]) -> str:
    """The network that an earlier run has chosen, if it is not the first one."""
    return former["network"] if former["networks"] and former["network"] != former["first"] else ""


def lacking(names: Sequence[str], hostvars: HostVars, former: Mapping[str, Any]) -> bool:
    """Whether some nodes, but not all, have no address in the network that was chosen: they are named, and the others
    keep it."""
    absent = fabric.choose(names, hostvars, chosen(former)).findings if chosen(former) else ()
    return 0 < len(absent) < len(names)


def fastest(now: str, rates: Mapping[str, Rate], speeds: Mapping[str, int]) -> str:
    """The network that is clearly faster than the present one; the present one if there is none."""
    best = max(rates, key=lambda network: (min(rates[network] or 0, FILLED), speeds[network]))
    mine, its = rates[now], rates[best]
    unknown = not any(rate is not None for rate in rates.values())
    if unknown or (mine and its and min(mine, its) >= FILLED):
        return best if 0 < CLEARLY * speeds[now] < speeds[best] else now
    return best if mine is not None and its is not None and its > CLEARLY * min(mine, FILLED) else now


def greater(first: Rate, second: Rate) -> Rate:
    """The better of two measurements; unknown if some could not connect in one of them."""
    return None if first is None or second is None else max(first, second)


def speed(network: Fabric, hostvars: HostVars) -> int:
    """The megabits per second of its slowest interface; 0 if any does not say."""
    links = {name: probe_of(hostvars[name])["machine"]["links"] for name in network.interfaces}
    return min((links[name].get(own) or {}).get("speed") or 0 for name, own in network.interfaces.items())


def carries(rate: Rate, mbit: int) -> str:
    """What is known of a network, for the user."""
    if rate is not None:
        return f"carries {rate:.0f} MB/s"
    return f"has interfaces of {mbit} Mbit/s" if mbit else "was not measured"
