"""A new machine in the place of a node: whose key is believed. tests/lab/test_waves.py replaces one."""

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.cli.change import Change, alone
from farandole.cli.replace import confirm, refuse_former, remember, renewed
from farandole.core.errors import FarandoleError
from farandole.inventory import excluded
from farandole.inventory.facts import describe
from farandole.inventory.host_keys import HostKey, known
from farandole.plays.playbook import Login
from farandole.trust.certificates import public_text


def made() -> HostKey:
    kind, blob = public_text(Ed25519PrivateKey.generate().public_key()).split()
    return HostKey(kind, blob)


@pytest.mark.parametrize("host", ["192.0.2.3", "[192.0.2.3]:2222"])
def test_the_new_key_takes_the_place_of_the_former_one(host: str, tmp_path: Path) -> None:
    file, former, new, other = tmp_path / "known_hosts", made(), made(), made()
    remember(file, host, former)
    remember(file, "192.0.2.30", other)
    remember(file, host, new)
    assert known((host,), (str(file),)) == [new]
    assert known(("192.0.2.30",), (str(file),)) == [other]


def test_what_a_person_has_said_of_other_hosts_stays(tmp_path: Path) -> None:
    file, former, new, other = tmp_path / "known_hosts", made(), made(), made()
    key = f"{former.kind} {former.blob}"
    revoked = f"@revoked * {other.kind} {other.blob}"
    lines = [revoked, f"@cert-authority 192.0.2.* {key}", f"192.0.2.* {key}", f"192.0.2.4,192.0.2.3 {key}"]
    file.write_text("\n".join([*lines, f"192.0.2.3 {key}", "# mine", ""]))
    remember(file, "192.0.2.3", new)
    kept = [*lines[:3], f"192.0.2.4 {key}", "# mine", f"192.0.2.3 {new.kind} {new.blob}", ""]
    assert file.read_text() == "\n".join(kept)
    subprocess.run(["ssh-keygen", "-H", "-f", file], check=True, capture_output=True)
    remember(file, "192.0.2.3", other)
    assert other.blob in file.read_text() and new.blob not in file.read_text()


def test_a_key_of_this_cluster_is_no_new_machines(tmp_path: Path) -> None:
    key, ca = made(), tmp_path / "ca"
    ca.mkdir()
    cluster = describe({"cluster": ["node-1", "node-2"], "head": ["node-1"]}, tmp_path)
    refuse_former("node-2", key, cluster)
    for file in ("signed_keys", "revoked_keys"):
        (ca / file).write_text(f"{key.kind} {key.blob} node-2 host\n")
        with pytest.raises(FarandoleError, match="no new machine"):
            refuse_former("node-2", key, cluster)
        refuse_former("node-2", made(), cluster)
        (ca / file).unlink()


def test_a_key_that_nobody_has_confirmed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    key = made()
    confirm("node-2", "192.0.2.3", key, key.fingerprint)
    assert key.fingerprint in capsys.readouterr().out
    with pytest.raises(FarandoleError, match="another one"):
        confirm("node-2", "192.0.2.3", key, "SHA256:x")
    with pytest.raises(FarandoleError, match="--host-key"):
        confirm("node-2", "192.0.2.3", key, "")


@pytest.mark.parametrize("decided", [False, True])
def test_a_new_machine_gets_jobs_once_it_is_proven(
    decided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, left_out = list[tuple[str, bool]](), excluded.by_person("carol", "it was replaced")
    late = excluded.by_person("dave", "smoke")

    def run(_change: Change, playbook: str, *arguments: str) -> bool:
        ran.append((" ".join((playbook, *arguments[:2])), "node-2" in excluded.read(tmp_path)))
        if decided and len(ran) == 2:
            with excluded.changing(tmp_path) as entries:
                entries["node-2"] = late
        return True

    monkeypatch.setattr(Change, "run", run)
    change = Change(tmp_path, Login(), describe({"cluster": ["node-1", "node-2"], "head": ["node-1"]}, tmp_path), "")
    with alone(tmp_path):
        why = change.brought_back({"node-2": left_out}, lambda: renewed(change, "node-2", left_out))
    # The others learn of the new keys while it is left out.
    assert ran[:2] == [("site.yml --limit node-2", False), ("site.yml", True)]
    assert why == ("somebody has said something else of it meanwhile" if decided else "")
    assert excluded.read(tmp_path) == ({"node-2": late} if decided else {})
