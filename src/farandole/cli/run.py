"""`farandole run`, `runs`, `logs`, `attach`, `fetch`, `stop`: send a folder to the head, and run programs there."""

from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.options import BY_KEY, Hosts, Inventory, as_given, with_login
from farandole.core.errors import FarandoleError, Interrupted
from farandole.jobs.files import get
from farandole.jobs.follow import follow, stream
from farandole.jobs.forward import forwarded, parsed
from farandole.jobs.login import head_of
from farandole.jobs.start import Wish, finish, left_out, start
from farandole.jobs.told import console, known, show
from farandole.node.head.folders import refuse_outside
from farandole.node.head.launch import LAUNCHERS, MEET_S, SHORT
from farandole.plays.playbook import Login

Number = Annotated[str, typer.Argument(metavar="[RUN]", help="Its number; the latest, if not given.")]
Forward = Annotated[
    str, typer.Option(metavar="[HERE:]PORT", help="Open a port of the first node here, for you alone, meanwhile.")
]
GivenNumber = Annotated[str, typer.Argument(metavar="RUN", help="Its number.")]


@with_login(*BY_KEY)
def run(
    inventory: Inventory,
    command: Annotated[
        list[str], typer.Argument(metavar="-- PROGRAM...", help="For example python train.py --epochs 3.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option("-np", min=1, metavar="N", help="Number of ranks; all slots of the nodes, if not given."),
    ] = None,
    hosts: Hosts = "",
    time: Annotated[str, typer.Option("--time", metavar="TIME", help="End it after 90s, 30m, 2h or 1d.")] = "",
    fetch: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Get this back when it ends; may be repeated.")
    ] = None,
    forward: Forward = "",
    restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start it again after a failure or the loss of a node, N times.")
    ] = 0,
    min_nodes: Annotated[int, typer.Option(min=0, metavar="M", help="Then, go on with as few as M nodes.")] = 0,
    checkpoints: Annotated[
        str, typer.Option(metavar="DIR", help="Where the program saves and finds its state, kept on the head.")
    ] = "",
    meet_within: Annotated[
        int, typer.Option(min=0, metavar="SECONDS", help="End it if a rank lets the others wait so long; 0: never.")
    ] = MEET_S,
    *,
    launcher: Annotated[
        str, typer.Option(metavar="NAME", help=f"What starts the ranks: {', '.join(LAUNCHERS)}.", show_default=False)
    ] = "",
    mpi: Annotated[bool, typer.Option("--mpi", help="Start the ranks with MPI.")] = False,
    gloo: Annotated[bool, typer.Option("--gloo", help="Start the ranks with Gloo, which is the default.")] = False,
    each: Annotated[
        bool, typer.Option("--each", help="Start independent programs; FARANDOLE_SLOT tells each its number.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for slots that other runs use.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is started.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send even a large folder without asking.")] = False,
    login: Login,
) -> None:
    """Send this folder to the nodes and start a program there, with one rank per slot.

    torchrun and accelerate launch are recognized. Ranks that never meet end the run with status 3: that is many
    trainings instead of one.

    Git's ignored files stay here, and what a file .farandoleignore names. Ctrl-C ends the run on every node; a lost
    connection does not.
    """
    given = {"mpi": mpi, "gloo": gloo, "each": each}
    names = [name for short, name, _ in SHORT if given[short]] + ([launcher] if launcher else [])
    if len(names) > 1 or {*names} - {*LAUNCHERS}:
        raise FarandoleError(f"name one launcher: {', '.join(LAUNCHERS)}")
    folder = Path.cwd()
    wish = Wish(
        command, ranks, hosts, time, fetch or [], launcher="".join(names), forward=forward, restarts=restarts,
        min_nodes=min_nodes, checkpoints=checkpoints, meet_within=meet_within, wait=wait, detach=detach,
    )  # fmt: skip
    wish.refuse_early(folder)
    again, without = as_given(inventory, login), left_out(inventory, hosts)
    head = head_of(inventory, login)
    number = start(head, wish, folder, without, yes=yes)
    if not detach:
        raise typer.Exit(finish(head, number, wish, folder, again))
    console.print(f"run {number} is started; next: farandole attach {again} {number}")


@with_login(*BY_KEY)
def attach(inventory: Inventory, number: Number = "", forward: Forward = "", *, login: Login) -> None:
    """Show what a run prints until it ends; Ctrl-C leaves it running."""
    head, again = head_of(inventory, login), as_given(inventory, login)
    number = number or known(head, "").number
    try:
        with forwarded(head, number, parsed(forward) if forward else None):
            status = follow(head, number)
    except Interrupted:
        raise Interrupted(f"the run goes on; to end it: farandole stop {again} {number}") from None
    raise typer.Exit(status)


@with_login(*BY_KEY)
def logs(inventory: Inventory, number: Number = "", *, login: Login) -> None:
    """Print what a run has printed so far."""
    head = head_of(inventory, login)
    status, errors, _ = stream(head, "logs", number)
    if status:
        raise FarandoleError(head.reason(status, errors))


@with_login(*BY_KEY)
def runs(inventory: Inventory, *, login: Login) -> None:
    """List the runs: when, with which stack, where, how long, and how they ended."""
    show(head_of(inventory, login).ask("farandole", "runs"))


@with_login(*BY_KEY)
def stop(inventory: Inventory, number: GivenNumber, login: Login) -> None:
    """End a run on all of its nodes."""
    show(head_of(inventory, login).ask("farandole", "stop", number))


@with_login(*BY_KEY)
def fetch(
    inventory: Inventory,
    number: GivenNumber,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="What to get, paths in the run's folder.")],
    login: Login,
) -> None:
    """Get results of a run, from its first node, into this folder; also while it runs."""
    head, complete = head_of(inventory, login), True
    refuse_outside(paths)
    try:
        head.ask("farandole", "fetch", number, "--", *paths)
    except FarandoleError as error:
        # What the head has can be had.
        console.print(str(error))
        complete = False
    fetched = [get(head, number, path, Path.cwd()) for path in paths]
    if not (complete and all(fetched)):
        raise typer.Exit(1)
