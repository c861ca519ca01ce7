"""One run at a time changes a cluster: which one it is, whether it still lives, and how the head is told so.

`python -m farandole.runs PID STARTED COMMAND…` is the keeper: it holds a connection to the head open as long as that
process lives. By what the connection started there, the head knows that the run is alive.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

from farandole.errors import FarandoleError

# Without a word for a minute, as from a machine that lost its power, the head takes the run for dead.
PATIENCE, BEAT = 60, 15
HOLDER = (
    "exec bash -c 'echo farandole-run $$ ${SSH_CONNECTION%% *}; "
    f"while read -r -t {PATIENCE} _; do :; done'"
)  # fmt: skip
HELD = re.compile(r"farandole-run (\d{1,10}) ?([0-9a-fA-F.:]{0,45})\s*")


@dataclass(frozen=True)
class Run:
    """A run that changes a cluster: who, since when, and the process by which it is known to live."""

    who: str
    since: str
    place: str
    pid: int
    started: int
    source: str = ""

    @property
    def here(self) -> bool:
        """Whether it is of this machine, so that its process can be looked for."""
        return self.place == place()

    @property
    def lives(self) -> bool:
        """Whether it goes on; only to be asked about a run of this machine."""
        return started(self.pid) == self.started

    def same(self, other: Run) -> bool:
        """Whether both are one run."""
        return (self.place, self.pid, self.started) == (other.place, other.pid, other.started)


def place() -> str:
    """Where a process number means what it does: this boot of this kernel, and the container in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def started(pid: int) -> int | None:
    """When a process began, in ticks since boot; none for one that is dead or only waits to be reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(rest[18])


def this_run(pid: int) -> Run:
    """The run whose main process is `pid`."""
    if (begun := started(pid)) is None:
        raise FarandoleError(f"the run of which this is a part has ended (process {pid})")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Run(f"{user}@{os.uname().nodename}", since, place(), pid, begun)


def read(told: Any) -> Run | None:
    """The run in a record; none where it is no record of one. A record may come from a node: its words stay words."""
    try:
        run = Run(**{field.name: told[field.name] for field in fields(Run)})
        words = {name: plain(getattr(run, name)) for name in ("who", "since", "place", "source")}
        run = replace(run, **words, pid=int(run.pid), started=int(run.started))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    # `kill` takes 0 and what is below for many processes.
    return run if 0 < run.pid < 1 << 22 else None


def plain(text: str) -> str:
    """What another machine said, as a short line without codes for a terminal."""
    return re.sub(r"[^ -~]", "?", text)[:120]


def take(state: Path, mine: Run) -> None:
    """Write this run into the state folder, or refuse it while another of this machine goes on.

    Nobody has to give the lock back: a run that is dead holds nothing. Of a run of another machine the head knows.
    """
    try:
        handle = os.open(state / "run", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise FarandoleError(f"{state / 'run'} cannot be written: {error.strerror}") from None
    with os.fdopen(handle, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        holder = None
        with suppress(ValueError):
            holder = read(json.load(file))
        if holder and holder.here and holder.lives and not holder.same(mine):
            raise FarandoleError(refusal(holder))
        file.seek(0)
        file.truncate()
        json.dump(asdict(mine), file)


def refusal(holder: Run) -> str:
    """Who changes the cluster, and what to do."""
    where = "on this machine" if holder.here else f"from {holder.source or 'another machine'}"
    end = f"end it by  kill {holder.pid}" if holder.here and holder.lives else "end it there"
    return (
        f"this cluster is being changed by {holder.who} {where} (process {holder.pid}, since {holder.since}); "
        f"this run has changed nothing. Wait until that one is over, or {end}"
    )


# The keeper


Keeper = tuple[subprocess.Popen[str], int, str]


def tell_head(mine: Run, connect: Callable[[], Keeper], ask: Callable[[dict[str, Any]], Mapping[str, Any]]) -> str:
    """Record this run on the head, or refuse it while another goes on; the warning if the head could not be told."""
    notice = ""
    # The second time over the connection that asking leaves open, where a login wants a password.
    for _ in range(2):
        keeper, holder = None, 0
        try:
            keeper, holder, source = connect()
            mine = replace(mine, source=source)
        except FarandoleError as error:
            notice = f"no connection can be held open to the head ({error})"
        try:
            held = _held_by_another(mine, holder, ask)
        except NoAnswerError as error:
            _end(keeper)
            return _unprotected(notice or f"the head does not answer ({error})")
        if held:
            _end(keeper)
            raise FarandoleError(refusal(held))
        if holder:
            return ""
    return _unprotected(notice)


class NoAnswerError(FarandoleError):
    """The head does not say whether another run is at work."""


def _unprotected(why: str) -> str:
    return f"runs from other control machines are not kept out of this cluster: {why}. See to it that there are none"


def _held_by_another(mine: Run, holder: int, ask: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Run | None:
    """The run that keeps this one out, as the head knows it."""
    call = {"run": asdict(mine), "holder": holder}
    held = _holder(ask(call))
    if held and held.here and not held.lives:
        held = _holder(ask({**call, "over": asdict(held)}))
    return held


def _holder(answer: Mapping[str, Any]) -> Run | None:
    if "held" not in answer:
        raise NoAnswerError(plain(str(answer.get("msg", "no answer"))))
    if not answer["held"]:
        return None
    if held := read(answer["held"]):
        return held
    raise FarandoleError(
        "the head says that another run is at work, and not which: remove /var/lib/farandole-run on it"
    )


def _end(keeper: subprocess.Popen[str] | None) -> None:
    if keeper:
        keeper.kill()


def own_connection(words: Sequence[str], ssh: str) -> list[str]:
    """The same ssh command, but one that never asks for anything and is no connection for others to share."""
    # Before ssh stands what gives it a password; -v would fill a pipe that nobody reads.
    options = [word for word in words[words.index(ssh) + 1 :] if not re.fullmatch("-v+", word)]
    return [ssh, "-o", "BatchMode=yes", "-o", "ControlMaster=no", *options]


def start_keeper(run: Run, command: Sequence[str]) -> Keeper:
    """Hold a connection open as long as the run lives: its keeper, the process at its far end, where it came from."""
    keeper = subprocess.Popen(
        # Without the working directory among the places of Python's modules.
        [sys.executable, "-P", "-m", "farandole.runs", str(run.pid), str(run.started), *command],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    output = cast(IO[str], keeper.stdout)
    said = output.readline() if select.select([output], [], [], PATIENCE)[0] else f"no answer in {PATIENCE} s"
    if found := HELD.fullmatch(said):
        return keeper, int(found[1]), found[2]
    keeper.kill()
    raise FarandoleError(plain(said.strip()) or "ssh says nothing")


def keep(pid: int, begun: int, command: Sequence[str]) -> None:
    """Connect, say by which process the far end is known, and send it a line now and then while the run lives."""
    ssh = subprocess.Popen(
        command, text=True, errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines, beats = cast(IO[str], ssh.stdout), cast(IO[str], ssh.stdin)
    said = ""
    # A login may greet with a few lines first.
    for _ in range(100):
        line = lines.readline(1000)
        said = line.strip() or said
        if not line or HELD.fullmatch(line):
            break
    print(said, flush=True)
    # Whoever reads the output of the run must not wait for this process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    due = 0.0
    with suppress(BrokenPipeError):
        while started(pid) == begun and ssh.poll() is None:
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                beats.write("\n")
                beats.flush()
            time.sleep(0.5)
    ssh.kill()


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
