"""The folder that a run gets, and the results that come back."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.findings import some
from farandole.core.text import one_line
from farandole.jobs.login import Head
from farandole.jobs.told import console
from farandole.node.head.folders import deepest, filters, place, staging
from farandole.node.head.runs import RefusedError

# From here on the user is asked before a folder is sent.
LARGE = 200 << 20


def send(head: Head, folder: Path, source: str, *, yes: bool) -> None:
    """Copy a folder to the head; of files that it has, only the changes."""
    options, patterns = filters(folder)
    size, outside = survey(folder, options, patterns)
    if outside:
        console.print(f"warning: the nodes get these links, but not what they point to: {some(outside)}")
    if not yes and size > LARGE:
        console.print(
            f"{folder} has {size / 1e6:.0f} MB, and every node gets a copy. Put large files that rarely change on "
            "storage that all nodes see; a file .farandoleignore names what stays here."
        )
        if not sys.stdin.isatty():
            raise FarandoleError("nothing was sent; to send it: --yes")
        typer.confirm("Send it?", abort=True)
    failed = head.rsync(["_receive", source], [*options, "--delete", "--delete-excluded", f"{folder}/"], "./", patterns)
    if failed:
        raise FarandoleError(f"{folder} could not be sent to {head.name}: {failed}")


def survey(folder: Path, options: Sequence[str], patterns: str) -> tuple[int, list[str]]:
    """The bytes that would be sent if the head had nothing, and the links that lead nowhere on the nodes."""
    done = subprocess.run(
        ["rsync", "--archive", "--dry-run", "--out-format=%l %i %n%L", *options, f"{folder}/", "/nonexistent/"],
        input=patterns, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, errors="surrogateescape",
        check=False,
    )  # fmt: skip
    size, outside = 0, []
    for line in done.stdout.splitlines():
        length, kind, name = (*line.split(" ", 2), "", "")[:3]
        if kind.startswith("cL"):
            link, _, target = name.partition(" -> ")
            inside = Path(os.path.normpath(folder / Path(link).parent / target)).is_relative_to(folder)
            # There, the folder has another path.
            if target.startswith("/") or not inside:
                outside.append(name)
        elif kind[1:2] == "f":
            size += int(length)
    return size, outside


def get(head: Head, number: str, path: str, folder: Path) -> bool:
    """Get a result from the head; whether all of it could be had."""
    failed, refused = "", []
    try:
        with hangup_interrupts(), staging(deepest(folder, path), folder) as (staged, options):
            failed = head.rsync(["_give", number], options, f"./{path}", to=staged)
            refused = list(place(staged, folder, Path(path)))
    except (RefusedError, OSError) as error:
        failed = one_line(error)
    rest = f"{path} is incomplete here" if refused else f"fetched {path}"
    for message in [*refused, f"{path} could not be fetched: {failed}" if failed else rest]:
        console.print(message)
    return not (failed or refused)


@contextmanager
def hangup_interrupts() -> Iterator[None]:
    """Let a terminal that is closed interrupt what has to clean up, unless nohup has this ignored."""
    usual = signal.getsignal(signal.SIGHUP)

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted("the terminal was closed; run the same command again")

    if usual == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, usual)
