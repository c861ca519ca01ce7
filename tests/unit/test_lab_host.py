"""Files that the lab handles as root where others could interfere, and commands of labs that are removed together."""

import fcntl
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.cli import lab as command
from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.lab import firewall, host, inventory, lab
from farandole.lab.shell import run


def hold(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_LOCK", lock)
    monkeypatch.setattr(host, "ready", lambda: True)  # otherwise removing the last lab would remove the lock too
    with host.locked(wait=lambda: None):
        pass


@pytest.mark.parametrize("place", [host._LOCK, host.RUN, host.STORE])
def test_only_root_can_replace_the_labs_files(place: Path) -> None:
    for folder in place.parents:
        assert folder.stat().st_uid == 0, folder
        assert not folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), folder


def test_the_lock_does_not_follow_links_or_truncate_and_belongs_to_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / "symlink").symlink_to(victim)
    with pytest.raises(FarandoleError, match=f"remove {tmp_path}/symlink"):
        hold(tmp_path / "symlink", monkeypatch)
    os.link(victim, tmp_path / "link")
    hold(tmp_path / "link", monkeypatch)
    assert victim.read_text() == "whole"
    hold(tmp_path / "lock", monkeypatch)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_a_lab_is_removed_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, held = tmp_path / "lock", []

    def nodes(_: str | None = None) -> list[lab.LabNode]:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
            else:
                held.append(False)
        return []

    hold(lock, monkeypatch)
    monkeypatch.setattr(host, "check", lambda: None)
    monkeypatch.setattr(host, "STORE", tmp_path / "store")
    monkeypatch.setattr(inventory, "folder", lambda name: tmp_path / name)
    monkeypatch.setattr(lab, "nodes", nodes)
    command.down("gone")
    assert held == [True, True]


def test_a_command_line_may_be_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_NAMESPACE", Path("/proc/self/ns/mnt"))
    with subprocess.Popen([b"caf\xe9", "60"], executable="sleep") as sleeping:
        try:
            assert (sleeping.pid, ["caf\N{REPLACEMENT CHARACTER}", "60", ""]) in host.processes()
        finally:
            sleeping.kill()


class Firewall:
    """Rules that podman's network programs made, and what is deleted of them."""

    def __init__(self, *chains: str) -> None:
        tables = [{"table": {"family": "inet", "name": "netavark"}}]
        self.rules = [*tables, *({"chain": {"family": "inet", "table": "netavark", "name": name}} for name in chains)]
        self.deleted: list[str] = []

    def __call__(self, *arguments: str) -> str:
        if arguments[0] == "delete":
            self.deleted.append(arguments[-1])
        return json.dumps({"nftables": self.rules})


@pytest.mark.parametrize(
    ("network", "deleted"),
    [
        ([], ["NETAVARK-HOSTPORT-DNAT", "netavark"]),
        (["nv_2f259bab_10_94_0_0_nm22"], ["NETAVARK-HOSTPORT-DNAT", "netavark"]),
        (["nv_2f259bab_10_88_0_0_nm16", "nv_2f259bab_10_88_0_0_nm16_dnat"], []),
    ],
)
def test_chains_that_another_podman_uses_stay(
    network: list[str], deleted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Firewall("NETAVARK-HOSTPORT-DNAT", *network)
    monkeypatch.setattr(firewall, "_nft", rules)
    firewall.clean([])
    assert rules.deleted == deleted


def test_a_setting_that_was_changed_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RUN", tmp_path / "run")
    monkeypatch.setattr(host, "_RECORD", tmp_path / "run/host.json")
    monkeypatch.setattr(host, "_SYSCTLS", ())
    monkeypatch.setattr(host, "_mounted", lambda _: False)
    monkeypatch.setattr(host, "_make_namespace", lambda: None)
    monkeypatch.setattr(host, "_remove_leftovers", lambda _: None)
    monkeypatch.setattr(firewall, "names", list)
    monkeypatch.setattr(firewall, "clean", lambda _: [])
    monkeypatch.setattr(host, "_sysctl_file", lambda name: tmp_path / name)
    for name in host._needed(1):
        (tmp_path / name).write_text("100\n")
    theirs = tmp_path / "fs.inotify.max_user_instances"
    host.prepare()
    for nodes in (1, 2):
        host.make_room(nodes, user_mode=False)
    theirs.write_text("8192\n")
    host.restore()
    assert theirs.read_text() == "8192\n"
    assert {(tmp_path / name).read_text() for name in host._needed(1) if name != theirs.name} == {"100"}


def test_programs_of_the_administrator_are_found_whatever_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(host, "_NEEDS", {"chroot": "coreutils"})
    monkeypatch.setattr(host, "is_root", lambda: False)
    done = CliRunner().invoke(app, ["lab", "setup"])
    assert done.exit_code == 0, done.exception
    assert run("chroot", "--version")


def test_root_is_asked_for_before_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_NEEDS", {"no-such-program": "none"})
    monkeypatch.setattr(host, "is_root", lambda: False)
    with pytest.raises(FarandoleError, match="run it with sudo"):
        host.check()
