"""What uses the stack of a node, and how its end is waited for."""

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farandole.node.head import status
from farandole.node.head.runs import Run
from farandole.node.head.slots import claimed

from .loading import load

stack_use = load("modules", "stack_use")
assert stack_use.CLAIMS == status.SLOTS_IN_USE


class AnsweredError(Exception):
    """The module has ended."""


class Module:
    """A module that is called with these arguments."""

    check_mode = False

    def __init__(self, wait: int, node: str) -> None:
        self.params: dict[str, Any] = {"wait": wait, "end": False, "node": node, "queue": True}

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


def answer(wait: int, monkeypatch: pytest.MonkeyPatch, node: str = "") -> str:
    monkeypatch.setattr(stack_use, "AnsibleModule", lambda **_: Module(wait, node))
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


@pytest.mark.parametrize("command", ["srun", "/usr/bin/salloc"])
def test_a_command_that_holds_a_job_elsewhere_is_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with subprocess.Popen(["bash", "-c", f"exec -a {command} sleep 60"]) as client:
        time.sleep(0.5)
        found = {*stack_use.queued()}
        client.kill()
    assert f"{Path(command).name} of {status.owner(os.getuid())}" in found


def test_a_run_has_its_nodes_before_and_between_its_processes(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(head, monkeypatch, "")
    monkeypatch.setattr(stack_use, "CLAIMS", head / "slots")
    wish = {"np": 2, "hosts": "", "wait": False}
    os.mkfifo(head / "slots/0-1-fifo")
    (head / "slots/0-2-link").symlink_to("/dev/zero")
    with claimed(Run(9), wish), (head / "slots/0-3-x").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("[" * 9999)
        other.flush()
        # An upgrade has left it out first.
        status.HOSTFILE.write_text("node-3")
        found = [answer(0, monkeypatch, f"node-{number}") for number in (1, 2, 3)]
    mine = f"['run 9 of {status.owner(os.getuid())}']"
    assert found == [mine, mine, "[]"] and answer(0, monkeypatch, "node-1") == "[]"


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "squeue").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(stack_use, "CLAIMS", folder / "none")
    monkeypatch.setattr(stack_use, "LOOK_S", 0.1)
    monkeypatch.setattr(stack_use, "SQUEUE_S", 1)
    monkeypatch.setattr(stack_use, "PATIENCE_S", 0)


def test_a_job_that_has_a_node_is_waited_for_without_a_process_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has the node at the first two looks.
    log = tmp_path / "log"
    squeue(tmp_path, monkeypatch, f'echo "$*" >>{log}; [ $(wc -l <{log}) -gt 2 ] || echo 7')
    assert answer(60, monkeypatch, "node-2") == "[]"
    asked = log.read_text().splitlines()
    assert len(asked) == 3 and all(" --nodelist=node-2" in line and "running" in line for line in asked)
    squeue(tmp_path, monkeypatch, "echo 7; echo 8")
    assert "still runs after 1 s: job 7 of the queue, job 8 of the queue" in answer(1, monkeypatch, "node-2")


@pytest.mark.parametrize(("script", "why"), [("echo gone >&2; exit 1", "gone"), ("sleep 60", "squeue ended with 124")])
def test_a_queue_that_does_not_answer_is_not_taken_for_an_empty_one(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(tmp_path, monkeypatch, script)
    assert f"does not say who has node-2: {why}" in answer(60, monkeypatch, "node-2")
