"""What is made of the events of a run, and how they are kept."""

import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.core.findings import Finding, finding, report, several
from farandole.explain.failures import Why
from farandole.explain.told import Told
from farandole.inventory import state
from farandole.watch import durations, events
from farandole.watch.viewer import Output, Viewer
from farandole.watch.watched import Watched

# Clears the screen, goes to its top, and writes over what is there; the last one turns the order of letters around.
HOSTILE = "\x1b[2J\x1b[1;1H\rforged: all is well\x07\u202e"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def event(kind: str, time: float = 0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, **fields}


def begin(hosts: int, **about: Any) -> Watched:
    """A run in whose first task some hosts have begun."""
    watched = Watched()
    for entry in (
        event("start", format=events.FORMAT, **about),
        event("play", name="Prepare every node"),
        event("task", task=1, name="base : Install the base packages"),
        *(event("begin", task=1, host=f"node-{number + 1}") for number in range(hosts)),
    ):
        watched.see(entry)
    return watched


def shown(watched: Watched, now: float = 10, width: int = 100, height: int = 24) -> list[str]:
    return [line.plain.rstrip() for line in watched.picture(now, width, height)]


def test_hosts_fit_in_any_terminal_with_what_they_say_of_a_long_step() -> None:
    watched = begin(64)
    for number in range(1, 62):
        watched.see(event("ok", task=1, host=f"node-{number}"))
    for number in (62, 63, 64):
        watched.see(event("progress", host=f"node-{number}", text=f"step {number}"))
    head, *rows = [line.split() for line in shown(watched)]
    assert head == ["base", ":", "Install", "the", "base", "packages", "0:10"]
    busy = [[f"node-{number}", "running", "0:10", "step", str(number)] for number in (62, 63, 64)]
    assert rows == [*busy, ["node-1", "to", "node-61", "done"]]
    rows = [line.split() for line in shown(watched, height=3)[1:]]
    assert rows == [["node-62", "to", "node-64", *busy[0][1:]], ["node-1", "to", "node-61", "done"]]
    for height in range(1, 10):
        for width in (1, 5, 20, 40, 200):
            lines = watched.picture(10, width, height)
            assert len(lines) <= height
            assert all(line.cell_len <= width for line in lines)


def test_a_host_whose_turn_has_not_come_is_not_done() -> None:
    watched = begin(8)
    watched.see(event("task", task=2, name="next"))
    for number in (1, 2):
        watched.see(event("begin", task=2, host=f"node-{number}"))
    watched.see(event("ok", task=2, host="node-1"))
    assert "1 of 8 hosts done" in watched.beat(10).plain


def test_what_changed_and_failed_stays_in_a_line_for_all_hosts_together() -> None:
    watched = begin(18)
    for number in range(1, 17):
        watched.see(event("changed", task=1, host=f"node-{number}"))
    watched.see(event("failed", task=1, host="node-17", text="No space left on device"))
    watched.see(event("unreachable", task=1, host="node-18", text="timed out"))
    lines = [line.plain for line in watched.see(event("task", task=2, name="next"))]
    assert [(line.partition(":")[0], line.partition(" on ")[2]) for line in lines] == [
        ("changed", "node-1 to node-16"), ("failed", "node-17"), ("lost", "node-18"),
    ]  # fmt: skip
    assert not watched.see(event("task", task=3, name="one more"))


def test_a_check_changes_nothing_and_says_so() -> None:
    watched = begin(1, check=True)
    watched.see(event("changed", task=1, host="node-1"))
    lines = [*shown(watched)[1:], watched.flush()[0].plain, watched.interrupted(10)[-1].plain]
    assert ["would" in line for line in lines] == [True] * 3
    watched.see(event("end", 7, hosts={"node-1": {"changed": 1}}))
    assert "nothing was changed, 1 change would be made on node-1, nothing failed" in watched.closing()[0].plain


def test_what_is_wrong_with_a_node_is_not_said_of_the_one_that_the_task_counts_for() -> None:
    watched = begin(1)
    fault = finding("answer-malformed", "node-2", seen="odd")
    watched.see(event("failed", task=1, host="node-1", text="x", findings=[asdict(fault)]))
    [line] = watched.see(event("end", 7, hosts={"node-1": {"failures": 1}}))
    assert line.plain == "failed: base : Install the base packages"
    watched.see(event("why", **Why([("found {problems}.", [fault])]).data()))
    assert watched.closing()[0].plain == "1 host in 0:07: nothing changed, failed"
    assert "\n".join(line.plain for line in watched.closing()[2:]) == report([fault], "found {problems}.")


def test_hosts_are_named_in_a_few_words() -> None:
    assert several(["b"]) == "b"
    assert several([f"node-{number}" for number in range(12, 0, -1)]) == "node-1 to node-12"
    assert several(["n1", "n2", "n5", "n6", "n7", "head"]) == "head, n1, n2, n5 to n7"
    assert several(["a", "c", "e", "g", "i", "k", "m"]).endswith("and 2 more")


def test_a_task_that_took_long_says_how_long(tmp_path: Path) -> None:
    path, task = tmp_path / "durations.json", "Prepare every node / base : Install the base packages"
    durations.save(path, [("quick", 0), (task, 1), (task, 43), ("end", 44)], 45)
    durations.save(path, [("quick", 0)], 1)
    watched = begin(1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").write_text(f"{json.dumps(event('start', format=events.FORMAT))}\n")
    viewer = Viewer(tmp_path / "run", console=Output(file=io.StringIO()))
    viewer.look()
    watched.last = viewer.watched.last
    assert watched.last == {task: 42, "end": 1, "quick": 1}
    assert "base packages (last time 0:42) " in shown(watched)[0]
    assert "(last time 0:42)" in watched.beat(10).plain
    watched.see(event("task", task=2, name="quick"))
    assert "last time" not in shown(watched)[0]


@pytest.mark.parametrize("content", ["", "[", "{}", '{"a": "b"}', "null", "[1]", '{"a": NaN}'])
def test_without_a_usable_last_run_nothing_is_said_of_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "kind").write_text(content)
    assert durations.load(tmp_path / "kind") == {}


def test_a_node_can_neither_move_the_cursor_nor_forge_a_line() -> None:
    watched = begin(1)
    lines = []
    told, pair = Told(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE), [(HOSTILE, HOSTILE)]
    why = Why([(HOSTILE + "{0}{x}", [Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE)])], pair, pair, [told])
    for entry in (
        event("progress", host="node-1", text=HOSTILE),
        event("message", host="node-1", text=HOSTILE),
        event("failed", task=1, host="node-1" + HOSTILE, text=f"{HOSTILE}\n{HOSTILE}"),
        event("why", **why.data()),
        event("task", task=2, name=HOSTILE),
        event("end", hosts={"node-1" + HOSTILE: {"failures": 1}}),
    ):
        lines += [*watched.see(entry), *watched.picture(10, 300, 24)]
    text = "\n".join(line.plain for line in [*lines, *watched.closing()])
    assert "forged" in text
    assert not CONTROL.search(text)


@pytest.mark.parametrize(
    "odd", [{}, {"event": "see"}, {"event": ["x"]}, {"event": "end", "hosts": [1]}, {"event": "ok", "task": "x"},
            {"event": "task", "time": "soon"}, {"event": "why", "findings": [1]}, {"event": "why", "causes": {}},
            {"event": "progress", "host": None, "time": float("nan")}],
)  # fmt: skip
def test_an_odd_event_is_no_traceback(odd: Mapping[str, Any]) -> None:
    watched = begin(2)
    watched.see(odd)
    watched.picture(1, 80, 24)
    watched.closing()


def test_a_run_of_another_version_is_refused_in_words() -> None:
    with pytest.raises(FarandoleError, match="recorded in format 7, and this version reads 2"):
        Watched().see(event("start", format=7))


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = events.Reader(path)
    assert not [*reader.lines()]
    path.write_bytes(b'{"event": "pl')
    assert not [*reader.lines()]
    with path.open("ab") as file:
        file.write(b'ay"}\nbroken\n')
    assert [events.parse(raw) for raw in reader.lines()] == [{"event": "play"}, {}]


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(state.SETTING, str(tmp_path / "state"))
    monkeypatch.delenv(events.VARIABLE, raising=False)
    return tmp_path


def test_a_bounded_number_of_runs_is_kept_and_only_their_owner_can_enter(own_state: Path) -> None:
    folders = [events.new_folder(own_state / "mine") for _ in range(events.RUNS + 3)]
    kept = events.runs_in(events.place_of(own_state / "mine"))
    assert kept == folders[: -events.RUNS - 1 : -1]
    assert {path.stat().st_mode & 0o777 for path in (kept[0], kept[0].parent, events.plays())} == {0o700}
    for number in range(events.INVENTORIES + 3):
        events.new_folder(own_state / f"other-{number}")
    assert len([*events.plays().iterdir()]) == events.INVENTORIES
    # A cluster's state may belong to another inventory of this name.
    assert events.place_of(own_state / "mine") != events.place_of(own_state / "other/mine")
    (own_state / "mine").mkdir(exist_ok=True)
    (own_state / "mine/hosts.yml").touch()
    assert events.place_of(own_state / "mine/hosts.yml") == events.place_of(own_state / "mine")


def test_a_slow_clock_does_not_make_a_run_the_oldest_one(own_state: Path) -> None:
    for number in range(events.RUNS):
        (events.place_of(own_state / "mine") / f"2999-01-01T00-00-{number:02}-000000Z").mkdir(parents=True)
    assert events.new_folder(own_state / "mine").is_dir()


def test_a_folder_that_cannot_be_made_is_an_error_in_words(own_state: Path) -> None:
    (own_state / "state").write_text("")
    with pytest.raises(FarandoleError, match=r"cannot be kept in .*: Not a directory; make this account the owner"):
        events.new_folder("mine")


@pytest.mark.parametrize("content", ["[]\n", "\x1b[2J\n", '{"event": "start", "format": 2, "run": 7}\n'])
def test_what_is_no_record_of_a_run_does_no_harm(content: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(content)
    file = io.StringIO()
    with Viewer(tmp_path, console=Output(file=file)) as viewer:
        viewer.skip("over")
    viewer.close()
    assert "\x1b" not in file.getvalue()
