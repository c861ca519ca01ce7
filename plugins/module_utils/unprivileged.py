"""How root tries a program that another machine made: as an account that can harm nobody but itself."""

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
    """Exit status and last words; nothing of root's is handed on. `folder` is root's own."""
    account = pwd.getpwnam(user)
    # Who is not root cannot become another account, and need not.
    other: dict[str, Any] = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    environ = {"PATH": PATH, "HOME": account.pw_dir, "LANG": "C.UTF-8", **(environment or {})}
    with tempfile.TemporaryFile(dir=folder) as words:
        process = subprocess.Popen(
            command, cwd="/", env=environ, stdin=subprocess.DEVNULL, stdout=words, stderr=subprocess.STDOUT,
            start_new_session=True, **(other if os.geteuid() == 0 else {}),
        )  # fmt: skip
        try:
            code, late = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code, late = 1, f"no end after {seconds} s"
        words.seek(max(0, words.seek(0, os.SEEK_END) - SHOWN))
        return code, late or words.read(SHOWN).decode(errors="replace").strip()
