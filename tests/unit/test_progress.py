"""What a run tells while it goes on, and what a terminal shows of it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from farandole.core.errors import FarandoleError
from farandole.core.findings import Finding, finding, report, several
from farandole.explain.failures import Why
from farandole.explain.told import Told
from farandole.inventory import state
from farandole.watch import durations, events
from farandole.watch.viewer import THEME, Output, Viewer
from farandole.watch.watched import Watched

from .loading import ROOT

SECRET = "correct-horse-battery-staple"  # noqa: S105, nothing is protected by it
# Clears the screen, goes to its top, and writes over what is there; the last one turns the order of letters around.
HOSTILE = "\x1b[2J\x1b[1;1H\rforged: all is well\x07\u202e"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def event(kind: str, time: float = 0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, **fields}


def begin(hosts: int, **about: Any) -> Watched:
    """A run in whose first task some hosts have begun."""
    watched = Watched()
    for one in (
        event("start", format=events.FORMAT, **about),
        event("play", name="Prepare every node"),
        event("task", task=1, name="base : Install the base packages"),
        *(event("begin", task=1, host=f"node-{number + 1}") for number in range(hosts)),
    ):
        watched.see(one)
    return watched


def shown(watched: Watched, now: float = 10, width: int = 100, height: int = 24) -> list[str]:
    return [line.plain.rstrip() for line in watched.picture(now, width, height)]


def test_few_hosts_have_a_line_each_with_what_they_say_of_a_long_step() -> None:
    watched = begin(2)
    watched.see(event("ok", 5, task=1, host="node-1"))
    watched.see(event("progress", 6, host="node-2", text="OpenMPI 4.1.4: checking for gcc"))
    head, *rows = shown(watched)
    assert head.split() == ["base", ":", "Install", "the", "base", "packages", "0:10"]
    assert rows == ["  node-1  done", "  node-2  running      0:10  OpenMPI 4.1.4: checking for gcc"]


def test_many_hosts_fit_in_any_terminal() -> None:
    watched = begin(64)
    for number in range(1, 62):
        watched.see(event("ok", task=1, host=f"node-{number}"))
    for number in (62, 63, 64):
        watched.see(event("progress", host=f"node-{number}", text=f"step {number}"))
    assert shown(watched)[1:] == [
        "  node-62            running      0:10  step 62",
        "  node-63            running      0:10  step 63",
        "  node-64            running      0:10  step 64",
        "  node-1 to node-61  done",
    ]
    assert shown(watched, height=3)[1:] == [
        "  node-62 to node-64  running      0:10  step 62",
        "  node-1 to node-61   done",
    ]
    for height in range(1, 10):
        for width in (1, 5, 20, 40, 200):
            lines = watched.picture(10, width, height)
            assert len(lines) <= height
            assert all(line.cell_len <= width for line in lines)


def test_what_changed_and_failed_stays_in_a_line_for_all_hosts_together() -> None:
    watched = begin(18)
    for number in range(1, 17):
        watched.see(event("changed", task=1, host=f"node-{number}"))
    watched.see(event("failed", task=1, host="node-17", text="No space left on device"))
    watched.see(event("unreachable", task=1, host="node-18", text="timed out"))
    assert [line.plain for line in watched.see(event("task", task=2, name="next"))] == [
        "changed: base : Install the base packages on node-1 to node-16",
        "failed: base : Install the base packages on node-17",
        "lost: base : Install the base packages on node-18",
    ]
    assert not watched.see(event("task", task=3, name="one more"))


def test_a_check_changes_nothing_and_says_so() -> None:
    watched = begin(1, check=True)
    watched.see(event("changed", task=1, host="node-1"))
    assert shown(watched)[1:] == ["  node-1  would change"]
    [line] = watched.flush()
    assert line.plain.startswith("would change: ")
    assert watched.interrupted(10)[-1].plain == "until then 1 change would be made on node-1"
    watched.see(event("end", 7, hosts={"node-1": {"changed": 1}}))
    told = "1 host in 0:07 (check only): nothing was changed, 1 change would be made on node-1, nothing failed"
    assert watched.closing()[0].plain == told


def test_what_is_wrong_with_a_node_is_not_said_of_the_one_that_the_task_counts_for() -> None:
    watched = begin(1)
    found = finding("answer-malformed", "node-2", seen="odd")
    watched.see(event("failed", task=1, host="node-1", text="x", findings=[asdict(found)]))
    [line] = watched.see(event("end", 7, hosts={"node-1": {"failures": 1}}))
    assert line.plain == "failed: base : Install the base packages"
    watched.see(event("why", **Why([("found {problems}.", [found])]).data()))
    assert watched.closing()[0].plain == "1 host in 0:07: nothing changed, failed"
    assert "\n".join(line.plain for line in watched.closing()[2:]) == report([found], "found {problems}.")


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
    watched.last = durations.load(path)
    assert watched.last == {task: 42, "end": 1, "quick": 1}
    assert "base packages (last time 0:42) " in shown(watched)[0]
    assert "(last time 0:42)" in watched.beat(10).plain
    watched.see(event("task", task=2, name="quick"))
    assert "last time" not in shown(watched)[0]


@pytest.mark.parametrize("content", ["", "[", "{}", '{"a": "b"}', "null", "[1]", '{"a": NaN}'])
def test_without_a_usable_last_run_nothing_is_said_of_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "kind").write_text(content)
    assert durations.load(tmp_path / "kind") == {}


# What the events are made of


def test_a_node_can_neither_move_the_cursor_nor_forge_a_line() -> None:
    watched = begin(1)
    lines = []
    told, pair = Told(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE), [(HOSTILE, HOSTILE)]
    why = Why([(HOSTILE + "{0}{x}", [Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE)])], pair, pair, [told])
    for one in (
        event("progress", host="node-1", text=HOSTILE),
        event("message", host="node-1", text=HOSTILE),
        event("failed", task=1, host="node-1" + HOSTILE, text=f"{HOSTILE}\n{HOSTILE}"),
        event("why", **why.data()),
        event("task", task=2, name=HOSTILE),
        event("end", hosts={"node-1" + HOSTILE: {"failures": 1}}),
    ):
        lines += [*watched.see(one), *watched.picture(10, 300, 24)]
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
    assert {one.stat().st_mode & 0o777 for one in (kept[0], kept[0].parent, events.plays())} == {0o700}
    for number in range(events.INVENTORIES + 3):
        events.new_folder(own_state / f"other-{number}")
    assert len([*events.plays().iterdir()]) == events.INVENTORIES
    # A cluster's state may belong to another inventory of this name.
    assert events.place_of(own_state / "mine") != events.place_of(own_state / "other/mine")


def test_a_slow_clock_does_not_make_a_run_the_oldest_one(own_state: Path) -> None:
    for number in range(events.RUNS):
        (events.place_of(own_state / "mine") / f"2999-01-01T00-00-{number:02}-000000Z").mkdir(parents=True)
    assert events.new_folder(own_state / "mine").is_dir()


def test_a_folder_that_cannot_be_made_is_an_error_in_words(own_state: Path) -> None:
    (own_state / "state").write_text("")
    with pytest.raises(FarandoleError, match=r"cannot be kept in .*: Not a directory; make this account the owner"):
        events.new_folder("mine")


# Whole runs, of a playbook of ansible-playbook with our settings


PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - {name: Change something, command: "true", tags: [brief]}
    - {name: Keep a secret, command: "echo {{ secret }}", no_log: true}
    - {name: Keep secrets, command: "echo {{ item }}", loop: ["{{ secret }}"], no_log: true}
    - {name: Say something, debug: {msg: "the cluster is fine"}, tags: [brief]}
    - {name: Print a lot, command: "echo a-lot-of-output"}
    - {name: Write a file, copy: {content: "what is new\\n", dest: "{{ to }}"}}
    - {name: Write a secret, copy: {content: "{{ secret }}\\n", dest: "{{ to }}.key"}, no_log: true}
    - {name: Fail in secret, command: "false {{ secret }}", no_log: true, when: inventory_hostname == 'node-2'}
    - {name: Fail, shell: "printf '\\\\033[2Jforged\\\\n' >&2; cp /dev/zero /dev/full", when: not ansible_check_mode}
    - {name: Take long, command: "sleep 30", tags: [brief], when: long is defined}
"""
MAIN = """
import os, sys
from pathlib import Path
from farandole.cli import app
from farandole.core import project
from farandole.plays import playbook
project.ROOT = playbook.ROOT = Path(sys.argv[1])
project.CONFIG = playbook.ROOT / "ansible.cfg"
os.environ["FARANDOLE_STATE"] = str(playbook.ROOT / ".farandole")
sys.argv[1:] = sys.argv[2:]
app.main()
"""
LONG = ("--tags", "brief", "-e", "long=true")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which runs are recorded, with a playbook for hosts that are this machine."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("collections", "ansible.cfg"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "src").mkdir()
    (folder / "src/farandole").symlink_to(ROOT / "src/farandole")
    (folder / "site.yml").write_text(PLAY)
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {"hosts": {"node-1": host, "node-2": host}, "vars": {"secret": SECRET}}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": hosts}))
    return folder


def command(clone: Path, verb: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", MAIN, str(clone), verb, "-i", str(clone / "hosts.yml"), *arguments]


def run(clone: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(clone, verb, *arguments), text=True, capture_output=True, timeout=60, check=False, cwd=clone
    )


def recorded(clone: Path) -> Path:
    """The folder of the last run."""
    return sorted(clone.glob(".farandole/.plays/hosts.yml-*/2*"))[-1]


@dataclass(frozen=True)
class Done:
    """A run that has ended: its status, what it printed, its events and its folder."""

    status: int
    said: str
    folder: Path

    @property
    def events(self) -> list[Mapping[str, Any]]:
        return [events.parse(raw) for raw in events.Reader(self.folder / "events.jsonl").lines()]

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [one for one in self.events if one["event"] == kind]

    def again(self, *, terminal: bool = False, width: int = 100, height: int = 24) -> str:
        """What a viewer prints of it."""
        file = io.StringIO()
        console = Output(
            file=file, force_terminal=terminal, highlight=False, markup=False, theme=THEME, width=width, height=height
        )
        with Viewer(self.folder, console=console) as viewer:
            viewer.watched.see(self.events[0])
            viewer.look()
        viewer.close()
        return file.getvalue()


@pytest.fixture(scope="module")
def failed(clone: Path) -> Done:
    """A run that changes something, shows differences, and fails on all hosts, on one of them in secret."""
    done = run(clone, "apply", "--diff", "-e", f"to={clone}/written-{{{{ inventory_hostname }}}}")
    return Done(done.returncode, done.stdout, recorded(clone))


@pytest.fixture(scope="module")
def checked(clone: Path) -> Done:
    """A run that only checks, and succeeds, for a program."""
    done = run(clone, "apply", "--check", "--json", "-e", f"to={clone}/predicted")
    assert done.stderr == ""
    return Done(done.returncode, done.stdout, recorded(clone))


def test_a_run_that_failed_says_what_changed_and_why_and_keeps_the_rest_in_its_log(failed: Done) -> None:
    assert failed.status == 2, failed.said
    assert "\x1b" not in failed.said
    assert "changed: Change something on node-1, node-2\n" in failed.said
    assert "the cluster is fine" in failed.said
    assert "failed: Fail in secret on node-2\n" in failed.said
    assert re.search(r"failed on node-1, node-2\nlog: .*\n\nroot cause \[disk-full\]", failed.said), failed.said
    assert failed.said.count("root cause") == 1
    assert "cure:" in failed.said.splitlines()[-1] + failed.said.splitlines()[-2]
    assert "TASK [Change something]" in (failed.folder / "log").read_text()
    assert "next: " not in failed.said


def test_differences_are_shown(failed: Done) -> None:
    assert "--- before" in failed.said
    assert re.search(r"^  \+what is new$", failed.said, re.MULTILINE)


def test_no_secret_and_no_output_is_kept_and_only_the_owner_reads_what_is(failed: Done, checked: Done) -> None:
    for done in (failed, checked):
        kept = done.said + "".join(path.read_text() for path in done.folder.iterdir())
        assert SECRET not in kept
        assert "a-lot-of-output" not in kept
        assert {one.stat().st_mode & 0o777 for one in done.folder.iterdir()} == {0o600}


def test_programs_get_every_event_as_json(checked: Done, failed: Done) -> None:
    assert checked.status == 0, checked.said
    assert [json.loads(line) for line in checked.said.splitlines()] == checked.events
    assert checked.events[0]["format"] == events.FORMAT
    assert {name: row["failures"] for name, row in checked.of("end")[0]["hosts"].items()} == {"node-1": 0, "node-2": 0}
    [why] = failed.of("why")
    assert [(one["role"], one["code"]) for one in why["causes"]] == [("root cause", "disk-full")]
    assert {one["host"] for one in failed.of("failed")} == {"node-1", "node-2"}


def test_a_check_says_that_nothing_is_changed(checked: Done, clone: Path) -> None:
    assert not [*clone.glob("predicted*")]
    said = checked.again()
    assert "would change: Write a file on node-1, node-2\n" in said
    assert not re.search(r"^changed: |: \d+ changes on", said, re.MULTILINE)
    assert "(check only): nothing was changed, " in said


def test_what_a_run_took_is_known_to_the_next_one(clone: Path) -> None:
    done = run(clone, "apply", "--tags", "brief")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("nothing failed") == 1
    assert {*durations.load(recorded(clone).parent / events.DURATIONS)} >= {"all / Change something"}


@pytest.mark.parametrize("columns", [1, 10, 60])
def test_a_terminal_may_be_as_narrow_as_it_likes(columns: int, failed: Done) -> None:
    said = failed.again(terminal=True, width=columns, height=3)
    assert "changed: " in plain(said)
    assert "\x1b" in said


def test_a_terminal_without_colours_gets_none(failed: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert re.search(r"\x1b\[[0-9;]*3\dm", failed.again(terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", failed.again(terminal=True))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in failed.again(terminal=True)


def test_what_fails_before_the_first_task_is_shown_from_the_log(clone: Path) -> None:
    # Standard output is for the program.
    done = run(clone, "apply", "--limit", "nobody*", "--json")
    assert done.returncode == 1
    assert "leaves us with no hosts to target" in " ".join(done.stderr.split())
    assert all(json.loads(line) for line in done.stdout.splitlines())


OUTPUT = """
import sys
from pathlib import Path
from farandole.plays import playbook
from farandole.watch.viewer import Viewer
folder, events = Path(sys.argv[1]), sys.argv[2]
viewer = Viewer(folder)
script = f"head -3 {events} > {folder}/events.jsonl; sleep 1; cp {events} {folder}"
status = playbook._follow(["sh", "-c", script], folder, viewer)
viewer.close()
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("| head -1", "nobody reads the output any more"),
        (">/dev/full", r"the output cannot be written \(No space left on device\)"),
        (">&-", None),
    ],
)
def test_an_output_that_cannot_be_written_does_not_end_the_run(
    where: str, words: str | None, failed: Done, tmp_path: Path
) -> None:
    program = [sys.executable, "-c", OUTPUT, str(tmp_path), str(failed.folder / "events.jsonl")]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$@" {where}', "bash", *program],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{words}; the run goes on: \S+\n" if words else "", done.stderr), done.stderr


def test_without_a_run_there_is_nothing_to_watch(clone: Path, tmp_path: Path) -> None:
    done = run(clone, "watch", "-i", str(tmp_path / "other"))
    assert done.returncode == 1
    assert "no run of" in done.stderr
    assert "was recorded here" in done.stderr


def test_a_run_that_was_killed_is_watched_to_its_last_event(clone: Path) -> None:
    with subprocess.Popen(command(clone, "apply", *LONG), stdout=subprocess.PIPE, cwd=clone) as process:
        assert process.stdout
        for line in process.stdout:
            if b"Change something" in line:
                break
        playbook = children(process.pid)[0]
        with subprocess.Popen(command(clone, "watch"), text=True, stdout=subprocess.PIPE, cwd=clone) as watch:
            wait_for(clone, '"Take long"')
            time.sleep(1)
            # Its workers, and then what runs in them, find that it is gone.
            os.kill(playbook, signal.SIGKILL)
            said, _ = watch.communicate(timeout=30)
    assert watch.returncode == 0
    assert "the run broke off during: Take long on node-1, node-2\n" in said
    assert said.splitlines()[-2].startswith("until then ")
    assert process.returncode == 128 + signal.SIGKILL
    assert processes(clone) == []


@pytest.mark.parametrize("content", ["[]\n", "\x1b[2J\n", '{"event": "start", "format": 2, "run": 7}\n'])
def test_what_is_no_record_of_a_run_does_no_harm(content: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(content)
    file = io.StringIO()
    with Viewer(tmp_path, console=Output(file=file)) as viewer:
        viewer.skip("over")
    viewer.close()
    assert "\x1b" not in file.getvalue()


def wait_for(clone: Path, words: str) -> None:
    while words not in (recorded(clone) / "events.jsonl").read_text():
        time.sleep(0.1)


# Real terminals


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, arguments: list[str], folder: Path, columns: int, rows: int = 24, **environment: str) -> None:
        pid, self.handle = pty.fork()
        if not pid:
            os.chdir(folder)
            # The tests themselves may run under nohup.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
            time.sleep(0.2)
            # Without an environment of its own it would get the size that readline has set for this process.
            os.execve(arguments[0], arguments, {**kept, "TERM": "xterm-256color", **environment})  # noqa: S606
        self.pid, self.text = pid, ""
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until: str = "") -> str:
        """Read until something is shown, or to the end."""
        while not until or until not in self.text:
            try:
                self.text += os.read(self.handle, 1 << 16).decode()
            except OSError:
                break
        return self.text

    def end(self) -> int:
        self.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_another_terminal_sees_the_run_and_two_interrupts_say_what_was_done_and_leave_nothing(clone: Path) -> None:
    terminal = Terminal(command(clone, "apply", "--ask-become-pass", *LONG), clone, 100)
    terminal.read("BECOME password: ")
    os.write(terminal.handle, f"{SECRET}\n".encode())
    terminal.read("Take long")
    other = Terminal(command(clone, "watch"), clone, 100)
    other.read("Take long")
    os.write(other.handle, b"\x03")
    assert other.end() == 130
    assert "interrupted; the run goes on" in plain(other.text)
    # No line of the narrow picture is wider than the terminal.
    before = len(terminal.text)
    terminal.resize(30)
    time.sleep(1.5)
    assert len(processes(clone)) > 2
    os.write(terminal.handle, b"\x03")
    time.sleep(0.05)
    os.write(terminal.handle, b"\x03")
    terminal.read("interrupted during")
    narrow = plain(terminal.text[before:]).split("interrupted during")[0]
    assert max(len(line) for line in narrow.replace("\r", "\n").splitlines()[-3:]) < 30
    assert terminal.end() == 130
    said = " ".join(plain(terminal.text).split())
    assert re.search(r"interrupted during: Take long, 0:\d\d on node-1, node-2", said), said
    assert re.search(r"until then \d+ changes on node-1, node-2", said)
    assert "run the same command again: it goes on where this one stopped" in said
    assert "\x1b[1A" in terminal.text
    assert "\x1b[33mchanged: " in terminal.text
    assert "Traceback" not in terminal.text
    assert processes(clone) == []
    assert SECRET not in terminal.text + "".join(one.read_text() for one in recorded(clone).iterdir())
    ended = run(clone, "watch")
    assert ended.returncode == 0
    assert re.match(r"no run is going on; the last one was started .* UTC:\n", ended.stdout)
    assert "the run broke off during: Take long" in ended.stdout


def test_a_terminal_that_is_closed_ends_the_run(clone: Path) -> None:
    arguments = [
        word.replace("app.main()", "playbook.GRACE_S = 1; app.main()") for word in command(clone, "apply", *LONG)
    ]
    terminal = Terminal(arguments, clone, 100)
    terminal.read("Take long")
    os.close(terminal.handle)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 130
    assert processes(clone) == []


def test_a_run_that_is_told_to_end_lets_ansible_end_by_itself(clone: Path) -> None:
    with subprocess.Popen(command(clone, "apply", *LONG), stdout=subprocess.PIPE, cwd=clone) as process:
        assert process.stdout
        while b"Change something" not in (line := process.stdout.readline()):
            assert line
        process.terminate()
        assert b"until then 2 changes on node-1, node-2\n" in process.communicate(timeout=15)[0]
    assert process.returncode == 130
    # Ansible sometimes trips over a worker that has ended meanwhile.
    ways = "User interrupted execution|process object is closed|worker was found in a dead state|KeyboardInterrupt"
    assert re.search(ways, (recorded(clone) / "log").read_text())
    assert processes(clone) == []


STUBBORN = """
import sys
from pathlib import Path
from farandole.core.errors import Interrupted
from farandole.plays import playbook
from farandole.watch.viewer import Viewer
folder = Path(sys.argv[1])
try:
    playbook._follow(["sh", "-c", "trap '' INT; setsid sleep 60 & sleep 60; true"], folder, Viewer(folder))
except Interrupted:
    print("ended")
"""


def test_a_second_interrupt_ends_what_takes_no_notice_of_the_first(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(tmp_path)], text=True, stdout=subprocess.PIPE
    ) as process:
        while len(sleepers := children(process.pid)) < 3:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=5)[0] == "ended\n"
    assert not [pid for pid in sleepers if Path(f"/proc/{pid}").exists()]


def children(pid: int) -> list[int]:
    """The processes that descend from one."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [below for child in found for below in children(child)]


def processes(clone: Path) -> list[str]:
    """The processes that belong to a run in the clone."""
    found = subprocess.run(
        ["pgrep", "--full", "--", f"-i {clone}/hosts.yml"], capture_output=True, text=True, check=False
    )
    return found.stdout.split()


@pytest.mark.parametrize("killed", [False, True])
def test_a_prompt_that_ends_leaves_a_terminal_that_shows_what_is_typed(clone: Path, *, killed: bool) -> None:
    terminal = Terminal(command(clone, "apply", "--ask-become-pass"), clone, 60)
    terminal.read("BECOME password: ")
    assert not termios.tcgetattr(terminal.handle)[3] & termios.ECHO
    if killed:
        os.kill(children(terminal.pid)[0], signal.SIGKILL)
    else:
        os.write(terminal.handle, b"\x03")
    assert terminal.end() == 128 + (signal.SIGKILL if killed else signal.SIGINT)
    assert termios.tcgetattr(terminal.handle)[3] & termios.ECHO
    assert "nothing was begun" in terminal.text


def plain(text: str) -> str:
    """What a terminal has received, without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
