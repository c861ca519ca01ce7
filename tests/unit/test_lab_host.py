"""Files that the lab handles as root where others could interfere, and commands of labs that are removed together."""

import fcntl
import os
import stat
import subprocess
from pathlib import Path

import pytest

from farandole.cli import lab as command
from farandole.core.errors import FarandoleError
from farandole.lab import host, inventory, lab


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
