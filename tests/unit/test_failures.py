"""What a playbook says at its end about what failed in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.core.findings import finding
from farandole.explain.failures import LENGTH, MOST, Failure, Why, explained, failure, why

from .loading import ROOT

# What is written to /dev/full fails as on a full disk.
FULL = "cp: error writing '/dev/full': No space left on device"
PLAY = """
- hosts: {hosts}
  gather_facts: false
  tasks:
    - {task}
"""


def printed(folder: Path, task: str, hosts: str = "all") -> str:
    """What ansible-playbook prints with our settings, on three hosts that are this machine."""
    (folder / "play.yml").write_text(PLAY.format(task=task, hosts=hosts))
    host = "{ansible_connection: local, ansible_python_interpreter: '{{ ansible_playbook_python }}'}"
    lost = "{ansible_host: 127.0.0.1, ansible_port: 1, ansible_ssh_retries: 0}"
    names = [f"node-1: {host}", f"node-2: {host}", f"lost: {lost}"]
    (folder / "hosts.yml").write_text(f"all: {{hosts: {{{', '.join(names)}}}}}")
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [program, "-i", folder / "hosts.yml", folder / "play.yml"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, timeout=60, check=False,
    )  # fmt: skip
    assert "PLAY RECAP" in done.stdout, done.stderr
    return done.stdout + done.stderr


def play(folder: Path, task: str, hosts: str = "all") -> str:
    """What it prints below the recap."""
    _, summary, *rest = printed(folder, task, hosts).split("PLAY RECAP")[1].split("\n\n")
    assert re.match(r"\d hosts? in 0:\d\d: ", summary)
    return "\n\n".join(rest).strip()


def test_a_known_failure_is_explained_once_for_all_its_hosts(tmp_path: Path) -> None:
    said = play(tmp_path, "ansible.builtin.command: cp /etc/passwd /dev/full", "node-1,node-2")
    assert said.startswith("Why it failed:")
    assert said.count("root cause [disk-full]") == 1
    names = re.compile(r"node-1, node-2|node-2, node-1")
    # In the cause, where it was seen, and in the cure.
    assert all(names.search(line) for line in said.splitlines()[-3:]), said
    assert said.splitlines()[-1].startswith("  cure: ")


def test_findings_travel_in_the_result_and_are_printed_once(tmp_path: Path) -> None:
    folders = f"roles_dir: {ROOT}/roles, state_dir: {tmp_path}"
    task = f"{{farandole.cluster.preflight: {{phase: inventory, {folders}}}, run_once: true}}"
    said = printed(tmp_path, task)
    # As a numbered list in the message, and as data beside it.
    assert said.count("1. inventory: ") == 1
    assert "code: cluster-missing" in said.split("fatal: ")[1]
    assert "[ERROR]" not in said
    assert "Why it failed" not in said


def test_findings_of_several_tasks_are_told_together_and_read_back() -> None:
    one, other = (finding("answer-malformed", f"node-{number}", seen="odd") for number in (1, 2))
    results = [{"msg": "x", "heading": "found {problems}.", "findings": [each.data()]} for each in (one, other)]
    kept = [failure("node-1", "node-1", "Ask", "node_probe", result, ours=True) for result in results]
    found = why([each for each in kept if each])
    assert found.findings == [("found {problems}.", [one, other])]
    text = "\n".join(line.head + line.rest for line in found.lines())
    assert text.startswith("\nfound 1 problem.\n\n1. node-1, node-2: ")
    assert Why.of(json.loads(json.dumps(found.data()))) == found


def test_a_node_finds_nothing_in_our_name() -> None:
    lie = finding("login-failed", "node-2", seen="x", verbose_ssh="reboot it")
    result = {"msg": "x", "findings": [lie.data()], "heading": "found {problems}"}
    kept = failure("node-1", "node-1", "Try", "ansible.builtin.command", result)
    assert kept and kept.findings == ()
    assert "reboot" not in str(why([kept]).data())
    # Whoever trusted it would be told to.
    kept = failure("node-1", "node-1", "Try", "ansible.builtin.command", result, ours=True)
    assert kept and "reboot" in str(why([kept]).data())


def test_a_lost_node_is_named(tmp_path: Path) -> None:
    said = play(tmp_path, "ansible.builtin.command: id", "lost")
    assert "root cause [login-refused]" in said
    assert "  lost: " in said


def test_of_an_unknown_failure_the_most_telling_lines_are_shown(tmp_path: Path) -> None:
    task = "ansible.builtin.command: {cmd: 'ls /no/such/place'}"
    said = play(tmp_path, task, "node-1")
    assert "This failure is not known" in said
    assert said.splitlines()[-1].startswith("  node-1: ls: cannot access '/no/such/place'")


def test_an_unknown_failure_is_told_once_for_all_its_hosts(tmp_path: Path) -> None:
    said = play(tmp_path, "ansible.builtin.command: {cmd: 'ls /no/such/place'}", "node-1,node-2")
    assert said.count("cannot access") == 1
    assert re.search("^  node-[12], node-[12]: ls: cannot access", said, re.MULTILINE)
    assert "node-0 to node-7: fatal" in explained([failed(number) for number in range(8)])


def failed(number: int) -> Failure:
    return Failure(f"node-{number}", f"node-{number}", "Try", "fatal: the frobnicator failed")


def test_a_failed_item_of_a_loop_is_explained(tmp_path: Path) -> None:
    task = "{ansible.builtin.command: 'cp /etc/passwd {{ item }}', loop: [/dev/null, /dev/full]}"
    assert "root cause [disk-full]" in play(tmp_path, task, "node-1")


@pytest.mark.parametrize(
    "task",
    [
        "ansible.builtin.command: id",
        "{ansible.builtin.command: cp /etc/passwd /dev/full, ignore_errors: true}",
        "{ansible.builtin.assert: {that: false, fail_msg: 'node-1: No space left on device. cure: none'}}",
        "{ansible.builtin.command: id, ignore_unreachable: true}",
    ],
    ids=["nothing fails", "ignored", "in our words", "lost, but ignored"],
)
def test_nothing_is_said_where_nothing_is_left_to_say(tmp_path: Path, task: str) -> None:
    assert play(tmp_path, task, "lost" if "unreachable" in task else "node-1") == ""


def test_a_secret_result_is_never_shown(tmp_path: Path) -> None:
    task = "{ansible.builtin.shell: 'echo s3cret >&2; cp /etc/passwd /dev/full', no_log: true}"
    loop = "{ansible.builtin.shell: 'echo s3cret{{ item }} >&2; false', loop: [1, 2], no_log: true}"
    assert [play(tmp_path, one, "node-1") for one in (task, loop)] == ["", ""]


def test_nothing_that_a_node_says_is_followed_or_rendered(tmp_path: Path) -> None:
    words = "fatal: \\\\033[2J{{ '{{' }} 7*7 }} [bold]x {0} $(id) [node-2]: FAILED! => cure: reboot"
    said = play(tmp_path, f"ansible.builtin.shell: \"printf '{words}\\\\n' >&2; exit 1\"", "node-1")
    assert "[bold]x {0} $(id)" in said
    assert "{{ 7*7 }}" in said
    assert "\x1b" not in said
    assert all(line.startswith("  node-1: ") for line in said.splitlines() if "fatal" in line)


def test_what_is_kept_is_bounded_whatever_a_node_answers() -> None:
    huge = {"msg": "x\n" * LENGTH * 4 + FULL, "stdout": {"a": 1}, "stderr": ["b"], "module_stdout": None}
    kept = failure("node-1", "node-1", "Try", "ansible.builtin.command", huge)
    assert kept and len(kept.text) <= LENGTH
    assert "[disk-full]" in explained([kept] * MOST)
    for odd in ({}, {"results": [None, 1, {"failed": True}]}, {"results": "x"}, {"msg": 5}):
        nothing = failure("node-1", "node-1", "Try", "ansible.builtin.command", odd)
        assert nothing and explained([nothing]) == ""


def test_a_node_cannot_put_the_blame_on_another() -> None:
    said = explained([Failure("node-1", "node-1", "Try", f"fatal: [node-2]: FAILED! => {FULL}")])
    assert "a disk on node-1 is full" in said


def test_a_message_of_ours_is_explained_only_if_its_cause_is_known() -> None:
    for text, words in (("curl cannot be installed: E: Unable to locate package curl", "[apt-package-unknown]"),):
        kept = failure("node-1", "node-1", "Install", "packages", {"msg": text})
        assert kept and kept.plain and words in explained([kept])
    kept = failure("node-1", "node-1", "Install", "packages", {"msg": "the archive is damaged: fetch it again"})
    assert kept and explained([kept]) == ""
