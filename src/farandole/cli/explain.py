"""`farandole explain`."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from farandole.core.causes import READ, Cause, causes
from farandole.core.errors import FarandoleError
from farandole.explain.diagnosis import explain, read
from farandole.explain.told import UNKNOWN, report, thread

WIDTH = 100
PLACES = {
    "login": "when this machine logs in to a node", "peer": "when one node logs in to another",
    "job": "in the output of a job", "log": "in a log", "trust": "by the check of connections between nodes",
    "files": "by the check of shared files", "probe": "by a job of the validation",
    "check": "by one of Farandole's own checks, such as preflight", "monitor": "by the head's Prometheus",
}  # fmt: skip


def command(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG|CODE]...",
            help="Files; - is the standard input, the default. Anything else is taken as the code of a cause.",
        ),
    ] = None,
    *,
    list_: Annotated[
        bool, typer.Option("--list", help="List the causes, a line each; with words, only those that contain them.")
    ] = False,
) -> None:
    """Say why something failed, from its log: consequences first, the root cause and its cure last.

    Reads the logs of training jobs, compilers, pip, apt, ssh and Ansible, from anywhere. With the code of a cause, as
    it stands in brackets in every message, says what is known of that cause. The exit status is 0 if a cause is named,
    or if nothing looks like a failure; 3 if the failure is not known; 1 if a log cannot be read.
    """
    arguments = logs or []
    if list_:
        shown = [cause for cause in causes().values() if all(word.lower() in everything(cause) for word in arguments)]
        if not shown:
            raise FarandoleError(f"no cause contains {' and '.join(arguments)}")
        print("\n".join(f"{cause.code}: {plain(cause.what)}" for cause in shown))
        return
    codes = [argument for argument in arguments if argument in causes() and not Path(argument).exists()]
    if codes:
        if len(codes) < len(arguments):
            raise FarandoleError(f"{codes[0]} is the code of a cause, and other arguments are files: name one kind")
        print("\n\n".join("\n".join(described(causes()[code])) for code in codes))
        return
    verdict = explain(read(arguments or ["-"]))
    print(report(verdict, several=len(arguments) > 1))
    if verdict.telling and not verdict.codes:
        raise typer.Exit(3)


def described(cause: Cause) -> Iterator[str]:
    """What is known of a cause."""
    role = "root cause if no other is found" if cause.leads else "consequence of another failure"
    kind = {"warn": "warning", "note": "note"}.get(cause.severity, role if cause.cascade else "root cause")
    yield f"{cause.code}: a {kind}, seen {PLACES[cause.seen]}"
    yield from paragraph("what", plain(cause.what))
    yield from paragraph("cure", plain(cause.cure))
    if cause.seen in READ:
        yield f"  looks like: {cause.pattern}"
    if cause.alert:
        yield f"  alerts on: {cause.alert}  for {cause.lasting}"
    if cause.upstream:
        yield f"  see: {thread(cause)}"


def paragraph(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name}: ", subsequent_indent="    ", break_on_hyphens=False)


def everything(cause: Cause) -> str:
    """What is searched for words."""
    return f"{cause.code} {cause.what} {cause.cure} {cause.pattern}".lower()


def plain(text: str) -> str:
    """A text of the catalogue, with words for its fields."""
    return re.sub(r"\{(\w+)\}", lambda field: UNKNOWN.get(field[1], field[1].upper()), text.replace(" ({seen})", ""))
