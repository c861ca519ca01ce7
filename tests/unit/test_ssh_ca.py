"""The cluster's CA on real files, with ssh-keygen as the judge of what it makes."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from .loading import load

ssh_ca = load("action", "ssh_ca")

DAY = 86400
NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
SECRET = "correct horse battery staple"  # noqa: S105, it protects the CA of a test
CA = Ed25519PrivateKey.generate()
HOST_KEY, JOB_KEY, OTHER_KEY = (ssh_ca.public_text(Ed25519PrivateKey.generate().public_key()) for _ in range(3))
HOST = ssh_ca.Wish("host", "node-1", HOST_KEY, ("node-1", "192.0.2.1"), (), 3650)
USER = ssh_ca.Wish("user", "node-1", JOB_KEY, ("trainer",), ("192.0.2.1", "127.0.0.1", "::1"), 300)


def authority(tmp_path: Path, passphrase: str = "", *, check_mode: bool = False) -> Any:
    return ssh_ca.Authority(tmp_path / "mine" / "ca", passphrase, check_mode=check_mode)


def issue(ca: Any, *wishes: Any) -> list[str]:
    """Certificates as a run asks for them."""
    return [ca.certificate(wish, ca.key(wish.kind)) for wish in wishes or (HOST, USER)]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def on_disk(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """A file that was written again has another inode, even with the same content."""
    return {path: (path.stat().st_ino, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def ssh_keygen(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh-keygen", *arguments],
        input=stdin,
        env={**os.environ, "TZ": "UTC"},
        capture_output=True,
        text=True,
        check=False,
    )


def fingerprint(key: str) -> str:
    return ssh_keygen("-l", "-f", "-", stdin=key).stdout.split()[1]


def opened(path: Path, passphrase: str) -> str:
    """The public half of a private key, nothing if the passphrase does not open it."""
    return " ".join(ssh_keygen("-y", "-P", passphrase, "-f", path).stdout.split()[:2])


def shown(certificate: str) -> list[str]:
    """What ssh-keygen reads in a certificate, whose signature it checks."""
    done = ssh_keygen("-L", "-f", "-", stdin=certificate)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    return [line for line in lines if not line.startswith("Serial:")]


@pytest.mark.parametrize("passphrase", ["", SECRET])
def test_everything_is_for_its_owner_alone(tmp_path: Path, passphrase: str) -> None:
    ca = authority(tmp_path, passphrase)
    issue(ca)
    ca.revoked(["node-1"])
    ca.announce(HOST_KEY)
    assert {path.name for path in on_disk(ca.folder)} == {
        "host_ca",
        "user_ca",
        "node-1.host-cert.pub",
        "node-1.user-cert.pub",
        "known_hosts",
        "revoked_keys",
    }
    assert {mode(path) for path in on_disk(ca.folder)} == {0o600}
    assert {mode(ca.folder), mode(ca.folder / "issued")} == {0o700}


def test_a_folder_that_others_can_enter_is_shut(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    ca.folder.mkdir(parents=True)
    ca.folder.chmod(0o755)
    ca.key("host")
    assert mode(ca.folder) == 0o700


def test_a_key_is_made_once_for_each_kind(tmp_path: Path) -> None:
    first, again = authority(tmp_path), authority(tmp_path)
    made = [ssh_ca.public_text(first.key(kind).public_key()) for kind in ("host", "user")]
    assert [opened(first.folder / f"{kind}_ca", "") for kind in ("host", "user")] == made
    assert [ssh_ca.public_text(again.key(kind).public_key()) for kind in ("host", "user")] == made
    assert made[0] != made[1]
    assert first.changed
    assert not again.changed


def test_the_passphrase_encrypts_the_key_on_disk(tmp_path: Path) -> None:
    ca = authority(tmp_path, SECRET)
    key = ssh_ca.public_text(ca.key("user").public_key())
    path = ca.folder / "user_ca"
    assert opened(path, "") == ""
    assert opened(path, SECRET) == key
    assert ssh_ca.public_text(authority(tmp_path, SECRET).key("user").public_key()) == key


@pytest.mark.parametrize(
    ("passphrase", "words"),
    [
        ("", "has a passphrase: set ssh_trust_ca_passphrase from Ansible Vault"),
        ("wrong", "cannot be opened: ssh_trust_ca_passphrase is not its passphrase; set ssh_trust_ca_passphrase"),
    ],
)
def test_a_key_that_stays_shut_names_the_variable(tmp_path: Path, passphrase: str, words: str) -> None:
    path = authority(tmp_path).folder / "user_ca"
    authority(tmp_path, SECRET).key("user")
    before = on_disk(tmp_path)
    with pytest.raises(AnsibleActionFail) as refusal:
        authority(tmp_path, passphrase).key("user")
    assert f"the CA key {path} {words}" in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert on_disk(tmp_path) == before


def test_an_open_key_is_encrypted_once_there_is_a_passphrase(tmp_path: Path) -> None:
    certificates = issue(authority(tmp_path))
    path = authority(tmp_path).folder / "user_ca"
    key = opened(path, "")
    ca = authority(tmp_path, SECRET)
    assert issue(ca) == certificates
    assert ca.changed
    assert (opened(path, ""), opened(path, SECRET), mode(path)) == ("", key, 0o600)
    again = authority(tmp_path, SECRET)
    assert issue(again) == certificates
    assert not again.changed


def test_what_is_no_key_is_told_apart_from_a_wrong_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "user_ca"
    path.write_text("nothing\n")
    with pytest.raises(AnsibleActionFail, match="cannot be opened") as refusal:
        ssh_ca.load_ca(path, "")
    assert "is not its passphrase" not in str(refusal.value)


def test_a_key_of_another_type_is_refused(tmp_path: Path) -> None:
    path, rsa = tmp_path / "user_ca", generate_private_key(65537, 2048)
    ssh_ca.save_ca(path, rsa, "")
    with pytest.raises(AnsibleActionFail, match=f"{path} is not an ed25519 key"):
        ssh_ca.load_ca(path, "")
    public = rsa.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with pytest.raises(AnsibleActionFail, match="node-1: its host key is not an ed25519 key"):
        ssh_ca.sign(replace(HOST, key=public.decode()), CA, NOW)


def test_the_control_machine_knows_the_nodes_by_their_ca(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    for key in (OTHER_KEY, HOST_KEY):
        ca.announce(key)
        found = ssh_keygen("-F", "node-1", "-f", ca.folder / "known_hosts").stdout
        assert found.splitlines()[1:] == [f"@cert-authority * {key}"]
    before = on_disk(tmp_path)
    ca.announce(HOST_KEY)
    assert on_disk(tmp_path) == before


def test_a_host_certificate_is_good_for_the_node_s_names() -> None:
    assert shown(ssh_ca.sign(HOST, CA, NOW)) == [
        "Type: ssh-ed25519-cert-v01@openssh.com host certificate",
        f"Public key: ED25519-CERT {fingerprint(HOST_KEY)}",
        f"Signing CA: ED25519 {fingerprint(ssh_ca.public_text(CA.public_key()))} (using ssh-ed25519)",
        'Key ID: "node-1 host"',
        "Valid: from 2027-01-15T07:55:00 to 2037-01-12T08:00:00",
        "Principals:",
        "node-1",
        "192.0.2.1",
        "Critical Options: (none)",
        "Extensions: (none)",
    ]


def test_a_user_certificate_is_good_from_its_node_alone_and_for_a_terminal_alone() -> None:
    assert shown(ssh_ca.sign(USER, CA, NOW)) == [
        "Type: ssh-ed25519-cert-v01@openssh.com user certificate",
        f"Public key: ED25519-CERT {fingerprint(JOB_KEY)}",
        f"Signing CA: ED25519 {fingerprint(ssh_ca.public_text(CA.public_key()))} (using ssh-ed25519)",
        'Key ID: "node-1 user"',
        "Valid: from 2027-01-15T07:55:00 to 2027-11-11T08:00:00",
        "Principals:",
        "trainer",
        "Critical Options:",
        "source-address 192.0.2.1,127.0.0.1,::1",
        "Extensions:",
        "permit-pty",
    ]


@pytest.mark.parametrize("wish", [HOST, USER], ids=lambda wish: str(wish.kind))
def test_a_certificate_that_says_what_is_wished_is_good(wish: Any) -> None:
    assert ssh_ca.is_good(ssh_ca.sign(wish, CA, NOW), wish, CA.public_key(), NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"principals": ("root",)},
        {"principals": ("trainer", "root")},
        {"sources": ("192.0.2.9",)},
        {"sources": ()},
        {"key": OTHER_KEY},
        {"days": 299},
    ],
    ids=str,
)
def test_a_certificate_that_says_anything_else_is_not(changes: dict[str, Any]) -> None:
    text = ssh_ca.sign(USER, CA, NOW)
    assert not ssh_ca.is_good(text, replace(USER, **changes), CA.public_key(), NOW)


def test_a_certificate_of_another_ca_is_not_good() -> None:
    text = ssh_ca.sign(USER, CA, NOW)
    assert not ssh_ca.is_good(text, USER, Ed25519PrivateKey.generate().public_key(), NOW)


@pytest.mark.parametrize("text", ["", "not a key", JOB_KEY, ssh_ca.sign(USER, CA, NOW)[:200]])
def test_what_is_no_certificate_is_not_good(text: str) -> None:
    assert not ssh_ca.is_good(text, USER, CA.public_key(), NOW)


@pytest.mark.parametrize(("age", "good"), [(0, True), (200 * DAY - 1, True), (200 * DAY, False), (400 * DAY, False)])
def test_a_certificate_is_good_for_two_thirds_of_its_life(age: int, good: bool) -> None:
    assert ssh_ca.is_good(ssh_ca.sign(USER, CA, NOW), USER, CA.public_key(), NOW + age) is good


def test_a_life_that_is_wished_longer_can_wait_for_the_last_third() -> None:
    text = ssh_ca.sign(USER, CA, NOW)
    assert ssh_ca.is_good(text, replace(USER, days=899), CA.public_key(), NOW)
    assert not ssh_ca.is_good(text, replace(USER, days=900), CA.public_key(), NOW)


def test_a_certificate_is_kept_to_the_letter(tmp_path: Path) -> None:
    first = authority(tmp_path)
    certificates = issue(first)
    assert first.changed
    before = on_disk(tmp_path)
    second = authority(tmp_path)
    assert issue(second) == certificates
    assert not second.changed
    assert on_disk(tmp_path) == before


def test_only_what_no_longer_serves_is_signed_again(tmp_path: Path) -> None:
    host, user = issue(authority(tmp_path))
    moved = replace(USER, sources=("192.0.2.9",))
    ca = authority(tmp_path)
    assert issue(ca, HOST) == [host]
    assert not ca.changed
    (renewed,) = issue(ca, moved)
    assert ca.changed
    assert renewed != user
    assert "source-address 192.0.2.9" in shown(renewed)
    assert ca.issued("node-1", "user").read_text() == renewed


def test_an_old_certificate_is_signed_again(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    old = ssh_ca.sign(USER, ca.key("user"), time.time() - 250 * DAY)
    ssh_ca.write_private(ca.issued("node-1", "user"), old.encode())
    assert issue(ca, USER) != [old]


def test_check_mode_makes_nothing(tmp_path: Path) -> None:
    ca = authority(tmp_path, SECRET, check_mode=True)
    host, user = issue(ca)
    ca.announce(HOST_KEY)
    assert (shown(host)[3], shown(user)[3]) == ('Key ID: "node-1 host"', 'Key ID: "node-1 user"')
    assert ca.changed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "act",
    [
        lambda ca: issue(ca, replace(USER, key=OTHER_KEY)),
        lambda ca: ca.revoked(["node-1"]),
        lambda ca: ca.rotate(),
    ],
    ids=["renew", "revoke", "rotate"],
)
def test_check_mode_touches_nothing_that_is_there(tmp_path: Path, act: Any) -> None:
    issue(authority(tmp_path))
    before = on_disk(tmp_path)
    ca = authority(tmp_path, check_mode=True)
    issue(ca)
    assert not ca.changed
    act(ca)
    assert ca.changed
    assert on_disk(tmp_path) == before


def test_check_mode_encrypts_nothing(tmp_path: Path) -> None:
    certificates = issue(authority(tmp_path))
    before = on_disk(tmp_path)
    ca = authority(tmp_path, SECRET, check_mode=True)
    assert issue(ca) == certificates
    assert ca.changed
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize("check_mode", [False, True])
def test_rotation_leaves_nothing_of_the_old_ca_but_what_is_revoked(tmp_path: Path, check_mode: bool) -> None:
    former = authority(tmp_path)
    old = issue(former)
    revoked = former.revoked(["node-1"])
    before = on_disk(tmp_path)
    ca = authority(tmp_path, check_mode=check_mode)
    ca.rotate()
    assert ca.changed
    assert authority(tmp_path).revoked([]) == revoked
    for one, other in zip(old, issue(ca), strict=True):
        # Line 2 tells the CA; from line 5 on come the names and the options.
        assert shown(one)[2] != shown(other)[2]
        assert shown(one)[5:] == shown(other)[5:]
    assert (on_disk(tmp_path) == before) is check_mode


def test_a_revoked_key_stays_revoked(tmp_path: Path) -> None:
    issue(authority(tmp_path), HOST, USER, replace(HOST, name="node-2", key=OTHER_KEY))
    lines = [f"{HOST_KEY} node-1", f"{JOB_KEY} node-1"]
    first = authority(tmp_path)
    assert first.revoked(["node-1"]) == lines
    assert first.changed
    assert (first.folder / "revoked_keys").read_text().splitlines() == lines
    for names in ([], ["node-1"]):
        later = authority(tmp_path)
        assert later.revoked(names) == lines
        assert not later.changed
    assert authority(tmp_path).revoked(["node-2"]) == [*lines, f"{OTHER_KEY} node-2"]


def test_a_new_key_does_not_take_the_old_one_off_the_list(tmp_path: Path) -> None:
    issue(authority(tmp_path))
    lines = authority(tmp_path).revoked(["node-1"])
    issue(authority(tmp_path), replace(HOST, key=OTHER_KEY))
    assert authority(tmp_path).revoked([]) == lines
    assert authority(tmp_path).revoked(["node-1"]) == [*lines, f"{OTHER_KEY} node-1"]


def test_nothing_is_revoked_of_a_node_that_was_never_signed(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    assert ca.revoked(["node-9"]) == []
    assert not ca.changed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wish", "file"),
    [(HOST, "/etc/ssh/ssh_host_ed25519_key"), (USER, "/etc/farandole/ssh/id_job")],
    ids=["host", "user"],
)
def test_a_revoked_key_is_not_signed_again(wish: Any, file: str) -> None:
    other = replace(wish, name="node-2", key=OTHER_KEY)
    with pytest.raises(AnsibleActionFail) as refusal:
        ssh_ca.refuse_revoked([other, wish], [f"{wish.key} node-1"])
    assert f"node-1: its {wish.kind} key is revoked" in str(refusal.value)
    assert f"delete {file} on it" in str(refusal.value)
    ssh_ca.refuse_revoked([other], [f"{wish.key} node-1"])


def test_a_name_that_is_known_nowhere_is_not_quietly_revoked() -> None:
    with pytest.raises(AnsibleActionFail, match="ssh_trust_revoked names nodee-1"):
        ssh_ca.refuse_unknown(["node-2", "node-1", "nodee-1"], [f"{HOST_KEY} node-1"], ["node-2"])
    ssh_ca.refuse_unknown(["node-2", "node-1"], [f"{HOST_KEY} node-1"], ["node-2"])


def test_a_rotation_takes_all_nodes_or_none() -> None:
    with pytest.raises(AnsibleActionFail, match=r"leaves out node-2, node-3: run it without --limit"):
        ssh_ca.refuse_partial_rotation(["node-1"], [], ["node-1", "node-2", "node-3"])
    ssh_ca.refuse_partial_rotation(["node-1"], ["node-2"], ["node-1", "node-2"])


def test_a_node_without_a_key_gets_no_certificate() -> None:
    node = {"name": "node-1", "names": ["node-1", "192.0.2.1"], "sources": ["192.0.2.1", "127.0.0.1", "::1"]}
    nodes = [
        {**node, "host_key": HOST_KEY, "job_key": JOB_KEY},
        {**node, "name": "node-2", "host_key": OTHER_KEY, "job_key": ""},
        {**node, "name": "node-3", "host_key": "", "job_key": ""},
    ]
    assert ssh_ca.wishes(nodes, "trainer", {"host": 3650, "user": 300}) == [
        HOST,
        USER,
        replace(HOST, name="node-2", key=OTHER_KEY),
    ]
