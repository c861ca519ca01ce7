"""For whom the CA signs, and what it revokes; ssh-keygen checks what it produces."""

import os
import pwd
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader

from farandole.core.errors import FarandoleError
from farandole.inventory.cluster import ssh_ports
from farandole.inventory.host_keys import ssh_options
from farandole.trust import rules as trust
from farandole.trust.rules import Signed

from .authority import (
    CLUSTER,
    HEAD,
    HOST,
    HOST_KEY,
    JOB_KEY,
    OTHER_KEY,
    USER,
    WORKER,
    A,
    B,
    C,
    authority,
    findings,
    given,
    node,
    on_disk,
    parsed,
    refused,
    revoked_keys,
    serve,
    shown,
    without,
)  # fmt: skip
from .loading import ROOT

WORKERS_KEY = Signed(OTHER_KEY, "node-2", "host")


def test_each_node_is_signed_once(tmp_path: Path) -> None:
    assert "the CA of this cluster is missing" in refused(tmp_path, HEAD)
    first = given(tmp_path)
    assert {name: parsed(text) for name, text in first["host"].items()} == {
        "node-1": (HOST_KEY, [b"node-1"]), "node-2": (OTHER_KEY, [b"node-2"]),
    }  # fmt: skip
    assert first["user"].keys() == {"node-1"}
    before, ca = on_disk(tmp_path), authority(tmp_path)
    assert given(tmp_path, ca=ca) == first
    assert not ca.changed
    assert on_disk(tmp_path) == before


ALICE, BOB = "user:alice", "user:bob"
EVERYBODY = ["trainer", "alice", "bob"]


def test_everyone_gets_a_certificate_for_their_own_name(tmp_path: Path) -> None:
    head = node("node-1", HOST_KEY, JOB_KEY, alice=A, bob=B)
    certificates = given(tmp_path, head, WORKER, users=EVERYBODY)["user"]["node-1"]
    assert {name: parsed(text) for name, text in certificates.items()} == {
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
    certificates = given(tmp_path, HEAD, mounter(A), **SHARED)["user"]["node-2"]
    lines = shown(certificates["root"])
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
    message = refused(tmp_path, head, WORKER)
    assert f"its {kind} key is not an ed25519 public key but " in message
    assert len(message) < 450
    assert message.replace("\n", "").isprintable()
    assert message.replace("…", "").isascii()
    assert list(tmp_path.iterdir()) == []


def test_all_bad_answers_are_reported_together(tmp_path: Path) -> None:
    assert findings(tmp_path, node("node-1", "x", "y"), node("node-2", "z", A)) == [
        ("node-1", "key-malformed"),
        ("node-1", "key-malformed"),
        ("node-2", "launcher-unexpected"),
        ("node-2", "key-malformed"),
    ]


def test_a_bare_node_has_no_keys_yet_in_check_mode(tmp_path: Path) -> None:
    certificates = given(tmp_path, node("node-1", "", ""), node("node-2", ""), ca=authority(tmp_path, check_mode=True))
    assert (certificates["host"], certificates["user"]) == ({}, {})


@pytest.mark.parametrize(
    ("nodes", "host", "message"),
    [
        ([HEAD, node("node-2", HOST_KEY)], "node-2", "its host key is the host key of node-1"),
        ([HEAD, node("node-2", JOB_KEY)], "node-2", "its host key is the user key of node-1"),
        ([node("node-1", HOST_KEY, HOST_KEY), WORKER], "node-1", "its user key is the host key of node-1"),
    ],
)
def test_the_key_of_another_node_is_refused(tmp_path: Path, nodes: Any, host: str, message: str) -> None:
    assert message in refused(tmp_path, *nodes)
    # The owner is known from the first run on, even if it does not take part in a later one.
    for known in (False, True):
        if known:
            given(tmp_path)
        for present in [nodes, nodes[1:]] if known and nodes[0] is HEAD else [nodes]:
            assert findings(tmp_path, *present) == [(host, "key-shared")]


def test_a_node_that_was_renamed_keeps_its_host_key(tmp_path: Path) -> None:
    given(tmp_path, cluster=["node-1", "gpu"], *[HEAD, node("gpu", OTHER_KEY)])  # noqa: B026
    assert "node-2" in given(tmp_path)["host"]
    assert OTHER_KEY not in revoked_keys(tmp_path)


def test_every_key_ever_signed_is_revoked_with_its_node(tmp_path: Path) -> None:
    for key in (A, B, C):
        given(tmp_path, HEAD, node("node-2", key))
    # Even if it takes part, which no run should let it.
    answer = given(tmp_path, HEAD, node("node-2", OTHER_KEY), revoked=["node-2"])
    assert (revoked_keys(tmp_path), answer["host"].keys()) == ({A, B, C}, {"node-1"})
    assert {entry.key for entry in authority(tmp_path).ledger} == {HOST_KEY, JOB_KEY, A, B, C}


def test_a_replaced_key_is_revoked_at_once_and_for_good(tmp_path: Path) -> None:
    former, head = node("node-1", HOST_KEY, A), node("node-1", HOST_KEY, B)
    for nodes in (former, head):
        given(tmp_path, nodes, WORKER)
    assert revoked_keys(tmp_path) == {A}
    assert findings(tmp_path, former, WORKER) == [("node-1", "job-key-revoked")]
    # A refused run revokes no key that is in use.
    assert revoked_keys(tmp_path) == {A}
    for _ in range(2):
        given(tmp_path, head, WORKER, rotate=True)
        assert revoked_keys(tmp_path) == {A}
    # So is that of a head in whose place there is another one.
    answer = given(tmp_path, node("node-1", HOST_KEY), node("node-2", OTHER_KEY, C), launchers=["node-2"])
    assert (revoked_keys(tmp_path), answer["user"].keys()) == ({A, B}, {"node-2"})


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
    answer = given(tmp_path, *changes.pop("nodes", [HEAD, WORKER]), **changes)
    assert f"{A} node-2" in answer["revoked"]
    assert f"@revoked * {A}\n" in (tmp_path / "mine/ca/known_hosts").read_text()
    assert not path.exists()
    # Back in the mesh, a new key is signed, and the old one is not.
    if not changes.get("revoked"):
        back = {"launchers": CLUSTER}
        assert findings(tmp_path, HEAD, node("node-2", OTHER_KEY, A), **back) == [("node-2", "job-key-revoked")]
        assert "node-2" in given(tmp_path, HEAD, node("node-2", OTHER_KEY, B), **back)["user"]


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
    one_of = [[answer["host"]["node-1"], answer["user"]["node-1"]["trainer"]] for answer in (old, new)]
    for former, latter in zip(*one_of, strict=True):
        assert shown(former)[2] != shown(latter)[2]
        assert shown(former)[5:] == shown(latter)[5:]
    assert (on_disk(tmp_path) == before) is check_mode
    if not check_mode:
        assert not authority(tmp_path).issued("node-2", "host").exists()


def test_a_rotation_needs_all_nodes(tmp_path: Path) -> None:
    given(tmp_path)
    message = refused(tmp_path, HEAD, rotate=True)
    assert "leaves out node-2. Run site.yml without --limit" in message


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (["host_ca", "user_ca"], "the CA of this cluster is missing: there is none in "),
        (["host_ca", "user_ca", "signed_keys"], "the CA of this cluster is missing: there is none in "),
        (["host_ca"], "host_ca is missing from "),
        (["user_ca"], "user_ca is missing from "),
        (["signed_keys"], "the CA in "),
    ],
    ids=str,
)
def test_a_lost_ca_does_not_split_the_cluster(tmp_path: Path, lost: list[str], message: str) -> None:
    old = given(tmp_path)
    without(tmp_path, *lost)
    before = on_disk(tmp_path)
    for check_mode in (True, False):
        refusal = refused(tmp_path, HEAD, ca=authority(tmp_path, check_mode=check_mode))
        assert refusal.startswith(message)
        assert "this run leaves out node-2" in refusal
        assert ("estore the folder from your backup" in refusal) is (lost != ["signed_keys"])
        assert on_disk(tmp_path) == before
    predicted, warning = serve(tmp_path, ca=authority(tmp_path, check_mode=True))
    assert on_disk(tmp_path) == before
    new, notice = serve(tmp_path)
    assert notice == warning
    assert notice.startswith(message)
    assert notice.endswith("a new CA replaces it, and nothing signed before is valid any longer")
    assert not {old["host_ca"], old["user_ca"]} & {new["host_ca"], new["user_ca"]}
    assert predicted["host"].keys() == new["host"].keys()
    # The next run keeps the new CA.
    assert given(tmp_path) == new


def test_certificates_of_an_older_version_can_still_be_revoked(tmp_path: Path) -> None:
    given(tmp_path, HEAD, node("node-2", OTHER_KEY, A), launchers=CLUSTER)
    without(tmp_path, "signed_keys")
    serve(tmp_path, HEAD, revoked=["node-2"])
    assert revoked_keys(tmp_path) == {OTHER_KEY, A}


def test_a_killed_rotation_is_completed_on_every_node_first(tmp_path: Path) -> None:
    given(tmp_path)
    serve(tmp_path, rotate=True)
    assert refused(tmp_path, HEAD).startswith("the run that made a new CA has not brought it to every node. A new CA")
    given(tmp_path)
    assert "node-1" in given(tmp_path, HEAD)["host"]


def test_without_the_list_of_revoked_keys_nothing_is_signed(tmp_path: Path) -> None:
    given(tmp_path)
    given(tmp_path, HEAD, revoked=["node-2"])
    path = tmp_path / "mine/ca/revoked_keys"
    path.write_text(f"\n{OTHER_KEY} node-2\n\n")
    assert given(tmp_path, HEAD)["revoked"] == [f"{OTHER_KEY} node-2"]
    path.unlink()
    assert "revoked_keys is missing, so it is not known which keys are revoked" in refused(tmp_path, HEAD)
    new, _ = serve(tmp_path, rotate=True)
    assert path.exists()
    assert new["host"].keys() == {"node-1", "node-2"}


def test_ssh_reads_what_is_revoked_and_takes_only_keys_that_can_be(tmp_path: Path) -> None:
    def settings() -> list[str]:
        told = subprocess.run(
            ["ssh", "-G", *shlex.split(ssh_options(state)), "node-1"], text=True, capture_output=True, check=True
        )
        return told.stdout.splitlines()

    known = (state := tmp_path / "a state's folder") / "ca/known_hosts"
    assert f"globalknownhostsfile {known} /etc/ssh/ssh_known_hosts" in settings()
    assert any(line.startswith("hostkeyalgorithms ") and "ecdsa" in line for line in settings())
    known.parent.mkdir(parents=True)
    known.touch()
    assert "hostkeyalgorithms ssh-ed25519-cert-v01@openssh.com,ssh-ed25519" in settings()


def ssh_settings(user: str, **nodes: dict[str, Any]) -> str:
    """The settings of ssh on each node, if this account is the job user."""
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(ROOT / "roles/ssh_trust/templates"), trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("ssh.conf.j2").render(
        __ssh_trust_users=["alice", user], __ssh_trust_job_keys={"alice": "/key/alice", user: "/key"},
        __ssh_trust_folder="/f", _ssh_trust_ports=ssh_ports([*nodes], nodes),
    )  # fmt: skip


def test_jobs_use_the_port_of_sshd(tmp_path: Path) -> None:
    def port(target: str) -> str:
        command = ["ssh", "-G", "-F", str(tmp_path / "ssh.conf"), target]
        told = subprocess.run(command, text=True, capture_output=True, check=True).stdout
        assert f"stricthostkeychecking {'true' if user == me else 'ask'}" in told.splitlines()
        return next(line for line in told.splitlines() if line.startswith("port "))

    me = pwd.getpwuid(os.geteuid()).pw_name
    nodes: dict[str, dict[str, Any]] = {
        "one": {"ansible_host": "192.0.2.1"},
        "two": {"ansible_host": "192.0.2.2", "cluster_ip": "10.0.0.2", "ansible_port": 2222},
        "three": {"ansible_host": "192.0.2.3", "ansible_port": "2223", "ssh_trust_aliases": ["fd00::3", "drei"]},
        "four": {"ansible_host": "192.0.2.4", "ansible_port": "22"},
    }
    wanted = dict.fromkeys(("two", "10.0.0.2", "192.0.2.2"), "2222")
    wanted |= dict.fromkeys(("three", "192.0.2.3", "fd00::3", "drei"), "2223")
    for user in (me, "nobody-else"):
        (tmp_path / "ssh.conf").write_text(ssh_settings(user=user, **nodes))
        for target in (*wanted, "one", "192.0.2.1", "four", "elsewhere"):
            assert port(target) == f"port {wanted.get(target, '22') if user == me else '22'}"


def test_where_all_ports_are_usual_no_file_changes() -> None:
    nodes: dict[str, dict[str, Any]] = {"one": {"ansible_host": "192.0.2.1"}, "two": {"ansible_port": 22}}
    assert ssh_settings(user="trainer", **nodes) == (
        "# Managed by Farandole, role ssh_trust.\n"
        "Match localuser alice\n  IdentityFile /key/alice\nMatch localuser trainer\n  IdentityFile /key\n"
        "Match localuser alice,trainer\n  StrictHostKeyChecking yes\n  RevokedHostKeys /f/revoked_keys\n"
        "  ConnectTimeout 10\n  ServerAliveInterval 15\n  ServerAliveCountMax 4\n"
    )
