"""The events of a run: one JSON object per line in one file, in a folder of the run's own on the control machine.

Workers append to the file, too: a line is written at once, and so is never torn.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.text import on_terminal, one_line
from farandole.inventory import state
from farandole.inventory.run_lock import ClusterRun, read

# Increased when a field gets another meaning.
FORMAT = 2
# Where a run finds its folder, and where its workers do.
VARIABLE = "FARANDOLE_PLAY"
EVENTS, LOG, DURATIONS = "events.jsonl", "log", "durations.json"
# What is left of an older run: what it changed, what failed, and how it ended.
BRIEF = "brief.jsonl"
TOLD = {"changed", "failed", "unreachable"}
KEPT = {"start", *TOLD, "why", "end"}
# What is kept: runs of an inventory, of older ones what is in BRIEF, inventories.
RUNS, BRIEFS, INVENTORIES = 10, 500, 20
# The letters that are kept of a name, of the words of a step, and of a text of several lines.
NAME, WORDS, TEXT = 200, 300, 1 << 16

Event = Mapping[str, Any]


def plays(inventory: str | Path = "") -> Path:
    """The folder for all runs. It is not in the state of a cluster, which may belong to another inventory."""
    return state.states(inventory) / ".plays"


def place_of(inventory: str | Path) -> Path:
    """The folder for the runs of an inventory, a path or a list of hosts."""
    real = Path(os.path.realpath(inventory))
    # A file means the same cluster as its folder.
    real = real.parent if real.is_file() else real
    return plays(inventory) / f"{real.name[:60] or 'root'}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"


def new_folder(inventory: str | Path) -> Path:
    """Make a folder for a run, which only its owner can enter, and remove the oldest ones."""
    place = place_of(inventory)
    folder = place / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S-%fZ}"
    try:
        for path in (place.parent, place):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(place)
        # Before there is a folder of this run, which would look like the oldest one if the clock is slow.
        prune(place)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise FarandoleError(
            f"the log of this run cannot be kept in {folder}: {error.strerror}; make this account the owner of "
            f"{place.parent}, and make sure that the disk is not full"
        ) from None
    return folder


def prune(place: Path) -> None:
    """Make room for a run: shorten older ones of its inventory, remove the oldest and long unused inventories."""
    known = runs_in(place)
    for folder in known[RUNS - 1 :]:
        if (folder / EVENTS).exists() and not is_alive(folder):
            shorten(folder)
    brief = [folder for folder in known[RUNS - 1 :] if (folder / BRIEF).exists()][:BRIEFS]
    old = [folder for folder in known[RUNS - 1 :] if folder not in brief]
    others = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*old, *(other for other in others[INVENTORIES:] if other != place)]:
        if not any(is_alive(folder) for folder in (path, *runs_in(path))):
            shutil.rmtree(path, ignore_errors=True)


def shorten(folder: Path) -> None:
    """Keep of a run that is over what its history tells."""
    with suppress(OSError):
        known = [(str(event.get("event")), event) for event in map(parse, Reader(folder / EVENTS).lines())]
        told = {str(event.get("task")) for kind, event in known if kind in TOLD}
        # Where it broke off, if it did.
        told |= {*[str(event.get("task")) for kind, event in known if kind == "task"][-1:]}
        kept = [event for kind, event in known if kind in KEPT or (kind == "task" and str(event.get("task")) in told)]
        write_private(folder / BRIEF, "".join(f"{json.dumps(event)}\n" for event in kept))
        (folder / LOG).unlink(missing_ok=True)
        (folder / EVENTS).unlink()


def history(inventory: Path) -> list[Path]:
    """The records of all runs of an inventory that are kept, the newest first."""
    place = place_of(inventory)
    if os.access(place.parent, os.F_OK) and not os.access(place.parent, os.R_OK | os.X_OK):
        raise FarandoleError(f"{place.parent} belongs to another account, which alone can see its runs")
    files = ([folder / name for name in (EVENTS, BRIEF) if (folder / name).is_file()] for folder in runs_in(place))
    return [either[0] for either in files if either]


def runs_in(place: Path) -> list[Path]:
    """The folders of an inventory's runs, the newest first."""
    with suppress(OSError):
        return sorted((path for path in place.iterdir() if path.name[:1].isdigit() and path.is_dir()), reverse=True)
    return []


def latest(inventory: Path | None) -> Path | None:
    """The run that is going on, or else the last one, of an inventory or of any."""
    kept = plays(inventory or "")
    for folder in (kept.parent, kept):
        if os.access(folder, os.F_OK) and not os.access(folder, os.R_OK | os.X_OK):
            raise FarandoleError(f"{folder} belongs to another account, which alone can watch its runs")
    places = [place_of(inventory)] if inventory else [*kept.glob("*-*")]
    runs = [run for place in places for run in runs_in(place) if (run / EVENTS).exists()]
    runs.sort(key=lambda run: run.name, reverse=True)
    return next((run for run in runs if is_alive(run)), runs[0] if runs else None)


def run_of(folder: Path) -> ClusterRun | None:
    with suppress(OSError), (folder / EVENTS).open("rb") as file:
        return read(parse(file.readline(TEXT)).get("run"))
    return None


def is_alive(folder: Path) -> bool:
    """Whether a run is going on, as far as can be known from here."""
    run = run_of(folder)
    return bool(run and run.here and run.alive)


# Writing


def record(folder: Path) -> None:
    """Let this process and those that it starts append to the file of a run."""
    os.close(os.open(folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    os.environ[VARIABLE] = str(folder)


def tell(host: str, text: str) -> None:
    """Say from a task what it is doing."""
    add("progress", host=host, text=one_line(text, WORDS))


def add(kind: str, **fields: Any) -> None:
    """Append an event, a line of ASCII, if this is part of a run; a disk that is full costs events and not the run."""
    if folder := os.environ.get(VARIABLE):
        event = json.dumps({"event": kind, "time": round(time.time(), 3), **fields})
        with suppress(OSError):
            handle = os.open(Path(folder) / EVENTS, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(handle, f"{event}\n".encode())
            finally:
                os.close(handle)


def text(message: object) -> str:
    """A text of several lines, harmless and of bounded length; the end says most."""
    return on_terminal(str(message)[-TEXT:])


# Reading


class Reader:
    """Reads the events that were added to a file since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.rest = path, 0, b""

    def lines(self) -> Iterator[bytes]:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.at)
            data = file.read()
            self.at += len(data)
            *whole, self.rest = (self.rest + data).split(b"\n")
            yield from whole


def parse(raw: bytes) -> Event:
    """An event of a line; what is none, as after a power cut, has no kind."""
    with suppress(ValueError, RecursionError):
        event = json.loads(raw)
        if isinstance(event, dict):
            return event
    return {}
