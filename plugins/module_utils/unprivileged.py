"""Run a program that came from another machine as an unprivileged account instead of root."""

import os
import pwd
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = "/usr/local/bin:/usr/bin:/bin"
SHOWN = 1500
# What the kernel says when it ends a program, or cannot read one.
FATAL = re.compile(
    r"segfault|traps:|general protection|[Oo]ut of memory|oom-kill|Killed process|I/O error|invalid opcode"
)
# The kernel's clock and this one differ slightly.
CLOCKS_S = 5


def run(
    command: Sequence[str], user: str, folder: Path, seconds: int = 600, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command without root's environment; return its exit status, which is the negative number of the signal that
    killed it, and its last output. Root owns `folder`."""
    account = pwd.getpwnam(user)
    # Without root it is neither possible nor necessary to become another account.
    other: dict[str, Any] = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    environ = {"PATH": PATH, "HOME": account.pw_dir, "LANG": "C.UTF-8", **(environment or {})}
    with tempfile.TemporaryFile(dir=folder) as output:
        process = subprocess.Popen(
            command, cwd="/", env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, **(other if os.geteuid() == 0 else {}),
        )  # fmt: skip
        try:
            code, overdue = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, overdue = process.wait(), f"it did not end within {seconds} s"
        output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN))
        return code, overdue or output.read(SHOWN).decode(errors="replace").strip()


def ending(code: int, began: float) -> str:
    """How a program ended that failed: its status, or its signal and what the kernel has logged since it began."""
    if 0 <= code <= 128:
        return f"It ended with status {code}."
    # A shell reports the death of its command as 128 and the signal.
    how = (
        f"ended with status {code}, as a shell says of {name(code - 128)}"
        if code > 0
        else f"was killed by {name(-code)}"
    )
    said = "; ".join(kernel(began))
    return f"It {how}.{f' The kernel said meanwhile: {said}' if said else ''}"


def name(number: int) -> str:
    """The name of a signal."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def kernel(began: float) -> list[str]:
    """The last lines about programs that failed in the kernel's log, if it can be read here."""
    try:
        done = subprocess.run(
            ["dmesg", "--color=never"], capture_output=True, text=True, errors="replace", check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [
        line[2]
        for line in re.finditer(r"^\[ *(\d+\.\d+)\] (.*)$", done.stdout, re.MULTILINE)
        if float(line[1]) > began - CLOCKS_S and FATAL.search(line[2])
    ]
    return [plain(line)[:300] for line in lines[-2:]]


def plain(text: str) -> str:
    """A text without control characters but for ends of lines."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
