"""What a playbook says at its end about what failed in it."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from farandole.core.findings import finding, joined
from farandole.explain.failures import LENGTH, Failure, Why, failure, why

from .loading import ROOT

# What is written to /dev/full fails as on a full disk.
FULL = "cp: error writing '/dev/full': No space left on device"
ODD = "fatal: \\\\033[2J{{ '{{' }} 7*7 }} [bold]x {0} $(id) [full-1]: FAILED! => cure: reboot"
# A node needs no Python for the second, so starting it takes a tenth of the time.
COMMAND, RAW = "ansible.builtin.command", "ansible.builtin.raw"
# What is done on each host, and how.
TASKS: dict[str, dict[str, object]] = {
    "full-1": {COMMAND: "cp /etc/passwd /dev/full"},
    "full-2": {RAW: "cp /etc/passwd /dev/full"},
    "item": {RAW: "cp /etc/passwd {{ item }}", "loop": ["/dev/null", "/dev/full"]},
    "odd-1": {RAW: "ls /no/such/place"},
    "odd-2": {RAW: "ls /no/such/place"},
    "nasty": {RAW: f"printf '{ODD}\\n' >&2; exit 1"},
    "secret": {RAW: "echo s3cret >&2; cp /etc/passwd /dev/full", "no_log": True},
    "secrets": {RAW: "echo s3cret{{ item }} >&2; false", "loop": [1, 2], "no_log": True},
    "ours": {"ansible.builtin.assert": {"that": False, "fail_msg": "a: No space left on device. cure: none"}},
    "ignored": {RAW: "cp /etc/passwd /dev/full", "ignore_errors": True},
    "fine": {RAW: "id"},
    "lost": {RAW: "id"},
    "spared": {RAW: "id", "ignore_unreachable": True},
}


def explained(failures: Sequence[Failure]) -> str:
    """What is left to say why a playbook failed, below its messages; nothing if they say all."""
    return joined(why(failures).explanation()).strip()


def printed(folder: Path, tasks: dict[str, dict[str, object]]) -> str:
    """What ansible-playbook prints with our settings of hosts that are this machine, each with a task of its own."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": "{{ ansible_playbook_python }}"}
    away = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0}
    hosts = {name: away if name in ("lost", "spared") else local for name in tasks}
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"include_tasks": "{{ inventory_hostname }}.yml"}]}
    files = {name: [{"name": "Try", **task}] for name, task in tasks.items()}
    for name, content in {**files, "play": [play], "hosts": {"all": {"hosts": hosts}}}.items():
        (folder / f"{name}.yml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        ["ansible-playbook", "-i", folder / "hosts.yml", folder / "play.yml"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, timeout=60, check=False,
    )  # fmt: skip
    assert "PLAY RECAP" in done.stdout, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return printed(tmp_path_factory.mktemp("play"), TASKS)


@pytest.fixture
def said(output: str) -> str:
    """What it prints below the recap."""
    _, summary, *rest = output.split("PLAY RECAP")[1].split("\n\n")
    assert re.match(r"\d+ hosts? in 0:\d\d: ", summary)
    return "\n\n".join(rest).strip()


def test_a_known_failure_is_explained_once_for_all_its_hosts(said: str) -> None:
    assert said.count("root cause [disk-full]") == 1
    cause = next(part for part in said.split("\n\n") if "[disk-full]" in part)
    # In the cause, and in the cure.
    assert len(re.findall(r"(?:full-1|full-2|item), (?:full-1|full-2|item), (?:full-1|full-2|item)", cause)) >= 2
    assert "\n  cure: " in cause


def test_a_lost_node_is_named(said: str) -> None:
    assert "root cause [login-refused]" in said
    assert "lost" in said


def test_of_an_unknown_failure_the_most_telling_lines_are_shown_once_for_all_its_hosts(said: str) -> None:
    assert said.count("cannot access") == 1
    assert re.search(r"^  odd-[12], odd-[12]: ls: cannot access '/no/such/place'", said, re.MULTILINE)
    assert "node-0 to node-7: fatal" in explained([failed(number) for number in range(8)])


def test_nothing_is_said_where_nothing_is_left_to_say_or_all_is_secret(said: str) -> None:
    for word in ("secret", "s3cret", "ours", "ignored", "fine", "spared"):
        assert word not in said


def test_nothing_that_a_node_says_is_followed_or_rendered(output: str, said: str) -> None:
    (line,) = [line for line in said.splitlines() if "[bold]x" in line]
    assert line.startswith("  nasty: ")
    assert "[bold]x {0} $(id)" in line and "{{ 7*7 }}" in line
    assert "\x1b" not in output


def test_findings_travel_in_the_result_and_are_printed_once(tmp_path: Path) -> None:
    asked = {"phase": "inventory", "roles_dir": f"{ROOT}/roles", "state_dir": str(tmp_path)}
    said = printed(tmp_path, {"node-1": {"farandole.cluster.preflight": asked}})
    # As a numbered list in the message, and as data beside it.
    assert said.count("1. inventory: ") == 1
    assert "code: cluster-missing" in said.split("fatal: ")[1]
    assert "[ERROR]" not in said
    assert "Why it failed" not in said


def test_findings_of_several_tasks_are_told_together_and_read_back() -> None:
    pair = [finding("answer-malformed", f"node-{number}", seen="odd") for number in (1, 2)]
    results = [{"msg": "x", "heading": "found {problems}.", "findings": [each.data()]} for each in pair]
    kept = [failure("node-1", "node-1", "Ask", "node_probe", result, ours=True) for result in results]
    reasons = why([each for each in kept if each])
    assert reasons.findings == [("found {problems}.", pair)]
    text = "\n".join(line.head + line.rest for line in reasons.lines())
    assert text.startswith("\nfound 1 problem.\n\n1. node-1, node-2: ")
    assert Why.of(json.loads(json.dumps(reasons.data()))) == reasons


def test_a_node_finds_nothing_in_our_name() -> None:
    lie = finding("login-failed", "node-2", seen="x", verbose_ssh="reboot it")
    result = {"msg": "x", "findings": [lie.data()], "heading": "found {problems}"}
    # Whoever trusted it would be told to reboot.
    for ours in (False, True):
        kept = failure("node-1", "node-1", "Try", "ansible.builtin.command", result, ours=ours)
        assert kept and bool(kept.findings) is ours
        assert ("reboot" in str(why([kept]).data())) is ours


def failed(number: int) -> Failure:
    return Failure(f"node-{number}", f"node-{number}", "Try", "fatal: the frobnicator failed")


def test_what_is_kept_is_bounded_whatever_a_node_answers() -> None:
    huge = {"msg": "x\n" * LENGTH * 4 + FULL, "stdout": {"a": 1}, "stderr": ["b"], "module_stdout": None}
    kept = failure("node-1", "node-1", "Try", "ansible.builtin.command", huge)
    assert kept and len(kept.text) <= LENGTH
    assert "[disk-full]" in explained([kept] * 10)
    for odd in ({}, {"results": [None, 1, {"failed": True}]}, {"results": "x"}, {"msg": 5}):
        nothing = failure("node-1", "node-1", "Try", "ansible.builtin.command", odd)
        assert nothing and explained([nothing]) == ""


def test_a_node_cannot_put_the_blame_on_another() -> None:
    said = explained([Failure("node-1", "node-1", "Try", f"fatal: [node-2]: FAILED! => {FULL}")])
    assert "a disk on node-1 is full" in said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("curl cannot be installed: E: Unable to locate package curl", "[apt-package-unknown]"),
        ("the archive is damaged: fetch it again", ""),
    ],
)
def test_a_message_of_ours_is_explained_only_if_its_cause_is_known(text: str, shown: str) -> None:
    kept = failure("node-1", "node-1", "Install", "packages", {"msg": text})
    assert kept and kept.plain
    assert shown in explained([kept]) if shown else explained([kept]) == ""
