"""The calls that a run asks for ahead, and what becomes of their answers."""

import atexit
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.plays.ahead import action, node
from farandole.plays.ahead.calls import ATTEMPTS, FRESH_S, Answer, Call, HostCalls, RunCalls

from .loading import load


def call(module: str = "stat", arguments: str = "{}", environment: str = "{}", user: str = "root") -> Call:
    return Call(module, arguments, environment, user)


@pytest.fixture
def host(tmp_path: Path) -> HostCalls:
    """A host whose last run called four modules."""
    RunCalls.begin(tmp_path / "run", tmp_path / "record")
    run = RunCalls.current(tmp_path / "run")
    assert run
    former = run.host("node/1")
    for name in "abcd":
        former.add(call(name))
    former.keep()
    RunCalls.begin(tmp_path / "next", tmp_path / "record")
    following = RunCalls.current(tmp_path / "next")
    assert following
    return following.host("node/1")


def test_a_call_and_those_after_it_are_asked_for(host: HostCalls, tmp_path: Path) -> None:
    assert RunCalls.current(tmp_path / "none") is None
    assert [due.module for due in host.due(call("b"))] == ["b", "c", "d"]
    # Too few of them, or others.
    for begun in (call("c"), call("e"), call("a", user="other"), call("a", '{"x": 1}')):
        assert list(host.due(begun)) == []
    assert (host.record.stat().st_mode & 0o777, host.record.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(("release", "asks"), [("2.19.12", True), ("2.20.0", False), ("2.190.1", False)])
def test_another_ansible_asks_nothing_ahead_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, asks: bool
) -> None:
    callback, messages = load("callback", "ask_ahead"), list[str]()
    for name, value in {"FOLDER": tmp_path / "run", "record": lambda: tmp_path, "__version__": release}.items():
        monkeypatch.setattr(callback, name, value)
    begun = callback.CallbackModule(display=SimpleNamespace(display=messages.append, verbosity=0))
    begun.v2_playbook_on_start(None)
    assert ((RunCalls.current(tmp_path / "run") is not None), [release in line for line in messages]) == (
        asks,
        [True] * (not asks),
    )


def test_runs_with_the_same_tags_share_a_record_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = load("callback", "ask_ahead")

    def record(*tags: str) -> object:
        given = {"args": ("site.yml",), "inventory": ("inventory/lab",), "tags": tags}
        monkeypatch.setattr(callback, "context", SimpleNamespace(CLIARGS=given))
        return callback.record()

    assert record("fabric", "slurm") == record("slurm", "fabric") != record("fabric")


def test_a_host_that_changes_again_and_again_is_asked_a_limited_number_of_times(host: HostCalls) -> None:
    assert [bool(host.due(call("a"))) for _ in range(ATTEMPTS + 1)] == [True] * ATTEMPTS + [False]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"module": "a"}\n', "\0"])
def test_a_damaged_record_asks_for_nothing(host: HostCalls, damage: str) -> None:
    host.record.write_text(damage)
    assert list(host.due(call("a"))) == []


def test_answers_are_used_until_something_changes_or_time_has_passed(host: HostCalls) -> None:
    answers = {call("a").key: Answer('{"changed": false}', "legacy")}
    assert host.answers() is None
    host.store(answers)
    assert host.answers() == answers
    host.forget()
    assert host.answers() is None
    host.store(answers)
    old = time.time() - FRESH_S - 1
    os.utime(host._file("answers"), (old, old))
    assert host.answers() is None


def test_what_is_no_result_counts_as_a_failure() -> None:
    for printed in ("", "no JSON", "[1]", '{"changed": fal', "{" * 5000):
        assert action.decode(Answer(printed, "legacy")) == {"failed": True}


def test_answers_belong_to_the_calls_in_the_order_of_the_questions() -> None:
    asked = [("key", "legacy"), ("other", "legacy")]
    answers = {"key": Answer("a", "legacy"), "other": Answer("{'key': 'x'}", "legacy")}
    assert action.told('{"outputs": ["a", {"key": "x"}], "key": "b"}', asked) == answers
    # Too few, too many or too long ones are none.
    for outputs in ("5", "{}", "[]", '["a"]', '["a", "b", "c"]', f'["a", "{"x" * action.LONGEST}"]'):
        assert action.told(f'{{"outputs": {outputs}}}', asked) == {}


def test_a_module_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"

    def hang(*_: object) -> None:
        child = os.fork()
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)
        os._exit(child)

    monkeypatch.setattr(node, "run", hang)
    begun = time.monotonic()
    assert node.ask({}, "", begun + 1) == ""
    assert time.monotonic() - begun < 10
    ended = [Path("/proc") / pid / "cmdline" for pid in pids.read_text().split()]
    assert len(ended) == 2
    deadline = time.monotonic() + 10
    # A zombie has no command line.
    while any(path.exists() and path.read_bytes() for path in ended):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_module_that_crashes_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    # A module's process has only its own clean-up; that of pytest removes old folders, which can take minutes.
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(node, "run", crash)
    assert node.ask({}, "", time.monotonic() + 60) == ""
    monkeypatch.setattr(node, "run", lambda *_: os.write(1, b"printed"))
    assert node.ask({}, "", time.monotonic() + 60) == "printed"


def test_the_call_of_the_task_itself_has_its_own_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(call: dict[str, Any], _: str) -> None:
        time.sleep(call["takes"])
        os.write(1, b"printed")

    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(node, "run", run)
    for name, seconds in {"CALL_S": 1, "ALL_S": 1.5, "OWN_S": 20}.items():
        monkeypatch.setattr(node, name, seconds)
    node.main("", [{"takes": seconds} for seconds in (0, 9, 9, 0, 2)])
    assert json.loads(capsys.readouterr().out) == {"outputs": ["printed", "", "", "", "printed"]}


@pytest.mark.parametrize("secret", [True, False])
def test_what_has_secrets_is_never_recorded(*, secret: bool) -> None:
    task = SimpleNamespace(delegate_to=None, no_log=secret, async_val=0, until=None)
    over_ssh: Any = SimpleNamespace(
        _task=task, _connection=SimpleNamespace(transport="ssh"), _is_pipelining_enabled=lambda _: True
    )
    assert action.AsksAhead._askable(over_ssh, {}) is not secret
