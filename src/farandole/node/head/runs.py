"""The runs of an account: their folders, what is written there, and the units of systemd that keep them."""

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from farandole.core.errors import FarandoleError

RUNS = Path(pwd.getpwuid(os.getuid()).pw_dir) / "runs"
HERE = socket.gethostname()
# Why a run ended that somebody stopped, or the machine, which waits for no copies.
STOPPED = ("stopped", "ended by the shutdown of the head")
# How this program logs in to nodes, which may be gone in the middle of it.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
# Bytes that are reserved for how a run ended.
RESERVED = 1 << 16


class Run:
    """A run's folder, which has the same path on all of its nodes."""

    def __init__(self, number: int) -> None:
        self.number, self.folder = number, RUNS / str(number)
        self.code, self.output = self.folder / "code", self.folder / "output"
        self.unit = f"farandole-run-{number}.service"

    def write(self, kind: str, **values: Any) -> None:
        draft = self.folder / f".{kind}"
        # In place, as its space may have been reserved.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(json.dumps(values))
            file.truncate()
        draft.replace(self.folder / f"{kind}.json")

    def reserve(self, kind: str) -> None:
        """Keep the space for what will be written, so that a full disk does not prevent it."""
        handle = os.open(self.folder / f".{kind}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, RESERVED)
        finally:
            os.close(handle)

    def read(self, kind: str) -> Any:
        try:
            return json.loads((self.folder / f"{kind}.json").read_text())
        except (OSError, ValueError):
            return {}

    def printed(self) -> BinaryIO:
        """What it has printed."""
        try:
            return self.output.open("rb")
        except FileNotFoundError:
            raise RefusedError(f"run {self.number} has printed nothing here") from None

    def is_alive(self) -> bool:
        shown = systemctl("show", "--property=ActiveState", self.unit)
        # If systemd does not answer, nothing is known.
        return shown.returncode != 0 or shown.stdout.strip() not in ("ActiveState=inactive", "ActiveState=failed")

    def end(self) -> Any:
        """How it ended; empty while it runs."""
        # In this order, as it can end between the two.
        if (result := self.read("ended")) or self.is_alive():
            return result
        with_head = booted() > self.read("run").get("created", 0)
        why = "ended by a restart of the head" if with_head else "lost: it ended without a result"
        return self.read("ended") or {"status": 1, "why": why, "with_head": with_head}


def all_runs() -> list[Run]:
    """All runs, the latest one last."""
    numbers = [number_in(path.name) for path in RUNS.glob("[1-9]*")]
    return [Run(number) for number in sorted(numbers) if number]


def number_in(text: str) -> int:
    """The number of a run; 0 if it is none."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else 0


def chosen(text: str) -> Run:
    """The run with a number, or the latest one."""
    runs = all_runs()
    matching = [run for run in runs if str(run.number) == text] if text else runs[-1:]
    if matching:
        return matching[0]
    known = ", ".join(str(run.number) for run in runs[-5:]) or "none yet"
    raise RefusedError(f"there is no run {text}; the latest are: {known} (farandole runs)" if text else "no runs yet")


def new_run() -> Run:
    """A folder for a new run."""
    RUNS.mkdir(mode=0o700, exist_ok=True)
    # A number is never used again: nodes may still have the folder of a run that was removed here.
    last, known = RUNS / ".last", 0
    with suppress(OSError, ValueError):
        known = number_in(last.read_text())
    while True:
        run = Run(max([known, *(other.number for other in all_runs())]) + 1)
        with suppress(FileExistsError):
            run.folder.mkdir(mode=0o700)
            draft = run.folder / ".last"
            try:
                draft.write_text(str(run.number))
            except OSError:
                shutil.rmtree(run.folder)
                raise
            draft.replace(last)
            return run


def told(run: Run) -> str:
    """How a run goes or went, in a few words."""
    slots, ended = run.read("started").get("slots", {}), run.end()
    where = ", ".join(f"{node}:{ranks}" for node, ranks in slots.items())
    if not ended:
        return f"running on {where}" if where else "waiting"
    how = ended["why"] or ended.get("reason")
    how = how or ("finished" if ended["status"] == 0 else f"failed with exit status {ended['status']}")
    after = f" after {ended['seconds']:.0f} s" if "seconds" in ended and where else ""
    dropped = f"; {ended['dropped']}" if ended.get("dropped") else ""
    return f"{how}{after}{f' on {where}' if where else ''}{dropped}"


def clock(seconds: float) -> str:
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%d %b %H:%M", then)


def booted() -> float:
    """When this system started; in a container its own start, which the kernel does not know."""
    shown = ran("systemctl", "show", "--value", "--property=UserspaceTimestampMonotonic").stdout.strip()
    return time.time() - time.monotonic() + int(shown) / 1e6 if shown.isdecimal() else 0


def systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran("systemctl", "--user", *arguments, env=bus())


def bus() -> dict[str, str]:
    """Where the user's systemd listens, which a shell of runuser or sudo does not know."""
    return {**os.environ, "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}


class RefusedError(FarandoleError):
    """Why a command on the head did nothing."""


class Output:
    """The run's output, which is also this program's; what cannot be kept is counted, and the job goes on."""

    def __init__(self, handle: int) -> None:
        self.handle, self.lock = handle, threading.Lock()
        # Bytes that could not be kept, here and in all, and why.
        self.gap, self.lost, self.why = 0, 0, ""

    def write(self, data: bytes) -> None:
        with self.lock:
            if self.gap and not self.keep(f"\nfarandole: {self.gap} bytes are missing here: {self.why}\n".encode()):
                self.gap = 0
            left = len(data) if self.gap else self.keep(data)
            self.gap, self.lost = self.gap + left, self.lost + left

    def dropped(self) -> str:
        """What could not be kept."""
        return f"{self.lost} bytes of output could not be kept on the head: {self.why}" if self.lost else ""

    def keep(self, data: bytes) -> int:
        """Write as much as possible; returns how many bytes are left."""
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except OSError as error:
            self.why = str(error.strerror)
        return len(data)


OUTPUT = Output(1)


def say(line: str) -> None:
    """Write a line of our own to the run's output."""
    OUTPUT.write(f"farandole: {line}\n".encode(errors="replace"))


def ran(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it printed."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, errors="surrogateescape", check=False, **options
    )
    return done


def reason(text: str) -> str:
    """The line of rsync or ssh that says why."""
    other = ("rsync error: ", "--copy-dest ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(other)]
    # rsync can lose what the other side says when it cannot write.
    return lines[0] if lines else "a file could not be written, as when the disk is full"
