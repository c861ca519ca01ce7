"""The cluster's CA on real files; ssh-keygen checks what it produces."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import FindingsError
from farandole.trust import authority as ca_of
from farandole.trust import certificates
from farandole.trust import rules as trust
from farandole.trust.certificates import Request
from farandole.trust.rules import Signed

DAY = 86400
NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC
SECRET = "correct horse battery staple"  # noqa: S105, it protects the CA of a test
# Always the same, because they are in the names of tests.
CA, *KEYS = (Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in range(7))
HOST_KEY, JOB_KEY, OTHER_KEY, A, B, C = (certificates.public_text(key.public_key()) for key in KEYS)
HOST = Request("host", "node-1", HOST_KEY, ("node-1", "192.0.2.1"), (), 3650)
USER = Request("user", "node-1", JOB_KEY, ("trainer",), ("192.0.2.1", "127.0.0.1", "::1"), 300)


def authority(tmp_path: Path, passphrase: str = "", *, check_mode: bool = False) -> Any:
    return ca_of.Authority(tmp_path / "mine" / "ca", passphrase, check_mode=check_mode)


def issue(ca: Any, *requests: Any) -> list[str]:
    """Issue certificates as a run does."""
    return [ca.certificate(request, ca.keys()[request.kind]) for request in requests or (HOST, USER)]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def on_disk(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Inode and content of every file: a file that was rewritten has another inode."""
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
    """The public half of a private key; empty if the passphrase does not open it."""
    return " ".join(ssh_keygen("-y", "-P", passphrase, "-f", path).stdout.split()[:2])


def shown(certificate: str) -> list[str]:
    """What ssh-keygen prints about a certificate, after checking its signature."""
    done = ssh_keygen("-L", "-f", "-", stdin=certificate)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    return [line for line in lines if not line.startswith("Serial:")]


@pytest.mark.parametrize("passphrase", ["", SECRET])
def test_only_the_owner_can_read_anything(tmp_path: Path, passphrase: str) -> None:
    ca = authority(tmp_path, passphrase)
    issue(ca)
    ca.record([HOST.signed, USER.signed])
    ca.revoke([HOST.signed])
    ca.announce(HOST_KEY)
    assert {path.name for path in on_disk(ca.folder)} == {
        "host_ca",
        "user_ca",
        "node-1.host-cert.pub",
        "node-1.user-cert.pub",
        "known_hosts",
        "revoked_keys",
        "signed_keys",
    }
    assert {mode(path) for path in on_disk(ca.folder)} == {0o600}
    assert {mode(ca.folder), mode(ca.folder / "issued")} == {0o700}


def test_a_folder_that_others_can_enter_is_closed_to_them(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    ca.folder.mkdir(parents=True)
    ca.folder.chmod(0o755)
    ca.keys()["host"]
    assert mode(ca.folder) == 0o700


def test_a_key_is_made_once_for_each_kind(tmp_path: Path) -> None:
    first, again = authority(tmp_path), authority(tmp_path)
    made = [certificates.public_text(first.keys()[kind].public_key()) for kind in ("host", "user")]
    assert [opened(first.folder / f"{kind}_ca", "") for kind in ("host", "user")] == made
    assert [certificates.public_text(again.keys()[kind].public_key()) for kind in ("host", "user")] == made
    assert made[0] != made[1]
    assert first.changed
    assert not again.changed


def test_the_passphrase_encrypts_the_key_on_disk(tmp_path: Path) -> None:
    ca = authority(tmp_path, SECRET)
    key = certificates.public_text(ca.keys()["user"].public_key())
    path = ca.folder / "user_ca"
    assert opened(path, "") == ""
    assert opened(path, SECRET) == key
    assert certificates.public_text(authority(tmp_path, SECRET).keys()["user"].public_key()) == key


@pytest.mark.parametrize(
    ("passphrase", "words"),
    [
        ("", "has a passphrase: set ssh_trust_ca_passphrase from Ansible Vault"),
        ("wrong", "cannot be opened: ssh_trust_ca_passphrase is not its passphrase; set ssh_trust_ca_passphrase"),
    ],
)
def test_a_key_that_cannot_be_opened_names_the_variable(tmp_path: Path, passphrase: str, words: str) -> None:
    path = authority(tmp_path).folder / "host_ca"
    authority(tmp_path, SECRET).keys()
    before = on_disk(tmp_path)
    with pytest.raises(FarandoleError) as refusal:
        authority(tmp_path, passphrase).keys()
    assert f"the CA key {path} {words}" in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert on_disk(tmp_path) == before


def test_an_unencrypted_key_is_encrypted_once_there_is_a_passphrase(tmp_path: Path) -> None:
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


def test_a_wrong_passphrase_encrypts_nothing(tmp_path: Path) -> None:
    """One of the two keys comes from a copy that had no passphrase yet."""
    plain = authority(tmp_path)
    plain.keys()
    kept = (plain.folder / "host_ca").read_bytes()
    authority(tmp_path, SECRET).keys()
    (plain.folder / "host_ca").write_bytes(kept)
    before = on_disk(tmp_path)
    with pytest.raises(FarandoleError, match="is not its passphrase"):
        authority(tmp_path, "wrong").keys()
    assert on_disk(tmp_path) == before
    authority(tmp_path, SECRET).keys()
    assert [opened(plain.folder / f"{kind}_ca", SECRET) != "" for kind in ("host", "user")] == [True, True]


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
    public = rsa.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with pytest.raises(FarandoleError, match="node-1: its host key is not an ed25519 key"):
        certificates.sign(replace(HOST, key=public.decode()), CA, NOW)


def test_the_control_machine_verifies_the_nodes_by_their_ca(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    for key in (OTHER_KEY, HOST_KEY):
        ca.announce(key)
        found = ssh_keygen("-F", "node-1", "-f", ca.folder / "known_hosts").stdout
        assert found.splitlines()[1:] == [f"@cert-authority * {key}"]
    before = on_disk(tmp_path)
    ca.announce(HOST_KEY)
    assert on_disk(tmp_path) == before


def test_a_host_certificate_is_valid_for_the_names_of_its_node() -> None:
    assert shown(certificates.sign(HOST, CA, NOW)) == [
        "Type: ssh-ed25519-cert-v01@openssh.com host certificate",
        f"Public key: ED25519-CERT {fingerprint(HOST_KEY)}",
        f"Signing CA: ED25519 {fingerprint(certificates.public_text(CA.public_key()))} (using ssh-ed25519)",
        'Key ID: "node-1 host"',
        "Valid: from 2027-01-15T07:55:00 to 2037-01-12T08:00:00",
        "Principals:",
        "node-1",
        "192.0.2.1",
        "Critical Options: (none)",
        "Extensions: (none)",
    ]


def test_a_user_certificate_is_valid_only_from_its_node_and_allows_only_a_terminal() -> None:
    assert shown(certificates.sign(USER, CA, NOW)) == [
        "Type: ssh-ed25519-cert-v01@openssh.com user certificate",
        f"Public key: ED25519-CERT {fingerprint(JOB_KEY)}",
        f"Signing CA: ED25519 {fingerprint(certificates.public_text(CA.public_key()))} (using ssh-ed25519)",
        'Key ID: "node-1 user"',
        "Valid: from 2027-01-15T07:55:00 to 2027-11-11T08:00:00",
        "Principals:",
        "trainer",
        "Critical Options:",
        "source-address 192.0.2.1,127.0.0.1,::1",
        "Extensions:",
        "permit-pty",
    ]


@pytest.mark.parametrize("asked", [HOST, USER], ids=lambda asked: str(asked.kind))
def test_a_certificate_that_matches_the_request_is_good(asked: Any) -> None:
    assert certificates.is_good(certificates.sign(asked, CA, NOW), asked, CA.public_key(), NOW)


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
def test_a_certificate_that_does_not_match_the_request_is_not_good(changes: dict[str, Any]) -> None:
    text = certificates.sign(USER, CA, NOW)
    assert not certificates.is_good(text, replace(USER, **changes), CA.public_key(), NOW)


def test_a_certificate_of_another_ca_is_not_good() -> None:
    text = certificates.sign(USER, CA, NOW)
    assert not certificates.is_good(text, USER, Ed25519PrivateKey.generate().public_key(), NOW)


@pytest.mark.parametrize(
    "text",
    ["", "not a key", JOB_KEY, certificates.sign(USER, CA, NOW)[:200]],
    ids=["nothing", "a word", "a key", "a part of one"],
)
def test_anything_but_a_certificate_is_not_good(text: str) -> None:
    assert not certificates.is_good(text, USER, CA.public_key(), NOW)


@pytest.mark.parametrize(("age", "good"), [(0, True), (200 * DAY - 1, True), (200 * DAY, False), (400 * DAY, False)])
def test_a_certificate_is_good_for_two_thirds_of_its_life(age: int, good: bool) -> None:
    assert certificates.is_good(certificates.sign(USER, CA, NOW), USER, CA.public_key(), NOW + age) is good


def test_a_longer_lifetime_can_wait_for_the_last_third() -> None:
    text = certificates.sign(USER, CA, NOW)
    assert certificates.is_good(text, replace(USER, days=899), CA.public_key(), NOW)
    assert not certificates.is_good(text, replace(USER, days=900), CA.public_key(), NOW)


def test_a_good_certificate_is_kept_unchanged(tmp_path: Path) -> None:
    first = authority(tmp_path)
    certificates = issue(first)
    assert first.changed
    before = on_disk(tmp_path)
    second = authority(tmp_path)
    assert issue(second) == certificates
    assert not second.changed
    assert on_disk(tmp_path) == before


def test_only_a_certificate_that_is_no_longer_good_is_signed_again(tmp_path: Path) -> None:
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
    old = certificates.sign(USER, ca.keys()["user"], time.time() - 250 * DAY)
    write_private(ca.issued("node-1", "user"), old.encode())
    assert issue(ca, USER) != [old]


def test_check_mode_creates_nothing(tmp_path: Path) -> None:
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


def test_check_mode_encrypts_nothing(tmp_path: Path) -> None:
    certificates = issue(authority(tmp_path))
    before = on_disk(tmp_path)
    ca = authority(tmp_path, SECRET, check_mode=True)
    assert issue(ca) == certificates
    assert ca.changed
    assert on_disk(tmp_path) == before


def node(name: str, host_key: Any, job_key: Any = None, **others: Any) -> dict[str, Any]:
    keys = {"trainer": job_key, **others} if job_key is not None else {}
    given = {"host_key": host_key, "job_keys": keys, "remembers": NOTHING}
    return {"name": name, **given, "names": [name], "sources": ["192.0.2.1"]}


NOTHING = {"authorities": [], "revoked": [], "certificate": ""}
CLUSTER = ["node-1", "node-2"]
HEAD = node("node-1", HOST_KEY, JOB_KEY)
WORKER = node("node-2", OTHER_KEY)
WORKERS_KEY = Signed(OTHER_KEY, "node-2", "host")


def serve(tmp_path: Path, *nodes: Any, ca: Any = None, cluster: Sequence[str] = CLUSTER, **changes: Any) -> Any:
    """Do the CA's part of site.yml; returns its result and its warning."""
    arguments = {
        "nodes": nodes or (HEAD, WORKER),
        "launchers": ["node-1"],
        "users": ["trainer"],
        "mounters": [],
        "homes": [],
        "host_days": 3650,
        "user_days": 300,
        "revoked": [],
        "rotate": False,
        **changes,
    }
    return ca_of.serve(ca or authority(tmp_path), arguments, cluster)


def given(tmp_path: Path, *nodes: Any, **changes: Any) -> dict[str, Any]:
    found, notice = serve(tmp_path, *nodes, **changes)
    assert notice == ""
    # As the role does in the end.
    (tmp_path / "mine/ca/unfinished").unlink(missing_ok=True)
    assert isinstance(found, dict)
    return found


def refused(tmp_path: Path, *nodes: Any, **changes: Any) -> str:
    """Why nothing was signed."""
    before = on_disk(tmp_path / "mine/ca/issued")
    with pytest.raises(FarandoleError) as refusal:
        serve(tmp_path, *nodes, **changes)
    assert on_disk(tmp_path / "mine/ca/issued") == before
    return str(refusal.value)


def findings(tmp_path: Path, *nodes: Any, **changes: Any) -> list[tuple[str, str]]:
    """Host and code of every finding because of which nothing was signed."""
    before = on_disk(tmp_path / "mine/ca/issued")
    with pytest.raises(FindingsError) as refusal:
        serve(tmp_path, *nodes, **changes)
    assert on_disk(tmp_path / "mine/ca/issued") == before
    assert all(one.cause in str(refusal.value) and one.cure in str(refusal.value) for one in refusal.value.findings)
    return [(one.host, one.code) for one in refusal.value.findings]


def revoked_keys(tmp_path: Path) -> set[str]:
    """The revoked keys as sshd and ssh read them on a node."""
    path = tmp_path / "mine" / "ca" / "revoked_keys"
    return {" ".join(line.split()[:2]) for line in path.read_text().splitlines()} if path.exists() else set()


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    first = given(tmp_path)
    before, ca = on_disk(tmp_path), authority(tmp_path)
    assert given(tmp_path, ca=ca) == first
    assert not ca.changed
    assert on_disk(tmp_path) == before


ALICE, BOB = "user:alice", "user:bob"
EVERYBODY = ["trainer", "alice", "bob"]


def test_everyone_gets_a_certificate_for_their_own_name(tmp_path: Path) -> None:
    head = node("node-1", HOST_KEY, JOB_KEY, alice=A, bob=B)
    found = given(tmp_path, head, WORKER, users=EVERYBODY)["user"]["node-1"]
    assert {name: parsed(text) for name, text in found.items()} == {
        "trainer": (JOB_KEY, [b"trainer"]),
        "alice": (A, [b"alice"]),
        "bob": (B, [b"bob"]),
    }
    assert authority(tmp_path).ledger[2:] == [Signed(A, "node-1", ALICE), Signed(B, "node-1", BOB), WORKERS_KEY]


def mounter(key: Any) -> dict[str, Any]:
    """A worker where root has a key for files."""
    return {**WORKER, "job_keys": {"root": key}, "sources": ["192.0.2.2", "127.0.0.1", "::1"]}


SHARED = {"mounters": ["node-2"], "homes": ["trainer", "alice"]}


def test_a_node_that_mounts_homes_gets_their_files_alone(tmp_path: Path) -> None:
    found = given(tmp_path, HEAD, mounter(A), **SHARED)["user"]["node-2"]
    lines = shown(found["root"])
    assert lines[lines.index("Principals:") + 1 :] == [
        "files:trainer",
        "files:alice",
        "Critical Options:",
        "force-command internal-sftp",
        "source-address 192.0.2.2",
        "Extensions: (none)",
    ]
    assert Signed(A, "node-2", "files") in authority(tmp_path).ledger
    ca = authority(tmp_path)
    given(tmp_path, HEAD, mounter(A), ca=ca, **SHARED)
    assert not ca.changed


@pytest.mark.parametrize("key", [A, HOST_KEY, "x"])
def test_a_node_cannot_make_itself_mount_homes(tmp_path: Path, key: str) -> None:
    assert findings(tmp_path, HEAD, mounter(key)) == [("node-2", "launcher-unexpected")]
    assert findings(tmp_path, HEAD, mounter(JOB_KEY), **SHARED) == [("node-2", "key-shared")]
    assert findings(tmp_path, HEAD, node("node-2", OTHER_KEY, A, root=B), **SHARED) == [
        ("node-2", "launcher-unexpected")
    ]


@pytest.mark.parametrize("changes", [{"revoked": ["node-2"], **SHARED}, {}])
def test_a_node_that_mounts_no_homes_any_more_has_its_key_revoked(tmp_path: Path, changes: dict[str, Any]) -> None:
    given(tmp_path, HEAD, mounter(A), **SHARED)
    nodes = [HEAD] if changes else [HEAD, WORKER]
    given(tmp_path, *nodes, **{**changes, "mounters": []})
    assert A in revoked_keys(tmp_path)
    assert not authority(tmp_path).issued("node-2", "files").exists()
    if not changes:
        assert findings(tmp_path, HEAD, mounter(A), **SHARED) == [("node-2", "job-key-revoked")]


def test_the_head_accepts_nodes_for_the_homes_that_are_shared() -> None:
    alice, bob = trust.principal_files(["alice", "bob"], ["alice"], "/x")
    assert alice == {"path": "/x/alice", "content": 'alice\nrestrict,command="internal-sftp" files:alice\n'}
    assert bob == {"path": "/x/bob", "content": "bob\n"}


def parsed(certificate: str) -> tuple[str, list[bytes]]:
    found = certificates.parse(certificate)
    assert found
    key = found.public_key()
    assert isinstance(key, Ed25519PublicKey)
    return certificates.public_text(key), found.valid_principals


def test_people_who_are_no_longer_listed_lose_their_keys_for_ever(tmp_path: Path) -> None:
    given(tmp_path, node("node-1", HOST_KEY, JOB_KEY, alice=A, bob=B), WORKER, users=EVERYBODY)
    head, users = node("node-1", HOST_KEY, JOB_KEY, bob=B), ["trainer", "bob"]
    assert given(tmp_path, head, WORKER, users=users)["user"]["node-1"].keys() == {"trainer", "bob"}
    assert revoked_keys(tmp_path) == {A}
    assert not authority(tmp_path).issued("node-1", ALICE).exists()
    back = node("node-1", HOST_KEY, JOB_KEY, alice=A, bob=B)
    assert findings(tmp_path, back, WORKER, users=EVERYBODY) == [("node-1", "job-key-revoked")]


@pytest.mark.parametrize(
    ("keys", "code"),
    [({}, "key-malformed"), ({"bob": A}, "key-shared"), ({"bob": JOB_KEY}, "key-shared")],
    ids=["missing", "another person's", "the job user's"],
)
def test_a_key_is_one_person_s(tmp_path: Path, keys: dict[str, str], code: str) -> None:
    head = node("node-1", HOST_KEY, JOB_KEY, alice=A, **keys)
    assert findings(tmp_path, head, WORKER, users=EVERYBODY) == [("node-1", code)]


@pytest.mark.parametrize("job_key", [A, HOST_KEY, "x", ["x"], {"x": 1}])
def test_a_node_cannot_make_itself_a_launcher(tmp_path: Path, job_key: Any) -> None:
    given(tmp_path)
    assert findings(tmp_path, HEAD, node("node-2", OTHER_KEY, job_key)) == [("node-2", "launcher-unexpected")]
    assert given(tmp_path, HEAD, node("node-2", OTHER_KEY, A), launchers=CLUSTER)["user"].keys() == set(CLUSTER)


@pytest.mark.parametrize(
    "answer",
    [
        "", None, 7, [], {}, "ssh-ed25519", f"{A}\n", f" {A}", f"{A} comment", f"{A}\n{B}", f'command="id" {A}',
        "ssh-ed25519 " + "A" * 16384, A[:-1], f"{A}A", A.replace("I", "\u0131"), "{{ lookup('pipe', 'id') }}",
        "\x1b[2J", "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQ",
    ],
    ids=lambda answer: ascii(answer)[:30],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["host", "user"])
def test_anything_but_one_key_is_one_finding_about_that_node(tmp_path: Path, kind: str, answer: Any) -> None:
    head = node("node-1", answer, JOB_KEY) if kind == "host" else node("node-1", HOST_KEY, answer)
    assert findings(tmp_path, head, WORKER) == [("node-1", "key-malformed")]
    words = refused(tmp_path, head, WORKER)
    assert f"its {kind} key is not an ed25519 public key but " in words
    assert len(words) < 450
    assert words.replace("\n", "").isprintable()
    assert words.replace("…", "").isascii()
    assert list(tmp_path.iterdir()) == []


def test_all_bad_answers_are_reported_together(tmp_path: Path) -> None:
    assert findings(tmp_path, node("node-1", "x", "y"), node("node-2", "z", A)) == [
        ("node-1", "key-malformed"),
        ("node-1", "key-malformed"),
        ("node-2", "launcher-unexpected"),
        ("node-2", "key-malformed"),
    ]


def test_a_bare_node_has_no_keys_yet_in_check_mode(tmp_path: Path) -> None:
    found = given(tmp_path, node("node-1", "", ""), node("node-2", ""), ca=authority(tmp_path, check_mode=True))
    assert (found["host"], found["user"]) == ({}, {})


@pytest.mark.parametrize(
    ("nodes", "host", "words"),
    [
        ([HEAD, node("node-2", HOST_KEY)], "node-2", "its host key is the host key of node-1"),
        ([HEAD, node("node-2", JOB_KEY)], "node-2", "its host key is the user key of node-1"),
        ([node("node-1", HOST_KEY, HOST_KEY), WORKER], "node-1", "its user key is the host key of node-1"),
    ],
)
def test_the_key_of_another_node_is_refused(tmp_path: Path, nodes: Any, host: str, words: str) -> None:
    assert findings(tmp_path, *nodes) == [(host, "key-shared")]
    assert words in refused(tmp_path, *nodes)
    given(tmp_path)
    # The owner is known from now on, even if it does not take part in the run.
    assert findings(tmp_path, *nodes) == [(host, "key-shared")]
    if nodes[0] is HEAD:
        assert findings(tmp_path, nodes[1]) == [(host, "key-shared")]


def test_a_node_that_was_renamed_keeps_its_host_key(tmp_path: Path) -> None:
    given(tmp_path, cluster=["node-1", "gpu"], *[HEAD, node("gpu", OTHER_KEY)])  # noqa: B026
    assert "node-2" in given(tmp_path)["host"]
    assert OTHER_KEY not in revoked_keys(tmp_path)


def test_every_key_ever_signed_is_revoked_with_its_node(tmp_path: Path) -> None:
    for key in (A, B, C):
        given(tmp_path, HEAD, node("node-2", key))
    given(tmp_path, HEAD, revoked=["node-2"])
    assert revoked_keys(tmp_path) == {A, B, C}
    assert {one.key for one in authority(tmp_path).ledger} == {HOST_KEY, JOB_KEY, A, B, C}


def test_a_replaced_key_is_revoked_at_once_and_for_good(tmp_path: Path) -> None:
    given(tmp_path, node("node-1", HOST_KEY, A), WORKER)
    given(tmp_path, node("node-1", HOST_KEY, B), WORKER)
    assert revoked_keys(tmp_path) == {A}
    assert findings(tmp_path, node("node-1", HOST_KEY, A), WORKER) == [("node-1", "job-key-revoked")]
    # A refused run revokes no key that is in use.
    assert revoked_keys(tmp_path) == {A}
    for _ in range(2):
        given(tmp_path, node("node-1", HOST_KEY, B), WORKER, rotate=True)
        assert revoked_keys(tmp_path) == {A}


def test_a_revoked_host_key_comes_with_its_cure(tmp_path: Path) -> None:
    given(tmp_path)
    given(tmp_path, HEAD, revoked=["node-2"])
    assert findings(tmp_path) == [("node-2", "host-key-revoked")]
    assert "ssh-keygen -A" in refused(tmp_path)
    given(tmp_path, HEAD, node("node-2", A))
    assert revoked_keys(tmp_path) == {OTHER_KEY}


@pytest.mark.parametrize(
    "changes",
    [
        {"launchers": ["node-1"]},
        {"launchers": ["node-1"], "nodes": [HEAD]},
        {"launchers": ["node-1"], "cluster": ["node-1"], "nodes": [HEAD]},
        {"launchers": ["node-1"], "nodes": [HEAD], "revoked": ["node-2"]},
    ],
    ids=["left the mesh", "left it outside of --limit", "left the cluster", "revoked"],
)
def test_a_node_that_no_longer_launches_jobs_has_its_key_revoked(tmp_path: Path, changes: dict[str, Any]) -> None:
    given(tmp_path, HEAD, node("node-2", OTHER_KEY, A), launchers=CLUSTER)
    path = authority(tmp_path).issued("node-2", "user")
    assert path.exists()
    found = given(tmp_path, *changes.pop("nodes", [HEAD, WORKER]), **changes)
    assert f"{A} node-2" in found["revoked"]
    assert f"@revoked * {A}\n" in (tmp_path / "mine/ca/known_hosts").read_text()
    assert not path.exists()
    # Back in the mesh, a new key is signed, and the old one is not.
    if not changes.get("revoked"):
        back = {"launchers": CLUSTER}
        assert findings(tmp_path, HEAD, node("node-2", OTHER_KEY, A), **back) == [("node-2", "job-key-revoked")]
        assert "node-2" in given(tmp_path, HEAD, node("node-2", OTHER_KEY, B), **back)["user"]


def test_a_new_head_replaces_the_launcher(tmp_path: Path) -> None:
    given(tmp_path)
    found = given(tmp_path, node("node-1", HOST_KEY), node("node-2", OTHER_KEY, A), launchers=["node-2"])
    assert (revoked_keys(tmp_path), found["user"].keys()) == ({JOB_KEY}, {"node-2"})


def test_a_bad_answer_does_not_prevent_revocation(tmp_path: Path) -> None:
    given(tmp_path, HEAD, node("node-2", OTHER_KEY, A), launchers=CLUSTER)
    with pytest.raises(FarandoleError):
        serve(tmp_path, HEAD, node("node-2", "x"))
    assert revoked_keys(tmp_path) == {A}


def test_a_revoked_head_leaves_no_launcher(tmp_path: Path) -> None:
    assert "put another node into group head" in refused(tmp_path, WORKER, launchers=[], revoked=["node-1"])


def test_an_unknown_name_is_not_silently_revoked(tmp_path: Path) -> None:
    given(tmp_path)
    assert refused(tmp_path, revoked=["nodee-2"]).startswith("ssh_trust_revoked names nodee-2")
    given(tmp_path, HEAD, cluster=["node-1"], revoked=["node-2"])
    assert revoked_keys(tmp_path) == {OTHER_KEY}


@pytest.mark.parametrize("check_mode", [False, True])
def test_rotation_keeps_nothing_of_the_old_ca_except_the_record_of_keys(tmp_path: Path, check_mode: bool) -> None:
    old = given(tmp_path)
    given(tmp_path, HEAD, revoked=["node-2"])
    before, ca = on_disk(tmp_path), authority(tmp_path, check_mode=check_mode)
    new = given(tmp_path, HEAD, ca=ca, revoked=["node-2"], rotate=True)
    assert ca.changed
    assert not {old["host_ca"], old["user_ca"]} & {new["host_ca"], new["user_ca"]}
    assert revoked_keys(tmp_path) == {OTHER_KEY}
    assert authority(tmp_path).ledger == [HOST.signed, USER.signed, Signed(OTHER_KEY, "node-2", "host")]
    # Line 2 is the CA; the names and options start at line 5.
    one_of = [[found["host"]["node-1"], found["user"]["node-1"]["trainer"]] for found in (old, new)]
    for one, other in zip(*one_of, strict=True):
        assert shown(one)[2] != shown(other)[2]
        assert shown(one)[5:] == shown(other)[5:]
    assert (on_disk(tmp_path) == before) is check_mode
    if not check_mode:
        assert not authority(tmp_path).issued("node-2", "host").exists()


def test_a_rotation_needs_all_nodes(tmp_path: Path) -> None:
    given(tmp_path)
    words = refused(tmp_path, HEAD, rotate=True)
    assert "leaves out node-2. Run site.yml without --limit" in words


def without(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / "mine" / "ca" / name).unlink()


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (["host_ca", "user_ca"], "the CA of this cluster is missing: there is none in "),
        (["host_ca", "user_ca", "signed_keys"], "the CA of this cluster is missing: there is none in "),
        (["host_ca"], "host_ca is missing from "),
        (["user_ca"], "user_ca is missing from "),
        (["signed_keys"], "the CA in "),
    ],
    ids=str,
)
def test_a_lost_ca_does_not_split_the_cluster(tmp_path: Path, lost: list[str], words: str) -> None:
    old = given(tmp_path)
    without(tmp_path, *lost)
    before = on_disk(tmp_path)
    for check_mode in (True, False):
        refusal = refused(tmp_path, HEAD, ca=authority(tmp_path, check_mode=check_mode))
        assert refusal.startswith(words)
        assert "this run leaves out node-2" in refusal
        assert ("estore the folder from your backup" in refusal) is (lost != ["signed_keys"])
        assert on_disk(tmp_path) == before
    predicted, warning = serve(tmp_path, ca=authority(tmp_path, check_mode=True))
    assert on_disk(tmp_path) == before
    new, notice = serve(tmp_path)
    assert notice == warning
    assert notice.startswith(words)
    assert notice.endswith("a new CA replaces it, and nothing signed before is valid any longer")
    assert not {old["host_ca"], old["user_ca"]} & {new["host_ca"], new["user_ca"]}
    assert predicted["host"].keys() == new["host"].keys()
    # The next run keeps the new CA.
    assert given(tmp_path) == new


def test_the_first_run_needs_all_nodes_and_warns_of_nothing(tmp_path: Path) -> None:
    assert "the CA of this cluster is missing" in refused(tmp_path, HEAD)
    given(tmp_path)


@pytest.mark.parametrize("passphrase", ["", "wrong"])
def test_an_encrypted_ca_is_not_replaced_by_an_unencrypted_one(tmp_path: Path, passphrase: str) -> None:
    given(tmp_path, ca=authority(tmp_path, SECRET))
    without(tmp_path, "signed_keys")
    before = on_disk(tmp_path)
    with pytest.raises(FarandoleError, match="ssh_trust_ca_passphrase"):
        serve(tmp_path, ca=authority(tmp_path, passphrase))
    assert on_disk(tmp_path) == before


def test_certificates_of_an_older_version_can_still_be_revoked(tmp_path: Path) -> None:
    given(tmp_path, HEAD, node("node-2", OTHER_KEY, A), launchers=CLUSTER)
    without(tmp_path, "signed_keys")
    serve(tmp_path, HEAD, revoked=["node-2"])
    assert revoked_keys(tmp_path) == {OTHER_KEY, A}


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


def test_a_node_without_a_key_gets_no_certificate() -> None:
    one = {"name": "node-1", "names": ["node-1", "192.0.2.1"], "sources": ["192.0.2.1", "127.0.0.1", "::1"]}
    nodes = [
        {**one, "host_key": HOST_KEY, "job_keys": {"trainer": JOB_KEY}},
        {**one, "name": "node-2", "host_key": OTHER_KEY, "job_keys": {}},
        {**one, "name": "node-3", "host_key": "", "job_keys": {}},
    ]
    assert ca_of.requests(nodes, ["trainer"], ["node-1"], [], [], {"host": 3650, "user": 300}) == [
        HOST,
        USER,
        replace(HOST, name="node-2", key=OTHER_KEY),
    ]


def test_a_killed_rotation_is_completed_on_every_node_first(tmp_path: Path) -> None:
    given(tmp_path)
    serve(tmp_path, rotate=True)
    assert refused(tmp_path, HEAD).startswith("the run that made a new CA has not brought it to every node. A new CA")
    given(tmp_path)
    assert "node-1" in given(tmp_path, HEAD)["host"]


def test_without_the_list_of_revoked_keys_nothing_is_signed(tmp_path: Path) -> None:
    given(tmp_path)
    given(tmp_path, HEAD, revoked=["node-2"])
    without(tmp_path, "revoked_keys")
    assert "revoked_keys is missing, so it is not known which keys are revoked" in refused(tmp_path, HEAD)
    new, _ = serve(tmp_path, rotate=True)
    assert (tmp_path / "mine/ca/revoked_keys").exists()
    assert new["host"].keys() == {"node-1", "node-2"}


def test_an_empty_line_among_the_revoked_keys_is_ignored(tmp_path: Path) -> None:
    given(tmp_path)
    (tmp_path / "mine/ca/revoked_keys").write_text(f"\n{OTHER_KEY} node-2\n\n")
    assert given(tmp_path, HEAD)["revoked"] == [f"{OTHER_KEY} node-2"]
