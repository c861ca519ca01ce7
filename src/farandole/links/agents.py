"""The program that measures on one node: it is sent there, answers requests, and ends with its connection."""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from farandole.core.errors import FarandoleError
from farandole.core.schema import fields, load, many, whole, within, words
from farandole.core.text import one_line

PROGRAM = Path(__file__).parents[1] / "node/agent.py"
# Jobs listen on random ports of this range; one in each third of it is tried.
LOWEST, HIGHEST, PORTS = 1024, 65535, 3
# The longest answer, and the lines around it that a login may print.
LONGEST, GREETING = 1 << 18, 1 << 16
STOP_S = 2

PORT = whole(65535)
LISTENING = fields(
    {
        "ports": many(PORT),
        "datagrams": PORT,
        "mtu": whole(1 << 31),
        "speed": whole(1 << 31),
        "hardware": many(words("([0-9a-f]{2}:){5}[0-9a-f]{2}")),
    }
)


@dataclass(frozen=True)
class Place:
    """A node, its address in the network for jobs, and the ssh command that starts Python on it."""

    name: str
    address: str
    command: tuple[str, ...] = ()
    python: str = "/usr/bin/python3"
    # The address that its name means on the others.
    named: str = ""
    # The interface with its address; without one, its MTU and speed are unknown.
    interface: str = ""


class LostError(FarandoleError):
    """A node's program does not answer."""


class Agent:
    """The program on one node."""

    def __init__(self, place: Place, secret: str) -> None:
        self.place, self.mark = place, f"{secret} ".encode()
        self.process: asyncio.subprocess.Process | None = None
        self.requests: Any = None
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
        self.requests, self.answers, self.errors = self.process.stdin, self.process.stdout, self.process.stderr
        own = {"name": self.place.name, "address": self.place.address, "interface": self.place.interface}
        line = json.dumps(
            {**own, "secret": secret, "seconds": seconds, "ports": [LOWEST, HIGHEST, PORTS], "peers": peers}
        )
        answer = await self.ask(program + f"{secret}\n{line}\n".encode(), patience)
        self.listening = within("the answer", LISTENING, answer)
        if len(self.listening["ports"]) > PORTS:
            raise LostError(f"it names {len(self.listening['ports'])} ports instead of {PORTS}")

    async def ask(self, request: bytes, seconds: float) -> Mapping[str, Any]:
        """Send a request and wait for its answer."""
        try:
            async with asyncio.timeout(seconds):
                self.requests.write(request)
                await self.requests.drain()
                answer = await self._answer()
        except TimeoutError:
            raise LostError(f"no answer in {seconds:.0f} s") from None
        except (OSError, ValueError) as error:  # ssh has ended; or a line without an end
            raise LostError(str(error) or "the connection was closed") from None
        if "error" in answer:
            raise LostError(one_line(answer["error"]))
        return answer

    async def _answer(self) -> Mapping[str, Any]:
        ignored = 0
        while ignored < GREETING:
            line = await cast(asyncio.StreamReader, self.answers).readline()
            if not line:
                raise LostError(await last_words(cast(asyncio.StreamReader, self.errors)) or "its program ended")
            if line.startswith(self.mark):
                return load(line.removeprefix(self.mark).decode(errors="replace"), LONGEST)
            ignored += len(line)
        raise LostError("too much output before the answer")

    async def request(self, message: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        return await self.ask(json.dumps(message).encode() + b"\n", seconds)

    async def stop(self) -> None:
        """End the program: it ends when its input does, and ssh with it."""
        process = self.process
        if process and process.returncode is None:
            self.requests.close()
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
