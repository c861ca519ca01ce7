"""The queue's key on the control machine: made once, never replaced in silence, refused when damaged."""

import os
from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.core.findings import FindingsError
from farandole.queue import key


def test_it_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recorded(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    path = tmp_path / "slurm/munge.key"
    assert key.keep(path, check_mode=True)
    assert not path.exists()
    assert key.keep(path, check_mode=False)
    assert synced[-2:] == ["slurm", tmp_path.name]
    text = path.read_text()
    assert len(text) == key.LENGTH + 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert not key.keep(path, check_mode=False)
    assert path.read_text() == text
    # As earlier versions wrote it, or an editor.
    path.write_text(text.strip())
    assert not key.keep(path, check_mode=False)


def test_a_former_key_is_never_used_again(tmp_path: Path) -> None:
    first, second = tmp_path / "munge.key", tmp_path / "munge-0123456789ab.key"
    key.keep(first, check_mode=False)
    known = first.read_text()
    assert key.keep(second, check_mode=True) and first.exists()
    # A node is revoked, and later its name is taken out of the list again.
    assert key.keep(second, check_mode=False) and not first.exists()
    assert key.keep(first, check_mode=False) and not second.exists()
    assert first.read_text() not in ("", known)


def test_a_new_key_is_for_all_nodes_at_once(tmp_path: Path) -> None:
    first, second = tmp_path / "munge.key", tmp_path / "munge-0123456789ab.key"
    # Those that are not there have none.
    assert key.keep(first, ["node-2"], check_mode=False)
    assert not key.keep(first, ["node-2"], check_mode=False)
    text = first.read_text()
    for check_mode in (True, False):
        with pytest.raises(FarandoleError, match="this run is without node-2, node-3: run site"):
            key.keep(second, ["node-2", "node-3"], check_mode=check_mode)
    assert first.read_text() == text and not second.exists()
    key.forget(tmp_path)
    with pytest.raises(FarandoleError, match="this run is without node-2"):
        key.keep(first, ["node-2"], check_mode=False)
    assert not first.exists() and key.keep(first, check_mode=False)
    assert not key.keep(first, ["node-2"], check_mode=False)


@pytest.mark.parametrize("text", ["", "\n", "a" * 255, "a" * 257, "a" * 255 + "\n\n", "a" * 200 + "\0" * 56, "ä" * 256])
@pytest.mark.parametrize("check_mode", [True, False])
def test_a_damaged_key_is_refused_by_the_name_of_its_file(tmp_path: Path, text: str, check_mode: bool) -> None:
    path = tmp_path / "munge.key"
    path.write_text(text)
    with pytest.raises(FindingsError) as refusal:
        key.keep(path, check_mode=check_mode)
    (finding,) = refusal.value.findings
    assert finding.code == "munge-key-damaged"
    assert f"{path}, is damaged" in finding.cause
    assert f"mv {path} " in finding.cure
    if len(text) > 10:
        assert text[:10] not in str(refusal.value)
    assert path.read_text() == text
