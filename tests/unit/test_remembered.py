"""What nodes remember of the CA when its folder was restored from an older copy, and what a lying node gets by it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.trust import authority as ca_of
from farandole.trust import certificates, remembered

from .authority import (
    HEAD,
    HOST_KEY,
    JOB_KEY,
    NOTHING,
    OTHER_KEY,
    A,
    B,
    authority,
    findings,
    given,
    node,
    on_disk,
    refused,
    revoked_keys,
    serve,
)
from .loading import load

ssh_identity = load("modules", "ssh_identity")
THREE = ["node-1", "node-2", "node-3"]
CLUSTER: dict[str, Any] = {"cluster": THREE}
REVOKED: dict[str, Any] = {"revoked": ["node-3"]}
NODES = {"node-1": HEAD, "node-2": node("node-2", OTHER_KEY), "node-3": node("node-3", A)}
STRANGER = certificates.public_text(Ed25519PrivateKey.generate().public_key())


@pytest.fixture
def ca(tmp_path: Path) -> dict[str, Any]:
    """A CA of three nodes, and a copy of its folder."""
    made = given(tmp_path, *NODES.values(), **CLUSTER)
    shutil.copytree(tmp_path / "mine/ca", tmp_path / "old")
    return made


def restore(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "mine/ca")
    shutil.copytree(tmp_path / "old", tmp_path / "mine/ca")


def told(made: dict[str, Any], *names: str, **others: Any) -> list[dict[str, Any]]:
    """The answers of nodes that a run of this CA has reached."""
    return [_knowing(name, made, **others) for name in names]


def _knowing(name: str, made: dict[str, Any], **others: Any) -> dict[str, Any]:
    memory = {
        "authorities": [made["host_ca"], made["user_ca"]],
        "revoked": made["revoked"],
        "certificate": made["host"].get(name, "").strip(),
    }
    return {**NODES[name], "remembers": {**memory, **others}}


@pytest.fixture
def revoked(tmp_path: Path, ca: dict[str, Any]) -> dict[str, Any]:
    """What node-3's revocation left on the others; the folder is again what it was before."""
    made = given(tmp_path, *told(ca, "node-1", "node-2"), revoked=["node-3"], **CLUSTER)
    assert f"{A} node-3" in made["revoked"]
    restore(tmp_path)
    return made


def test_an_older_folder_does_not_take_a_revoked_node_back(tmp_path: Path, revoked: dict[str, Any]) -> None:
    nodes = [*told(revoked, "node-1", "node-2"), NODES["node-3"]]
    before = on_disk(tmp_path)
    assert findings(tmp_path, *nodes, **CLUSTER) == [("node-1", "revoked-unknown"), ("node-2", "revoked-unknown")]
    assert findings(tmp_path, nodes[0], **CLUSTER) == [("node-1", "revoked-unknown")]
    assert on_disk(tmp_path) == before
    # Without what the nodes remember, it is signed again.
    assert "node-3" in given(tmp_path, HEAD, NODES["node-2"], NODES["node-3"], **CLUSTER)["host"]


@pytest.mark.parametrize("never_known", [set(), {B}], ids=["known", "never known"])
def test_it_is_revoked_again_by_its_name(tmp_path: Path, revoked: dict[str, Any], never_known: set[str]) -> None:
    lines = [*revoked["revoked"], *(f"{key} node-3" for key in never_known)]
    for _ in range(2):
        given(tmp_path, *told(revoked, "node-1", "node-2", revoked=lines), **CLUSTER, **REVOKED)
    assert revoked_keys(tmp_path) == {A, *never_known}


def test_a_new_ca_keeps_what_the_nodes_know_to_be_revoked(tmp_path: Path, revoked: dict[str, Any]) -> None:
    nodes = told(revoked, "node-1", "node-2")
    # Not the node that was revoked, whoever rotates.
    assert findings(tmp_path, *nodes, NODES["node-3"], rotate=True, **CLUSTER) == [("node-3", "host-key-revoked")]
    made = given(tmp_path, *nodes, rotate=True, cluster=THREE[:2])
    assert revoked_keys(tmp_path) == {A}
    again = authority(tmp_path)
    assert given(tmp_path, *told(made, "node-1", "node-2"), cluster=THREE[:2], ca=again) == made
    assert not again.changed


@pytest.fixture
def backup(tmp_path: Path, revoked: dict[str, Any]) -> dict[str, Any]:
    """The same, and the folder comes from a backup."""
    (tmp_path / "mine/ca/restored").write_text("2026-11-27T16:00:00Z\n")
    return revoked


def test_a_backup_that_is_older_than_a_revocation_takes_no_node_back(tmp_path: Path, backup: dict[str, Any]) -> None:
    nodes = told(backup, "node-1", "node-2")
    assert findings(tmp_path, *nodes, NODES["node-3"], **CLUSTER) == [("node-3", "host-key-revoked")]
    # Not before all nodes have been asked.
    assert "was restored from a backup of 2026-11-27T16:00:00Z" in refused(tmp_path, *nodes, **CLUSTER)
    made, notice = serve(tmp_path, *nodes, cluster=THREE[:2])
    assert "a new CA replaces it" in notice
    assert made["user_ca"] != backup["user_ca"]
    assert revoked_keys(tmp_path) == {A}
    assert not (tmp_path / "mine/ca/restored").exists()
    # What was signed since is worthless, and the next run has nothing to say.
    (tmp_path / "mine/ca/unfinished").unlink()
    given(tmp_path, *told(made, "node-1", "node-2"), cluster=THREE[:2])


def test_after_a_restoration_what_a_single_node_knows_is_not_passed_over(
    tmp_path: Path, backup: dict[str, Any]
) -> None:
    """As after a run with --limit; which node that was, the operator knows."""
    nodes = [*told(backup, "node-1", revoked=[]), *told(backup, "node-2")]
    assert findings(tmp_path, *nodes, cluster=THREE[:2]) == [("node-2", "revoked-unknown")]
    assert (tmp_path / "mine/ca/restored").exists()
    serve(tmp_path, *nodes, **CLUSTER, **REVOKED)
    assert revoked_keys(tmp_path) == {A}


def test_a_new_ca_after_a_restoration_is_completed_after_a_kill(
    tmp_path: Path, backup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, keys = told(backup, "node-1", "node-2"), ca_of.Authority.keys

    def killed(_: Any) -> None:
        monkeypatch.setattr(ca_of.Authority, "keys", keys)
        raise KeyboardInterrupt

    def renewed(self: ca_of.Authority) -> None:
        monkeypatch.setattr(ca_of.Authority, "keys", killed)
        renew(self)

    renew = ca_of.Authority.renew
    monkeypatch.setattr(ca_of.Authority, "renew", renewed)
    with pytest.raises(KeyboardInterrupt):
        serve(tmp_path, *nodes, cluster=THREE[:2])
    monkeypatch.setattr(ca_of.Authority, "renew", renew)
    serve(tmp_path, *nodes, cluster=THREE[:2])
    assert revoked_keys(tmp_path) == {A}


def test_what_the_inventory_and_the_nodes_keys_explain_is_no_finding(tmp_path: Path, ca: dict[str, Any]) -> None:
    """The head has a new job key since; that the former one is revoked follows from that."""
    head = {**_knowing("node-1", ca), "job_keys": {"trainer": B}}
    made = given(tmp_path, head, *told(ca, "node-2", "node-3"), **CLUSTER)
    restore(tmp_path)
    head = {**_knowing("node-1", made), "job_keys": {"trainer": B}}
    given(tmp_path, head, *told(made, "node-2", "node-3"), **CLUSTER)
    assert revoked_keys(tmp_path) == {JOB_KEY}


def test_no_key_is_revoked_under_the_name_of_another_node(tmp_path: Path, ca: dict[str, Any]) -> None:
    """Two nodes that lie are enough for what nobody can disprove, but the CA knows whose this key is."""
    everybody: dict[str, Any] = {"cluster": [*THREE, "node-4"], "revoked": ["node-4"]}
    liars = told(ca, "node-2", "node-3", revoked=[f"{HOST_KEY} node-4"])
    faults = findings(tmp_path, _knowing("node-1", ca), *liars, **everybody)
    assert faults == [("node-2", "revoked-unknown"), ("node-3", "revoked-unknown")]
    assert HOST_KEY not in revoked_keys(tmp_path)


def test_an_older_folder_is_recognized_by_its_own_signature(tmp_path: Path, ca: dict[str, Any]) -> None:
    """Nothing was revoked since, but a node has joined whose key could not be revoked any more."""
    joined = {**node("node-4", B), "remembers": NOTHING}
    made = given(tmp_path, *told(ca, *THREE), joined, cluster=[*THREE, "node-4"])
    restore(tmp_path)
    joined["remembers"] = {**NOTHING, "certificate": made["host"]["node-4"].strip()}
    everybody: dict[str, Any] = {"cluster": [*THREE, "node-4"]}
    assert findings(tmp_path, *told(ca, *THREE), joined, **everybody) == [("node-4", "ledger-outdated")]
    given(tmp_path, *told(ca, *THREE), joined, rotate=True, **everybody)


def test_a_node_cannot_make_up_such_a_certificate(tmp_path: Path, ca: dict[str, Any]) -> None:
    own = certificates.Request("host", "node-2", B, ("node-2",), (), 9)
    forged = certificates.sign(own, Ed25519PrivateKey.generate(), 1.8e9)
    swapped = ca["host"]["node-1"].strip()
    damaged = swapped[:-20] + ("A" if swapped[-20] != "A" else "B") + swapped[-19:]
    for text in (forged, swapped, damaged):
        given(tmp_path, _knowing("node-1", ca), _knowing("node-2", ca, certificate=text), NODES["node-3"], **CLUSTER)


@pytest.mark.parametrize("kind", ["host", "user"])
def test_a_folder_from_before_a_new_ca_is_refused(tmp_path: Path, ca: dict[str, Any], kind: str) -> None:
    made = given(tmp_path, *told(ca, *THREE), rotate=True, **CLUSTER)
    # The node that the rotation did not reach is not refused.
    given(tmp_path, _knowing("node-1", ca), *told(made, "node-2", "node-3"), **CLUSTER)
    restore(tmp_path)
    nodes = [_knowing(name, ca, authorities=[made[f"{kind}_ca"]]) for name in THREE]
    assert findings(tmp_path, *nodes, **CLUSTER) == [(name, "ca-unknown") for name in THREE]
    given(tmp_path, *nodes, rotate=True, **CLUSTER)


def test_one_node_gets_no_key_of_another_revoked_and_does_not_stop_the_cluster(
    tmp_path: Path, ca: dict[str, Any]
) -> None:
    for line in (f"{HOST_KEY} node-1", f"{JOB_KEY} node-3", f"{STRANGER} node-3", f"{B} nobody"):
        liar = _knowing("node-2", ca, revoked=[line])
        nodes = [_knowing("node-1", ca), liar, _knowing("node-3", ca)]
        assert findings(tmp_path, *nodes, **CLUSTER) == [("node-2", "revoked-unknown")]
        # Not even if the operator names that node, nor with a new CA.
        assert findings(tmp_path, *nodes[:2], revoked=["node-3"], **CLUSTER) == [("node-2", "revoked-unknown")]
        restore(tmp_path)
        ca = given(tmp_path, *nodes, rotate=True, **CLUSTER)
        assert revoked_keys(tmp_path) == set()
        shutil.rmtree(tmp_path / "old")
        shutil.copytree(tmp_path / "mine/ca", tmp_path / "old")
    # The way out is what the finding says.
    given(tmp_path, *told(ca, "node-1", "node-3"), revoked=["node-2"], **CLUSTER)
    assert revoked_keys(tmp_path) == {OTHER_KEY}


def test_the_only_node_there_is_knows_best(tmp_path: Path) -> None:
    made = given(tmp_path, HEAD, cluster=["node-1"])
    knowing = _knowing("node-1", made, revoked=[f"{B} gone"])
    assert findings(tmp_path, knowing, cluster=["node-1"]) == [("node-1", "revoked-unknown")]
    given(tmp_path, knowing, cluster=["node-1"], rotate=True)
    assert revoked_keys(tmp_path) == {B}


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_second_control_machine_does_not_replace_the_ca_by_mistake(
    tmp_path: Path, ca: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, check_mode: bool
) -> None:
    shutil.rmtree(tmp_path / "mine")
    nodes = [*told(ca, "node-1", "node-2"), NODES["node-3"]]
    new = authority(tmp_path, check_mode=check_mode)
    assert findings(tmp_path, *nodes, ca=new, **CLUSTER) == [("node-1", "ca-unknown"), ("node-2", "ca-unknown")]
    assert not (tmp_path / "mine").exists()
    # A rotation that was killed at once is completed by a run without that option.
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(ca_of.Authority, "keys", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        serve(tmp_path, *nodes, rotate=True, **CLUSTER)
    assert given(tmp_path, *nodes, **CLUSTER)["user_ca"] != ca["user_ca"]
    # Nor does a restoration that was killed ask for it.
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine/ca").mkdir(parents=True)
    (tmp_path / "mine/ca/restored").write_text("2026-11-27T16:00:00Z\n")
    given(tmp_path, *nodes, **CLUSTER)
    # Nodes that trust nobody yet get their CA from anywhere.
    shutil.rmtree(tmp_path / "mine")
    given(tmp_path, *NODES.values(), **CLUSTER)


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_killed_renewal_is_completed(tmp_path: Path, ca: dict[str, Any], check_mode: bool) -> None:
    """The whole folder is lost; nodes that have not got the new CA yet remember what nobody else does."""
    shutil.rmtree(tmp_path / "mine/ca")
    nodes = [_knowing("node-1", ca), _knowing("node-2", ca, revoked=[f"{B} gone"]), _knowing("node-3", ca)]
    made, _ = serve(tmp_path, *nodes, rotate=True, **CLUSTER)
    reached = [_knowing("node-1", made), *nodes[1:]]
    serve(tmp_path, *reached, ca=authority(tmp_path, check_mode=check_mode), **CLUSTER)
    # One that has it must not know more than the folder, even then.
    knowing = _knowing("node-1", made, revoked=[f"{B} gone"])
    assert findings(tmp_path, knowing, *nodes[1:], **CLUSTER) == [("node-1", "revoked-unknown")]


@pytest.mark.parametrize(
    "changes",
    [
        {"revoked": "x"}, {"revoked": [A]}, {"revoked": [f"{A} node-1\n"]}, {"revoked": [f"{A} \x1b[2J"]},
        {"revoked": [f"{A} x"] * 5000}, {"authorities": [f"{A} x"]}, {"authorities": None}, {"certificate": 7},
        {"certificate": "x" * 99999}, {"more": 1},
    ],
    ids=lambda changes: ascii(changes)[:30],
)  # fmt: skip
def test_a_malformed_memory_is_one_finding_about_that_node(tmp_path: Path, changes: dict[str, Any]) -> None:
    liar = {**HEAD, "remembers": {**NOTHING, **changes}}
    assert findings(tmp_path, liar, *list(NODES.values())[1:], **CLUSTER) == [("node-1", "memory-malformed")]
    absent: list[Any] = [None, [], "x", {}]
    for missing in absent:
        assert findings(tmp_path, {**HEAD, "remembers": missing}, NODES["node-2"]) == [("node-1", "memory-malformed")]


def test_a_node_tells_what_the_list_of_this_run_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_identity, "HOST_KEY", tmp_path / "host_key")
    monkeypatch.setattr(ssh_identity, "KNOWN_HOSTS", tmp_path / "known_hosts")
    assert ssh_identity.remembered(tmp_path, "") == NOTHING
    (tmp_path / "revoked_keys").write_bytes(f"# Managed\n{A} node-1\n{B} node-2\n".encode() + b"\xff\x00cut\n")
    (tmp_path / "user_ca.pub").write_text(f"{HOST_KEY}\n")
    (tmp_path / "known_hosts").write_text(f"other\n@cert-authority * {JOB_KEY} farandole\n@revoked * {A} farandole\n")
    certificate = certificates.sign(
        certificates.Request("host", "node-1", A, ("node-1",), (), 9), Ed25519PrivateKey.generate(), 1.8e9
    )
    (tmp_path / "host_key-cert.pub").write_text(f"{certificate}\n")
    memory = ssh_identity.remembered(tmp_path, f"{B} node-7\n")
    assert memory == {"authorities": [JOB_KEY, HOST_KEY], "revoked": [f"{A} node-1"], "certificate": certificate}
    assert remembered.memories([{"name": "node-1", "remembers": memory}]) == {"node-1": memory}
