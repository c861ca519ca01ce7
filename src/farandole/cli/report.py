"""`farandole report`."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.node import cluster_of
from farandole.cli.options import OneInventory
from farandole.core import files
from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.table import table
from farandole.core.text import on_terminal
from farandole.inventory.reading import only
from farandole.inventory.state import states
from farandole.report.compare import Comparison, compare
from farandole.report.markdown import markdown
from farandole.report.page import page
from farandole.report.read import file_of, read

GONE = "The reports of a lab are removed with it; if you copied one before, name its folder"


def report(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A report's folder, or its result.json; else the latest.")
    ] = None,
    inventory: OneInventory = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OLDER", help="An older report: show what has changed since then.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the page.")] = None,
    *,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print it for an issue, and write no page.")] = False,
) -> None:
    """Make the page of a validation again, compare it with an older one, or print it for an issue."""
    try:
        _report(folder or _latest(inventory), against, output, as_markdown=as_markdown)
    except Interrupted:
        raise Interrupted("a page is written as a whole or not at all: run the same command again") from None


def _report(folder: Path, against: Path | None, output: Path | None, *, as_markdown: bool) -> None:
    source = file_of(folder)
    results = [read(source), *([read(against)] if against else [])]
    comparison = compare(results[1], results[0]) if against else None
    if as_markdown:
        typer.echo(on_terminal(markdown(results[0], comparison)), nl=False)
        return
    target = output or source.parent / ("comparison.html" if against else "index.html")
    try:
        files.write(target, page(results[0], comparison))
    except OSError as error:
        raise FarandoleError(
            f"{target} cannot be written: {error.strerror}; name another place with --output"
        ) from None
    if comparison:
        typer.echo(on_terminal(changes(comparison)))
    typer.echo(f"{results[0]['verdict']}: {target}")


def _latest(inventory: Path | None) -> Path:
    """The newest report of a cluster; without an inventory, of the only one that has any, or is in ./inventory."""
    if inventory:
        if not inventory.exists():
            raise FarandoleError(f"there is no inventory {inventory}. {GONE}")
        return cluster_of(inventory, write=False).state / "reports"
    known = sorted(states().glob("*/reports/latest"))
    if len(known) != 1:
        names = ", ".join(link.parents[1].name for link in known)
        if not names:
            raise FarandoleError(f"no cluster here has a report;  farandole validate -i INVENTORY  makes one. {GONE}")
        with suppress(FarandoleError):
            return _latest(only())
        raise FarandoleError(f"several clusters have reports: {names}; name a report's folder, or an inventory with -i")
    return known[0]


def changes(comparison: Comparison) -> str:
    parts = [f"since {comparison.old_time}, the verdict was {comparison.old_verdict} and is {comparison.new_verdict}"]
    parts += [table([head, *rows]) for head, rows in comparison.tables() if rows]
    return "\n\n".join(parts) + "\n"
