"""What the lab does with nodes and networks, of which podman tells; tests/lab/test_lab.py runs real ones."""

import json
import signal
import subprocess
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Timer, get_ident
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT
from farandole.lab import host, image, inventory, lab, machine
from farandole.lab.host import Kernel

KIND = lab.Kind(image.Suite.bookworm, Kernel.shared, 0, decoy=False)
NEVER = -62135596800
HERE = str(inventory.project())


def entry(name: str, state: str, started: int = 1_700_000_000, **labels: str) -> dict[str, Any]:
    """A node, as podman lists it."""
    told = {"lab": "lab", "node": name, "suite": "trixie", "address": "10.94.0.11", **labels}
    ours = {f"farandole.{key}": value for key, value in told.items()}
    return {"Labels": ours, "State": state, "StartedAt": started, "Pid": 0}


class Podman:
    """Answers as podman does, and keeps what it was asked."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self.entries = list(entries)
        self.asked: list[tuple[str, ...]] = []
        self.errors: dict[str, list[str]] = {}

    def __call__(self, *arguments: str) -> str:
        self.asked.append(arguments)
        if errors := self.errors.get(arguments[0]):
            raise FarandoleError(errors.pop(0))
        if arguments[0] == "start":
            for one in self.entries:
                one["State"] = "running"
        return ""

    def remove(self, containers: list[str]) -> None:
        self.asked.append(("rm", *containers))
        self.entries.clear()


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Podman:
    """A machine with a lab of one node, which is down; whatever labs this one has, they are left alone."""
    fake = Podman(entry("node-1", "exited"))
    for name in ("check_space", "prepare", "make_room"):
        monkeypatch.setattr(host, name, lambda *_, **__: None)
    for name in ("reap_strays", "_ensure_networks", "wait_for_ssh", "write_inventory"):
        monkeypatch.setattr(lab, name, lambda *_, **__: {})
    monkeypatch.setattr(host, "ready", lambda: True)
    monkeypatch.setattr(host, "STORE", tmp_path)
    monkeypatch.setattr(machine, "MACHINES", tmp_path / "machines")
    monkeypatch.setattr(image, "ensure", lambda *_: "image")
    monkeypatch.setattr(lab, "_create", lambda _, index, *__: fake.asked.append(("run", f"node-{index}")))
    monkeypatch.setattr(lab, "podman", fake)
    monkeypatch.setattr(lab, "query", lambda *_: fake.entries)
    monkeypatch.setattr(lab, "remove", fake.remove)
    monkeypatch.setattr(lab, "power_cycle", lambda error, _: fake.asked.append(("cycle", str(error))))
    return fake


def up(count: int = 1) -> None:
    lab.up("lab", count, KIND, second=False, progress=lambda _: None)


def test_a_node_that_cannot_be_started_keeps_its_disk(podman: Podman) -> None:
    podman.errors["start"] = ["10.94.0.11 is already allocated", "no space left"]
    with pytest.raises(FarandoleError, match="no space left"):
        up()
    start = ("start", "farandole-lab-node-1")
    assert podman.asked == [start, ("cycle", "10.94.0.11 is already allocated"), start]


@pytest.mark.parametrize("state", ["exited", "stopped", "created", "initialized"])
def test_a_node_that_ran_before_a_reboot_of_this_machine_is_started_again(podman: Podman, state: str) -> None:
    podman.entries[0]["State"] = state
    up()
    assert podman.asked == [("start", "farandole-lab-node-1")]


@pytest.mark.parametrize(("state", "started"), [("created", NEVER), ("initialized", NEVER), ("removing", 5)])
def test_a_node_that_is_half_made_is_made_again(podman: Podman, state: str, started: int) -> None:
    podman.entries[0] |= {"State": state, "StartedAt": started}
    up()
    assert podman.asked == [("rm", "farandole-lab-node-1"), ("run", "node-1")]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What podman keeps of a network; its bridge has a name that another podman may have taken meanwhile."""
    settings = tmp_path / "networks/farandole-lab.json"
    settings.parent.mkdir()

    def answer(_: str, verb: str, *__: str) -> str:
        if verb == "rm":
            settings.unlink()
        elif verb == "inspect":
            return f"[{settings.read_text()}]"
        return settings.stem if settings.exists() else ""

    monkeypatch.setattr(host, "STORE", tmp_path)
    monkeypatch.setattr(lab, "podman", answer)
    monkeypatch.setattr(host, "restore", lambda: [])
    return settings


@pytest.mark.parametrize(("bridge", "named"), [("podman999", "farandole2"), ("lo", "lo")])
def test_podman_does_not_name_a_bridge_that_is_not_in_use_yet(network: Path, bridge: str, named: str) -> None:
    told = {"name": network.stem, "subnets": [{"subnet": "10.94.8.0/22"}]}
    network.write_text(json.dumps({**told, "network_interface": bridge}))
    lab._ensure_networks("lab", second=False)
    assert json.loads(network.read_text()) == {**told, "network_interface": named}


@pytest.mark.parametrize(("ours", "deleted"), [("farandole", []), ("l", ["lo"])])
def test_only_a_bridge_that_the_lab_has_named_is_deleted(
    podman: Podman, network: Path, monkeypatch: pytest.MonkeyPatch, ours: str, deleted: list[str]
) -> None:
    seen: list[str] = []
    network.write_text('{"network_interface": "lo"}')
    podman.entries.clear()
    monkeypatch.setattr(lab, "run", lambda *command: seen.append(command[-1]))
    monkeypatch.setattr(lab, "_BRIDGE", ours)
    lab.down("lab", lambda _: None)
    assert (seen, network.exists()) == (deleted, False)


def test_a_machine_without_free_addresses_is_told(podman: Podman) -> None:
    podman.errors["network"] = ["subnet is already used on the host"] * 64
    with pytest.raises(FarandoleError, match=r"all of 10\.94\.0\.0/16 is in use here"):
        lab._create_network("lab", "farandole-lab")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("project", "refused"), [("", False), (HERE, False), ("/etc", True), ("/no/longer/there", False)]
)
def test_a_lab_of_another_checkout_is_refused_until_it_is_known_here(
    podman: Podman, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: str, *, refused: bool, known: bool
) -> None:
    podman.entries = [entry("node-1", "running", project=project)]
    monkeypatch.setattr(inventory, "folder", lambda name: tmp_path if known else tmp_path / name)
    for command in (up, partial(lab.refuse_foreign, "lab")):
        with pytest.raises(FarandoleError, match="belongs to /etc: ") if refused and not known else nullcontext():
            command()


@pytest.fixture
def rebooted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What a lab with two networks has left on the disk of a machine that was rebooted."""
    (tmp_path / "networks").mkdir()
    for name in ("farandole-big.json", "farandole-big.second.json", "netavark.lock"):
        (tmp_path / "networks" / name).touch()
    monkeypatch.setattr(host, "STORE", tmp_path)
    monkeypatch.setattr(host, "ready", lambda: False)
    monkeypatch.setattr(host, "check", lambda: None)
    monkeypatch.setattr(host, "changes", list)
    return tmp_path


def test_a_stopped_lab_is_shown_and_not_purged(rebooted: Path) -> None:
    shown = CliRunner().invoke(app, ["lab", "status"]).stdout
    assert shown == "lab big is stopped: `farandole lab up --name big` starts it\n"
    with pytest.raises(FarandoleError, match="big"):
        lab.purge()
    assert rebooted.exists()


def test_how_to_keep_nodes_is_said_before_how_to_remove_them(podman: Podman) -> None:
    podman.entries = [entry(f"node-{number}", "exited") for number in (1, 2, 3)]
    with pytest.raises(FarandoleError, match=r"--nodes 3 .*lab down"):
        up(2)


def test_waiting_for_nodes_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = lab.LabNode("node-1", "lab", "trixie", Kernel.shared, "127.0.0.1", "running", 0, "")
    monkeypatch.setattr(lab, "SSH_SECONDS", {Kernel.shared: 20})
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=ConnectionRefusedError))
    begun = time.monotonic()
    Timer(1, signal.pthread_kill, (get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        lab.wait_for_ssh([waiting])
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], ["make demo-down", "farandole lab ssh node-1"]),
        (["LAB=big"], ["make demo-down LAB=big", "farandole lab ssh --name big node-1"]),
    ],
)
def test_the_demo_ends_with_commands_for_its_lab(given: list[str], shown: list[str]) -> None:
    done = subprocess.run(["make", "-n", "demo", *given], cwd=ROOT, text=True, capture_output=True, check=True)
    assert all(command in done.stdout for command in shown)
    assert done.stdout.count(shown[1]) == 2
