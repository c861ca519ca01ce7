"""Whether a run that failed starts again, from the checkpoints that it has written."""

import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from farandole.node.head import runs
from farandole.node.head.runs import SSH, Run, ran, say
from farandole.node.head.status import Slots

# Seconds between two copies of the checkpoints.
COPY_EVERY = 5
# Seconds between two questions to each node, and how many of them it may miss.
ASK_EVERY, MISSED = 10, 2
# Seconds in which a copy has ended.
JOIN_S = 30
# The last line of an exception, behind the rank that prints it.
RAISED = re.compile(rb"^\[\d+\] ([\w.]*(?:Error|Exception)\b.*)")


class Restarts:
    """What is known of the starts of a run so far."""

    def __init__(self, run: Run, wish: Any) -> None:
        self.folder, self.most, self.done = wish["checkpoints"], wish["restarts"], 0
        # A path that all nodes see may be named as well.
        self.code, self.path = run.code, run.code / self.folder
        self.copied = [self.folder] if self.folder and not Path(self.folder).is_absolute() else []
        # Nodes that are left out.
        self.gone: set[str] = set()
        # Nodes that stopped answering in the middle.
        self.silent: set[str] = set()
        # The checkpoints that nodes may have from the head, and those that the first node had at last.
        self.sent: set[str] = set()
        self.had: set[str] = set()
        # The copies in a row that failed, and whether it was said.
        self.failed, self.told = 0, False
        # What failed last, and before that with which checkpoints.
        self.raised, self.before = b"", ("", frozenset[tuple[str, int, int]]())

    def read(self, line: bytes) -> None:
        """Remember how a program fails."""
        if raised := RAISED.match(line):
            self.raised = raised[1]

    def refusal(self, code: int, lost: list[str], *, began: bool = True) -> str:
        """Why a run that failed does not start again; empty if it does. One that has not begun could change nothing."""
        missing = {*lost} | self.silent
        self.gone, self.silent = self.gone | missing, set()
        failure = "" if missing else f"{code} {self.raised!r}"
        now, (failed, had) = frozenset(self.files()), self.before
        self.before, self.raised = (failure, now), b""
        if self.done >= self.most:
            return f"it has started again {self.done} times (--restarts)"
        if failure and failure == failed and now == had:
            return "the program has failed twice in the same way"
        if began and self.done and self.folder and now == had:
            return f"nothing in {self.folder} has changed since it started again"
        self.done += 1
        return ""

    def files(self) -> Iterator[tuple[str, int, int]]:
        """The checkpoints, as far as they show that a program got on."""
        for path in self.path.rglob("*") if self.folder else ():
            try:
                facts = path.lstat()
            except OSError:
                continue
            if path.is_file():
                yield str(path), facts.st_size, facts.st_mtime_ns

    def here(self) -> set[str]:
        """The paths of the checkpoints that the head has."""
        return {str(path.relative_to(self.code)) for path in (self.path.rglob("*") if self.copied else ())}

    def deleting(self) -> list[str]:
        """The options with which rsync removes what the head lacks: later, only what the program has removed."""
        self.had = self.here()
        self.sent |= self.had
        if not self.done:
            return ["--delete"]
        removed = (re.sub(r"[\\*?[]", r"[\\\g<0>]", path) for path in sorted(self.sent - self.had))
        return ["--update", "--delete", *(f"--filter=R /{path}" for path in removed), "--filter=P **"]

    def forget(self, has: set[str]) -> None:
        """Remove on the head what the program has removed on the first node, which has these."""
        for path in sorted(self.here() & self.had - has, reverse=True):
            # Another rank may have written to a folder here.
            with suppress(OSError):
                try:
                    (self.code / path).unlink()
                except IsADirectoryError:
                    (self.code / path).rmdir()
        self.had = has

    def look(self, nodes: Iterable[str]) -> bool:
        """Whether all of these nodes answer; those that do not are left out."""
        others = [node for node in nodes if node != runs.HERE]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            silent = {node for node, answer in zip(others, pool.map(answers, others), strict=True) if not answer}
        self.gone |= silent
        return not silent

    def take_back(self) -> None:
        """Use nodes again that have come back, as after a reboot."""
        self.gone = {node for node in self.gone if not answers(node)}

    @contextmanager
    def watched(self, slots: Slots, end: Callable[[], None]) -> Iterator[None]:
        """End what runs when a node stops answering, as one that is frozen breaks no connection."""
        others = [node for node in slots if node != runs.HERE] if self.most else []
        missed = dict.fromkeys(others, 0)

        def ask() -> None:
            for node, answer in zip(others, pool.map(answers, others), strict=True):
                missed[node] = 0 if answer else missed[node] + 1
            self.silent |= {node for node, times in missed.items() if times >= MISSED}
            if self.silent:
                end()

        with ThreadPoolExecutor(max(1, len(others))) as pool, repeated(ASK_EVERY if others else 0, ask):
            yield

    @contextmanager
    def kept(self, slots: Slots, shared: bool, copy: Callable[[list[str]], Iterable[str]]) -> Iterator[None]:
        """Copy the checkpoints to the head meanwhile, where the loss of the first node does not take them."""
        is_safe = not self.copied or shared or next(iter(slots)) == runs.HERE

        def act() -> None:
            failures = [*copy(self.copied)]
            self.failed = self.failed + 1 if failures else 0
            # One may fail because a file vanishes meanwhile.
            if self.failed >= MISSED and not self.told:
                say(f"{failures[0]}; this is tried again every {COPY_EVERY} s")
                self.told = True

        with repeated(0 if is_safe else COPY_EVERY, act):
            yield


@contextmanager
def repeated(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Do something every so many seconds meanwhile; never, if they are 0."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            try:
                act()
            except (OSError, RuntimeError) as error:
                say(f"this is tried again: {error}")

    if not seconds:
        yield
        return
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # A node may be gone, which ssh notices later.
        thread.join(JOIN_S)


def answers(node: str) -> bool:
    """Whether a node runs a command."""
    try:
        return ran(*SSH.split(), node, "true", timeout=ASK_EVERY).returncode == 0
    except subprocess.TimeoutExpired:
        return False
