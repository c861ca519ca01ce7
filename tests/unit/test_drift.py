"""What `farandole drift` says of nodes that are this machine, and how it goes on without one that fails."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from farandole.inventory import excluded, run_lock

from .loading import ROOT
from .test_progress import MAIN

PLAY = """
- hosts: cluster
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - {name: Answer, fail: {msg: it is broken}, when: inventory_hostname == broken | default('')}
    - name: Begin
      farandole.cluster.run_lock: {state_dir: "{{ to }}/.farandole/mine"}
      delegate_to: node-1
      run_once: true
      # Otherwise it would write below /run of this machine.
      when: ansible_check_mode
    - {name: Write a file, copy: {content: "new\\n", dest: "{{ to }}/{{ inventory_hostname }}"}}
"""
NODES = ("node-1", "node-2", "node-3")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose playbook writes a file for each of three nodes, and has done so."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("collections", "ansible.cfg"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "src").mkdir()
    (folder / "src/farandole").symlink_to(ROOT / "src/farandole")
    (folder / "site.yml").write_text(PLAY)
    (folder / "mine").mkdir()
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    groups: dict[str, Any] = {"cluster": {"hosts": dict.fromkeys(NODES, host)}, "head": {"hosts": {"node-1": {}}}}
    groups["cluster"]["vars"] = {"to": str(folder)}
    (folder / "mine/hosts.yml").write_text(yaml.safe_dump(groups))
    assert call(folder, "apply").returncode == 0
    return folder


@pytest.fixture
def drifted(clone: Path) -> Path:
    """Somebody has edited the files of two nodes."""
    for name in NODES:
        (clone / name).write_text("edited\n" if name != "node-1" else "new\n")
    return clone


def call(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, str(clone), *arguments, "-i", str(clone / "mine")]
    return subprocess.run(command, text=True, capture_output=True, timeout=60, check=False, cwd=clone)


def asked(clone: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = call(clone, "drift", "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


def records(clone: Path) -> int:
    return len([*clone.glob(".farandole/.plays/mine-*/2*")])


def test_nothing_differs_and_nothing_is_left_of_the_look(clone: Path) -> None:
    for name in NODES:
        (clone / name).write_text("new\n")
    before = records(clone)
    code, answer = asked(clone)
    assert (code, answer["differs"], answer["complete"], answer["changes"]) == (0, False, True, [])
    assert records(clone) == before


def test_what_differs_is_said_by_task_with_its_nodes_and_content_and_stays_as_it_is(drifted: Path) -> None:
    code, answer = asked(drifted, "--diff")
    assert (code, answer["unseen"]) == (1, {})
    assert answer["changes"] == [{"task": "Write a file", "hosts": ["node-2", "node-3"]}]
    assert {host for content in answer["contents"] for host in content["hosts"]} == {"node-2", "node-3"}
    assert all("-edited" in content["text"] and "+new" in content["text"] for content in answer["contents"])
    assert (drifted / "node-2").read_text() == "edited\n"
    shown = call(drifted, "drift", "--limit", "node-1,node-2", "-e", "x=a b")
    assert shown.returncode == 1
    assert "Write a file  node-2\n" in shown.stdout
    assert f"farandole apply -i {drifted}/mine --limit node-1,node-2 --extra-vars 'x=a b'\n" in shown.stdout
    assert "edited" not in shown.stdout


def test_a_node_that_fails_is_named_and_hides_no_other(drifted: Path) -> None:
    before = records(drifted)
    done = call(drifted, "drift", "-e", "broken=node-3")
    assert done.returncode == 2
    assert {"Write a file  node-2", "node-3: it is broken", "not looked at: node-3 (failed: Answer)"} <= {
        *done.stdout.splitlines()
    }
    assert records(drifted) == before


def test_a_look_is_refused_while_another_run_changes_the_cluster_once_and_keeps_its_log(drifted: Path) -> None:
    before, state = records(drifted), drifted / ".farandole/mine"
    state.mkdir(exist_ok=True)
    with subprocess.Popen(["sleep", "100"]) as other:
        run_lock.take(state, run_lock.this_run(other.pid))
        code, answer = asked(drifted)
        other.kill()
    assert (code, answer["complete"], answer["differs"], answer["unseen"]) == (2, False, False, {})
    assert f"process {other.pid}" in answer["why"]
    assert records(drifted) == before + 1
    # It recorded nothing itself.
    assert json.loads((state / "run").read_text())["pid"] == other.pid


def test_a_node_that_is_left_out_is_said_and_does_not_count(clone: Path) -> None:
    for name in NODES:
        (clone / name).write_text("new\n")
    with excluded.changing(clone / ".farandole/mine") as entries:
        entries["node-3"] = excluded.by_person("alice", "its fan")
    done = call(clone, "drift")
    (clone / ".farandole/mine" / excluded.FILE).unlink()
    assert done.returncode == 0, done.stdout
    assert re.search("^left out: node-3, .* by alice: its fan$", done.stdout, re.MULTILINE)
    assert "nothing differs on 2 nodes\n" in done.stdout


def test_an_error_is_not_taken_for_a_difference(clone: Path) -> None:
    command = [sys.executable, "-c", MAIN, str(clone), "drift", "-i", str(clone / "none")]
    assert subprocess.run(command, capture_output=True, check=False, cwd=clone).returncode == 2
    done = call(clone, "drift", "--json", "--vault-password-file", str(clone / "none"))
    assert (done.returncode, json.loads(done.stdout)["complete"]) == (2, False)
    assert "The vault password file" in done.stderr


@pytest.mark.parametrize(("command", "status"), [("drift", 2), ("apply", 1)])
def test_a_tag_that_no_task_has_is_refused(drifted: Path, command: str, status: int) -> None:
    for option in ("--tags", "--skip-tags"):
        done = call(drifted, command, option, "stack,fabrik")
        assert (done.returncode, "[tag-unknown]" in done.stderr, "fabrik" in done.stderr) == (status, True, True)
    assert (drifted / "node-2").read_text() == "edited\n"
