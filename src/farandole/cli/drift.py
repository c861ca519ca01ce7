"""`farandole drift`."""

import json
import shlex
import shutil
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from farandole.cli.node import cluster_of
from farandole.cli.options import AsObject, ExtraVars, Forks, Inventory, Limit, SkipTags, Tags, with_login, words
from farandole.core.findings import Line, count, joined, natural, several, together
from farandole.core.table import table
from farandole.core.text import on_terminal
from farandole.explain.failures import Why
from farandole.inventory.variables import refuse_unknown
from farandole.plays.playbook import Login, viewed
from farandole.watch.events import new_folder
from farandole.watch.viewer import Glance
from farandole.watch.watched import LOST, SAID, Watched, coloured_diff, styled

# Increased when a field gets another meaning.
FORMAT = 1
# Whatever the inventory says: it is only looked, at each node by itself, and for one that is down nobody waits long.
LOOKING = (
    "--check", "--timeout", "5", "--extra-vars", "on_bad_node=stop", "--extra-vars", "preflight_network=nothing",
)  # fmt: skip
HEADING = "{problems} kept this from looking at all nodes:"


@dataclass(frozen=True)
class Unseen:
    """Why nobody could look at a node: the code of a cause, if there is one, and words."""

    code: str
    why: str

    @property
    def told(self) -> str:
        """What is not said with the cause."""
        return "" if self.code else f" ({self.why})"


@dataclass
class Drift:
    """What differs, as the last of one or several looks has seen it, and what could not be seen."""

    seen: Watched
    finished: bool
    unseen: dict[str, Unseen] = field(default_factory=dict)
    why: list[Why] = field(default_factory=list)

    @property
    def status(self) -> int:
        return 2 if self.unseen or not self.finished else int(bool(self.seen.changes))


@with_login()
def drift(
    inventory: Inventory,
    limit: Limit = "",
    tags: Tags = "",
    skip_tags: SkipTags = "",
    extra_vars: ExtraVars = None,
    *,
    diff: Annotated[bool, typer.Option("--diff", "-D", help="Show what differs in files.")] = False,
    forks: Forks = None,
    login: Login,
    as_json: AsObject = False,
) -> None:
    """Show what differs on the nodes from what site.yml would leave; nothing is changed.

    Takes the options with which the cluster was set up. Exits with 0 if nothing differs, with 1 if something does, and
    with 2 if it could not look at all nodes. Those that are left out do not count.
    """
    refuse_unknown(inventory.absolute(), "--limit", limit)
    cluster = cluster_of(inventory, write=False)
    same = words({"--limit": limit, "--tags": tags, "--skip-tags": skip_tags}, extra_vars)
    arguments = [*same, *LOOKING, *words({"--forks": forks}), *["--diff"] * diff]
    found = look(inventory, limit, login, arguments)
    if as_json:
        typer.echo(json.dumps({**data(found, diff=diff), "left_out": {**cluster.excluded}}))
    else:
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        out = [Text(on_terminal(f"left out: {name}, {why}")) for name, why in cluster.excluded.items()]
        again = shlex.join(["-i", str(inventory), *same])
        for line in [*told(found), *out, *verdict(found, cluster.left_out, again)]:
            console.print(line)
    if found.status:
        raise typer.Exit(found.status)


def look(inventory: Path, limit: str, login: Login, arguments: Iterable[str]) -> Drift:
    """Predict what site.yml would change, again and again without the nodes that keep it from looking at the others."""
    unseen: dict[str, Unseen] = {}
    why: list[Why] = []
    while True:
        folder = new_folder(inventory)
        viewer = Glance(folder)
        rest = ["--limit", ",".join([limit or "all", *(f"!{name}" for name in unseen)])] if unseen else []
        status = viewed(viewer, "site.yml", inventory, login, *arguments, *rest, interrupted="nothing was changed")
        seen = viewer.watched
        new = culprits(seen) if status else {}
        why += [seen.why] if status else []
        if status and (not new.keys() - unseen.keys() or seen.hosts.keys() <= new.keys()):
            return Drift(seen, False, unseen | new, why)
        # What it saw is said here, and the logs of runs that changed something are kept for longer.
        shutil.rmtree(folder, ignore_errors=True)
        if not status:
            return Drift(seen, True, unseen, why)
        unseen |= new


def culprits(seen: Watched) -> dict[str, Unseen]:
    """The nodes without which a look would have gone on."""
    stops = [finding for _, findings in seen.why.findings for finding in findings if finding.severity == "stop"]
    # A finding about the inventory, or about two nodes, is not mended by leaving one out.
    if any(stop.host not in seen.hosts for stop in stops):
        return {}
    found = {stop.host: Unseen(stop.code, on_terminal(stop.cause)) for stop in stops}
    states = {name: host.state for name, host in seen.hosts.items() if name not in seen.blamed}
    # What fails everywhere, or is done once for all, fails without any of them, too.
    own = LOST if {*states.values()} & {"ok", "changed", "skipped"} else {"unreachable"}
    return found | {
        name: Unseen("", f"{SAID.get(state, state)}: {seen.task}") for name, state in states.items() if state in own
    }


# What is shown


def data(found: Drift, *, diff: bool) -> dict[str, object]:
    """The answer for programs."""
    seen = found.seen
    contents = [
        {"task": task, "hosts": sorted(hosts, key=natural), "text": text}
        for (task, text), hosts in seen.contents.items()
    ]
    return {
        "format": FORMAT,
        "differs": bool(seen.changes),
        "complete": found.status < 2,
        "changes": [{"task": task, "hosts": sorted(hosts, key=natural)} for task, hosts in seen.changes.items()],
        **({"contents": contents} if diff else {}),
        "unseen": {name: asdict(unseen) for name, unseen in found.unseen.items()},
        "why": on_terminal(joined(reasons(found))).strip(),
    }


def told(found: Drift) -> list[Text]:
    """What differs where, and why not everything could be seen."""
    changes = found.seen.changes
    rows = [["differs", "on"], *([task, several(hosts)] for task, hosts in changes.items())]
    lines = [Text(line) for line in table(rows).splitlines()] if changes else []
    for (task, text), hosts in found.seen.contents.items():
        lines += [Text(""), Text(f"{task} on {several(hosts)}:", "bold")]
        lines += [coloured_diff(line) for line in text.strip("\n").splitlines()]
    lines += [styled(line) for line in reasons(found)]
    return [*lines, *[Text("")] * bool(lines)]


def reasons(found: Drift) -> list[Line]:
    """Why not everything could be seen."""
    lines = []
    for why in found.why:
        stops = [(HEADING, [one for one in findings if one.severity == "stop"]) for _, findings in why.findings]
        lines += replace(why, findings=stops).lines()
    return lines


def verdict(found: Drift, left_out: Collection[str], again: str) -> list[Text]:
    """How much differs, and what mends it. Those that are left out do not count, although preflight asks some."""
    seen = found.seen
    hosts = {name for names in seen.changes.values() for name in names}
    total = count(sum(map(len, seen.changes.values())), "difference")
    looked = seen.hosts.keys() - found.unseen.keys() - {*left_out}
    lines = []
    for group in together(found.unseen.items(), lambda item: item[1].told):
        names = several(name for name, _ in group)
        lines.append(Text(f"not looked at: {names}{group[0][1].told}", "bold red"))
    if not found.finished:
        lines.append(Text("what comes later in site.yml was not looked at on any node", "bold red"))
    if hosts:
        lines += [Text(f"{total} on {several(hosts)}", "bold"), Text(f"to mend this: farandole apply {again}")]
    elif found.finished:
        lines.append(Text(f"nothing differs on {count(len(looked), 'node')}", "bold"))
    return lines
