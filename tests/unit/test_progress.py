"""Whole runs: what a terminal shows, what is kept, and what a kill leaves; the playbook runs under our settings."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.bounds import descendants
from farandole.core.errors import FarandoleError
from farandole.watch import durations, events
from farandole.watch.viewer import THEME, Output, Viewer

from .loading import ROOT

SECRET = "correct-horse-battery-staple"  # noqa: S105, nothing is protected by it

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - {name: Change something, raw: "echo a-lot-of-output", tags: [quick]}
    - {name: Keep secrets, debug: {msg: "{{ item }}"}, loop: ["{{ secret }}"], no_log: true}
    - {name: Say something, debug: {msg: "the cluster is fine"}, tags: [quick]}
    - {name: Write a file, copy: {content: "what is new\\n", dest: "{{ to }}"}, run_once: true}
    - {name: Write a secret, copy: {content: "{{ secret }}\\n", dest: "{{ to }}.key"}, run_once: true, no_log: true}
    - {name: Fail in secret, raw: "false {{ secret }}", no_log: true, when: inventory_hostname == 'node-2'}
    - {name: Fail, raw: "printf '\\\\033[2Jforged\\\\n' >&2; cp /dev/zero /dev/full", when: not ansible_check_mode}
    - {name: Take long, command: "sleep 30", tags: [quick], when: long is defined}
"""
MAIN = """
import os, sys
from pathlib import Path
from farandole.cli import app
from farandole.core import project
from farandole.plays import playbook
project.ROOT = playbook.ROOT = Path(sys.argv.pop(1))
project.CONFIG = playbook.ROOT / "ansible.cfg"
os.environ["FARANDOLE_STATE"] = str(playbook.ROOT / ".farandole")
os.environ.pop("ANSIBLE_CONFIG", None)
app.main()
"""
LONG = ("--tags", "quick", "-e", "long=true")


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


def ended(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, text=True, capture_output=True, timeout=60, check=False, cwd=folder)


def run(clone: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ended(command(clone, verb, *arguments), clone)


def recorded(clone: Path) -> Path:
    """The folder of the last run."""
    return sorted(clone.glob(f".farandole/.plays/{clone.name}-*/2*"))[-1]


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
        return [event for event in self.events if event["event"] == kind]

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
    assert "\x1b" not in failed.said and "next: " not in failed.said
    for part in ("changed: Change something on node-1, node-2\n", "the cluster is fine", "--- before", "+what is new"):
        assert part in failed.said
    assert "failed: Fail in secret on node-2\n" in failed.said
    assert re.search(r"failed on node-1, node-2\nlog: .*\n\nroot cause \[disk-full\]", failed.said), failed.said
    assert failed.said.count("root cause") == 1
    assert "cure:" in "".join(failed.said.splitlines()[-2:])
    assert "TASK [Change something]" in (failed.folder / "log").read_text()


def test_no_secret_and_no_output_is_kept_and_only_the_owner_reads_what_is(failed: Done, checked: Done) -> None:
    for done in (failed, checked):
        kept = done.said + "".join(path.read_text() for path in done.folder.iterdir())
        assert SECRET not in kept
        assert "a-lot-of-output" not in kept
        assert {path.stat().st_mode & 0o777 for path in done.folder.iterdir()} == {0o600}


def test_programs_get_every_event_of_a_check_as_json(checked: Done, failed: Done, clone: Path) -> None:
    assert checked.status == 0, checked.said
    assert not [*clone.glob("predicted*")]
    assert [json.loads(line) for line in checked.said.splitlines()] == checked.events
    assert checked.events[0]["format"] == events.FORMAT
    assert {name: row["failures"] for name, row in checked.of("end")[0]["hosts"].items()} == {"node-1": 0, "node-2": 0}
    [why] = failed.of("why")
    assert [(cause["role"], cause["code"]) for cause in why["causes"]] == [("root cause", "disk-full")]
    assert {event["host"] for event in failed.of("failed")} == {"node-1", "node-2"}


def test_what_a_run_took_is_known_to_the_next_one(clone: Path) -> None:
    done = run(clone, "apply", "--tags", "quick")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("nothing failed") == 1
    assert {*durations.load(recorded(clone).parent / events.DURATIONS)} >= {"all / Change something"}


def test_a_terminal_may_be_narrow_and_without_colours(failed: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for columns in (1, 10, 60):
        output = failed.again(terminal=True, width=columns, height=3)
        assert "changed: " in plain(output) and "\x1b" in output
    colour = re.compile(r"\x1b\[[0-9;]*3\dm")
    assert colour.search(failed.again(terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(failed.again(terminal=True))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in failed.again(terminal=True)


def test_what_fails_before_the_first_task_is_shown_from_the_log(clone: Path) -> None:
    # Standard output is for the program.
    done = run(clone, "apply", "--limit", "nobody*", "--json")
    assert done.returncode == 1
    assert "leaves us with no hosts to target" in " ".join(done.stderr.split())
    assert all(json.loads(line) for line in done.stdout.splitlines())


FOLLOW = """
import signal
import sys
from pathlib import Path
from farandole.core.errors import Interrupted
from farandole.plays import playbook
from farandole.watch.viewer import Viewer
folder = Path(sys.argv[1])
viewer = Viewer(folder)
"""
OUTPUT = f"""{FOLLOW}
script = "head -3 $1 > events.jsonl; sleep .3; cp $1 ."
status = playbook._follow(["sh", "-c", script, "sh", sys.argv[2]], folder, viewer)
viewer.close()
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("| head -1", "the output is no longer read"),
        (">/dev/full", r"the output cannot be written \(No space left on device\)"),
        (">&-", None),
    ],
)
def test_an_output_that_cannot_be_written_does_not_end_the_run(
    where: str, message: str | None, failed: Done, tmp_path: Path
) -> None:
    program = [sys.executable, "-c", OUTPUT, str(tmp_path), str(failed.folder / "events.jsonl")]
    done = ended(["bash", "-o", "pipefail", "-c", f'"$@" {where}', "bash", *program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{message}; the run goes on: \S+\n" if message else "", done.stderr), done.stderr


def test_without_a_run_there_is_nothing_to_watch(tmp_path: Path) -> None:
    os.environ["FARANDOLE_STATE"] = str(tmp_path)
    error = CliRunner().invoke(app, ["watch", "-i", str(tmp_path)]).exception
    assert isinstance(error, FarandoleError) and "no run of" in str(error)


def test_a_run_that_was_killed_is_watched_to_its_last_event(clone: Path) -> None:
    with subprocess.Popen(command(clone, "apply", *LONG), stdout=subprocess.PIPE, cwd=clone) as process:
        assert process.stdout
        for line in process.stdout:
            if b"Change something" in line:
                break
        playbook = descendants(process.pid)[0]
        with subprocess.Popen(command(clone, "watch"), text=True, stdout=subprocess.PIPE, cwd=clone) as watch:
            while '"Take long"' not in (recorded(clone) / "events.jsonl").read_text():
                time.sleep(0.1)
            time.sleep(1)
            # Its workers, and then what runs in them, find that it is gone.
            os.kill(playbook, signal.SIGKILL)
            output, _ = watch.communicate(timeout=30)
    assert watch.returncode == 0
    assert "the run broke off during: Take long on node-1, node-2\n" in output
    assert output.splitlines()[-2].startswith("until then ")
    assert process.returncode == 128 + signal.SIGKILL
    assert processes(clone) == []


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
    # Soon no line of the picture is wider than the terminal.
    before, picture = len(terminal.text), list[str]()
    terminal.resize(30)
    while len(picture) < 3 or max(map(len, picture)) >= 30:
        terminal.text += os.read(terminal.handle, 1 << 16).decode()
        picture = re.findall(r"[^\r\n]+", plain(terminal.text[before:]))[-3:]
    assert len(processes(clone)) > 2
    os.write(terminal.handle, b"\x03")
    time.sleep(0.05)
    os.write(terminal.handle, b"\x03")
    terminal.read("interrupted during")
    assert terminal.end() == 130
    text = " ".join(plain(terminal.text).split())
    assert re.search(r"interrupted during: Take long, 0:\d\d on node-1, node-2", text), text
    assert re.search(r"until then \d+ changes on node-1, node-2", text)
    assert all(code in terminal.text for code in ("\x1b[1A", "\x1b[33mchanged: "))
    assert "Traceback" not in terminal.text
    assert processes(clone) == []
    assert SECRET not in terminal.text + "".join(path.read_text() for path in recorded(clone).iterdir())
    ended_before = run(clone, "watch")
    assert ended_before.returncode == 0
    assert "no run is in progress" in ended_before.stdout
    assert "the run broke off during: Take long" in ended_before.stdout


def test_a_terminal_that_is_closed_ends_the_run(clone: Path) -> None:
    arguments = [
        word.replace("app.main()", "playbook.GRACE_S = 1; app.main()") for word in command(clone, "apply", *LONG)
    ]
    terminal = Terminal(arguments, clone, 100)
    terminal.read("Take long")
    os.close(terminal.handle)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 130
    assert processes(clone) == []


# The terminal is closed while half a line is written.
HALF = """
import signal, sys, time
from farandole.cli import app
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def half():
    print("ready", flush=True)
    time.sleep(1)
    sys.stdout.write("half a line")
    raise app.Interrupted("")
app.app = half
app.main()
"""


def test_what_a_closed_terminal_was_not_told_changes_no_exit_status(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", HALF], tmp_path, 100, PYTHONUNBUFFERED="")
    terminal.read("ready")
    os.close(terminal.handle)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 130


def test_a_run_that_is_told_to_end_names_what_it_changed(clone: Path) -> None:
    with subprocess.Popen(command(clone, "apply", *LONG), stdout=subprocess.PIPE, cwd=clone) as process:
        assert process.stdout
        while b"Change something" not in (line := process.stdout.readline()):
            assert line
        process.terminate()
        assert b"until then 2 changes on node-1, node-2\n" in process.communicate(timeout=15)[0]
    assert process.returncode == 130
    assert processes(clone) == []


# Ansible itself sometimes ends without a word.
TIDY = f"""{FOLLOW}
# nohup, and a script's &, under which the tests may run, have these ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
script = "trap 'sleep 1; echo tidied up; exit' INT; touch ready; while true; do sleep .1; done"
try:
    playbook._follow(["sh", "-c", f"cd {{folder}}; {{script}}"], folder, viewer)
except Interrupted:
    # Another Ctrl-C, while it is shown what was done.
    signal.raise_signal(signal.SIGINT)
    print((folder / "log").read_text(), end="")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_lets_ansible_end_by_itself(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", TIDY, str(tmp_path)], text=True, stdout=subprocess.PIPE) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        assert process.communicate(timeout=9)[0] == "tidied up\n"


# The interrupt comes when Popen.wait has just taken its lock.
LOCKED = f"""{FOLLOW}
import subprocess, threading
class Lock:
    def __init__(self):
        self.lock, self.taken = threading.Lock(), 0
    def acquire(self, *arguments):
        got = self.lock.acquire(*arguments)
        self.taken += 1
        if self.taken == 2:
            signal.raise_signal(signal.SIGTERM)
        return got
    def release(self):
        self.lock.release()
    def __enter__(self):
        return self.acquire()
    def __exit__(self, *_):
        self.release()
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._waitpid_lock = Lock()
playbook.subprocess.Popen, playbook.GRACE_S = Popen, 1
try:
    playbook._follow(["sh", "-c", "sleep 60"], folder, viewer)
except Interrupted:
    print("ended")
"""


def test_an_interrupt_can_come_at_any_moment(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path)], text=True, capture_output=True, timeout=9, check=False
    )
    assert done.stdout == "ended\n", done.stderr


STUBBORN = f"""{FOLLOW}
try:
    playbook._follow(["sh", "-c", "trap '' INT; setsid sleep 60 & sleep 60; true"], folder, viewer)
except Interrupted:
    print("ended")
"""


def test_a_second_interrupt_ends_what_takes_no_notice_of_the_first(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(tmp_path)], text=True, stdout=subprocess.PIPE
    ) as process:
        while len(sleepers := descendants(process.pid)) < 3:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=5)[0] == "ended\n"
    assert not [pid for pid in sleepers if Path(f"/proc/{pid}").exists()]


def processes(clone: Path) -> list[str]:
    """The processes that belong to a run in the clone."""
    return ended(["pgrep", "--full", "--", f"-i {clone}/hosts.yml"], clone).stdout.split()


@pytest.mark.parametrize("killed", [False, True])
def test_a_prompt_that_ends_leaves_a_terminal_that_shows_what_is_typed(clone: Path, *, killed: bool) -> None:
    terminal = Terminal(command(clone, "apply", "--ask-become-pass"), clone, 60)
    terminal.read("BECOME password: ")
    assert not termios.tcgetattr(terminal.handle)[3] & termios.ECHO
    if killed:
        os.kill(descendants(terminal.pid)[0], signal.SIGKILL)
    else:
        os.write(terminal.handle, b"\x03")
    assert terminal.end() == 128 + (signal.SIGKILL if killed else signal.SIGINT)
    assert termios.tcgetattr(terminal.handle)[3] & termios.ECHO
    assert "nothing was begun" in terminal.text


def plain(text: str) -> str:
    """What a terminal has received, without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
