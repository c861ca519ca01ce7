"""What uses the stack of a node, and how its end is waited for."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .loading import load

stack_use = load("modules", "stack_use")


class AnsweredError(Exception):
    """The module has ended."""


class Module:
    """A module that is called with `wait` only."""

    check_mode = False

    def __init__(self, wait: int) -> None:
        self.params: dict[str, Any] = {"wait": wait, "end": False}

    def run_command(self, command: list[str]) -> tuple[int, str, str]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def exit_json(self, **answer: object) -> None:
        raise AnsweredError(str(answer["running"]))

    def fail_json(self, msg: str, **_: object) -> None:
        raise AnsweredError(msg)


@pytest.fixture(autouse=True)
def _of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have jobs, too."""
    monkeypatch.setattr(stack_use, "MARK", f"OF_{tmp_path}=".encode())
    monkeypatch.setattr(stack_use, "ROOT", f"{tmp_path}/".encode())
    monkeypatch.setattr(stack_use, "queued", lambda: iter(()))


@contextmanager
def job(folder: Path, seconds: str) -> Iterator[None]:
    with subprocess.Popen(["env", f"OF_{folder}=x", "sleep", seconds]) as process:
        yield
        process.kill()


def answer(wait: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(stack_use, "AnsibleModule", lambda **_: Module(wait))
    with pytest.raises(AnsweredError) as answered:
        stack_use.main()
    return str(answered.value)


def test_the_end_of_a_job_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    with job(tmp_path, "1.5"):
        assert answer(60, monkeypatch) == "[]"
    assert time.monotonic() - begun > 1.4


def test_a_job_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(tmp_path, "60"):
        time.sleep(0.2)
        assert answer(1, monkeypatch).startswith("this still runs after 1 s: sleep of ")


def test_a_job_of_the_queue_is_found_by_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with subprocess.Popen(["bash", "-c", "exec -a 'slurmstepd: [7777777.batch]' sleep 60"]) as step:
        time.sleep(0.5)
        found = {*stack_use.queued()}
        step.kill()
    assert "job 7777777 of the queue" in found
