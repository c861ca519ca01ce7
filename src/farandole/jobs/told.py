"""What the head reports about a run, and how it is shown."""

import json
import re
import sys
from dataclasses import dataclass

from rich.console import Console

from farandole.core.errors import FarandoleError
from farandole.core.text import on_terminal
from farandole.jobs.login import Head

# How progress bars go back: to the start of their line, character by character, or to the line above.
REWRITTEN = re.compile(r"\r|\x08+|\x1b\[A")
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, stderr=True)


def show(text: str) -> None:
    """Print what a node says; a progress bar, which overwrites its line, becomes several lines."""
    sys.stdout.write(on_terminal(REWRITTEN.sub("\n", text.replace("\r\n", "\n"))))
    sys.stdout.flush()


@dataclass(frozen=True)
class State:
    """What the head says of a run: how it ended, which nodes and ranks it lacked, and the ranks of each node."""

    number: str
    launcher: str
    ended: bool
    why: str
    fetched: bool
    complete: bool
    late: str
    # Whether the head went down in the middle of it.
    with_head: bool
    lost: tuple[str, ...]
    slots: tuple[tuple[str, int], ...]


def known(head: Head, number: str) -> State:
    """What the head knows of a run."""
    try:
        answer = json.loads(head.ask("farandole", "_state", *([number] if number else [])))
        ended, slots = answer["ended"], answer["started"].get("slots", {}).items()
        return State(
            number=str(int(answer["number"])), launcher=str(answer.get("launcher", "")), ended=bool(ended),
            why=str(ended.get("why", "")),
            fetched=ended.get("fetched") is True, complete=ended.get("complete") is not False,
            late=str(ended.get("late", "")), with_head=ended.get("with_head") is True,
            lost=tuple(on_terminal(str(node)) for node in ended.get("lost", ())),
            slots=tuple((str(node), int(ranks)) for node, ranks in slots),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FarandoleError(f"{head.name} gives no valid description of run {number}") from None


def has_ended(head: Head, number: str) -> bool:
    """Whether the run has ended, as far as is known."""
    try:
        return known(head, number).ended
    except FarandoleError:
        return False
