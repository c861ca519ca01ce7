"""The `farandole stack` commands: show packed stacks, and what the nodes run."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from farandole.cli.options import OneInventory
from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT, environment
from farandole.core.table import table
from farandole.core.text import one_line
from farandole.stack.cache import Builds, Built, Lock, record_path
from farandole.stack.lock import read, text
from farandole.stack.settings import builds_of

app = typer.Typer(no_args_is_help=True, help="Show stacks packed on this machine and installed on nodes.")
HEADLINE = ("tensorflow", "torch", "horovod", "openmpi", "numpy")


@app.command("list")
def list_stacks(inventory: OneInventory = None) -> None:
    """List the stacks packed on this machine; with -i only those of one cluster, and what each of its nodes has."""
    folders = builds_of(inventory)
    rows = [[*row(built), str(builds.root)] for builds in folders for built in builds.packed()]
    if rows:
        typer.echo(table([["stack", "platform", *HEADLINE, "adds", "size", "packed", "kept in"], *rows]))
    else:
        typer.echo(f"no stack is packed in {locations(folders)}")
    if inventory:
        typer.echo("\n" + node_table(nodes_of(inventory)))


@app.command()
def show(
    stack: Annotated[str, typer.Argument(help="A stack id, its beginning, or a lock file.")],
    inventory: OneInventory = None,
) -> None:
    """Print a stack's lock: every component with its version, source and sha256."""
    typer.echo(text(find(stack, inventory)), nl=False)


@app.command()
def diff(
    old: Annotated[str, typer.Argument(help="A stack id, its beginning, or a lock file.")],
    new: Annotated[str, typer.Argument(help="Likewise.")],
    inventory: OneInventory = None,
) -> None:
    """Show the differences between two stacks."""
    changes = differences(find(old, inventory), find(new, inventory))
    typer.echo(table([["component", old, new], *map(list, changes)]) if changes else "nothing differs")


def row(built: Built) -> list[str]:
    """A table row for a packed stack."""
    lock = built.about["lock"]
    versions = contents(lock)
    made = datetime.fromtimestamp(record_path(built.path).stat().st_mtime, UTC)
    platform = f"{lock['platform']['os']} {lock['platform']['arch']}"
    size = f"{built.path.stat().st_size / 1e6:.0f} MB"
    # A stack with packages of the user's own has nothing else: the rest is in the same stack without them.
    adds = " ".join(lock["wanted"].get("packages", [])) or "-"
    return [lock["id"], platform, *(versions.get(name, "-") for name in HEADLINE), adds, size, f"{made:%Y-%m-%d %H:%M}"]


def contents(lock: Lock) -> dict[str, str]:
    """Versions by component: the solver's choices and every wheel."""
    wheels = {wheel["name"]: wheel["version"] for wheel in lock["wheels"]}
    return {**wheels, **{name: str(version) for name, version in lock["versions"].items()}}


def differences(old: Lock, new: Lock) -> list[tuple[str, str, str]]:
    """The differences as (component, before, after)."""
    before, after = details(old), details(new)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # If a component's version differs, all else of it differs as a consequence: do not repeat it.
    components = {*contents(old), *contents(new)} & {*names}
    parts = tuple(f"{name}{mark}" for name in components for mark in ". ")
    return [(name, before.get(name, "-"), after.get(name, "-")) for name in names if not name.startswith(parts)]


def details(lock: Lock) -> dict[str, str]:
    """What a lock says, by name: versions, settings and sources, and short digests of wheels."""
    parts = (leaves(part, lock[part]) for part in ("platform", "wanted", "openmpi", "horovod"))
    digests = {f"{wheel['name']} {wheel['version']} sha256": wheel["sha256"][:12] for wheel in lock["wheels"]}
    return {**dict(sorted(contents(lock).items())), **{name: text for part in parts for name, text in part}, **digests}


def leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Flatten a value into names and texts; an item of a list is either present or absent."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict):
                yield f"{name} {inner['file']}", inner["sha256"][:12]
            else:
                yield f"{name} {inner}", "yes"
    else:
        yield name, str(value)


def find(wanted: str, inventory: Path | None = None) -> Lock:
    """Find a lock by file, id or beginning of an id."""
    if Path(wanted).is_file():
        return read(Path(wanted))
    folders = builds_of(inventory)
    # The id is a digest of the lock, so it does not matter in which folder it is found.
    locks = {built.about["lock"]["id"]: built.about["lock"] for builds in folders for built in builds.packed()}
    matching = [lock for stack, lock in locks.items() if stack.startswith(wanted)]
    if len(matching) == 1:
        return dict(matching[0])
    problem = "more than one stack begins" if matching else "no stack begins"
    packed = ", ".join(sorted(locks)) or "none"
    raise FarandoleError(f"{problem} with {wanted} in {locations(folders)}; packed there: {packed}")


def locations(folders: list[Builds]) -> str:
    """The folders of packed stacks, as text."""
    return " or ".join(str(builds.stacks) for builds in folders)


def nodes_of(inventory: Path) -> dict[str, dict[str, Any]]:
    """Probe every node now; a node that does not answer has the reason instead."""
    with tempfile.TemporaryDirectory() as answers:
        command = [str(Path(sys.executable).with_name("ansible")), "cluster", "-i", str(inventory.absolute())]
        # Preflight checks the job user's account; here any account will do.
        probe = ["-m", "farandole.cluster.node_probe", "-a", '{"accounts": {}}']
        command += ["--become", "--tree", answers, *probe]
        done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, check=False)
        results = {path.name: json.loads(path.read_text()) for path in sorted(Path(answers).iterdir())}
    if not results:
        raise FarandoleError(f"the nodes of {inventory} cannot be probed:\n{(done.stdout + done.stderr).strip()}")
    return results


def node_table(nodes: dict[str, dict[str, Any]]) -> str:
    rows = [["node", "current", "former", "installed"]]
    for host, answer in nodes.items():
        if "probe" in answer:
            stacks = answer["probe"]["stacks"]
            rows.append([host, stacks["current"], stacks["former"], " ".join(stacks["installed"])])
        else:
            reasons = [answer[key] for key in ("unreachable_reason", "unfit", "msg") if answer.get(key)]
            rows.append([host, "?", "?", one_line(reasons[0] if reasons else "")])
    return table([[cell or "-" for cell in row] for row in rows])
