"""The `farandole` command."""

import importlib.metadata
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from farandole.cli import apply as progress_commands
from farandole.cli import bundle, explain, lab
from farandole.cli import lock as stack_commands
from farandole.cli import node as node_commands
from farandole.cli import predict as predict_command
from farandole.cli import preflight as preflight_commands
from farandole.cli import report as report_commands
from farandole.cli import stack as show
from farandole.cli import status as status_commands
from farandole.cli import validate as validation_commands
from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.text import on_terminal
from farandole.jobs import run as jobs
from farandole.lab import prove
from farandole.plays import removal

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn bare Debian machines into a cluster that trains with Horovod, and prove that it works.",
)
app.add_typer(lab.app, name="lab")
app.add_typer(node_commands.app, name="node")
app.command()(stack_commands.lock)
app.command()(bundle.bundle)
app.command()(prove.prove)
app.add_typer(show.app, name="stack")
app.command()(preflight_commands.preflight)
app.command()(progress_commands.apply)
app.command()(validation_commands.validate)
app.command()(status_commands.status)
app.command()(report_commands.report)
app.command()(progress_commands.watch)
app.command("predict")(predict_command.predict_command)
app.command()(removal.remove)
app.command("explain")(explain.command)
app.command(context_settings={"allow_interspersed_args": False})(jobs.run)
for command in (jobs.runs, jobs.logs, jobs.attach, jobs.fetch, jobs.stop):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farandole {importlib.metadata.version('farandole')}")
        raise typer.Exit


@app.callback()
def farandole(
    *,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and nothing else.")
    ] = False,
) -> None:
    """Hold the options common to all subcommands."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # click would turn KeyboardInterrupt into a bare "Aborted".
    raise Interrupted("run the same command again to continue")


def main() -> None:
    """Run the command; the user sees messages, never a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        app()
    except FarandoleError as error:
        console.print(f"[bold red]error:[/] {escape(on_terminal(str(error)))}")
        sys.exit(1)
    except Interrupted as interrupt:
        # There is nothing left that another one could end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Its terminal may be closed.
        with suppress(OSError):
            console.print(f"interrupted; {interrupt}")
        sys.exit(130)
