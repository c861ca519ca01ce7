"""Show a run to a person on a terminal, as lines in a file or pipe, or as JSON to a program."""

import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text
from rich.theme import Theme

from farandole.core.text import on_terminal, visible
from farandole.watch.durations import load
from farandole.watch.events import DURATIONS, EVENTS, LOG, Reader, parse
from farandole.watch.watched import Watched

# Seconds between two looks, two pictures, and two words where there is no terminal.
LOOK, DRAW, BEAT = 0.2, 0.5, 30.0
# Lines of the log that are shown of a run that has not even begun.
TAIL = 30
# With less free space, events may be lost, and Ansible itself ends if it cannot write.
ROOM = 1 << 16
# The lines of a picture; more would push what stays off the screen.
TALLEST = 20
THEME = Theme({"play": "bold cyan"})


class Output(Console):
    """A console that goes silent when nobody reads it any more, or it cannot be written: the run goes on."""

    why = ""

    def on_broken_pipe(self) -> None:
        """Goes silent."""
        self.quiet = True
        self.why = self.why or "the output is no longer read"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self.why = f"the output cannot be written ({error.strerror})"
            self.on_broken_pipe()


class Area:
    """The last lines of a terminal, which are drawn again and again."""

    def __init__(self, console: Console) -> None:
        self.console, self.lines = console, list[Text]()

    def draw(self, lines: list[Text], above: Iterable[Text] = ()) -> None:
        """Replace the lines, below others that stay."""
        with self.console:
            self._erase()
            for line in above:
                self.console.print(line, soft_wrap=True)
            for line in lines:
                self.console.print(line, no_wrap=True, crop=True)
        self.lines = lines

    def _erase(self) -> None:
        """Go back to the first line. On a terminal that was made narrower, each may take several by now."""
        width = max(1, self.console.width)
        rows = sum(max(1, -(-line.cell_len // width)) for line in self.lines)
        if rows:
            codes: list[tuple[ControlType, int] | ControlType | tuple[ControlType, int, int] | tuple[ControlType, str]]
            codes = [ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)]
            for _ in range(rows):
                codes += [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
            self.console.control(Control(*codes))


class Viewer:
    """Follows the events of a run."""

    def __init__(self, folder: Path, *, as_json: bool = False, console: Console | None = None) -> None:
        self.folder, self.as_json = folder, as_json
        self.console = console or Output(highlight=False, markup=False, theme=THEME, emoji=False)
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and not as_json
        self.watched, self.reader, self.area = Watched(), Reader(folder / EVENTS), Area(self.console)
        self.drawn, self.said = 0.0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.area.draw([])

    def look(self) -> None:
        """Take in what is new, and show it."""
        stay: list[Text] = []
        for raw in self.reader.lines():
            if self.as_json:
                self._write(raw)
            event = parse(raw)
            stay += self.watched.see(event)
            if event.get("event") == "start":
                self.watched.last = load(self.folder.parent / DURATIONS)
        if self.as_json:
            return
        self._show([line for line in stay if not (self.live and line.style == "play")])

    def skip(self, note: str) -> None:
        """Take in what is over, and show only how it ended."""
        if self.as_json:
            return
        for raw in self.reader.lines():
            self.watched.see(parse(raw))
        self.lines([Text(note)])

    def _show(self, stay: list[Text]) -> None:
        now = time.monotonic()
        if self.live:
            if stay or now - self.drawn >= DRAW:
                self.drawn = now
                height = min(TALLEST, self.console.height - 2)
                self.area.draw(self.watched.picture(time.time(), self.console.width - 1, height), stay)
            return
        if not stay and self.watched.task and self.watched.end is None and now - self.said >= BEAT:
            stay = [self.watched.beat(time.time())]
        if stay:
            self.said = now
            self.lines(stay)

    def lines(self, lines: Iterable[Text]) -> None:
        """Say lines that stay."""
        if self.as_json:
            return
        if self.live:
            self.area.draw([], lines)
        else:
            for line in lines:
                self.console.print(line, soft_wrap=True)
        self._notice()

    def _write(self, raw: bytes) -> None:
        """Pass an event on. Who writes the file writes ASCII without control characters."""
        if raw:
            self.console.print(visible(raw.decode("ascii", "replace")), soft_wrap=True)
            self._notice()

    def _notice(self) -> None:
        """Say once why nothing more is said."""
        if isinstance(self.console, Output) and self.console.why:
            why, self.console.why = self.console.why, ""
            with suppress(OSError):
                print(f"{why}; the run goes on: {shown(self.folder)}", file=sys.stderr, flush=True)

    def close(self, *, interrupted: bool = False) -> None:
        """Say what was done, and where the log is."""
        self.look()
        log = self.folder / LOG
        if interrupted:
            lines = self.watched.interrupted(time.time())
        elif self.watched.end is None:
            # It failed before it could begin, or it was killed.
            full = Text(f"the rest could not be recorded: free some space on the disk with {shown(self.folder)}")
            room = shutil.disk_usage(self.folder).free >= ROOM
            lines = [*(Text(line) for line in tail(log)), *(self.watched.interrupted() if room else [full])]
            if self.as_json:
                print("\n".join(line.plain for line in lines), file=sys.stderr)
        else:
            lines = self.watched.closing()
        where = [Text(f"log: {shown(log)}", "bright_black")] if log.exists() else []
        self.lines([*lines[:1], *where, *lines[1:]] if self.watched.end is not None else [*lines, *where])


class Glance(Viewer):
    """Shows what runs now, on a terminal, and nothing that stays, unless the run breaks off."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, console=Output(highlight=False, markup=False, theme=THEME, emoji=False, stderr=True))

    def _show(self, stay: list[Text]) -> None:  # noqa: ARG002
        if self.live:
            super()._show([])

    def close(self, *, interrupted: bool = False) -> None:
        """Say why it broke off."""
        self.look()
        if interrupted or self.watched.end is None:
            super().close(interrupted=interrupted)


def tail(log: Path) -> list[str]:
    """The end of a log; what is printed by ansible-playbook itself is in none."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 16)))
        return on_terminal(file.read().decode(errors="replace")).splitlines()[-TAIL:]


def shown(path: Path) -> str:
    """A path as the user would write it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
