"""The `farandole` command."""

import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from farandole.cli import (
    apply,
    bundle,
    explain,
    init,
    lab,
    lock,
    node,
    predict,
    preflight,
    remove,
    report,
    run,
    stack,
    status,
    validate,
)
from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.project import version
from farandole.core.text import on_terminal
from farandole.lab import prove

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn bare Debian machines into a cluster that trains with Horovod, and prove that it works.",
)
for name, group in {"lab": lab.app, "node": node.app, "stack": stack.app}.items():
    app.add_typer(group, name=name)
for command in (
    *(init.init, lock.lock, bundle.bundle, prove.prove, preflight.preflight, apply.apply, validate.validate),
    *(status.status, report.report, apply.watch, remove.remove),
):
    app.command()(command)
app.command("predict")(predict.predict_command)
app.command("explain")(explain.command)
app.command(context_settings={"allow_interspersed_args": False})(run.run)
for command in (run.runs, run.logs, run.attach, run.fetch, run.stop):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farandole {version()}")
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
