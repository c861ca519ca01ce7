"""Measure the connections between the nodes, each of which runs agent.py for as long as that takes."""

import asyncio
import resource
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.schema import Check, fields, many, number, optional, row, text, whole, within, words
from farandole.links.agents import PORT, Agent, Place

START_S, ANSWER_S = 8, 10
# More nodes start more slowly, as one processor has to log in to all of them.
START_EACH_S = 0.25
# Before what failed twice is tried for the last time.
LATER_S = 3
# All at once, in rounds, alone.
SECONDS = (0.2, 0.2, 0.3)
# Slow connections that are measured again alone, and how often.
AGAIN, TRIES = 24, 4

# A source and a target.
Way = tuple[str, str]
# What the others are told of it.
ASKED = ("ports", "datagrams", "mtu", "hardware")
REASON = words("refused|reset|no route|forbidden|failed|no answer|another machine")
PLACE = whole(1 << 20)


REACHED = fields(
    {
        "closed": many(row(PLACE, PORT, REASON)),
        "path": many(row(PLACE, whole(65535), whole(65535))),
        "name": many(row(PLACE, many(text(60)))),
        "untried": whole(1 << 32),
        "delay_us": optional(number),
    }
)
HERE = fields({"crowding": many(text(60))})
SENT = fields({"rate": optional(number)}, {"why": REASON})


@dataclass(frozen=True)
class Closed:
    """A port of a node to which another one could not connect."""

    source: str
    target: str
    port: int
    why: str


@dataclass(frozen=True)
class Narrow:
    """A path that drops packets which both ends would send."""

    source: str
    target: str
    passes: int
    sent: int


@dataclass(frozen=True)
class Misnamed:
    """A name that means another address on a node."""

    source: str
    target: str
    seen: tuple[str, ...]


@dataclass
class Measured:
    """What the nodes said of their connections."""

    names: list[str]
    closed: list[Closed] = field(default_factory=list)
    narrow: list[Narrow] = field(default_factory=list)
    misnamed: list[Misnamed] = field(default_factory=list)
    delays_us: dict[str, float] = field(default_factory=dict)
    speeds: dict[str, int] = field(default_factory=dict)
    # Bytes per second by source and target, one for each try: beside others, and alone, which is faster.
    rates: dict[Way, list[float]] = field(default_factory=dict)
    alone: dict[Way, list[float]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    # By source, how many of its attempts were not over in time.
    untried: dict[str, int] = field(default_factory=dict)
    # By target, the sources that it turned away, as too many connections came from there.
    crowded: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0


@dataclass
class Measurement:
    """One measurement, with the programs that run for it."""

    agents: dict[str, Agent]
    result: Measured

    async def each(
        self, asks: Mapping[str, dict[str, Any]], form: Check, seconds: float
    ) -> dict[str, Mapping[str, Any]]:
        """Ask several nodes at the same time; one without an answer of this form takes no further part."""

        async def ask(name: str) -> Any:
            return within("the answer", form, await self.agents[name].request(asks[name], seconds))

        answers = await asyncio.gather(*map(ask, asks), return_exceptions=True)
        fit = {name: self._fit(name, answer) for name, answer in zip(asks, answers, strict=True)}
        return {name: answer for name, answer in fit.items() if answer is not None}

    def _fit(self, name: str, answer: Any) -> Any:
        """An answer; None if the node is lost."""
        if isinstance(answer, FarandoleError):
            self._lose(name, str(answer))
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _lose(self, name: str, why: str) -> None:
        self.result.silent[name] = why
        self.agents.pop(name, None)

    async def start(self, places: Sequence[Place], secret: str, seconds: float) -> None:
        patience, peers = START_S + START_EACH_S * len(places), sorted({place.address for place in places})
        starts = (self.agents[place.name].start(secret, peers, patience, seconds) for place in places)
        began = await asyncio.gather(*starts, return_exceptions=True)
        for place, answer in zip(places, began, strict=True):
            self._fit(place.name, answer)
        self.result.speeds = {name: agent.listening["speed"] for name, agent in self.agents.items()}

    async def reach(self, *, names: bool) -> None:
        """Have every node connect to every other; what failed is tried again when the others are done, and once more.

        A node that many others ask at the same time, or one of them again and again, may be too busy to answer soon.
        """
        peers = [
            [name, agent.place.address, *(agent.listening[field] for field in ASKED), agent.place.named]
            for name, agent in self.agents.items()
        ]
        places = {name: place for place, name in enumerate(self.agents)}
        await self._reach(peers, dict.fromkeys(places), names=names)
        for pause in (0, LATER_S):
            failed: dict[str, set[int]] = {}
            bad: list[Closed | Narrow] = [*self.result.closed, *self.result.narrow]
            for link in bad:
                if link.source in self.agents:
                    failed.setdefault(link.source, set()).add(places[link.target])
            self.result.closed.clear()
            self.result.narrow.clear()
            if failed:
                await asyncio.sleep(pause)
                await self._reach(peers, {name: sorted(targets) for name, targets in failed.items()}, names=False)

    async def finish(self) -> None:
        """Drop what says nothing of a connection: nobody can connect to a program that has ended, or was crowded.

        Any program on a node, of whoever, can open so many connections that those of the measurement are turned away.
        """
        addresses = {agent.place.address: name for name, agent in self.agents.items()}
        answers = await self.each({name: {"do": "here"} for name in self.agents}, HERE, ANSWER_S)
        for target, answer in answers.items():
            away = [addresses.get(address, target) for address in answer["crowding"]]
            if sources := [name for name in dict.fromkeys(away) if name != target]:
                self.result.crowded[target] = sources
        ways = {(source, target) for target, sources in self.result.crowded.items() for source in sources}
        self.result.closed = [link for link in self.result.closed if (link.source, link.target) not in ways]
        for way in ways:
            self.result.rates.pop(way, None)
            self.result.alone.pop(way, None)

    async def _reach(self, peers: Sequence[Any], only: Mapping[str, Sequence[int] | None], *, names: bool) -> None:
        """Have some nodes connect to some of these peers each, or to all."""
        present = [peer[0] for peer in peers]
        seconds = ANSWER_S + 0.05 * len(present)
        common = {"do": "reach", "peers": peers, "seconds": seconds, "names": names}
        answers = await self.each(
            {name: {**common, "place": present.index(name), "only": targets} for name, targets in only.items()},
            REACHED,
            seconds + ANSWER_S,
        )
        for name, answer in answers.items():
            self._reached(name, answer, present)

    def _reached(self, name: str, answer: Mapping[str, Any], present: Sequence[str]) -> None:
        peers = [peer for kind in ("closed", "path", "name") for peer, *_ in answer[kind]]
        if any(peer >= len(present) or present[peer] == name for peer in peers):
            self._lose(name, "its answer is about a node that it was not asked about")
            return
        self.result.closed += [Closed(name, present[at], port, why) for at, port, why in answer["closed"]]
        self.result.narrow += [Narrow(name, present[at], size, sent) for at, size, sent in answer["path"]]
        self.result.misnamed += [Misnamed(name, present[at], tuple(seen)) for at, seen in answer["name"]]
        if answer["untried"]:
            self.result.untried[name] = self.result.untried.get(name, 0) + answer["untried"]
        if answer["delay_us"] is not None:
            self.result.delays_us.setdefault(name, answer["delay_us"])

    async def send(self, ways: Sequence[Way], seconds: float, into: dict[Way, list[float]]) -> None:
        """Measure the rates from sources to targets, all at the same time."""
        # Where large packets get lost, a connection hangs instead of being slow.
        bad: list[Closed | Narrow] = [*self.result.closed, *self.result.narrow]
        shut = {(link.source, link.target) for link in bad} | {
            (link.target, link.source) for link in self.result.narrow
        }
        ways = [way for way in ways if {*way} <= self.agents.keys() and way not in shut]
        asks = {
            source: {
                "do": "send", "name": target, "address": self.agents[target].place.address,
                "port": self.agents[target].listening["ports"][0], "seconds": seconds,
            }
            for source, target in ways
        }  # fmt: skip
        for source, answer in (await self.each(asks, SENT, 2 * ANSWER_S + seconds)).items():
            into.setdefault((source, asks[source]["name"]), []).append(answer["rate"] or 0.0)

    async def rates(self, slow: Callable[[Measured], Sequence[Way]]) -> None:
        """All nodes at once; in rounds if any connection is slow; those that still are again, alone."""
        all_at_once, in_rounds, alone = SECONDS
        names = list(self.agents)
        together, apart = self.result.rates, self.result.alone
        await self.send([*zip(names, [*names[1:], names[0]], strict=True)], all_at_once, together)
        if len(names) == 2:
            await self.send([(names[1], names[0])], all_at_once, together)
        if slow(self.result):
            for number in chosen_rounds(len(names)):
                pairs = pairs_of(names, number)
                await self.send(pairs, in_rounds, together)
                await self.send([(target, source) for source, target in pairs], in_rounds, together)
        for _ in range(TRIES):
            # The slowest first, as there is no time for all of many.
            worst = sorted(slow(self.result), key=lambda way: max(self.result.rates[way]))
            for way in worst[:AGAIN]:
                await self.send([way], alone, apart)


async def measured(
    places: Sequence[Place], slow: Callable[[Measured], Sequence[Way]] | None, *, names: bool
) -> Measured:
    """Measure, without rates if nothing says what is slow."""
    secret, begun = secrets.token_hex(16), time.monotonic()
    # Three rounds of answers, the rates, and whether programs are still there.
    limit = 2 * START_S + 10 * ANSWER_S + len(places)
    agents = {place.name: Agent(place, secret) for place in places}
    measurement = Measurement(dict(agents), Measured([place.name for place in places]))
    async with AsyncExitStack() as stack:
        for agent in agents.values():
            stack.push_async_callback(agent.stop)
        await measurement.start(places, secret, limit)
        if len(measurement.agents) > 1:
            await measurement.reach(names=names)
        if slow and len(measurement.agents) > 1:
            await measurement.rates(slow)
        if len(measurement.agents) > 1:
            await measurement.finish()
        await asyncio.gather(*(agent.stop() for agent in agents.values()))
    measurement.result.seconds = round(time.monotonic() - begun, 2)
    return measurement.result


def measure(
    places: Sequence[Place], slow: Callable[[Measured], Sequence[Way]] | None = None, *, names: bool = False
) -> Measured:
    """What the connections between these nodes are like."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(measured(places, slow, names=names))


def pairs_of(names: Sequence[str], number: int) -> list[Way]:
    """A round in which every node takes part once, by the circle method; an odd one out rests.

    Among as many rounds as there are other nodes, every two meet once.
    """
    places: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    *circle, fixed = places
    turns = len(circle)
    met = [(fixed, circle[number % turns])]
    met += [(circle[(number + k) % turns], circle[(number - k) % turns]) for k in range(1, (turns + 1) // 2)]
    return [(first, second) for first, second in met if first is not None and second is not None]


def chosen_rounds(number: int) -> list[int]:
    """The rounds that tell a bad node from a bad link: three at distances 1, 2, 4, or all if there are fewer."""
    rounds = number - 1 if number % 2 == 0 else number
    return list(dict.fromkeys([*(distance % rounds for distance in (1, 2, 4)), *range(rounds)]))[:3]
