"""What is known of a run from its events, and how that is shown. Nothing here reads a file or a clock."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from farandole.core.errors import FarandoleError
from farandole.core.findings import Line, count, several, together
from farandole.core.schema import number
from farandole.core.text import on_terminal, one_line
from farandole.explain.failures import Why
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
# The words of a finding or a cause.
WORDED = {"stop": "bold red", "warn": "yellow", "note": "cyan", "cure": "bold green", "": ""}
# A task that took so many seconds the last time is worth waiting for.
LONG = 5


@dataclass
class HostState:
    """A host in the present task: how it stands there, since when, and what it says of itself."""

    state: str = ""
    since: float = 0
    text: str = ""


@dataclass
class Watched:
    """A run, as its events tell it."""

    # The seconds of each task when it last ran to its end.
    last: Mapping[str, float] = field(default_factory=dict)
    hosts: dict[str, HostState] = field(default_factory=dict)
    # Hosts for which a task failed because of what was found elsewhere.
    blamed: set[str] = field(default_factory=set)
    # Hosts, by the task that changed something there, and by what differs in files.
    changes: dict[str, list[str]] = field(default_factory=dict)
    contents: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    about: Event = field(default_factory=dict)
    play: str = ""
    opened: bool = False
    task: str = ""
    number: int = 0
    began: float = 0
    task_began: float = 0
    why: Why = field(default_factory=Why)
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
        self.names[self.number] = self.task
        self.task_began = seconds(event)
        for host in self.hosts.values():
            host.state, host.text = "", ""
        # A play whose tasks are all left out is not worth a line.
        lines += [] if self.opened else [Text(self.play, "play")]
        self.opened = True
        return lines

    def _begin(self, event: Event) -> list[Text]:
        self.hosts[words(event, "host")] = HostState("running", seconds(event))
        return []

    def _progress(self, event: Event) -> list[Text]:
        if host := self.hosts.get(words(event, "host")):
            host.text = words(event, "text", WORDS)
        return []

    def _result(self, event: Event, state: str) -> list[Text]:
        name = words(event, "host")
        # A task that ran in the background may answer when another one runs.
        if whole(event, "task") == self.number:
            self.hosts[name] = HostState(state, seconds(event))
        if state in LOST | {"changed"}:
            self.news.setdefault(state, []).extend([] if event.get("findings") else [name])
        self.blamed |= {name} if event.get("findings") else set()
        if state == "changed":
            self.changes.setdefault(self.names.get(whole(event, "task"), self.task), []).append(name)
        return []

    def _diff(self, event: Event) -> list[Text]:
        text, name = on_terminal(str(event.get("text", ""))[-TEXT:]), words(event, "host")
        self.diffs.setdefault(text, []).append(name)
        self.contents.setdefault((self.names.get(whole(event, "task"), self.task), text), []).append(name)
        return []

    def _message(self, event: Event) -> list[Text]:
        text = on_terminal(str(event.get("text", ""))[-TEXT:])
        # All hosts may say the same.
        new, self.told = text != self.told, text
        return [Text(line) for line in text.splitlines()] if new else []

    def _why(self, event: Event) -> list[Text]:
        with suppress(LookupError, TypeError, ValueError):
            self.why = Why.of(event)
        return []

    def _end(self, event: Event) -> list[Text]:
        lines = self.flush()
        value = event.get("hosts")
        hosts = value if isinstance(value, Mapping) else {}
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
        took = self.ended - self.began
        lines = [Text(summary(self.end, took, self.blamed, check=self.check), "bold")] if self.end is not None else []
        return lines + [styled(line) for line in self.why.lines()]

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
        if not self.changes:
            return "nothing had changed"
        made = " would be made" if self.check else ""
        hosts = [name for names in self.changes.values() for name in names]
        return f"{count(len(hosts), 'change')}{made} on {several(hosts)}"

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
        spent = Text(clock(max(0.0, now - self.began)), "bold")
        room = width - spent.cell_len - 2
        title = Text(self.task or self.play or "starting", "bold")
        if room < 10:
            return spent.append("  ").append_text(title)
        title.append(self.before(), "bright_black not bold").truncate(room, overflow="ellipsis", pad=True)
        return title.append("  ").append_text(spent)

    def before(self) -> str:
        """How long the present task took the last time, if that is worth knowing."""
        took = self.last.get(f"{self.play} / {self.task}", 0.0)
        return f" (last time {clock(took)})" if took >= LONG else ""

    def _rows(self, now: float, height: int) -> list[Text]:
        """A line for each host, or for each group of hosts if they would be too many."""
        rows = [([name], host) for name, host in self.hosts.items()]
        if len(rows) > min(height, 8):
            rows = grouped(rows, apart=True)
        if len(rows) > height:
            rows = grouped(rows, apart=False)
        shown = [(several(names), host) for names, host in rows[:height]]
        pad = min(40, max((len(name) for name, _ in shown), default=0))
        return [row(name.ljust(pad), host, now, check=self.check) for name, host in shown]

    def beat(self, now: float) -> Text:
        """What runs, for where there is no terminal."""
        running = [host for host in self.hosts.values() if host.state == "running"]
        note = next((f": {host.text}" for host in running if host.text), "")
        # Those whose turn has not come have no state.
        ended = sum(host.state not in ("", "running") for host in self.hosts.values())
        done = f", {ended} of {count(len(self.hosts), 'host')} done" if self.hosts else ""
        return Text(f"… {self.task} {clock(now - self.task_began)}{self.before()}{done}{note}", "bright_black")


KINDS = {"start", "play", "task", "begin", "progress", "diff", "message", "why", "end"}


def grouped(rows: Iterable[tuple[list[str], HostState]], *, apart: bool) -> list[tuple[list[str], HostState]]:
    """Join the hosts that are in the same state; those that say something of themselves only if need be."""
    groups = together(rows, lambda row: (row[1].state, row[1].text if apart else ""))
    joined = [
        (
            [name for names, _ in group for name in names],
            HostState(group[0][1].state, min(host.since for _, host in group), group[0][1].text),
        )
        for group in groups
    ]
    order = list(STYLES)
    return sorted(joined, key=lambda row: order.index(row[1].state))


def said_of(state: str, check: bool) -> str:
    return "would change" if check and state == "changed" else SAID.get(state, state)


def row(name: str, host: HostState, now: float, *, check: bool = False) -> Text:
    """The line of a host or group."""
    line = Text(f"  {name}  ").append(f"{said_of(host.state, check):<13}", STYLES[host.state])
    if host.state == "running":
        line.append(clock(max(0.0, now - host.since)))
        line.append(f"  {host.text}" if host.text else "", "bright_black")
    return line


def styled(line: Line) -> Text:
    return Text(on_terminal(line.head), WORDED.get(line.style, "")).append(on_terminal(line.rest), "default not bold")


def coloured_diff(line: str) -> Text:
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
    value = event.get(name)
    return value if isinstance(value, int) else 0


def seconds(event: Event) -> float:
    """When an event was."""
    try:
        return number(event.get("time"))
    except FarandoleError:
        return 0.0
