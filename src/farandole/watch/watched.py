"""What is known of a run from its events, and how that is said. Nothing here reads a file or a clock."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from farandole.core.errors import FarandoleError
from farandole.core.findings import CURE, count, several
from farandole.core.schema import number
from farandole.core.text import on_terminal, one_line
from farandole.watch.durations import Durations
from farandole.watch.events import FORMAT, NAME, TEXT, WORDS, Event
from farandole.watch.steps import clock

# How a host stands in a task, in the order in which it is shown, with its colour.
STYLES = {
    "failed": "bold red", "unreachable": "bold red", "running": "", "changed": "yellow", "ok": "green",
    "ignored": "green", "skipped": "bright_black", "": "bright_black",
}  # fmt: skip
SAID = {"unreachable": "does not answer", "ok": "done", "ignored": "done", "skipped": "nothing to do", "": "waits"}
RESULTS = {"ok", "changed", "skipped", "failed", "unreachable", "ignored"}
LOST = {"failed", "unreachable"}
# The bar is shown from this width on, and is so wide itself.
WIDE, BAR = 60, 20
# More failures than anybody reads.
MOST = 100


@dataclass
class Host:
    """A host in the present task: how it stands there, since when, and what it says of itself."""

    state: str = ""
    since: float = 0
    words: str = ""


@dataclass(frozen=True)
class Failure:
    """What a host said when a task failed there, and whether that is all there is to say about it."""

    host: str
    task: str
    text: str
    alone: bool


@dataclass
class Watched:
    """A run, as its events tell it."""

    durations: Durations = field(default_factory=Durations)
    hosts: dict[str, Host] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    changes: dict[str, int] = field(default_factory=dict)
    about: Event = field(default_factory=dict)
    play: str = ""
    opened: bool = False
    task: str = ""
    number: int = 0
    began: float = 0
    task_began: float = 0
    why: str = ""
    told: str = ""
    # The end of each host, and when that was.
    end: Mapping[str, Mapping[str, int]] | None = None
    ended: float = 0
    # Who changed and who failed in the present task, until that is said.
    news: dict[str, list[str]] = field(default_factory=dict)
    # What differs in files, and on which hosts, until that is said.
    diffs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def check(self) -> bool:
        """Whether nothing is changed, only said."""
        return self.about.get("check") is True

    def see(self, event: Event) -> list[Text]:
        """Take an event in; returns the lines that are worth keeping."""
        kind = str(event.get("event"))
        if kind in RESULTS:
            return self._result(event, kind)
        lines: list[Text] = getattr(self, f"_{kind}")(event) if kind in KINDS else []
        return lines

    def _start(self, event: Event) -> list[Text]:
        if event.get("format") != FORMAT:
            raise FarandoleError(
                f"this run was recorded in format {one_line(event.get('format'), 20)}, and this version reads "
                f"{FORMAT}: watch it with the version that runs it"
            )
        self.about, self.began = event, seconds(event)
        self.task_began = self.began
        return []

    def _play(self, event: Event) -> list[Text]:
        lines = self.flush()
        self.play, self.opened = words(event, "name"), False
        return lines

    def _task(self, event: Event) -> list[Text]:
        lines = self.flush()
        self.task, self.number = words(event, "name"), whole(event, "task")
        self.task_began = seconds(event)
        for host in self.hosts.values():
            host.state, host.words = "", ""
        self.durations.begin(f"{self.play} / {self.task}")
        # A play whose tasks are all left out is not worth a line.
        lines += [] if self.opened else [Text(self.play, "play")]
        self.opened = True
        return lines

    def _begin(self, event: Event) -> list[Text]:
        self.hosts[words(event, "host")] = Host("running", seconds(event))
        return []

    def _progress(self, event: Event) -> list[Text]:
        if host := self.hosts.get(words(event, "host")):
            host.words = words(event, "text", WORDS)
        return []

    def _result(self, event: Event, state: str) -> list[Text]:
        name = words(event, "host")
        # A task that ran in the background may answer when another one runs.
        if whole(event, "task") == self.number:
            self.hosts[name] = Host(state, seconds(event))
            self.durations.changed |= state == "changed"
        if state in LOST | {"changed"}:
            self.news.setdefault(state, []).extend([] if CURE in str(event.get("text")) else [name])
        if state == "changed":
            self.changes[name] = self.changes.get(name, 0) + 1
        if state in LOST and len(self.failures) < MOST:
            said = on_terminal(str(event.get("text", ""))[-TEXT:])
            self.failures.append(Failure(name, self.task, said, event.get("alone") is True))
        return []

    def _diff(self, event: Event) -> list[Text]:
        self.diffs.setdefault(on_terminal(str(event.get("text", ""))[-TEXT:]), []).append(words(event, "host"))
        return []

    def _message(self, event: Event) -> list[Text]:
        text = on_terminal(str(event.get("text", ""))[-TEXT:])
        # All hosts may say the same.
        new, self.told = text != self.told, text
        return [coloured(line) for line in text.splitlines()] if new else []

    def _why(self, event: Event) -> list[Text]:
        self.why = on_terminal(str(event.get("text", ""))[-TEXT:])
        return []

    def _end(self, event: Event) -> list[Text]:
        lines = self.flush()
        found = event.get("hosts")
        hosts = found if isinstance(found, Mapping) else {}
        self.end = {one_line(name, NAME): row for name, row in hosts.items() if isinstance(row, Mapping)}
        self.ended = seconds(event)
        return lines

    def flush(self) -> list[Text]:
        """The lines about what changed and what failed in the present task."""
        lines = []
        for state in ("changed", "failed", "unreachable"):
            if (names := self.news.pop(state, None)) is not None:
                verb = "lost" if state == "unreachable" else said_of(state, self.check)
                lines.append(Text(f"{verb}: ", STYLES[state]).append(self.task, "default"))
                lines[-1].append(f" on {several(names)}" if names else "", "bright_black not bold")
        for text, names in self.diffs.items():
            lines += [Text(f"{several(names)}:"), *(coloured_diff(line) for line in text.strip("\n").splitlines())]
        self.diffs.clear()
        return lines

    # What is said at the end

    def closing(self) -> list[Text]:
        """What was done, and if it failed, why: the root cause last."""
        elsewhere = {one.host for one in self.failures if CURE in one.text}
        took = self.ended - self.began
        lines = [Text(summary(self.end, took, elsewhere, check=self.check), "bold")] if self.end is not None else []
        bad = {name for name, row in (self.end or {}).items() if row.get("failures") or row.get("dark")}
        alone: dict[str, list[str]] = {}
        for one in self.failures:
            if one.alone and one.text and one.host in bad:
                alone.setdefault(one.text, []).append(one.host)
        for said, names in list(alone.items())[-3:]:
            told = said if CURE in said else f"{several(names)}: {said}"
            lines += [Text(), *(coloured(line) for line in told.splitlines())]
        if self.why:
            lines += [Text(), *(coloured(line) for line in self.why.splitlines())]
        return lines

    def interrupted(self, now: float | None = None) -> list[Text]:
        """What was done until now, or, of a run that is dead, until nobody knows when."""
        if not self.about:
            return [Text("nothing was begun")]
        lines = self.flush()
        running = [name for name, host in self.hosts.items() if host.state == "running"]
        where = f" on {several(running)}" if running else ""
        since = "" if now is None else f", {clock(now - self.task_began)}"
        during = f"during: {self.task}{since}{where}" if self.task else "before the first task"
        how = "the run broke off" if now is None else "interrupted"
        return [*lines, Text(f"{how} {during}"), Text(f"until then {self.changed()}")]

    def changed(self) -> str:
        """How much has changed, and where."""
        if not self.changes:
            return "nothing had changed"
        made = " would be made" if self.check else ""
        return f"{count(sum(self.changes.values()), 'change')}{made} on {several([*self.changes])}"

    # What is shown while it runs

    def picture(self, now: float, width: int, height: int) -> list[Text]:
        """The run at this moment, in so many columns and at most so many lines."""
        if not self.about or self.end is not None:
            return []
        lines = [self._headline(now, width), *self._rows(now, max(1, height - 1))]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
        return lines[: max(1, height)]

    def _headline(self, now: float, width: int) -> Text:
        spent = max(0.0, now - self.began)
        left = self.durations.left(now - self.task_began)
        times = Text(clock(spent), "bold")
        # A run that takes longer than the last one says nothing about its end.
        if left is not None and left >= 1:
            times.append(f", about {clock(left)} left", "not bold")
            if width >= WIDE:
                times = bar(spent / (spent + left)).append("  ").append_text(times)
        room = width - times.cell_len - 2
        what = Text(self.task or self.play or "starting", "bold")
        if room < 10:
            return Text(clock(spent), "bold").append("  ").append_text(what)
        what.truncate(room, overflow="ellipsis", pad=True)
        return what.append("  ").append_text(times)

    def _rows(self, now: float, height: int) -> list[Text]:
        """A line for each host, or for each group of hosts if they would be too many."""
        rows = [([name], host) for name, host in self.hosts.items()]
        if len(rows) > min(height, 8):
            rows = grouped(rows, words=True)
        if len(rows) > height:
            rows = grouped(rows, words=False)
        shown = [(several(names), host) for names, host in rows[:height]]
        pad = min(40, max((len(name) for name, _ in shown), default=0))
        return [row(name.ljust(pad), host, now, check=self.check) for name, host in shown]

    def beat(self, now: float) -> Text:
        """What runs, for where there is no terminal."""
        running = [host for host in self.hosts.values() if host.state == "running"]
        said = next((f": {host.words}" for host in running if host.words), "")
        done = f", {len(self.hosts) - len(running)} of {count(len(self.hosts), 'host')} done" if self.hosts else ""
        left = self.durations.left(now - self.task_began)
        rest = f", about {clock(left)} left in all" if left is not None and left >= 1 else ""
        return Text(f"… {self.task} {clock(now - self.task_began)}{done}{rest}{said}", "bright_black")


KINDS = {"start", "play", "task", "begin", "progress", "diff", "message", "why", "end"}


def grouped(rows: Iterable[tuple[list[str], Host]], *, words: bool) -> list[tuple[list[str], Host]]:
    """Join the hosts that stand alike; those that say something of themselves only if need be."""
    groups: dict[tuple[str, str], tuple[list[str], Host]] = {}
    for names, host in rows:
        key = (host.state, host.words if words else "")
        kept = groups.setdefault(key, ([], Host(host.state, host.since, host.words)))
        kept[0].extend(names)
        kept[1].since = min(kept[1].since, host.since)
    order = list(STYLES)
    return sorted(groups.values(), key=lambda one: order.index(one[1].state))


def said_of(state: str, check: bool) -> str:
    """How a state of a host is said."""
    return "would change" if check and state == "changed" else SAID.get(state, state)


def row(name: str, host: Host, now: float, *, check: bool = False) -> Text:
    """The line of a host or group."""
    line = Text(f"  {name}  ").append(f"{said_of(host.state, check):<13}", STYLES[host.state])
    if host.state == "running":
        line.append(clock(max(0.0, now - host.since)))
        line.append(f"  {host.words}" if host.words else "", "bright_black")
    return line


def bar(share: float) -> Text:
    """How far a run is, if it goes like the last one."""
    full = min(BAR, int(share * BAR))
    return Text("━" * full, "green").append("━" * (BAR - full), "bright_black")


def coloured(line: str) -> Text:
    """A line of a report, in the colour of what it says."""
    styles = {
        r"\bred\b": "red", r"\bgreen\b": "green", r"\bslow\b": "yellow", r"^root cause \[[^]]*\]": "bold red",
        r"^\d+\. [^:]+:": "bold red", r"^consequence \[[^]]*\]": "yellow", r"^ +cure:": "bold green",
    }  # fmt: skip
    text = Text(line)
    for pattern, style in styles.items():
        if found := re.search(pattern, line):
            text.stylize(style, *found.span())
    return text


def coloured_diff(line: str) -> Text:
    """A line of a diff."""
    return Text(f"  {line}", {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], ""))


def summary(
    hosts: Mapping[str, Mapping[str, Any]], took: float, elsewhere: Collection[str], *, check: bool = False
) -> str:
    """A run in one line. What failed `elsewhere` is not the fault of the host that it counts for."""
    changed = [name for name, row in hosts.items() if row.get("changed")]
    total = sum(whole(row, "changed") for row in hosts.values())
    bad = [name for name, row in hosts.items() if row.get("failures")]
    lost = [name for name, row in hosts.items() if row.get("dark")]
    if check:
        would = f"nothing was changed, {count(total, 'change')} would be made on {several(changed)}"
        parts = [would if total else "nothing would change"]
    else:
        parts = [f"{count(total, 'change')} on {several(changed)}" if total else "nothing changed"]
    own = [name for name in bad if name not in elsewhere]
    failed = f"failed on {several(own)}" if own else "failed" if bad else ""
    parts += [failed, f"no answer from {several(lost)}" if lost else ""]
    parts += [] if bad or lost else ["nothing failed"]
    checked = " (check only)" if check else ""
    return f"{count(len(hosts), 'host')} in {clock(took)}{checked}: {', '.join(filter(None, parts))}"


def words(event: Event, name: str, limit: int = NAME) -> str:
    """A short text of an event."""
    return one_line(event.get(name, ""), limit)


def whole(event: Mapping[str, Any], name: str) -> int:
    """A number of an event."""
    found = event.get(name)
    return found if isinstance(found, int) else 0


def seconds(event: Event) -> float:
    """When an event was."""
    try:
        return number(event.get("time"))
    except FarandoleError:
        return 0.0
