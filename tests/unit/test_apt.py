"""How packages are waited for that another program has locked, with Debian's own dpkg."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from .loading import load

apt = load("module_utils", "apt")
# Has them locked until its input ends.
OTHER = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, 2); print(flush=True); sys.stdin.read()"


class Module:
    """What runs a module's commands."""

    def run_command(self, command: list[str], environ_update: dict[str, str]) -> tuple[int, str, str]:
        done = subprocess.run(
            command, env={**os.environ, **environ_update}, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("patience", "code"), [(60, 0), (0.3, 2)])
def test_what_another_program_has_locked_is_waited_for_but_not_for_ever(
    patience: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("updates", "info"):
        (tmp_path / name).mkdir()
    (tmp_path / "status").touch()
    monkeypatch.setattr(apt, "PATIENCE_S", patience)
    monkeypatch.setattr(apt, "PAUSE_S", 0.1)
    command = [sys.executable, "-c", OTHER, str(tmp_path / "lock-frontend")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        if not code:
            threading.Timer(1, other.stdin.close).start()
        done = apt.Apt(Module()).run("dpkg", f"--admindir={tmp_path}", "--configure", "--pending")
        other.stdin.close()
    assert (done[0], "frontend lock was locked by another process" in done[2]) == (code, bool(code))
