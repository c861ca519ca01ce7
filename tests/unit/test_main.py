"""What `farandole` itself makes of errors, interrupts and terminals: messages, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
from farandole.cli import app
from farandole.core.errors import Interrupted
def stopped():
    raise Interrupted("to go on: farandole attach -i '[/a] :key:'")
app.app = stopped
app.main()
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    (tmp_path / "hosts.yml").write_text("cluster: {hosts: {node-1: }}\nhead: {hosts: {node-1: }}\n")
    return tmp_path


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given, command = {**os.environ, **environment}, [sys.executable, *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, errors="replace", check=False)


@pytest.mark.parametrize("home", ["/proc/nowhere/.ansible", ""])
def test_a_home_that_cannot_be_written_is_one_message(inventory: Path, home: str) -> None:
    given = {"HOME": "/proc/nowhere", "ANSIBLE_HOME": home or str(inventory / ".ansible")}
    done = started("-m", "farandole", "runs", "-i", str(inventory), **given)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert "/proc/nowhere" in done.stderr


def test_what_the_locale_lacks_is_escaped() -> None:
    done = started("-m", "farandole", "explain", "--list", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupts_message_is_shown_as_it_is() -> None:
    done = started("-c", INTERRUPTED)
    assert (done.returncode, done.stderr) == (130, "interrupted; to go on: farandole attach -i '[/a] :key:'\n")
