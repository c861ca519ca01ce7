"""Measure the connections between the nodes, each of which runs agent.py for as long as that takes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from farandole.core.errors import FarandoleError
from farandole.core.schema import fields, load, many, number, optional, text, whole, within, words
from farandole.core.text import one_line
from farandole.links import rounds

PROGRAM = Path(__file__).parents[1] / "node/agent.py"
# Jobs listen on random ports of this range; one in each third of it is tried.
LOWEST, HIGHEST, PORTS = 1024, 65535, 3
# The longest answer, and the lines around it that a login may print.
LONGEST, GREETING = 1 << 16, 1 << 16
START_S, ANSWER_S, STOP_S = 8, 10, 2
# More nodes start more slowly, as one processor has to log in to all of them.
START_EACH_S = 0.25
# Before what failed twice is tried for the last time.
LATER_S = 3
# All at once, in rounds, alone.
SECONDS = (0.2, 0.2, 0.3)
# Slow connections that are measured again alone, and how often.
AGAIN, TRIES = 24, 4

PORT = whole(65535)
REASON = words("refused|reset|no route|forbidden|failed|no answer|another machine")
LISTENING = fields(
    {
        "ports": many(PORT),
        "datagrams": PORT,
        "mtu": whole(1 << 31),
        "speed": whole(1 << 31),
        "hardware": many(words("([0-9a-f]{2}:){5}[0-9a-f]{2}")),
    }
)
# What the others are told of it.
ASKED = ("ports", "datagrams", "mtu", "hardware")
PLACE = whole(1 << 20)


def row(*checks: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """A list with exactly these values."""

    def checked(value: Any) -> list[Any]:
        values = many(lambda one: one)(value)
        if len(values) != len(checks):
            raise FarandoleError(f"has {len(values)} values instead of {len(checks)}")
        return [within(f"[{place}]", check, one) for place, (check, one) in enumerate(zip(checks, values, strict=True))]

    return checked


REACHED = fields(
    {
        "closed": many(row(PLACE, PORT, REASON)),
        "path": many(row(PLACE, whole(65535), whole(65535))),
        "name": many(row(PLACE, many(text(60)))),
        "failures": whole(1 << 32),
        "untried": whole(1 << 32),
        "delay_us": optional(number),
    }
)
HERE = fields({"crowding": many(text(60))})
SENT = fields({"rate": optional(number)}, {"why": REASON})


@dataclass(frozen=True)
class Place:
    """A node, its address in the network for jobs, and the ssh command that starts Python on it."""

    name: str
    address: str
    command: tuple[str, ...] = ()
    python: str = "/usr/bin/python3"
    # The address that its name means on the others.
    named: str = ""


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
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    alone: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    # By target, the sources that it turned away, as too many connections came from there.
    crowded: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0


class LostError(FarandoleError):
    """A node's program does not answer."""


class Agent:
    """The program on one node."""

    def __init__(self, place: Place, secret: str) -> None:
        self.place, self.mark = place, f"{secret} ".encode()
        self.process: asyncio.subprocess.Process | None = None
        self.listening: dict[str, Any] = {}

    async def start(self, secret: str, peers: Sequence[str], patience: float, seconds: float) -> None:
        """Send the program and have it listen to these addresses, for so many seconds at most."""
        program = PROGRAM.read_bytes()
        python = shlex.quote(self.place.python)
        load_it = f"import sys; exec(compile(sys.stdin.buffer.read({len(program)}), 'pairs', 'exec'))"
        self.process = await asyncio.create_subprocess_exec(
            *self.place.command, f"exec {python} -I -c {shlex.quote(load_it)}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, limit=LONGEST,
        )  # fmt: skip
        about = {"name": self.place.name, "address": self.place.address, "secret": secret, "seconds": seconds}
        line = json.dumps({**about, "ports": [LOWEST, HIGHEST, PORTS], "peers": peers})
        answer = await self.ask(program + f"{secret}\n{line}\n".encode(), patience)
        self.listening = within("the answer", LISTENING, answer)
        if len(self.listening["ports"]) > PORTS:
            raise LostError(f"it names {len(self.listening['ports'])} ports instead of {PORTS}")

    async def ask(self, request: bytes, seconds: float) -> Mapping[str, Any]:
        """Send a request and wait for its answer."""
        process = cast(asyncio.subprocess.Process, self.process)
        requests, answers = cast(asyncio.StreamWriter, process.stdin), cast(asyncio.StreamReader, process.stdout)
        try:
            async with asyncio.timeout(seconds):
                requests.write(request)
                await requests.drain()
                answer = await self._answer(answers, cast(asyncio.StreamReader, process.stderr))
        except TimeoutError:
            raise LostError(f"no answer in {seconds:.0f} s") from None
        except (OSError, ValueError) as error:  # ssh has ended; or a line without an end
            raise LostError(str(error) or "the connection was closed") from None
        if "error" in answer:
            raise LostError(one_line(answer["error"]))
        return answer

    async def _answer(self, output: asyncio.StreamReader, errors: asyncio.StreamReader) -> Mapping[str, Any]:
        ignored = 0
        while ignored < GREETING:
            line = await output.readline()
            if not line:
                raise LostError(await last_words(errors) or "its program ended")
            if line.startswith(self.mark):
                return load(line.removeprefix(self.mark).decode(errors="replace"), LONGEST)
            ignored += len(line)
        raise LostError("too much output before the answer")

    async def request(self, what: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        return await self.ask(json.dumps(what).encode() + b"\n", seconds)

    async def stop(self) -> None:
        """End the program: it ends when its input does, and ssh with it."""
        process = self.process
        if process and process.returncode is None:
            cast(asyncio.StreamWriter, process.stdin).close()
            if not await ends(process):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                cast(Any, process)._transport.close()
                await ends(process)


async def ends(process: asyncio.subprocess.Process) -> bool:
    """Whether a process ends soon."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await process.wait()
            return True
    return False


async def last_words(errors: asyncio.StreamReader) -> str:
    """What ssh said before it ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(1):
            return one_line((await errors.read(LONGEST)).decode(errors="replace"))
    return ""


@dataclass
class Measurement:
    """One measurement, with the programs that run for it."""

    agents: dict[str, Agent]
    result: Measured

    async def each(self, asks: Mapping[str, dict[str, Any]], seconds: float) -> dict[str, Mapping[str, Any]]:
        """Ask several nodes at the same time; one that does not answer takes no further part."""
        names = list(asks)
        answers = await asyncio.gather(
            *(self.agents[name].request(asks[name], seconds) for name in names), return_exceptions=True
        )
        fit = {name: self._fit(name, answer) for name, answer in zip(names, answers, strict=True)}
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
            [name, one.place.address, *(one.listening[what] for what in ASKED), one.place.named]
            for name, one in self.agents.items()
        ]
        places = {name: place for place, name in enumerate(self.agents)}
        await self._reach(peers, dict.fromkeys(places), names=names)
        for pause in (0, LATER_S):
            failed: dict[str, set[int]] = {}
            bad: list[Closed | Narrow] = [*self.result.closed, *self.result.narrow]
            for one in bad:
                if one.source in self.agents:
                    failed.setdefault(one.source, set()).add(places[one.target])
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
        for target, answer in (await self.each({name: {"do": "here"} for name in self.agents}, ANSWER_S)).items():
            try:
                away = [addresses.get(one, target) for one in within("the answer", HERE, answer)["crowding"]]
            except FarandoleError as error:
                self._lose(target, str(error))
                continue
            if sources := [name for name in dict.fromkeys(away) if name != target]:
                self.result.crowded[target] = sources
        ways = {(source, target) for target, sources in self.result.crowded.items() for source in sources}
        self.result.closed = [one for one in self.result.closed if (one.source, one.target) not in ways]
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
            seconds + ANSWER_S,
        )
        for name, answer in answers.items():
            try:
                self._reached(name, within("the answer", REACHED, answer), present)
            except FarandoleError as error:
                self._lose(name, str(error))

    def _reached(self, name: str, answer: Mapping[str, Any], present: Sequence[str]) -> None:
        rows = [row for kind in ("closed", "path", "name") for row in answer[kind]]
        if any(row[0] >= len(present) or present[row[0]] == name for row in rows):
            raise FarandoleError("its answer is about a node that it was not asked about")
        self.result.closed += [Closed(name, present[at], port, why) for at, port, why in answer["closed"]]
        self.result.narrow += [Narrow(name, present[at], size, sent) for at, size, sent in answer["path"]]
        self.result.misnamed += [Misnamed(name, present[at], tuple(seen)) for at, seen in answer["name"]]
        if answer["delay_us"] is not None:
            self.result.delays_us.setdefault(name, answer["delay_us"])

    async def send(self, ways: Sequence[tuple[str, str]], seconds: float) -> None:
        """Measure the rates from sources to targets, all at the same time."""
        await self._send(ways, seconds, self.result.rates)

    async def _send(
        self, ways: Sequence[tuple[str, str]], seconds: float, into: dict[tuple[str, str], list[float]]
    ) -> None:
        shut = {(one.source, one.target) for one in self.result.closed}
        ways = [way for way in ways if {*way} <= self.agents.keys() and way not in shut]
        asks = {
            source: {
                "do": "send", "name": target, "address": self.agents[target].place.address,
                "port": self.agents[target].listening["ports"][0], "seconds": seconds,
            }
            for source, target in ways
        }  # fmt: skip
        answers = await self.each(asks, 2 * ANSWER_S + seconds)
        for source, target in ways:
            with suppress(FarandoleError):
                rate = within("the answer", SENT, answers.get(source, {}))["rate"]
                into.setdefault((source, target), []).append(rate or 0.0)

    async def rates(self, slow: Callable[[Measured], Sequence[tuple[str, str]]]) -> None:
        """All nodes at once; in rounds if any connection is slow; those that still are again, alone."""
        all_at_once, in_rounds, alone = SECONDS
        names = list(self.agents)
        await self.send([*zip(names, [*names[1:], names[0]], strict=True)], all_at_once)
        if len(names) == 2:
            await self.send([(names[1], names[0])], all_at_once)
        if slow(self.result):
            for number in rounds.chosen_rounds(len(names)):
                pairs = rounds.pairs_of(names, number)
                await self.send(pairs, in_rounds)
                await self.send([(other, one) for one, other in pairs], in_rounds)
        for _ in range(TRIES):
            # The slowest first, as there is no time for all of many.
            worst = sorted(slow(self.result), key=lambda way: max(self.result.rates[way]))
            for way in worst[:AGAIN]:
                await self._send([way], alone, self.result.alone)


async def measured(
    places: Sequence[Place], slow: Callable[[Measured], Sequence[tuple[str, str]]] | None, *, names: bool
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
    places: Sequence[Place], slow: Callable[[Measured], Sequence[tuple[str, str]]] | None = None, *, names: bool = False
) -> Measured:
    """What the connections between these nodes are like."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(measured(places, slow, names=names))
