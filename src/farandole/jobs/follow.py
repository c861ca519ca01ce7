"""Show what a run prints until it ends, and the cause if it failed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence

from farandole.core.errors import FarandoleError
from farandole.core.text import on_terminal
from farandole.jobs.failure import OF_SSH, explain
from farandole.jobs.login import Head
from farandole.jobs.told import has_ended, known, show

# Lines in which a cause is searched.
REMEMBERED, LONGEST = 2000, 1 << 16


def follow(head: Head, number: str) -> int:
    """Show what a run prints until it ends, and the cause if it failed; returns its exit status."""
    status, said, lines = stream(head, "attach", number)
    if status == OF_SSH and not has_ended(head, number):
        raise FarandoleError(
            f"the connection to {head.name} was lost; if that node is up, the run goes on there, and "
            "`farandole attach` shows it again"
        )
    sys.stderr.write(on_terminal(said))
    if status and not said.startswith("error: "):
        explain(known(head, number), lines)
    return status


def stream(head: Head, what: str, number: str) -> tuple[int, str, Sequence[str]]:
    """Show what a command on the head prints; returns its exit status, its errors, and its last lines."""
    lines: deque[str] = deque(maxlen=REMEMBERED)
    # An interrupt is for this process: the run is then ended in order, or goes on.
    with tempfile.TemporaryFile("w+", errors="replace") as said, subprocess.Popen(
        head.command("farandole", what, *([number] if number else [])), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=said, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while line := process.stdout.readline(LONGEST) if process.stdout else "":
                lines.append(line.rstrip("\n"))
                show(line)
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        said.seek(0)
        return status, said.read(1 << 16), lines
