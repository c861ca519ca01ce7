"""A node's host and job keys, made by the real ssh-keygen."""

import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .loading import load

ssh_identity = load("modules", "ssh_identity")
ME = pwd.getpwuid(os.geteuid()).pw_name


class Module:
    """The parts of AnsibleModule that the module uses."""

    def __init__(self, check_mode: bool, **params: Any) -> None:
        self.check_mode, self.params = check_mode, {"revoked": "", **params}
        self.answer: dict[str, Any] = {}

    def run_command(self, command: list[str], check_rc: bool) -> tuple[int, str, str]:
        done = subprocess.run(command, capture_output=True, text=True, check=check_rc)
        return done.returncode, done.stdout, done.stderr

    def exit_json(self, **answer: Any) -> None:
        self.answer = answer


@pytest.fixture
def job_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ssh_identity, "HOST_KEY", tmp_path / "host_key")
    return tmp_path / "id_job"


def run(monkeypatch: pytest.MonkeyPatch, job_key: Path, *, check_mode: bool = False, **params: Any) -> dict[str, Any]:
    module = Module(check_mode, **{"folder": str(job_key.parent), "job_keys": {ME: str(job_key)}, **params})
    monkeypatch.setattr(ssh_identity, "AnsibleModule", lambda **_: module)
    ssh_identity.main()
    return module.answer


def test_a_revoked_job_key_is_replaced_by_a_new_pair(job_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(monkeypatch, job_key)
    assert run(monkeypatch, job_key, revoked="ssh-ed25519 other node-1\n") == {**first, "changed": False}
    arguments: dict[str, Any] = {"revoked": f"{first['job_keys'][ME]} node-1\n{first['host_key']} node-1\n"}
    predicted = run(monkeypatch, job_key, check_mode=True, **arguments)
    assert (predicted["changed"], predicted["job_keys"]) == (True, {ME: ""})
    second = run(monkeypatch, job_key, **arguments)
    # Only the operator replaces a host key, because the operator must know it.
    assert (second["changed"], second["host_key"]) == (True, first["host_key"])
    private = subprocess.run(["ssh-keygen", "-y", "-f", job_key], capture_output=True, text=True, check=True).stdout
    assert " ".join(private.split()[:2]) == second["job_keys"][ME] != first["job_keys"][ME]


def test_check_mode_does_not_return_a_job_key_that_will_be_removed(
    job_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, job_key)
    for check_mode in (True, False):
        left = run(monkeypatch, job_key, check_mode=check_mode, job_keys={})
        assert (left["changed"], left["job_keys"]) == (True, {})
        assert job_key.exists() is check_mode


def test_jobs_find_their_keys_whatever_the_umask_of_the_login(job_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = job_key.parent / "ssh"
    arguments: dict[str, Any] = {"folder": str(folder), "job_keys": {ME: str(folder / "id_jobs/me")}}
    before = os.umask(0o027)
    try:
        run(monkeypatch, job_key, **arguments)
    finally:
        os.umask(before)
    for closed in (folder, folder / "id_jobs"):
        assert closed.stat().st_mode & 0o777 == 0o755
        # As earlier versions left it.
        closed.chmod(0o750)
        for check_mode, changed, mode in ((True, True, 0o750), (False, True, 0o755), (False, False, 0o755)):
            assert run(monkeypatch, job_key, check_mode=check_mode, **arguments)["changed"] is changed
            assert closed.stat().st_mode & 0o777 == mode
