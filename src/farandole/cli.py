"""The command `farandole`."""

import signal
import sys
from types import FrameType

import typer
from rich.console import Console

from farandole.errors import FarandoleError
from farandole.lab import commands as lab

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Farandole turns bare Linux machines into a cluster that trains with Horovod, and proves it.",
)
app.add_typer(lab.app, name="lab")


@app.callback()
def farandole() -> None:
    """Keep `lab` a sub-command even while it is the only one."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command; a person sees messages, never a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    console = Console(stderr=True, soft_wrap=True)
    try:
        app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.TyperException as error:
        error.show()
        sys.exit(error.exit_code)
    except FarandoleError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it stopped", highlight=False)
        sys.exit(130)
