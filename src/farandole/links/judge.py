"""Tell bad nodes, bad links and groups that do not reach each other apart, from what the nodes measured."""

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from farandole.core.findings import Finding, finding, some
from farandole.core.schema import MANY
from farandole.links.agents import HIGHEST, LOWEST
from farandole.links.measure import Closed, Measured, Narrow, Way

# The ends of a way.
SOURCE, TARGET = 0, 1
MEGA = 1_000_000
# Less than this share of what is usual is no coincidence where nothing tells how fast a connection ought to be: two
# nodes have no third one to compare with, and interfaces of virtual machines name no speed.
CLEARLY = 0.5
# Shares of what is usual below which jobs are not worth starting. A single link is measured less often than a node.
HOPELESS_NODE, HOPELESS_LINK = 0.5, 0.2
# How much longer than usual packets need, in microseconds and as a factor, if that is to be said.
LATE_US, LATE = 1000, 1.4
# Bytes per second above which one connection measures the processor and its load, not the network.
FILLED = 1e9


@dataclass(frozen=True)
class Bars:
    """What is too slow: below a share of what is usual in this cluster, or below a number of megabits per second."""

    share: float = 0.85
    floor_mbit: float = 0


def judge(measured: Measured, bars: Bars, network: str = "") -> list[Finding]:
    """All findings about the connections between the nodes."""
    return [
        *(finding("pair-unmeasured", name, seen=why) for name, why in measured.silent.items()),
        *(
            finding("pair-unmeasured", name, seen=f"{number} attempts were not over in time")
            for name, number in measured.untried.items()
            if name not in measured.silent
        ),
        *(finding("pair-crowded", name, other=some(others)) for name, others in measured.crowded.items()),
        *judge_closed(measured, network),
        *judge_paths(measured),
        *(
            finding("pair-name-wrong", wrong.source, other=wrong.target, seen=", ".join(wrong.seen) or "nothing")
            for wrong in measured.misnamed
        ),
        *judge_rates(measured, bars),
    ]


def judge_closed(measured: Measured, network: str) -> Iterator[Finding]:
    names = [name for name in measured.names if name not in measured.silent]
    subnet = network or "the network of the nodes"
    strangers = shared_addresses(measured.closed, names)
    for name in names:
        if witnesses := strangers.get(name):
            asked = ordered(witnesses, names)
            # What one node says of another is a matter between the two.
            where = name if len(asked) > 1 else both_ends(asked[0], name)
            yield finding("pair-address-shared", where, other=some(asked), host=name)
    unfit = strangers.keys() | measured.silent.keys()
    closed: dict[Way, list[Closed]] = {}
    for link in measured.closed:
        if not {link.source, link.target} & unfit:
            closed.setdefault((link.source, link.target), []).append(link)
    ways = {*closed}
    if len(parts := groups(names, lambda first, second: not {(first, second), (second, first)} & ways)) > 1:
        yield finding("pair-groups-apart", "all", seen="; ".join(some(part) for part in parts), subnet=subnet)
        home = {name: number for number, part in enumerate(parts) for name in part}
        ways = {way for way in ways if home.get(way[0], -1) == home.get(way[1], -2)}
    bad, links = bad_ends(ways, names)
    for (name, end), others in sorted(bad.items(), key=lambda item: names.index(item[0][0])):
        if end == TARGET:
            both = " It cannot connect to them either." if (name, SOURCE) in bad else ""
            seen, other = ports(closed, [(source, name) for source in others]), some(ordered(others, names))
            yield finding("pair-node-closed", name, other=other, seen=seen, both=both, subnet=subnet)
        elif (name, TARGET) not in bad:
            seen, other = ports(closed, [(name, target) for target in others]), some(ordered(others, names))
            yield finding("pair-node-shut-in", name, other=other, seen=seen, subnet=subnet)
    for source, target in sorted(links, key=lambda way: (names.index(way[1]), names.index(way[0]))):
        which = " With two nodes, it cannot be told which of them blocks it." if len(names) == 2 else ""
        seen = ports(closed, [(source, target)])
        yield finding(
            "pair-link-closed",
            both_ends(source, target),
            other=source,
            host=target,
            seen=seen,
            which=which,
            subnet=subnet,
        )


def shared_addresses(closed: Iterable[Closed], names: Sequence[str]) -> dict[str, set[str]]:
    """Nodes at whose address another machine answers, and whom; one node's word is not enough if there are more."""
    sources: dict[str, set[str]] = {}
    for link in closed:
        if link.why == "another machine" and {link.source, link.target} <= {*names}:
            sources.setdefault(link.target, set()).add(link.source)
    return {name: witnesses for name, witnesses in sources.items() if len(witnesses) >= min(2, len(names) - 1)}


def bad_ends(ways: Collection[Way], names: Sequence[str]) -> tuple[dict[tuple[str, int], set[str]], set[Way]]:
    """Nodes that explain closed ways, as one end of more than one and of most of theirs, with the other ends; and the
    ways that are left. Who explains most comes first, so that nobody is blamed for having met a bad node."""
    others: dict[tuple[str, int], set[str]] = {(name, end): set() for end in (TARGET, SOURCE) for name in names}
    for source, target in ways:
        others[source, SOURCE].add(target)
        others[target, TARGET].add(source)
    bad: dict[tuple[str, int], set[str]] = {}
    while others:
        (name, end), most = max(others.items(), key=lambda item: len(item[1]))
        if len(most) < 2 or 2 * len(most) <= len(names) - 1:
            break
        bad[name, end] = most
        others[name, end] = set()
        for other in most:
            others[other, 1 - end].remove(name)
    return bad, {(name, other) for (name, end), rest in others.items() if end == SOURCE for other in rest}


def ordered(some_names: Iterable[str], names: Sequence[str]) -> list[str]:
    return sorted(set(some_names), key=names.index)


def ports(closed: Mapping[Way, Sequence[Closed]], ways: Iterable[Way]) -> str:
    """The ports that could not be reached, and what happened."""
    links = [link for way in ways for link in closed[way]]
    numbers = some([str(port) for port in sorted({link.port for link in links})])
    return f"TCP {numbers}: {' and '.join(sorted({link.why for link in links}))}"


def groups(names: Sequence[str], connected: Any) -> list[list[str]]:
    """The groups of at least two nodes that are connected within but not with each other; single nodes are in none."""
    left, separate = list(names), []
    while left:
        group = [left.pop(0)]
        for name in group:
            near = [other for other in left if connected(name, other)]
            group += near
            left = [other for other in left if other not in near]
        separate.append(ordered(group, names))
    return [group for group in separate if len(group) > 1]


def judge_paths(measured: Measured) -> Iterator[Finding]:
    """Packets that are lost although both ends would send them: a connection opens, and then hangs."""
    ways = {tuple(sorted((narrow.source, narrow.target))): narrow for narrow in measured.narrow}
    others = {name: {end for way in ways if name in way for end in way} - {name} for name in measured.names}
    # A node that is in more than one bad pair, and in most of its own, is itself bad.
    number = len(measured.names) - len(measured.silent) - 1
    bad = {name for name, ends in others.items() if len(ends) > 1 and 2 * len(ends) > number}
    for name in ordered(bad, measured.names):
        mine = [narrow for way, narrow in ways.items() if name in way]
        yield finding(
            "pair-path-narrow", name, other=f"it and {some(ordered(others[name], measured.names))}", seen=size(mine)
        )
    for way, narrow in ways.items():
        if not bad & {*way}:
            ends = both_ends(narrow.source, narrow.target)
            yield finding("pair-path-narrow", ends, other=f"{narrow.source} and {narrow.target}", seen=size([narrow]))


def size(narrow: Sequence[Narrow]) -> str:
    return f"{min(path.passes for path in narrow)} of {max(path.sent for path in narrow)} bytes"


def best(measured: Measured) -> dict[Way, float]:
    """The best rate of each way, as a busy machine can only make a measurement worse."""
    return {way: max(rates + measured.alone.get(way, [])) for way, rates in measured.rates.items()}


def usual(measured: Measured) -> dict[Way, float]:
    """What is usual for a way: of links whose slower interface has the same speed, the median of the nodes' best rates.

    A bad node spoils all its pairs, but only one best. Rates that were measured alone do not count, as they are higher,
    nor what is faster than a processor fills it.
    """
    kinds = {way: min(measured.speeds.get(name, 0) for name in way) for way in measured.rates}
    bests: dict[int, dict[str, float]] = {}
    for way, rates in measured.rates.items():
        of_kind = bests.setdefault(kinds[way], {})
        for name in way:
            of_kind[name] = max(*rates, of_kind.get(name, 0))
    medians = {kind: min(statistics.median(of_kind.values()), FILLED) for kind, of_kind in bests.items()}
    return {way: medians[kind] for way, kind in kinds.items()}


def is_comparable(measured: Measured, way: Way) -> bool:
    """Whether other nodes and the interfaces tell how fast a way ought to be."""
    return len(measured.names) > 2 and all(measured.speeds.get(name) for name in way)


def bar(measured: Measured, bars: Bars) -> dict[Way, float]:
    """The rate of each way below which it is slow."""
    shares = {way: bars.share if is_comparable(measured, way) else min(bars.share, CLEARLY) for way in measured.rates}
    return {way: max(shares[way] * rate, bars.floor_mbit * MEGA / 8) for way, rate in usual(measured).items()}


def slow_ways(measured: Measured, bars: Bars) -> list[Way]:
    """The ways that are below the bar."""
    least = bar(measured, bars)
    return [way for way, rate in best(measured).items() if rate < least[way]]


def judge_rates(measured: Measured, bars: Bars) -> Iterator[Finding]:
    slow, rates = slow_ways(measured, bars), best(measured)
    if not slow:
        return
    if len(slow) == len(rates):
        yield finding("pair-slow-all", "all", seen=speed(max(rates.values())), wanted=f"{bars.floor_mbit:g} Mbit/s")
        return
    pairs = {tuple(sorted(way)) for way in slow}
    measured_pairs = {tuple(sorted(way)) for way in rates}
    # Among so many that not all could be measured again alone, only these count.
    sure = [way for way in slow if way in measured.alone] if measured.alone else slow
    found = {*slow_nodes(pairs, measured_pairs, measured.names), *slow_ends(slow, rates, measured.names)}
    bad = found & {name for way in sure for name in way}
    for name in ordered(bad, measured.names):
        mine = [way for way in slow if name in way]
        yield too_slow("pair-slow-node", name, mine, measured, bars, HOPELESS_NODE, far=far(name, measured))
    left = [way for way in sure if not bad & {*way}]
    parts = groups(measured.names, lambda first, second: tuple(sorted((first, second))) in measured_pairs - pairs)
    # If most were fast alone, the others were not slow because of where they lead.
    if len(left) > 2 and len(parts) > 1 and 2 * len(sure) >= len(measured.alone):
        seen = f"{speed(max(rates[way] for way in left))} between {'; '.join(map(some, parts))}"
        yield finding("pair-slow-groups", "all", seen=seen, usual=speed(max(usual(measured).values())))
        return
    for way in left:
        which = " With two nodes, it cannot be told which of them is slow." if len(measured.names) == 2 else ""
        fields = {"other": way[0], "to": way[1], "which": which}
        yield too_slow("pair-slow-link", both_ends(*way), [way], measured, bars, HOPELESS_LINK, **fields)


def far(name: str, measured: Measured) -> str:
    """What is to be said of a node whose packets take longer than those of the others; empty for nothing."""
    others = [delay for other, delay in measured.delays_us.items() if other != name]
    mine = measured.delays_us.get(name, 0)
    usually = statistics.median(others or [mine])
    # The others' are longer as well: of three nodes, each of the others sends half of its packets to this one.
    if mine < max([*others, usually + LATE_US, LATE * usually]):
        return ""
    return (
        f"; a packet needs {mine / 1000:.1f} ms there and back, {usually / 1000:.1f} ms are usual, which slows TCP down"
    )


def slow_nodes(
    slow: Collection[tuple[str, ...]], pairs: Collection[tuple[str, ...]], names: Sequence[str]
) -> Iterator[str]:
    """Nodes all of whose pairs are slow, more than one, while partners of theirs are good elsewhere."""
    good = {name for pair in pairs if pair not in slow for name in pair}
    for name in names:
        mine = [pair for pair in pairs if name in pair]
        partners = {partner for pair in mine for partner in pair} - {name}
        if len(mine) > 1 and all(pair in slow for pair in mine) and partners & good:
            yield name


def slow_ends(slow: Collection[Way], rates: Mapping[Way, float], names: Sequence[str]) -> Iterator[str]:
    """Nodes that are slow to all to which they send, more than one, while others are not to some of these; or from all
    from which they receive. The slowest comes first, so that nobody is blamed for having met it."""
    ends: dict[tuple[str, int], set[Way]] = {(name, end): set() for name in names for end in (0, 1)}
    for way in rates:
        for end in (0, 1):
            ends[way[end], end].add(way)
    bad, explained = {*slow}, set[Way]()
    good = {end: {way[1 - end] for way in rates if way not in bad} for end in (0, 1)}
    for (name, end), ways in sorted(ends.items(), key=lambda one: max(map(rates.__getitem__, one[1]), default=0)):
        mine = ways - explained
        if len(mine) > 1 and mine <= bad and good[end] & {way[1 - end] for way in mine}:
            yield name
            explained |= ends[name, 0] | ends[name, 1]


def both_ends(source: str, target: str) -> str:
    """The host of a finding about a link. The one that says so comes first."""
    return f"{source}, {target}"


def too_slow(
    code: str, host: str, ways: Sequence[Way], measured: Measured, bars: Bars, hopeless: float, **fields: str
) -> Finding:
    """A warning, unless it is hopeless compared with what these ways ought to carry."""
    rate, usually = max(best(measured)[way] for way in ways), usual(measured)
    slow = finding(code, host, seen=speed(rate), usual=speed(usually[ways[0]]), **fields)
    known = min((usually[way] for way in ways if is_comparable(measured, way)), default=0)
    return slow if rate < max(hopeless * known, bars.floor_mbit * MEGA / 8) else replace(slow, severity="warn")


def speed(rate: float) -> str:
    return f"{rate / MEGA:.1f} MB/s"


def pairs(measured: Measured, bars: Bars) -> list[list[Any]]:
    """Source, target, MB/s and bar of each way, the worst first; without numbers if nothing gets through."""
    least = bar(measured, bars)
    shut = dict.fromkeys((way.source, way.target) for way in measured.closed)
    open_ways: list[list[Any]] = [
        [*way, round(rate / MEGA, 1), round(least[way] / MEGA, 1)]
        for way, rate in best(measured).items()
        if way not in shut
    ]
    closed: list[list[Any]] = [[*way, None, None] for way in shut]
    return [*closed, *sorted(open_ways, key=lambda row: row[2] / (row[3] or 1))][:MANY]


def record(measured: Measured, bars: Bars | None = None) -> Mapping[str, Any]:
    """What preflight.json keeps of the connections."""
    bests: dict[str, float] = {}
    for way, rate in best(measured).items():
        for name in way:
            bests[name] = max(rate, bests.get(name, 0))
    return {
        "nodes": {
            name: {
                "delay_us": round(measured.delays_us[name], 1) if name in measured.delays_us else None,
                "mb_per_s": round(bests[name] / MEGA, 1) if name in bests else None,
            }
            for name in measured.names
            if name not in measured.silent
        },
        "usual_mb_per_s": round(statistics.median(bests.values()) / MEGA, 1) if bests else None,
        "pairs": pairs(measured, bars or Bars()),
        "ports": [LOWEST, HIGHEST],
        "seconds": measured.seconds,
    }
