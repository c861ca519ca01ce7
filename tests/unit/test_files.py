"""Files of the control machine are replaced as a whole or not at all."""

import os
from pathlib import Path

import pytest

from farandole.core import files


def test_a_file_has_the_requested_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files.write(tmp_path / "a", "öne")
        files.write(tmp_path / "b", b"two", 0o640)
    finally:
        os.umask(before)
    written = {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert written == {"a": ("öne", 0o644), "b": ("two", 0o640)}


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    files.write(tmp_path / "a", "old")
    monkeypatch.setattr(os if failing == "fsync" else Path, failing, fails)
    with pytest.raises(OSError, match="the disk is gone"):
        files.write(tmp_path / "a", "new", durable=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}
