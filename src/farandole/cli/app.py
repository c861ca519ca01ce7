"""The `farandole` command."""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.project import version
from farandole.core.text import on_terminal

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn bare Debian machines into a cluster that trains with Horovod, and prove that it works.",
)
# Where each command is, as help lists them.
GROUPS = {"lab": "cli.lab", "node": "cli.node", "stack": "cli.stack"}
COMMANDS = {
    "init": "cli.init:init",
    "lock": "cli.lock:lock",
    "bundle": "cli.bundle:bundle",
    "prove": "lab.prove:prove",
    "preflight": "cli.preflight:preflight",
    "apply": "cli.apply:apply",
    "validate": "cli.validate:validate",
    "status": "cli.status:status",
    "drift": "cli.drift:drift",
    "history": "cli.history:history",
    "report": "cli.report:report",
    "monitor": "cli.monitor:monitor",
    "watch": "cli.apply:watch",
    "upgrade": "cli.upgrade:upgrade",
    "replace": "cli.replace:replace",
    "remove": "cli.remove:remove",
    "backup": "cli.backup:backup",
    "restore": "cli.backup:restore",
    "predict": "cli.predict:predict_command",
    "explain": "cli.explain:command",
    "run": "cli.run:run",
    "runs": "cli.run:runs",
    "logs": "cli.run:logs",
    "attach": "cli.run:attach",
    "fetch": "cli.run:fetch",
    "stop": "cli.run:stop",
}
SETTINGS = {"run": {"allow_interspersed_args": False}}
# How a command ends that could not answer, if 1 is one of its answers.
ERRORS = {"drift": 2, "monitor": 2}


def _load(names: Iterable[str]) -> None:
    for name in names:
        if name in GROUPS:
            app.add_typer(import_module(f"farandole.{GROUPS[name]}").app, name=name)
        else:
            module, function = COMMANDS[name].split(":")
            app.command(name, context_settings=SETTINGS.get(name))(
                getattr(import_module(f"farandole.{module}"), function)
            )


# Importing all takes longer than what most of them do.
_wanted = {*sys.argv[1:2]} & {*GROUPS, *COMMANDS, "--version"}
_load(_wanted - {"--version"} if _wanted else [*GROUPS, *COMMANDS])


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
    for stream in (sys.stdout, sys.stderr):
        # What the locale lacks is escaped.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    try:
        app()
    except (FarandoleError, OSError) as error:
        console.print(Text.assemble(("error:", "bold red"), f" {on_terminal(str(error))}"))
        sys.exit(ERRORS.get("".join(sys.argv[1:2]), 1))
    except Interrupted as interrupt:
        # There is nothing left that another one could end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Its terminal may be closed.
        with suppress(OSError):
            console.print(f"interrupted; {interrupt}")
        # Python would try again to write what is left, and end with another status.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(130)
