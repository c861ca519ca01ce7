"""Run a program that came from another machine as an unprivileged account instead of root."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = "/usr/local/bin:/usr/bin:/bin"
SHOWN = 1500


def run(
    command: Sequence[str], user: str, folder: Path, seconds: int = 600, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command without root's environment; return its exit status and last output. Root owns `folder`."""
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
            process.wait()
            code, overdue = 1, f"it did not end within {seconds} s"
        output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN))
        return code, overdue or output.read(SHOWN).decode(errors="replace").strip()
