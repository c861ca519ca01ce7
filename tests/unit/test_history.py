"""What `farandole history` makes of records that are whole, cut short, edited, or of another version."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from farandole.cli import history
from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.inventory import excluded, run_lock, state
from farandole.watch import events

from .test_watched import CONTROL, HOSTILE

Make = Callable[..., Path]
RUNS = history.runs
WHO = {"who": "alice@desk", "since": "", "place": "elsewhere", "pid": 7, "started": 7, "source": ""}
START = {"event": "start", "format": events.FORMAT, "playbook": "/x/site.yml", "limit": "node-2", "run": WHO}
DONE = (
    {"event": "task", "task": 1, "name": "base : Look"}, {"event": "ok", "task": 1, "host": "node-1"},
    {"event": "task", "task": 2, "name": "base : Write"},
    *({"event": "changed", "task": 2, "host": f"node-{number}"} for number in (1, 2)),
    {"event": "task", "task": 3, "name": "base : Wait"}, {"event": "begin", "task": 3, "host": "node-2"},
)  # fmt: skip
END = {"event": "end", "time": 60, "hosts": {"node-1": {"changed": 1}, "node-2": {"changed": 1}}}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory whose head does not answer."""
    monkeypatch.setenv(state.SETTING, str(tmp_path / "state"))
    monkeypatch.delenv(events.VARIABLE, raising=False)
    monkeypatch.setattr(history, "runs", lambda *_: silent())
    groups: dict[str, Any] = {"cluster": {"hosts": {"node-1": {}, "node-2": {}}}, "head": {"hosts": {"node-1": {}}}}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/hosts.yml").write_text(yaml.safe_dump(groups))
    return tmp_path / "mine"


def silent() -> dict[str, list[history.Entry] | None]:
    raise FarandoleError("no answer")


@pytest.fixture
def make(mine: Path) -> Make:
    """Makes the record of a run that began on a day of this January."""

    def made(day: int, *known: Any) -> Path:
        folder = events.place_of(mine) / f"2026-01-{day:02}T03-04-05-000000Z"
        folder.mkdir(parents=True)
        lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in known]
        (folder / events.EVENTS).write_text("".join(f"{line}\n" for line in lines))
        return folder

    return made


def called(mine: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["history", "-i", str(mine), *arguments])
    assert not result.exception, result.output
    return result


def told(mine: Path, *arguments: str) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(called(mine, *arguments, "--json").stdout)["events"]
    return answer


def test_who_did_what_when_and_what_changed(mine: Path, make: Make) -> None:
    make(2, START, *DONE, END)
    make(1, {**START, "playbook": "/x/playbooks/validate.yml", "check": True}, END)
    old, new = told(mine)
    assert (old["what"], new["what"]) == ("validate --check --limit node-2", "apply --limit node-2")
    assert (new["time"], new["who"], new["nodes"]) == ("2026-01-02T03:04:05Z", "alice@desk", ["node-1", "node-2"])
    assert new["changes"] == [{"task": "base : Write", "hosts": ["node-1", "node-2"]}]
    lines = called(mine).stdout.splitlines()
    assert [line[:10] for line in lines] == ["2026-01-01", "2026-01-02"]
    assert "2 changes on node-1, node-2" in lines[1]
    detail = called(mine, "2026-01-02").stdout.splitlines()
    assert (detail[0][:10], detail[1]) == ("2026-01-02", "  changed: base : Write on node-1, node-2")


# An ssh to a head where bob has no account.
SSH = """#!/bin/sh
eval "last=\\${$#}"
case "$last" in *"-u bob "*) exit 1 ;; *-u*) set -- ${last#*-u }; who=$1 ;; *) who=alice ;; esac
echo "{\\"number\\": 1, \\"owner\\": \\"$who\\", \\"created\\": 1, \\"program\\": \\"x\\", \\"how\\": \\"y\\"}"
"""


@pytest.mark.parametrize(
    ("user", "listed", "not_listed"),
    [
        ("root", ["trainer", "alice"], "bob"),
        ("admin", ["trainer", "alice"], "bob"),
        ("alice", ["alice"], "trainer, bob"),
    ],
)
def test_it_says_whose_programs_are_listed(
    user: str, listed: list[str], not_listed: str, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "runs", RUNS)
    people = [{"name": "alice", "uid": 2001}, {"name": "bob", "uid": 2002}]
    groups = yaml.safe_load((mine / "hosts.yml").read_text())
    groups["cluster"]["vars"] = {"cluster_users": people, "ansible_user": user}
    (mine / "hosts.yml").write_text(yaml.safe_dump(groups))
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [entry["who"] for entry in told(mine)] == listed
    assert json.loads(called(mine, "--json").stdout)["runs_of"] == listed
    assert f"programs of {not_listed} are not listed" in called(mine).stderr


def test_since_and_node_choose(mine: Path, make: Make) -> None:
    make(1, START, *DONE[:4], END)
    make(3, START, {**END, "hosts": {"node-1": {"changed": 0}}})
    assert [entry["time"][:10] for entry in told(mine, "--since", "2026-01-02")] == ["2026-01-03"]
    [only] = told(mine, "--node", "node-2")
    assert (only["time"][:10], only["how"].partition(":")[0]) == ("2026-01-01", "1 host in 1")
    assert not told(mine, "--since", "1h")
    assert CliRunner().invoke(app, ["history", "-i", str(mine), "--since", "soon"]).exit_code == 1


def test_a_run_that_was_killed_is_no_success_and_one_that_goes_on_is_not_dead(mine: Path, make: Make) -> None:
    make(1, START, *DONE)
    make(2, {**START, "run": asdict(run_lock.this_run(1))}, *DONE)
    dead, alive = told(mine)
    assert "broke off during: base : Wait on node-2" in dead["how"]
    assert "2 changes on node-1, node-2" in dead["how"]
    assert alive["how"] == "goes on: base : Wait"


@pytest.mark.parametrize(
    "known",
    [
        [], ["[]"], ["[" * 100_000], ['{"event": "start", "format": 2, "ru'],
        [{**START, "run": 7, "tags": [{}]}, {"event": "end"}],
        [START, {"event": "changed", "task": [], "host": {}}, {"event": "end", "hosts": [7]}],
        [{**START, "format": 9}], [{**START, "playbook": {}}, {**END, "time": "x", "hosts": {"a": {"changed": {}}}}],
        [{"event": "why", "findings": 7}, END],
    ],
)  # fmt: skip
def test_a_record_that_was_cut_short_or_edited_hides_no_other(mine: Path, make: Make, known: list[Any]) -> None:
    make(1, *known)
    make(2, START, *DONE, END)
    for _ in range(events.RUNS):
        events.new_folder(mine)
    assert [entry["time"][:10] for entry in told(mine)] == ["2026-01-01", "2026-01-02"]
    called(mine, "2026")


def test_nobody_can_control_the_terminal(mine: Path, make: Make) -> None:
    odd = {"name": HOSTILE, "host": HOSTILE, "text": HOSTILE, "hosts": {HOSTILE: {"changed": 1}}}
    make(1, {**START, "playbook": f"/{HOSTILE}.yml", "limit": HOSTILE, "run": {**WHO, "who": HOSTILE}},
         *({**entry, **{key: odd[key] for key in odd if key in entry}} for entry in (*DONE, END)))  # fmt: skip
    make(2, {**START, "limit": HOSTILE}, END)
    assert not CONTROL.search(called(mine, "2026").stdout)
    spoken = history.program(
        json.dumps({"number": 1, "owner": "bob", "created": 1, "program": HOSTILE, "how": HOSTILE})
    )
    assert spoken
    assert not CONTROL.search(spoken.what + spoken.how)
    for change in ({"owner": HOSTILE}, {"created": "x"}, {"slots": {HOSTILE: 1}}, {"number": -1}):
        good = {"number": 1, "owner": "bob", "created": 1, "program": "x", "how": "x"}
        assert history.program(json.dumps(good))
        assert not history.program(json.dumps({**good, **change}))


def test_of_older_runs_what_they_changed_is_kept(mine: Path, make: Make) -> None:
    whole, torn = make(1, START, *DONE, END), make(2, START, *DONE)
    (whole / events.LOG).write_text("what Ansible printed")
    before = told(mine)
    for _ in range(events.RUNS):
        events.new_folder(mine)
    assert [path.name for path in whole.iterdir()] == [events.BRIEF] == [path.name for path in torn.iterdir()]
    after = told(mine)
    assert after[0] == before[0]
    assert "during: base : Wait" in after[1]["how"]
    assert after[1]["changes"] == before[1]["changes"]
    assert not events.latest(mine)


def test_no_more_is_kept_than_is_read(mine: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BRIEFS", 2)
    for day in range(1, 6):
        make(day, START, *DONE, END)
    for _ in range(events.RUNS):
        events.new_folder(mine)
    assert [entry["time"][8:10] for entry in told(mine)] == ["04", "05"]


def test_the_verdict_stands_with_the_validation_that_came_to_it(mine: Path, make: Make) -> None:
    began = 1767323045
    make(2, {**START, "playbook": "/x/validate.yml"}, {**END, "time": began + 60})
    reports = state.state_folder(mine) / "reports"
    of_others = ("2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z")
    for name, time, verdict in (
        *zip("ac", of_others, ("red",) * 2, strict=True),
        ("b", "2026-01-02T03:05:00Z", "green"),
    ):
        (reports / name).mkdir(parents=True)
        result = {"verdict": verdict, "time": time, "hosts": ["node-1"]}
        (reports / name / "result.json").write_text(json.dumps(result))
    (reports / "latest").symlink_to("b")
    (reports / "torn").mkdir()
    (reports / "torn/result.json").write_text('{"verdict": ')
    first, joined, last = told(mine)
    assert [(alone["kind"], alone["how"], alone["who"]) for alone in (first, last)] == [("validation", "red", "")] * 2
    assert (joined["kind"], joined["who"]) == ("playbook", "alice@desk")
    assert joined["how"].split("; ")[0] == "green"
    assert joined["how"].count("green") == 1


def test_nodes_that_were_left_out_are_told(mine: Path) -> None:
    folder = state.state_folder(mine)
    with excluded.changing(folder) as entries:
        entries["node-1"] = excluded.Entry("2026-01-02T02:00:00Z", "check", "", "clock-skewed", "late", "preflight")
        entries["node-2"] = excluded.Entry("2026-01-01T02:00:00Z", "person", "carol", "", "its fan", "")
    with excluded.changing(folder) as entries:
        del entries["node-1"]
    with (folder / excluded.FORMER).open("a") as log:
        log.write('["node-3", "yesterday", "x", {}]\n["node')
    of_1 = told(mine, "--node", "node-1")
    assert [(event["what"], event["how"]) for event in of_1] == [
        ("node exclude node-1", "late"), ("node include node-1", "it takes part again"),
    ]  # fmt: skip
    assert of_1[0]["who"] == "preflight" and of_1[1]["who"] == run_lock.person()
    assert [event["what"] for event in told(mine)] == ["node exclude node-2", *(event["what"] for event in of_1)]
