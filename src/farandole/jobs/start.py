"""Start a run: what is wanted of it, and what is refused before anything is sent."""

import hashlib
import os
import shlex
import shutil
import socket
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from pathlib import Path

from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.text import on_terminal, one_line
from farandole.inventory.facts import of_inventory
from farandole.jobs.files import get, send
from farandole.jobs.follow import follow
from farandole.jobs.forward import PortError, forwarded, listening, parsed
from farandole.jobs.login import Head
from farandole.jobs.told import console, known, show
from farandole.node.arguments import duration
from farandole.node.head.folders import refuse_checkpoints, refuse_early
from farandole.node.head.launch import MEET_S, recognized


@dataclass(frozen=True)
class Wish:
    """What is wanted of a run."""

    program: list[str]
    ranks: int | None = None
    hosts: str = ""
    time: str = ""
    fetch: list[str] = field(default_factory=list)
    launcher: str = ""
    forward: str = ""
    restarts: int = 0
    min_nodes: int = 0
    checkpoints: str = ""
    meet_within: int = MEET_S
    wait: bool = False
    detach: bool = False

    def refuse_early(self, folder: Path) -> None:
        """Refuse what cannot work."""
        if self.detach and self.fetch:
            raise FarandoleError("--fetch brings results back when the run ends, so it does not go with --detach")
        if self.detach and self.forward:
            raise FarandoleError("--forward lasts as long as this command; later: farandole attach --forward PORT")
        if not shutil.which("rsync"):
            raise FarandoleError("rsync is not installed on this machine: apt install rsync")
        refuse_early(self.program, self.fetch, folder)
        recognized(self.program, self.launcher)
        refuse_checkpoints(self.checkpoints)
        if (self.min_nodes or self.checkpoints) and not self.restarts:
            raise FarandoleError("--min-nodes and --checkpoints are for a run with --restarts N")
        if self.forward:
            # Before anything is sent, and again when the run is there.
            listening(parsed(self.forward)).close()
        try:
            if self.time:
                duration(self.time)
        except ArgumentTypeError as refused:
            raise FarandoleError(str(refused)) from None

    def options(self) -> list[str]:
        """The options with which the head's command is asked for it."""
        values = {"-np": self.ranks, "--hosts": self.hosts, "--time": self.time, "--launcher": self.launcher}
        values |= {"--restarts": self.restarts, "--min-nodes": self.min_nodes, "--checkpoints": self.checkpoints}
        arguments = [word for name, value in values.items() if value for word in (name, str(value))]
        arguments += [f"--meet-within={self.meet_within}"]
        arguments += ["--wait"] if self.wait else []
        return [*arguments, *(f"--fetch={path}" for path in self.fetch)]


def left_out(inventory: Path, hosts: str) -> list[str]:
    """The nodes that a run does not use; refuses to be told to use them."""
    cluster = of_inventory(inventory)
    wanted = [name.strip() for name in hosts.split(",")] if hosts else cluster.nodes
    out = {name: why for name, why in cluster.excluded.items() if name in wanted}
    for name, why in out.items():
        note = on_terminal(f"{name} is left out: {why}")
        if hosts:
            raise FarandoleError(
                f"--hosts: {note}; to use it again: farandole node include {name} --prove -i {inventory}"
            )
        console.print(note)
    return [*out]


def start(head: Head, wish: Wish, folder: Path, without: list[str], *, yes: bool) -> str:
    """Send a folder to the head and start a run there; returns its number."""
    machine = Path("/etc/machine-id")
    here = machine.read_text() if machine.exists() else socket.gethostname()
    source = hashlib.sha256(f"{here} {os.getuid()} {folder}".encode()).hexdigest()[:16]
    send(head, folder, source, yes=yes)
    options = ["--detach", *wish.options(), *([f"--without={','.join(without)}"] if without else [])]
    try:
        number = head.ask("farandole", "run", *options, f"--source={source}", "--", *wish.program).strip()
    except Interrupted:
        raise Interrupted(
            "the run may have been started: `farandole runs` shows it then, and `farandole stop` ends it"
        ) from None
    if not number.isdigit():
        raise FarandoleError(f"{head.name} did not start a run: {one_line(number)}")
    return number


def finish(head: Head, number: str, wish: Wish, folder: Path, again: str) -> int:
    """Show a run until it ends, stop it if interrupted, and get its results; returns the exit status."""
    fetch = wish.fetch
    try:
        with forwarded(head, number, parsed(wish.forward) if wish.forward else None):
            status = follow(head, number)
    except PortError as error:
        raise FarandoleError(f"{error}; run {number} goes on: farandole attach {again} {number}") from None
    except Interrupted:
        console.print(f"stopping run {number}")
        try:
            show(head.ask("farandole", "stop", number))
        except Interrupted:
            raise Interrupted(f"run {number} may still be ending; farandole runs {again} shows it") from None
        except FarandoleError as error:
            raise FarandoleError(f"{error}; unless it has ended: farandole stop {again} {number}") from None
        hint = f"; its results: farandole fetch {again} {number} {shlex.join(fetch)}" if fetch else ""
        raise Interrupted(f"run {number} is ended on every node{hint}") from None
    if fetch and (state := known(head, number)).fetched:
        got = [get(head, number, path, folder) for path in fetch]
        status = status or int(not (state.complete and all(got)))
    return status
