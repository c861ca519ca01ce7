"""The lock that a run holds on a cluster; a dead run holds none."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.inventory import run_lock as runs

from .loading import load

run_lock = load("modules", "run_lock")
Run = runs.ClusterRun
Sleeping = subprocess.Popen[bytes]
ELSEWHERE = "another-boot pid:[4026531836]"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands in for another run's ansible-playbook."""
    with subprocess.Popen(["sleep", "100"]) as sleeping:
        yield sleeping
        sleeping.kill()


@pytest.fixture
def other(process: Sleeping) -> Run:
    return runs.this_run(process.pid)


@pytest.fixture
def mine() -> Iterator[Run]:
    with subprocess.Popen(["sleep", "100"]) as sleeping:
        yield runs.this_run(sleeping.pid)
        sleeping.kill()


@pytest.mark.parametrize(
    ("number", "changes", "holds"),
    [
        (0, {}, True),
        (signal.SIGSTOP, {}, True),
        (signal.SIGKILL, {}, False),
        (signal.SIGTERM, {}, False),
        # Its process has another number by now, or it is left to the head.
        (0, {"started": 1}, False),
        (0, {"place": ELSEWHERE}, False),
    ],
)
def test_a_lock_is_held_by_a_live_run_of_this_machine(
    tmp_path: Path, process: Sleeping, other: Run, mine: Run, number: int, changes: dict[str, Any], holds: bool
) -> None:
    held = replace(other, **changes)
    for _ in range(2):
        runs.take(tmp_path, held)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o600
    if number:
        process.send_signal(number)
    deadline = time.monotonic() + 5
    # It is a zombie, so its number is still in use.
    while not holds and held.alive and held.place == other.place and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ("kill" in runs.refusal(held)) is holds
    if holds:
        message = f"changed by {other.who} on this machine .process {other.pid}, since {other.since}.*kill {other.pid}"
        with pytest.raises(FarandoleError, match=message):
            runs.take(tmp_path, mine)
        return
    runs.take(tmp_path, mine)
    assert runs.read(json.loads((tmp_path / "run").read_text())) == mine
    for text in ("", "{", "[]", "null", '{"pid": 1}'):
        (tmp_path / "run").write_text(text)
        runs.take(tmp_path, mine)


def test_text_from_the_head_is_made_printable(other: Run) -> None:
    record = {**asdict(other), "who": "\x1b[2Jroot\n$(touch /tmp/x)" + 1000 * "x", "place": ELSEWHERE}
    run = runs.read(record)
    assert run
    assert run.who.startswith("?[2Jroot?$(touch /tmp/x)xxx")
    assert len(run.who) == 120
    assert "kill" not in runs.refusal(run)
    wrong: list[dict[str, Any]] = [{"pid": "1; reboot"}, {"pid": None}, {"who": ["x"]}, {"since": {}}]
    # `kill` would read these as all processes, or a group.
    wrong += [{"pid": -1}, {"pid": 0}, {"pid": 1e999}]
    assert [runs.read({**record, **change}) for change in wrong] == [None] * 7


# The head


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the module as a run does; a local process stands in for the one on the head."""
    monkeypatch.setattr(run_lock, "GRACE", 0)
    path = tmp_path / "head"
    path.touch()

    def ask(run: Run, holder: int, over: Run | None = None) -> Any:
        with path.open("r+") as file:
            if held := run_lock.held_by_another(file, asdict(run), asdict(over) if over else None):
                return held
            run_lock.write(file, asdict(run), holder)
            return None

    return ask


@pytest.mark.parametrize("place", ["here", ELSEWHERE])
def test_the_head_refuses_all_runs_but_the_recorded_one_while_it_lives(
    head: Any, process: Sleeping, other: Run, mine: Run, place: str
) -> None:
    other = replace(other, place=place)
    for _ in range(2):
        assert head(other, process.pid) is None
    assert runs.read(head(mine, mine.pid)) == other
    assert head(mine, mine.pid, over=other) is None
    assert runs.read(head(other, process.pid)) == mine
    assert head(other, process.pid, over=mine) is None
    process.kill()
    process.wait()
    # It had already ended when it was recorded.
    head(other, process.pid)
    assert head(mine, mine.pid) is None


# The keeper

REMOTE = ["env", "SSH_CONNECTION=192.0.2.5 1 192.0.2.1 22", "sh", "-c", f"echo Welcome; {runs.HOLDER}"]


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while runs.started(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    return runs.started(pid) is None


@pytest.mark.parametrize("killed", ["run", "keeper"])
def test_the_remote_process_lives_as_long_as_the_run_and_its_keeper(process: Sleeping, other: Run, killed: str) -> None:
    keeper, holder, source = runs.start_keeper(other, REMOTE)
    assert source == "192.0.2.5"
    assert not gone(holder, 1.5 if killed == "run" else 0)
    (process if killed == "run" else keeper).kill()
    assert gone(holder, 10)
    keeper.wait(10)


def test_the_remote_process_ends_without_heartbeats() -> None:
    quick = runs.HOLDER.replace(f"-t {runs.PATIENCE}", "-t 1")
    assert quick != runs.HOLDER
    with subprocess.Popen(["sh", "-c", quick], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as silent:
        assert silent.wait(10) == 0


def test_a_failed_connection_shows_the_message_of_ssh(other: Run) -> None:
    with pytest.raises(FarandoleError, match="Permission denied"):
        runs.start_keeper(other, ["sh", "-c", "echo Welcome; echo 'Permission denied (publickey).' >&2; exit 255"])


def registered(run: Run, head: Any) -> str:
    def ask(call: dict[str, Any]) -> dict[str, Any]:
        over = runs.read(call["over"]) if "over" in call else None
        return {"held": head(runs.read(call["run"]), call["holder"], over)}

    return runs.register_on_head(run, partial(runs.start_keeper, run, REMOTE), ask)


def test_the_head_records_a_run_and_then_refuses_others(head: Any, other: Run, mine: Run) -> None:
    assert registered(mine, head) == ""
    with pytest.raises(FarandoleError, match=f"process {mine.pid}, since .*has changed nothing"):
        registered(other, head)


def test_a_dead_run_of_this_machine_blocks_no_other(head: Any, process: Sleeping, other: Run, mine: Run) -> None:
    # Its connection to the head is still open.
    head(other, mine.pid)
    process.kill()
    process.wait()
    assert registered(mine, head) == ""
    assert runs.read(head(other, 0)) == replace(mine, source="192.0.2.5")


def test_a_head_that_cannot_record_a_run_gives_a_warning(mine: Run) -> None:
    def unconnected() -> runs.Keeper:
        raise FarandoleError("ssh says no")

    reason = "are not kept out of this cluster: no connection can be held open to the head (ssh says no). Make sure"
    assert reason in runs.register_on_head(mine, unconnected, lambda _: {})
    keeper = partial(runs.start_keeper, mine)
    reason = "are not kept out of this cluster: the head does not answer (gone?). Make sure"
    assert reason in runs.register_on_head(mine, partial(keeper, REMOTE), lambda _: {"msg": "gone\n"})
    # One that does not name the other run refuses it.
    with pytest.raises(FarandoleError, match="remove /var/lib/farandole-run on it"):
        runs.register_on_head(mine, partial(keeper, REMOTE), lambda _: {"held": {"who": "x"}})


def test_the_keepers_connection_never_prompts() -> None:
    command = ["sshpass", "-d9", "ssh", "-vvv", "-o", "A=b", "node-1", runs.HOLDER]
    expected = ["ssh", "-o", "BatchMode=yes", "-o", "ControlMaster=no", "-o", "A=b", "node-1", runs.HOLDER]
    assert runs.own_connection(command, "ssh") == expected


def test_a_person_who_uses_sudo_is_known_by_their_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    assert runs.this_run(1).who.startswith("alice@")
