"""What the module accounts does besides accounts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .loading import load

accounts = load("modules", "accounts")


def test_a_folder_that_was_made_by_a_strict_umask_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def done(*, check_mode: bool) -> list[str]:
        params: dict[str, Any] = {"admins": [], "job_user": "", "linger": False, "end_jobs": False}
        module = SimpleNamespace(check_mode=check_mode, params=params, run_command=lambda command, **_: command)
        return [line for line in accounts.apply(module, {}) if not line.startswith("groupadd ")]

    monkeypatch.setattr(accounts, "GROUP", "no-such-group")
    monkeypatch.setattr(accounts, "SUDOERS", tmp_path / "sudoers")
    monkeypatch.setattr(accounts, "LISTED", tmp_path / "etc/uids")
    assert done(check_mode=False) == []
    (tmp_path / "etc").mkdir(mode=0o700)
    for check_mode, mode in ((True, 0o700), (False, 0o755)):
        assert done(check_mode=check_mode) == [f"open {tmp_path / 'etc'}"]
        assert (tmp_path / "etc").stat().st_mode & 0o777 == mode
    # Others can enter it.
    (tmp_path / "etc").chmod(0o711)
    assert done(check_mode=False) == []
