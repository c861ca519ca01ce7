"""The proof that nodes share files: its probe on a real folder, and the judgement of its answers."""

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farandole.validation import files
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, Check

from .loading import ROOT

# It waits for less long for what does not come.
PROBE = (ROOT / "src/farandole/node/probes/shared_files.py").read_text().replace("PATIENCE = 10", "PATIENCE = 1")
HOSTS = ("node-1", "node-2")


def folder(path: Path, host: str, **changes: Any) -> dict[str, Any]:
    mount = {"where": str(path), "what": "nas:/export", "options": changes.pop("options", "")}
    (shared,) = files.shared(HOSTS, {host: {"storage_mounts": [mount]} for host in HOSTS}, getpass.getuser(), HOSTS[0])[
        host
    ]
    return {**shared, "mounted": False, **changes}


def ask(do: str, host: str, *folders: files.Folder) -> dict[str, Any]:
    """A node's answer, as a registered result."""
    task = {"do": do, "mark": "7", "host": host, "folders": folders}
    command = [sys.executable, "-c", PROBE, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, check=False)
    assert done.stderr == ""
    return {"rc": done.returncode, "stdout": done.stdout}


def proof(path: Path, *, between: Sequence[Any] = (), **changes: Any) -> Check:
    """All steps on two nodes that share a folder."""
    folders = {host: folder(path, host, **changes) for host in HOSTS}
    wrote = {host: ask("write", host, folders[host]) for host in HOSTS}
    for call in between:
        call()
    usable = {host: files.usable([folders[host]], wrote[host]) for host in HOSTS}
    read = {host: ask("read", host, *usable[host]) for host in HOSTS}
    for host in HOSTS:
        ask("remove", host, *usable[host])
    answers = {host: {"folders": [folders[host]], "wrote": wrote[host], "read": read[host]} for host in HOSTS}
    (check,) = files.file_checks(answers)
    return check


def test_what_each_writes_the_others_read_and_nothing_is_left(tmp_path: Path) -> None:
    check = proof(tmp_path)
    assert (check.status, check.hosts) == (GREEN, list(HOSTS)), check
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_only_read_must_look_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert proof(tmp_path, options="ro").status == GREEN
    answers = {}
    for host in HOSTS:
        (tmp_path / host).touch()
        mounted = folder(tmp_path, host, options="noatime,ro")
        answers[host] = {"folders": [mounted], "wrote": ask("write", host, mounted), "read": {}}
    (check,) = files.file_checks(answers)
    assert (check.status, check.code) == (RED, "files-differ")
    assert "node-2" in check.cause


def lose(path: Path) -> None:
    (path / ".farandole-7-node-2").unlink()


def hang(path: Path) -> None:
    lose(path)
    os.mkfifo(path / ".farandole-7-node-2")


def give_away(path: Path) -> None:
    os.chown(path / ".farandole-7-node-1", 12345, -1)


@pytest.mark.parametrize(
    ("fault", "code", "host"),
    [
        (lose, "files-missing", "node-1"),
        (hang, "files-silent", "node-1"),
        pytest.param(
            give_away, "files-owner", "node-2", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can")
        ),
        (shutil.rmtree, "files-failed", "node-1"),
    ],
)
def test_a_fault_is_red_on_the_node_that_sees_it(tmp_path: Path, fault: Any, code: str, host: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    check = proof(shared, between=[lambda: fault(shared)], seconds=2 if fault is hang else 20)
    assert (check.status, check.code) == (RED, code)
    assert f"{shared} on {host}, from nas:/export" in check.cause
    assert check.cure


def test_what_is_not_mounted_is_red_although_it_can_be_written(tmp_path: Path) -> None:
    check = proof(tmp_path, mounted=True)
    assert (check.status, check.code) == (RED, "files-unmounted")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_red(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    check = proof(tmp_path / "there")
    assert (check.status, check.code) == (RED, "files-failed")


@pytest.mark.parametrize("output", ["", "x", "{}", '{"folders": {"/data": {"code": "files-good"}}}'])
def test_an_answer_of_another_form_is_red(output: str) -> None:
    mounted = {**folder(Path("/data"), "node-1"), "peers": []}
    good = json.dumps({"folders": {"/data": {"code": "", "seen": "", "listing": "", "seconds": 1}}})
    for wrote, read in ((output, ""), (good, output)):
        answers = {"folders": [mounted], "wrote": {"rc": 1, "stdout": wrote}, "read": {"rc": 1, "stdout": read}}
        (check,) = files.file_checks({"node-1": answers})
        assert (check.status, check.code) == (RED, "answer-malformed" if output else "node-unusable")
    assert files.usable([mounted], {"stdout": output}) == []


def test_two_servers_at_one_path_are_two_checks_that_say_so() -> None:
    whats = {"node-1": "a:/x", "node-2": "a:/x", "node-3": "b:/x"}
    mounts = {host: {"storage_mounts": [{"where": "/data", "what": what}]} for host, what in whats.items()}
    good = {"stdout": json.dumps({"folders": {"/data": {"code": "", "seen": "", "listing": "", "seconds": 1}}})}

    def checks(*hosts: str) -> dict[str, str]:
        shared = files.shared(hosts, mounts, "trainer", "node-1")
        answers = {host: {"folders": own, "wrote": good, "read": good} for host, own in shared.items()}
        return {check.id: check.words for check in files.file_checks(answers)}

    assert checks("node-1", "node-2") == {"files.data": "/data on node-1, node-2: what each writes, the others read"}
    two = checks(*whats)
    assert two.keys() == {"files.data.node-1", "files.data.node-3"}
    assert "/data on node-3, from b:/x, unlike on other nodes: " in two["files.data.node-3"]


def test_a_folder_that_only_one_node_of_the_run_has_is_not_measured() -> None:
    mounts = {"node-1": {"storage_mounts": [{"where": "/data", "what": "a:/x"}]}, "node-2": {}}
    step = {"code": "", "seen": "", "listing": "", "seconds": 1}
    for code, status in (("", NOT_MEASURED), ("files-failed", RED)):
        good = {"stdout": json.dumps({"folders": {"/data": {**step, "code": code}}})}
        own = files.shared(list(mounts), mounts, "trainer", "node-1")["node-1"]
        (check,) = files.file_checks({"node-1": {"folders": own, "wrote": good, "read": good}})
        assert (check.status, check.hosts) == (status, ["node-1"])


def test_nodes_share_only_what_they_mount_from_the_same_place() -> None:
    mounts = {
        "node-1": {"storage_mounts": [{"where": "/data", "what": "a:/x"}]},
        "node-2": {"storage_mounts": [{"where": "/data", "what": "b:/x"}]},
        "node-3": {},
    }
    shared = files.shared(list(mounts), mounts, "trainer", "node-1")
    assert {host: [entry["peers"] for entry in own] for host, own in shared.items()} == {
        "node-1": [[]], "node-2": [[]], "node-3": [],
    }  # fmt: skip


def test_homes_are_shared_except_those_of_administrators() -> None:
    people = [{"name": "alice", "uid": 2001}, {"name": "bob", "uid": 2002, "admin": True}]
    own = {"storage_home": "sshfs", "cluster_users": people}
    shared = files.shared(HOSTS, dict.fromkeys(HOSTS, own), "trainer", "node-1")
    assert [(entry["path"], entry["user"], entry["mounted"], entry["peers"]) for entry in shared["node-2"]] == [
        ("/home/trainer", "trainer", True, ["node-1"]),
        ("/home/alice", "alice", True, ["node-1"]),
    ]
    assert not any(entry["mounted"] for entry in shared["node-1"])
