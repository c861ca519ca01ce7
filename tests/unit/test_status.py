"""What `farandole status` makes of what nodes say. The nodes themselves are asked on the labs."""

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.status import (
    LEFT_OUT,
    NO_JOBS,
    NOT_SET_UP,
    REVOKED,
    UNPROVEN,
    UPGRADING,
    NodeState,
    Status,
    judge,
    told,
)
from farandole.jobs import ask
from farandole.jobs.ask import Answer, answer_of
from farandole.jobs.login import Head
from farandole.node.head import status as program

STACK, OTHER = "0123456789ab", "ba9876543210"
SAYS: dict[str, Any] = {
    "stack": STACK,
    "slots": {"node-1": 4, "node-2": 4},
    "uses": [[7, "alice", 100.0, {"node-1": 2}]],
    "queue": [["12", "bob", "RUNNING", "1:02", "2"], ["13_[1-4]", "bob", "PENDING", "0:00", "1"]],
}
HEAD = Answer(True, STACK, SAYS["slots"])
DRAINS = Answer(True, STACK, SAYS["slots"], no_jobs={"node-2": "drained: its fan"})
LOST = Answer(True, STACK, SAYS["slots"], no_jobs={"node-2": "down: Not responding"}, lost=["node-2"])


def asked(*lines: str, status: int = 0) -> Answer:
    return answer_of("\n".join(lines), status, "ssh root@192.0.2.1")


def cluster(nodes: dict[str, NodeState], **changes: Any) -> list[str]:
    plain: dict[str, Any] = {"runs": (), "queue": None, "validation": None, "applying": False}
    return told(Status("inventory/mine", next(iter(nodes)), STACK, nodes, **(plain | changes)), 400.0)


def test_what_a_node_says_is_read_below_what_its_login_prints() -> None:
    answer = asked("Welcome!", json.dumps(SAYS))
    assert (answer.up, answer.stack, answer.slots) == (True, STACK, SAYS["slots"])
    assert answer.uses == ({"number": 7, "owner": "alice", "since": 100.0, "slots": {"node-1": 2}},)
    assert isinstance(answer.queue, list)
    assert [job["id"] for job in answer.queue] == ["12", "13_[1-4]"]


@pytest.mark.parametrize(
    "changes",
    [
        {"stack": "\x1b[2J"},
        {"stack": "../../tmp"},
        {"slots": {"\x1b[2J": 4}},
        {"slots": {"node-1": float("inf")}},
        {"slots": {"node-1": -1}},
        {"uses": [[7, "\x1b]0;", 1.0, {}]]},
        {"uses": [[7, "alice", 1.0]]},
        {"uses": {}},
        {"queue": [["12", "bob", "\x9b2J", "1:02", "2"]]},
        {"queue": 1},
        {"no_jobs": {"\x1b[2J": "drained"}},
        {"no_jobs": ["node-1"]},
        {"lost": ["\x1b[2J"]},
        {"upgrading": "no"},
    ],
)
def test_an_answer_of_another_form_is_refused_as_a_whole(changes: dict[str, Any]) -> None:
    answer = asked(json.dumps({**SAYS, **changes}))
    assert (answer.up, answer.code, answer.stack) == (False, "answer-malformed", "")
    assert answer.why.isprintable()


@pytest.mark.parametrize(
    ("output", "status", "code"),
    [
        ("ssh: connect to host 192.0.2.1 port 22: Connection timed out", 255, "login-timeout"),
        ("ssh: connect to host 192.0.2.1 port 22: No route to host", 255, "login-no-route"),
        ("Host key verification failed.", 255, "login-host-key-unknown"),
        ("root@192.0.2.1: Permission denied (publickey).", 255, "login-denied"),
        ("\x1b[2Jwhat is this", 255, "login-failed"),
        ("", 255, "login-failed"),
        ("", -9, "node-silent"),
        ("sh: 1: /usr/bin/python3: not found", 127, "answer-malformed"),
        ("Killed", 0, "answer-malformed"),
        ('{"stack": 1', 0, "answer-malformed"),
        ("{" * 100_000, 0, "answer-malformed"),
        ("x" * (ask.LONGEST + 1), -9, "answer-malformed"),
    ],
)
def test_why_there_is_no_answer(output: str, status: int, code: str) -> None:
    answer = asked(output, status=status)
    assert (answer.up, answer.code) == (False, code)
    assert answer.why.isprintable()
    assert "ssh root@192.0.2.1" in answer.why


@pytest.mark.parametrize(
    ("answer", "out", "lock", "head", "code"),
    [
        (Answer(True, STACK), "", STACK, HEAD, ""),
        (Answer(True, STACK), "", STACK, Answer(up=False), ""),
        (Answer(True, OTHER), "", STACK, HEAD, NOT_SET_UP),
        (Answer(True, STACK), "", "", HEAD, NOT_SET_UP),
        (Answer(True, ""), "", STACK, HEAD, NOT_SET_UP),
        (Answer(True, ""), "", "", HEAD, NOT_SET_UP),
        (Answer(True, STACK), "", STACK, Answer(True, STACK, {"node-1": 4}), NOT_SET_UP),
        (Answer(True, STACK), "its fan is broken", STACK, HEAD, LEFT_OUT),
        (Answer(True, STACK), "its fan is broken", STACK, DRAINS, LEFT_OUT),
        (Answer(True, STACK), "", STACK, DRAINS, NO_JOBS),
        (Answer(True, STACK), "", STACK, LOST, UNPROVEN),
        (Answer(True, STACK, upgrading=True), "", STACK, HEAD, UPGRADING),
        (Answer(up=False, code="login-timeout"), "", STACK, HEAD, "login-timeout"),
        (Answer(up=False, code="login-timeout"), "its fan is broken", STACK, HEAD, "login-timeout"),
        (None, "", STACK, HEAD, REVOKED),
    ],
)
def test_a_node_is_good_if_it_answers_takes_part_and_has_the_stack_of_the_lock(
    answer: Answer | None, out: str, lock: str, head: Answer, code: str
) -> None:
    node = judge(answer, out, lock, head, "node-2")
    assert (node.code, node.good) == (code, not code)


def test_nodes_that_never_answer_cost_seconds_and_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "ANSWER_S", 2)
    mark = f"{600 + os.getpid()}"
    dead = Head("node-1", ("ssh", "-o", f"ProxyCommand=sh -c 'sleep {mark}; true'"), "root@192.0.2.1", ())
    begun = time.monotonic()
    answers = ask.ask_all({f"node-{number}": dead for number in range(64)})
    # Even on a slow machine far less than one after the other.
    assert time.monotonic() - begun < 60
    assert {(answer.up, answer.code) for answer in answers.values()} == {(False, "node-silent")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert f"sleep {mark}".encode() not in path.read_bytes().replace(b"\0", b" ")


def test_many_nodes_that_are_alike_fit_in_one_line() -> None:
    nodes = {f"node-{number}": NodeState(True, STACK, 4, ()) for number in range(1, 65)}
    nodes["node-9"] = NodeState(
        False, "", 0, ("no answer (ssh root@192.0.2.9: Connection timed out)",), "login-timeout"
    )
    lines = cluster(nodes)
    assert len(lines) <= 10
    assert lines[1].split()[:4] == ["node-1", "to", "node-8,", "node-10"]
    assert "4 each" in lines[1]
    assert lines[2].startswith("node-9 ")
    assert lines[-1].endswith("farandole preflight -i inventory/mine")


def test_what_ends_an_upgrade_that_was_cut_off_is_told() -> None:
    lines = cluster({"node-1": judge(Answer(True, STACK, upgrading=True), "", STACK, HEAD, "node-1")})
    assert lines[-1] == "next, if no upgrade is at work: farandole apply -i inventory/mine"


def test_what_runs_is_bounded_and_unknown_without_the_head() -> None:
    up = {"node-1": NodeState(True, STACK, 4, ())}
    run = {"number": 7, "owner": "alice", "since": 100.0, "slots": {"node-1": 2}}
    assert "run 7 of alice on node-1 (2), for 5 min" in cluster(up, runs=(run,))
    many = cluster(up, runs=(run,) * 500)
    assert len(many) < 20
    assert "and 490 more" in many
    assert "queue: empty" in cluster(up, queue=[])
    assert "nothing runs" not in cluster(up, queue=[])
    assert not re.search("nothing runs|queue: empty", "\n".join(cluster({"node-1": NodeState(False, "", 0, (), "x")})))


def test_a_head_with_a_long_queue_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostfile").write_text("node-1 slots=4\n")
    for place, path in (("QUEUE", tmp_path), ("SLOTS_IN_USE", tmp_path), ("HOSTFILE", tmp_path / "hostfile")):
        monkeypatch.setattr(program, place, path)
    for name, script in (
        ("squeue", "for n in $(seq 5000); do echo 7_$n'|bob|RUNNING|1-02:03:04|1'; done"),
        ("sinfo", "echo 'node-1|4/0/0/4|allocated|none'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    head = asked(json.dumps(program.status()))
    assert (head.up, head.used, head.why) == (True, {"node-1": 4}, "")
    assert isinstance(head.queue, list)
    assert len(head.queue) + head.unlisted == 5000
    up = {"node-1": NodeState(True, STACK, 4, ())}
    assert "and 4990 more" in cluster(up, queue=head.queue, unlisted=head.unlisted)


def test_a_queue_that_does_not_answer_is_not_good() -> None:
    up = {"node-1": NodeState(True, STACK, 4, ())}
    queues: tuple[Any, ...] = (None, [], "timed out")
    states = [Status("mine", "node-1", STACK, up, (), queue, None, applying=False) for queue in queues]
    assert [state.good for state in states] == [True, True, False]
    assert any("timed out" in line for line in cluster(up, queue="timed out"))


def test_a_verdict_about_another_stack_or_not_all_nodes_says_so() -> None:
    up = {"node-1": NodeState(True, STACK, 4, ())}
    was = {"verdict": "green", "time": "2026-01-02T03:04:05Z"}
    assert cluster(up, validation={**was, "stack": STACK})[-1] == "last validation: green, 2026-01-02 03:04 UTC"
    assert OTHER in cluster(up, validation={**was, "stack": OTHER})[-1]
    of_all = {**was, "hosts": ["node-1"], "quick": False}
    assert cluster(up, validation=of_all)[-1] == "last validation: green, 2026-01-02 03:04 UTC"
    nodes = dict.fromkeys(("node-1", "node-2", "node-3"), up["node-1"])
    some = cluster(nodes, validation={**was, "hosts": ["node-1", "node-9"], "quick": True})[-1]
    assert some == "last validation: green (quick, 1 of 3 nodes), 2026-01-02 03:04 UTC"
    assert cluster(up)[-1] == "never validated; to do that: farandole validate -i inventory/mine"
