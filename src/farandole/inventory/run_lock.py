"""The lock that lets one run at a time change a cluster, and the keeper that proves to the head that the run is alive.

`python -m farandole.inventory.run_lock PID STARTED COMMAND…` is the keeper: it holds a connection to the head open
while that process is alive. On the head, the process that the connection started represents the run.
"""

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

from farandole.core.errors import FarandoleError

# After a minute without a heartbeat, as when the control machine lost power, the head considers the run dead.
PATIENCE, BEAT = 60, 15
HOLDER = (
    "exec bash -c 'echo farandole-run $$ ${SSH_CONNECTION%% *}; "
    f"while read -r -t {PATIENCE} _; do :; done'"
)  # fmt: skip
HELD = re.compile(r"farandole-run (\d{1,10}) ?([0-9a-fA-F.:]{0,45})\s*")


@dataclass(frozen=True)
class ClusterRun:
    """A run that changes a cluster: whose it is, when it started, and its process."""

    who: str
    since: str
    place: str
    pid: int
    started: int
    source: str = ""

    @property
    def here(self) -> bool:
        """Whether it runs on this machine, so that its process can be looked up."""
        return self.place == place()

    @property
    def alive(self) -> bool:
        """Whether it is still running; only meaningful for a run on this machine."""
        return started(self.pid) == self.started

    def same(self, other: "ClusterRun") -> bool:
        """Whether both are the same run."""
        return (self.place, self.pid, self.started) == (other.place, other.pid, other.started)


def place() -> str:
    """The scope of a process id: this boot of this kernel, and this PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it is dead or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(rest[18])


def person() -> str:
    """Who calls this program, also by sudo."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def this_run(pid: int) -> ClusterRun:
    """Return the run whose main process is `pid`."""
    if (begun := started(pid)) is None:
        raise FarandoleError(f"the run that this task belongs to has ended (process {pid})")
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return ClusterRun(f"{person()}@{os.uname().nodename}", since, place(), pid, begun)


def read(record: Any) -> ClusterRun | None:
    """Parse a record of a run; None if it is not one. It may come from a node, so its text is made printable."""
    try:
        run = ClusterRun(**{field.name: record[field.name] for field in fields(ClusterRun)})
        texts = {name: plain(getattr(run, name)) for name in ("who", "since", "place", "source")}
        run = replace(run, **texts, pid=int(run.pid), started=int(run.started))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    # `kill` reads 0 and negative numbers as groups of processes.
    return run if 0 < run.pid < 1 << 22 else None


def plain(text: str) -> str:
    """Reduce another machine's text to a short line of printable ASCII."""
    return re.sub(r"[^ -~]", "?", text)[:120]


def take(state: Path, mine: ClusterRun) -> None:
    """Record this run in the state folder, or refuse if another run on this machine is still alive.

    The lock need not be released: a dead run holds nothing. Runs of other machines are known to the head.
    """
    try:
        handle = os.open(state / "run", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise FarandoleError(f"{state / 'run'} cannot be written: {error.strerror}") from None
    with os.fdopen(handle, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _refuse_another(file, mine)
        file.seek(0)
        file.truncate()
        json.dump(asdict(mine), file)


def refuse_another(state: Path, mine: ClusterRun) -> None:
    """Refuse if another run on this machine is still alive, and record nothing."""
    try:
        with (state / "run").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            _refuse_another(file, mine)
    except FileNotFoundError:
        return
    except OSError as error:
        raise FarandoleError(f"{state / 'run'} cannot be read: {error.strerror}") from None


def _refuse_another(file: IO[str], mine: ClusterRun) -> None:
    holder = None
    with suppress(ValueError):
        holder = read(json.load(file))
    if holder and holder.here and holder.alive and not holder.same(mine):
        raise FarandoleError(refusal(holder))


def refusal(holder: ClusterRun) -> str:
    """Say who is changing the cluster, and what to do."""
    where = "on this machine" if holder.here else f"from {holder.source or 'another machine'}"
    end = f"end it with  kill {holder.pid}" if holder.here and holder.alive else "end it there"
    return (
        f"this cluster is being changed by {holder.who} {where} (process {holder.pid}, since {holder.since}); "
        f"this run has changed nothing. Wait until that one has ended, or {end}"
    )


# The keeper


Keeper = tuple[subprocess.Popen[str], int, str]


def register_on_head(
    mine: ClusterRun, connect: Callable[[], Keeper], ask: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> str:
    """Record this run on the head, or refuse if another is alive; return a warning if the head cannot record it."""
    why = ""
    # If the login needs a password, the second attempt can use the connection that asking has left open.
    for _ in range(2):
        keeper, holder = None, 0
        try:
            keeper, holder, source = connect()
            mine = replace(mine, source=source)
        except FarandoleError as error:
            why = f"no connection can be held open to the head ({error})"
        call = {"run": asdict(mine), "holder": holder}
        answer = ask(call)
        if (held := _held(answer)) and held.here and not held.alive:
            answer = ask({**call, "over": asdict(held)})
            held = _held(answer)
        if keeper and (held or "held" not in answer):
            keeper.kill()
        if held:
            raise FarandoleError(refusal(held))
        if "held" not in answer:
            why = why or f"the head does not answer ({plain(str(answer.get('msg', 'no answer')))})"
            break
        if holder:
            return ""
    return f"runs from other control machines are not kept out of this cluster: {why}. Make sure that there are none"


def _held(answer: Mapping[str, Any]) -> ClusterRun | None:
    """The run that blocks this one, as recorded on the head."""
    record = answer.get("held")
    if record and not (held := read(record)):
        where = "remove /var/lib/farandole-run on it"
        raise FarandoleError(f"the head says that another run is active, but not which: {where}")
    return held if record else None


def own_connection(command: Sequence[str], ssh: str) -> list[str]:
    """Change an ssh command so that it never prompts and its connection is not shared."""
    # A program that supplies the password comes before ssh; -v would fill a pipe that nobody reads.
    options = [option for option in command[command.index(ssh) + 1 :] if not re.fullmatch("-v+", option)]
    return [ssh, "-o", "BatchMode=yes", "-o", "ControlMaster=no", *options]


def start_keeper(run: ClusterRun, command: Sequence[str]) -> Keeper:
    """Start the keeper; returns it, the process that it started on the head, and the address that the head sees."""
    keeper = subprocess.Popen(
        # -P keeps the working directory off Python's module path.
        [sys.executable, "-P", "-m", "farandole.inventory.run_lock", str(run.pid), str(run.started), *command],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    output = cast(IO[str], keeper.stdout)
    reply = output.readline() if select.select([output], [], [], PATIENCE)[0] else f"no answer in {PATIENCE} s"
    if match := HELD.fullmatch(reply):
        return keeper, int(match[1]), match[2]
    keeper.kill()
    raise FarandoleError(plain(reply.strip()) or "ssh printed nothing")


def keep(pid: int, begun: int, command: Sequence[str]) -> None:
    """Connect, print the id of the process on the head, and send it heartbeats while the run is alive."""
    ssh = subprocess.Popen(
        command, text=True, errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines, beats = cast(IO[str], ssh.stdout), cast(IO[str], ssh.stdin)
    last = ""
    # The login may print a few lines of greeting first.
    for _ in range(100):
        line = lines.readline(1000)
        last = line.strip() or last
        if not line or HELD.fullmatch(line):
            break
    print(last, flush=True)
    # A reader of the run's output must not wait for this process.
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
