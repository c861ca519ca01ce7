"""What the parts of the command have in common: how they refuse, run programs, and print."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from typing import Any

HERE = socket.gethostname()
# Seconds that a job has to end by itself.
GRACE = 10


class RefusedError(Exception):
    """A message for the user."""


class Output:
    """The run's output, which is also this program's; what cannot be kept is counted, and the job goes on."""

    def __init__(self, handle: int) -> None:
        self.handle, self.lock = handle, threading.Lock()
        # Bytes that could not be kept, here and in all, and why.
        self.gap, self.lost, self.why = 0, 0, ""

    def write(self, data: bytes) -> None:
        with self.lock:
            if self.gap and not self.keep(f"\nfarandole: {self.gap} bytes are missing here: {self.why}\n".encode()):
                self.gap = 0
            left = len(data) if self.gap else self.keep(data)
            self.gap, self.lost = self.gap + left, self.lost + left

    def dropped(self) -> str:
        """What could not be kept."""
        return f"{self.lost} bytes of output could not be kept on the head: {self.why}" if self.lost else ""

    def keep(self, data: bytes) -> int:
        """Write as much as possible; returns how many bytes are left."""
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except OSError as error:
            self.why = str(error.strerror)
        return len(data)


OUTPUT = Output(1)


def say(line: str) -> None:
    """Write a line of our own to the run's output."""
    OUTPUT.write(f"farandole: {line}\n".encode(errors="replace"))


def ran(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it printed."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, errors="surrogateescape", check=False, **options
    )
    return done


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job's process group, gently at first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
            return


def reason(text: str) -> str:
    """The line of rsync or ssh that says why."""
    other = ("rsync error: ", "--copy-dest ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(other)]
    # rsync can lose what the other side says when it cannot write.
    return lines[0] if lines else "a file could not be written, as when the disk is full"
