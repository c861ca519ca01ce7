"""The CA's keys and certificates on disk; test_ssh_trust has whom it signs for."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.trust import authority as ca_of
from farandole.trust import certificates
from farandole.trust.rules import Signed

from .authority import (
    CA,
    HOST,
    HOST_KEY,
    JOB_KEY,
    OTHER_KEY,
    USER,
    A,
    authority,
    given,
    issue,
    on_disk,
    serve,
    shown,
    ssh_keygen,
    without,
)

DAY = 86400
NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
SECRET = "correct horse battery staple"  # noqa: S105, it protects the CA of a test
KINDS = ("host", "user")
CERTIFICATE = certificates.sign(USER, CA, NOW)


class Quick:
    """The module that encrypts keys, with fewer rounds."""

    def __getattr__(self, name: str) -> Any:
        builder = serialization.PrivateFormat.OpenSSH.encryption_builder().kdf_rounds(1)
        return builder.build if name == "BestAvailableEncryption" else getattr(serialization, name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ca_of, "serialization", Quick())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def fingerprint(key: str) -> str:
    return ssh_keygen("-l", "-f", "-", stdin=key).stdout.split()[1]


def opened(ca: Any, kind: str, passphrase: str) -> str:
    """The public half of a private key; empty if the passphrase does not open it."""
    return " ".join(ssh_keygen("-y", "-P", passphrase, "-f", ca.folder / f"{kind}_ca").stdout.split()[:2])


def public(ca: Any) -> list[str]:
    return [certificates.public_text(ca.keys()[kind].public_key()) for kind in KINDS]


@pytest.mark.parametrize("passphrase", ["", SECRET])
def test_only_the_owner_can_read_anything(tmp_path: Path, passphrase: str) -> None:
    ca = authority(tmp_path, passphrase)
    ca.folder.mkdir(parents=True)
    ca.folder.chmod(0o755)
    issue(ca)
    ca.record([HOST.signed, USER.signed])
    ca.revoke([HOST.signed])
    ca.announce(HOST_KEY)
    names = {"host_ca", "user_ca", "known_hosts", "revoked_keys", "signed_keys"}
    assert {path.name for path in on_disk(ca.folder)} == names | {f"node-1.{kind}-cert.pub" for kind in KINDS}
    assert {mode(path) for path in on_disk(ca.folder)} == {0o600}
    assert {mode(ca.folder), mode(ca.folder / "issued")} == {0o700}


@pytest.mark.parametrize("passphrase", ["", SECRET])
def test_a_key_is_made_once_for_each_kind_and_encrypted_by_the_passphrase(tmp_path: Path, passphrase: str) -> None:
    first, again = authority(tmp_path, passphrase), authority(tmp_path, passphrase)
    made = public(first)
    assert made[0] != made[1]
    assert [opened(first, kind, passphrase) for kind in KINDS] == made == public(again)
    if passphrase:
        assert [opened(first, kind, "") for kind in KINDS] == ["", ""]
    assert (first.changed, again.changed) == (True, False)


@pytest.mark.parametrize(
    ("passphrase", "message"),
    [("", "has a passphrase: set ssh_trust_ca_passphrase"), ("wrong", "ssh_trust_ca_passphrase is not its passphrase")],
)
def test_a_key_that_cannot_be_opened_names_the_variable_and_is_not_replaced(
    tmp_path: Path, passphrase: str, message: str
) -> None:
    given(tmp_path, ca=authority(tmp_path, SECRET))
    for lost in ((), ("signed_keys",)):
        without(tmp_path, *lost)
        before = on_disk(tmp_path)
        with pytest.raises(FarandoleError) as refusal:
            serve(tmp_path, ca=authority(tmp_path, passphrase))
        assert f"the CA key {authority(tmp_path).folder / 'host_ca'} " in str(refusal.value)
        assert message in str(refusal.value)
        assert SECRET not in str(refusal.value)
        assert on_disk(tmp_path) == before


def test_an_unencrypted_key_is_encrypted_once_there_is_a_passphrase(tmp_path: Path) -> None:
    plain = authority(tmp_path)
    issued, keys, before = issue(plain), public(plain), on_disk(tmp_path)
    predicting = authority(tmp_path, SECRET, check_mode=True)
    assert (issue(predicting), predicting.changed, on_disk(tmp_path)) == (issued, True, before)
    for changed in (True, False):
        ca = authority(tmp_path, SECRET)
        assert (issue(ca), ca.changed) == (issued, changed)
        assert [opened(ca, kind, word) for word in ("", SECRET) for kind in KINDS] == ["", "", *keys]
        assert mode(ca.folder / "user_ca") == 0o600


def test_a_wrong_passphrase_encrypts_nothing(tmp_path: Path) -> None:
    """One of the two keys comes from a copy that had no passphrase yet."""
    plain = authority(tmp_path)
    keys = public(plain)
    kept = (plain.folder / "host_ca").read_bytes()
    authority(tmp_path, SECRET).keys()
    (plain.folder / "host_ca").write_bytes(kept)
    before = on_disk(tmp_path)
    with pytest.raises(FarandoleError, match="is not its passphrase"):
        authority(tmp_path, "wrong").keys()
    assert on_disk(tmp_path) == before
    assert public(authority(tmp_path, SECRET)) == keys == [opened(plain, kind, SECRET) for kind in KINDS]


@pytest.mark.parametrize("passphrase", ["", SECRET])
def test_a_malformed_key_is_distinguished_from_a_wrong_passphrase(tmp_path: Path, passphrase: str) -> None:
    path = tmp_path / "user_ca"
    path.write_text("nothing\n")
    with pytest.raises(FarandoleError, match=r"cannot be opened: .*; restore it from your backup") as refusal:
        ca_of.load_ca(path, passphrase)
    assert "is not its passphrase" not in str(refusal.value)


def test_a_key_of_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "user_ca"
    rsa: Any = generate_private_key(65537, 2048)
    ca_of.save_ca(path, rsa, "")
    with pytest.raises(FarandoleError, match=f"{path} is not an ed25519 key"):
        ca_of.load_ca(path, "")
    text = rsa.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with pytest.raises(FarandoleError, match="node-1: its host key is not an ed25519 key"):
        certificates.sign(replace(HOST, key=text.decode()), CA, NOW)


def test_the_control_machine_verifies_the_nodes_by_their_ca(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    for key in (OTHER_KEY, HOST_KEY):
        ca.announce(key)
        lines = ssh_keygen("-F", "node-1", "-f", ca.folder / "known_hosts").stdout.splitlines()
        assert lines[1:] == [f"@cert-authority * {key}"]
    before = on_disk(tmp_path)
    ca.announce(HOST_KEY)
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize(
    ("request_", "key", "until", "rest"),
    [
        (HOST, HOST_KEY, "2037-01-12", ["node-1", "192.0.2.1", "Critical Options: (none)", "Extensions: (none)"]),
        (
            USER, JOB_KEY, "2027-11-11",
            ["trainer", "Critical Options:", "source-address 192.0.2.1,127.0.0.1,::1", "Extensions:", "permit-pty"],
        ),
    ],
    ids=KINDS,
)  # fmt: skip
def test_a_certificate_is_for_the_names_of_its_node_or_for_a_terminal_from_there(
    request_: Any, key: str, until: str, rest: list[str]
) -> None:
    kind = request_.kind
    assert shown(certificates.sign(request_, CA, NOW)) == [
        f"Type: ssh-ed25519-cert-v01@openssh.com {kind} certificate",
        f"Public key: ED25519-CERT {fingerprint(key)}",
        f"Signing CA: ED25519 {fingerprint(certificates.public_text(CA.public_key()))} (using ssh-ed25519)",
        f'Key ID: "node-1 {kind}"',
        f"Valid: from 2027-01-14T08:00:00 to {until}T08:00:00",
        "Principals:",
        *rest,
    ]


@pytest.mark.parametrize(
    ("changes", "age", "good"),
    [
        ({}, 0, True),
        ({"principals": ("root",)}, 0, False),
        ({"principals": ("trainer", "root")}, 0, False),
        ({"sources": ("192.0.2.9",)}, 0, False),
        ({"sources": ()}, 0, False),
        ({"key": OTHER_KEY}, 0, False),
        ({"days": 299}, 0, False),
        # A longer lifetime can wait for the last third.
        ({"days": 899}, 0, True),
        ({"days": 900}, 0, False),
        ({}, 200 * DAY - 1, True),
        ({}, 200 * DAY, False),
        ({}, 400 * DAY, False),
    ],
    ids=str,
)
def test_a_certificate_is_good_if_it_is_what_is_asked_for_two_thirds_of_its_life(
    changes: dict[str, Any], age: int, good: bool
) -> None:
    assert certificates.is_good(CERTIFICATE, replace(USER, **changes), CA.public_key(), NOW + age) is good


@pytest.mark.parametrize("text", ["", "not a key", JOB_KEY, CERTIFICATE[:200], "another's"], ids=lambda text: text[:12])
def test_anything_but_a_certificate_of_this_ca_is_not_good(text: str) -> None:
    text = certificates.sign(USER, Ed25519PrivateKey.generate(), NOW) if text == "another's" else text
    assert not certificates.is_good(text, USER, CA.public_key(), NOW)
    assert certificates.is_good(certificates.sign(HOST, CA, NOW), HOST, CA.public_key(), NOW)


def test_only_a_certificate_that_is_no_longer_good_is_signed_again(tmp_path: Path) -> None:
    host, user = issue(authority(tmp_path))
    ca, before = authority(tmp_path), on_disk(tmp_path)
    assert issue(ca) == [host, user]
    assert (ca.changed, on_disk(tmp_path)) == (False, before)
    (renewed,) = issue(ca, replace(USER, sources=("192.0.2.9",)))
    assert ca.changed
    assert "source-address 192.0.2.9" in shown(renewed)
    assert ca.issued("node-1", "user").read_text() == renewed != user
    old = certificates.sign(USER, ca.keys()["user"], time.time() - 250 * DAY)
    write_private(ca.issued("node-1", "user"), old.encode())
    assert issue(ca, USER) != [old]


def test_check_mode_creates_nothing(tmp_path: Path) -> None:
    ca = authority(tmp_path, SECRET, check_mode=True)
    issued = issue(ca)
    ca.announce(HOST_KEY)
    assert [shown(text)[3] for text in issued] == ['Key ID: "node-1 host"', 'Key ID: "node-1 user"']
    assert ca.changed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "act",
    [
        lambda ca: issue(ca, replace(USER, key=OTHER_KEY)),
        lambda ca: ca.record([Signed(OTHER_KEY, "node-2", "host")]),
        lambda ca: ca.revoke([HOST.signed]),
        lambda ca: ca.withdraw([], [], ["trainer"]),
        lambda ca: ca.renew(),
    ],
    ids=["another key", "record", "revoke", "withdraw", "new CA"],
)
def test_check_mode_changes_no_existing_file(tmp_path: Path, act: Any) -> None:
    issue(authority(tmp_path))
    before = on_disk(tmp_path)
    ca = authority(tmp_path, check_mode=True)
    issue(ca)
    assert not ca.changed
    act(ca)
    assert ca.changed
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize("line", ["x", f"{A} node-1", f"{A} node-1 other", f"{A}x node-1 host", ""])
def test_a_ledger_that_was_cut_or_edited_is_refused(tmp_path: Path, line: str) -> None:
    given(tmp_path)
    path = tmp_path / "mine" / "ca" / "signed_keys"
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(FarandoleError, match=f"line 4 of {path} is not a signed key"):
        authority(tmp_path)


def test_keys_are_recorded_on_disk_before_they_are_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs, renames and signatures are recorded in the order in which they happen."""
    done: list[str] = []
    fsync, replace_, sign = os.fsync, Path.replace, certificates.sign

    def synced(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        # A draft has a random suffix.
        done.append(f"sync {path.name if path.is_dir() else path.stem}")
        fsync(handle)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"place {target.name}")
        return replace_(path, target)

    def signed(asked: Any, *rest: Any) -> Any:
        done.append("sign")
        return sign(asked, *rest)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(certificates, "sign", signed)
    given(tmp_path)
    for name in ("signed_keys", "host_ca", "user_ca"):
        step = done.index(f"place {name}")
        assert done[step - 1 : step + 3] == [f"sync .{name}", f"place {name}", "sync ca", "sync mine"]
        assert step < done.index("sign")
