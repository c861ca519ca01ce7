"""`farandole history`."""

import json
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from farandole.cli.node import cluster_of
from farandole.cli.options import BY_KEY, AsObject, Inventory, with_login
from farandole.core.errors import FarandoleError
from farandole.core.findings import natural
from farandole.core.schema import fields, load, many, number, optional, text, whole, words
from farandole.core.table import table
from farandole.core.text import one_line
from farandole.inventory import excluded, run_lock
from farandole.inventory.cluster import job_users
from farandole.inventory.variables import host_variables
from farandole.jobs.ask import CONNECT_S, PERSON, SLOTS
from farandole.jobs.login import Head, login_to
from farandole.node.arguments import duration
from farandole.plays.playbook import Login
from farandole.watch import events
from farandole.watch.viewer import shown
from farandole.watch.watched import Watched, summary
from farandole.watch.watched import words as word

# Increased when a field gets another meaning.
FORMAT = 1
TIME = "%Y-%m-%dT%H:%M:%SZ"
# A folder of a run, or of a report.
FOLDER = "%Y-%m-%dT%H-%M-%S-%fZ"
# The playbooks that have a command of another name.
VERBS = {"site": "apply"}
# The letters of what was done, and the most that is read of a report.
WIDTH, LONGEST = 60, 1 << 26
RUN = fields(
    {"number": whole(10**9), "owner": PERSON, "created": number, "program": text(200), "how": text(300)},
    {"slots": optional(SLOTS)},
)
VERDICT = fields(
    {"verdict": words("green|slow|red"), "time": words(r"[\d-]{10}T[\d:]{8}Z"), "hosts": many(text(100))}, {}
)


@dataclass(frozen=True)
class Entry:
    """What happened: when, by whom, what, how it went, and on which nodes; of a playbook also what changed where."""

    time: float
    kind: str
    who: str
    what: str
    how: str
    nodes: tuple[str, ...]
    changes: Mapping[str, list[str]] = field(default_factory=dict)
    ended: float = 0
    # What is said of it alone.
    lines: tuple[Text, ...] = ()

    @property
    def at(self) -> str:
        return f"{datetime.fromtimestamp(self.time, UTC):{TIME}}"

    def data(self) -> dict[str, Any]:
        """For programs."""
        changes = [{"task": task, "hosts": sorted(hosts, key=natural)} for task, hosts in self.changes.items()]
        known = {"time": self.at, "kind": self.kind, "who": self.who, "what": self.what, "how": self.how}
        return {**known, "nodes": self.nodes, "changes": changes}


@with_login(*BY_KEY)
def history(
    inventory: Inventory,
    when: Annotated[
        str, typer.Argument(metavar="[WHEN]", help="Tell all of what began then: a time as shown, or its beginning.")
    ] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Since 2026-01-31, or in the last 12h or 7d.")] = "",
    node: Annotated[str, typer.Option(metavar="NAME", help="Only what concerns this node.")] = "",
    *,
    as_json: AsObject = False,
    login: Login,
) -> None:
    """List who did what on the cluster, and when: playbooks that ran here, validations, and programs that ran there.

    The newest comes last, and all times are UTC. With WHEN, shows also what changed.
    """
    begin = start_of(since) if since else 0.0
    state, notes = cluster_of(inventory, write=False).state, Console(stderr=True, highlight=False, markup=False)
    known, of = [*validated(plays(inventory, node), state), *left_out(state)], dict[str, list[Entry] | None]()
    try:
        of = runs(inventory, login)
    except FarandoleError as error:
        notes.print(f"programs that ran there are not listed: {error}", soft_wrap=True)
    if others := ", ".join(account for account, entries in of.items() if entries is None):
        notes.print(f"programs of {others} are not listed: this login cannot become them", soft_wrap=True)
    known += [entry for entries in of.values() for entry in entries or ()]
    wanted = [
        entry for entry in sorted(known, key=lambda entry: entry.time)
        if entry.time >= begin and entry.at.startswith(when) and (not node or node in entry.nodes)
    ]  # fmt: skip
    if as_json:
        people = [account for account, entries in of.items() if entries is not None]
        typer.echo(json.dumps({"format": FORMAT, "events": [entry.data() for entry in wanted], "runs_of": people}))
        return
    if not wanted:
        notes.print("nothing is known of that time, or that node" if when or since or node else "nothing is known yet")
    else:
        show(wanted, whole=bool(when))


def show(wanted: Sequence[Entry], *, whole: bool) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line, entry in zip(table([row(entry) for entry in wanted]).splitlines(), wanted, strict=True):
        console.print(Text(line))
        for more in entry.lines if whole else ():
            console.print(Text("  ").append_text(more))


def row(entry: Entry) -> list[str]:
    return [entry.at, entry.who or "-", textwrap.shorten(entry.what, WIDTH, placeholder=" …"), entry.how]


def start_of(since: str) -> float:
    """A point in time, given as such or by how long ago it was."""
    with suppress(ArgumentTypeError):
        return datetime.now(UTC).timestamp() - duration(since)
    try:
        then = datetime.fromisoformat(since)
    except ValueError:
        raise FarandoleError(f"--since {since} is no time: write 2026-01-31, 2026-01-31T12:00, 12h or 7d") from None
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()


# What is recorded here


def plays(inventory: Path, node: str = "") -> list[Entry]:
    """The playbooks that ran here."""
    known = (play(file, node) for file in events.history(inventory))
    return [entry for entry in known if entry]


def play(file: Path, node: str) -> Entry | None:
    """A playbook, by its events, of which any may be missing or wrong."""
    try:
        began = datetime.strptime(file.parent.name, FOLDER).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    seen, lines, why = Watched(), list[Text](), ""
    try:
        for raw in events.Reader(file).lines():
            lines += seen.see(events.parse(raw))
    except (FarandoleError, OSError) as error:
        why = str(error)
    run = run_lock.read(seen.about.get("run"))
    hosts = (seen.end or {}).keys() | seen.hosts.keys() | {name for names in seen.changes.values() for name in names}
    how, rest = ended(seen, node) if seen.end is not None else broken(seen, alive=events.is_alive(file.parent))
    log = file.parent / events.LOG
    rest = [*(line for line in lines if line.style != "play"), *rest]
    rest += [Text(f"log: {shown(log)}", "bright_black")] if log.exists() else []
    return Entry(
        began, "playbook", run.who if run else "", what(seen.about), why or how, tuple(sorted(hosts, key=natural)),
        {task: [name for name in names if node in ("", name)] for task, names in seen.changes.items()
         if not node or node in names},
        seen.ended, tuple(rest),
    )  # fmt: skip


def what(about: Mapping[str, Any]) -> str:
    """The command of a playbook, as a person would give it."""
    name = Path(word(about, "playbook")).stem
    verb = VERBS.get(name, name) or "a playbook"
    flags = ["--check"] if about.get("check") is True else []
    for option in ("limit", "tags", "skip_tags"):
        value = about.get(option)
        given = ",".join(map(str, value)) if isinstance(value, list) else str(value or "")
        if given and given != "all":
            flags.append(f"--{option.replace('_', '-')} {given}")
    return one_line(" ".join([verb, *flags]))


def ended(seen: Watched, node: str) -> tuple[str, list[Text]]:
    """How a playbook came to its end, in a line and in several."""
    rows = {name: row for name, row in (seen.end or {}).items() if node in ("", name)}
    codes = [finding.code for _, findings in seen.why.findings for finding in findings if finding.severity == "stop"]
    codes = [*dict.fromkeys([*codes, *(cause.code for cause in seen.why.causes[-1:])])]
    why = f" [{one_line(', '.join(codes))}]" if codes else ""
    line = summary(rows, max(0.0, seen.ended - seen.began), seen.blamed, check=seen.check)
    return f"{line}{why}", seen.closing()


def broken(seen: Watched, *, alive: bool) -> tuple[str, list[Text]]:
    """How far a playbook is, or was when it was killed or interrupted."""
    if alive:
        return f"goes on: {seen.task or 'it begins'}", []
    lines = seen.interrupted()
    return "; ".join(line.plain for line in lines[-2:]), lines


def validated(plays: Iterable[Entry], state: Path) -> list[Entry]:
    """Playbooks with the verdicts of those that validated, and the verdicts of which there is no playbook any more."""
    known = sorted(plays, key=lambda entry: entry.time)
    for time, verdict, hosts in verdicts(state):
        of = [at for at, entry in enumerate(known) if entry.what.startswith("validate") and entry.time <= time]
        if of and time <= known[of[-1]].ended + 1:
            entry = known[of[-1]]
            known[of[-1]] = replace(entry, how=f"{verdict}; {entry.how}", nodes=(*{*entry.nodes, *hosts},))
        else:
            known.append(Entry(time, "validation", "", "validate", verdict, hosts))
    return known


def verdicts(state: Path) -> Iterator[tuple[float, str, tuple[str, ...]]]:
    """When each report was written, its verdict and its nodes; nothing of one that cannot be read."""
    for path in (state / "reports").glob("*/result.json"):
        with suppress(OSError, ValueError, FarandoleError):
            if not path.parent.is_symlink():
                result = VERDICT(load(path.read_text(), LONGEST))
                then = datetime.strptime(result["time"], TIME).replace(tzinfo=UTC)
                yield then.timestamp(), result["verdict"], tuple(result["hosts"])


def left_out(state: Path) -> Iterator[Entry]:
    """The nodes that are or were left out."""
    back = [*excluded.former(state)]
    out = [*((name, entry) for name, _, _, entry in back), *excluded.read(state).items()]
    events = [(name, entry.since, entry.person or entry.measurement, "exclude", entry.why) for name, entry in out]
    events += [(name, until, who, "include", "it takes part again") for name, until, who, _ in back]
    for name, time, who, what, how in events:
        then = datetime.strptime(time, TIME).replace(tzinfo=UTC).timestamp()
        yield Entry(then, "node", who, f"node {what} {name}", how, (name,))


# What the head says


def runs(inventory: Path, login: Login) -> dict[str, list[Entry] | None]:
    """The programs that ran on the cluster, by account; None for one that this login cannot become."""
    name, known = next(iter(host_variables(inventory.absolute(), "head").items()))
    head, accounts = login_to(name, known, login), job_users(known)
    head = replace(head, ssh=(head.ssh[0], "-o", f"ConnectTimeout={CONNECT_S}", *head.ssh[1:]))

    def of_other(account: str) -> list[Entry] | None:
        with suppress(FarandoleError):
            return programs(replace(head, become=(*head.become[:-2], account, "--"))) if head.become else None
        return None

    own = accounts[0] if head.become else head.target.partition("@")[0]
    found: dict[str, list[Entry] | None] = {own: programs(head)}
    others = [account for account in accounts if account != own]
    # sshd allows ten sessions in a connection.
    with ThreadPoolExecutor(8) as pool:
        return found | dict(zip(others, pool.map(of_other, others), strict=True))


def programs(head: Head) -> list[Entry]:
    """The programs of the account that this becomes."""
    return [entry for line in head.ask("farandole", "_runs").splitlines() if (entry := program(line))]


def program(line: str) -> Entry | None:
    """A program, as the head describes it; nothing if that is no description."""
    try:
        run = RUN(load(line, 1 << 16))
    except FarandoleError:
        return None
    nodes = tuple(run.get("slots") or ())
    return Entry(run["created"], "run", run["owner"], f"run {run['number']}: {run['program']}", run["how"], nodes)
