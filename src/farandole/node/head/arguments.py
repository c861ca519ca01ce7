"""The options of the head's command."""

from __future__ import annotations

import argparse
import re
from typing import Any

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# By command: what it does with a run. Those without are called by the control machine and by systemd.
ON_RUN = {
    "logs": "print what a run has printed",
    "attach": "print what a run prints until it ends",
    "stop": "end a run on all of its nodes",
    "_job": "",
    "_state": "",
}


def duration(text: str) -> int:
    """Seconds, of a text such as 2h."""
    found = re.fullmatch(r"(\d{1,7})([smhd]?)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 30m, 2h or 1d")
    return int(found[1]) * UNITS[found[2]]


def positive(text: str) -> int:
    """A number of ranks."""
    if not re.fullmatch(r"0*[1-9]\d{0,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


def parsed() -> argparse.Namespace:
    """The arguments of this call."""
    top = argparse.ArgumentParser(prog="farandole", description="Run programs on the cluster's nodes.")
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add_run(
        commands.add_parser("run", help="send this folder to the nodes and start a program there", allow_abbrev=False)
    )
    commands.add_parser("runs", help="list your runs")
    for name, words in ON_RUN.items():
        command = commands.add_parser(name, help=words) if words else commands.add_parser(name)
        # Everybody is the job user, so the latest may be somebody else's.
        latest: dict[str, Any] = {} if name == "stop" else {"nargs": "?", "default": ""}
        command.add_argument(
            "run", help="its number" if name == "stop" else "its number; the latest, if not given", **latest
        )
    command = commands.add_parser("fetch", help="get results of a run from its first node")
    command.add_argument("run", help="its number")
    command.add_argument("paths", nargs="+", metavar="PATH", help="what to get, a path in the run's folder")
    for name in ("_receive", "_give"):
        command = commands.add_parser(name)
        command.add_argument("name")
        command.add_argument("arguments", nargs=argparse.REMAINDER)
    return top.parse_args()


def add_run(run: argparse.ArgumentParser) -> None:
    """The options of a run."""
    run.add_argument("-np", type=positive, default=0, metavar="N", help="number of ranks; all slots, if not given")
    run.add_argument("--hosts", default="", help="only these nodes, separated by commas")
    run.add_argument("--mpi", action="store_true", help="start the ranks with MPI")
    run.add_argument("--gloo", dest="mpi", action="store_false", help="start the ranks with Gloo, which is the default")
    run.add_argument("--time", type=duration, default=0, help="end it after 90s, 30m, 2h or 1d")
    run.add_argument("--wait", action="store_true", help="wait for slots that other runs use")
    run.add_argument("--detach", action="store_true", help="print its number and return")
    fetch = "get this from the first node when the run ends"
    run.add_argument("--fetch", action="append", default=[], metavar="PATH", help=fetch)
    run.add_argument("--source", help=argparse.SUPPRESS)
    run.add_argument("--without", type=lambda text: text.split(","), default=[], help=argparse.SUPPRESS)
    run.add_argument("program", nargs="+", metavar="-- PROGRAM", help="for example python train.py --epochs 3")
