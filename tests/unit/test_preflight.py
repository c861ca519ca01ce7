"""Bad inventories and bad nodes, and the findings about each."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from farandole.core.causes import Severity
from farandole.core.files import write_private
from farandole.core.findings import Finding, finding, refused, report
from farandole.explain.diagnosis import OWN
from farandole.inventory.cluster import Node
from farandole.links.fabric import Fabric
from farandole.preflight import answer as answers
from farandole.preflight import inventory, nodes, unreachable
from farandole.preflight.people import judge_people

from .loading import ROOT, load
from .machines import hosts_phase
from .machines import probe as sound

DECLARED = {
    "base": frozenset({"base_user", "base_user_id"}),
    "ssh_trust": frozenset({"ssh_trust_dir"}),
    "stack": frozenset({"stack_id"}),
}

preflight = load("action", "preflight")
asking = load("action", "node_probe")
probing = load("modules", "node_probe")


def node(name: str, host: str = "192.0.2.1", **more: Any) -> Any:
    return Node(name, host, **more)


def groups(**named: list[str]) -> dict[str, list[str]]:
    return {"all": sorted({host for hosts in named.values() for host in hosts}), "ungrouped": [], **named}


def codes(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(one.host, one.code) for one in findings]


FREE: dict[str, Any] = {"user_id": None, "group_id": None, "id_owner": None, "group_id_owner": None}
ACCOUNTS = {"trainer": 2000, "alice": 2001}


def probe(**changes: Any) -> dict[str, Any]:
    return sound(**{"machine_id": "0123", "accounts": dict.fromkeys(ACCOUNTS, FREE), **changes})


def account(name: str = "trainer", **changes: Any) -> dict[str, Any]:
    """A node's answer about one account; the others are free."""
    return {"accounts": dict.fromkeys(ACCOUNTS, FREE) | {name: FREE | changes}}


def login(**changes: Any) -> dict[str, Any]:
    plain = {"host": "192.0.2.1", "port": None, "user": "root", "key": None, "common_args": ""} | changes
    return {**plain, "command": answers.ssh_command(plain)}


def answer(skew: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {"probe": probe(**changes), "skew": skew, "login": login()}


def judged(reply: dict[str, Any], check_mode: bool = False) -> list[tuple[str, str]]:
    return codes(nodes.judge_hosts([node("node-1")], {"node-1": reply}, ACCOUNTS, check_mode))


def found(reply: dict[str, Any]) -> Finding:
    (finding,) = nodes.judge_hosts([node("node-1")], {"node-1": reply}, ACCOUNTS, check_mode=False)
    return finding


def test_a_good_inventory_has_no_finding() -> None:
    nodes = [
        node(
            "node-1",
            "192.0.2.1",
            variables=frozenset({"base_user", "cluster_ip", "_base_x", "ansible_user"}),
        ),
        node("node-2", "gpu2.example.org", cluster_ip="192.0.2.2"),
        node("node-3", "gpu2.example.org", port="2222", cluster_ip="192.0.2.33"),
    ]
    named = groups(cluster=["node-1", "node-2", "node-3"], head=["node-1"], builders=["node-2"])
    assert inventory.judge_inventory(named, nodes, DECLARED) == []


@pytest.mark.parametrize(
    ("named", "host", "code"),
    [
        (groups(), "inventory", "inventory-empty"),
        (groups(web=["a"]), "inventory", "cluster-missing"),
        (groups(clusters=["a"]), "inventory", "cluster-misspelt"),
        (groups(cluster=["a"]), "inventory", "head-not-one"),
        (groups(cluster=["a", "b"], head=["a", "b"]), "inventory", "head-not-one"),
        (groups(cluster=["a"], head=["x"]), "x", "not-in-cluster"),
        (groups(cluster=["a"], head=["a"], builders=["x"]), "x", "not-in-cluster"),
    ],
)
def test_groups(named: dict[str, list[str]], host: str, code: str) -> None:
    assert codes(inventory.judge_groups(named)) == [(host, code)]


def test_a_finding_names_what_it_saw_and_an_example() -> None:
    (found,) = inventory.judge_groups(groups(cluster=["a", "b"], head=["a", "b"]))
    assert found.cause == "group head has 2 hosts: a, b"
    assert found.cure == "put one host of group cluster into group head, for example a"


@pytest.mark.parametrize("group", ["head", "builders"])
def test_a_revoked_node_can_be_neither_head_nor_builder(group: str) -> None:
    named = groups(cluster=["a", "b"], head=["a"], builders=["a"])
    named[group] = ["b"]
    (found,) = inventory.judge_revoked(named, ["b"])
    assert (found.host, found.code) == ("b", "server-revoked")
    assert f"group {group}" in found.cause
    assert inventory.judge_revoked(named, []) == []


@pytest.mark.parametrize("name", ["a", "node-1", "9lives", "n" * 63])
def test_good_names(name: str) -> None:
    assert inventory.judge_names([name]) == []


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("node_1", "node-1"),
        ("Node-1", "node-1"),
        ("-node", "node"),
        ("gpu1.example.org", "gpu1"),
        ("n" * 64, "n" * 63),
        ("12", "node-1"),
        ("10.0.0.1", "node-1"),
        ("localhost", "node-1"),
    ],
)
def test_bad_names(name: str, better: str) -> None:
    (finding,) = inventory.judge_names([name])
    assert (finding.host, finding.code) == (name, "name-localhost" if name == "localhost" else "name-malformed")
    assert finding.cure.endswith(f" {better}")


def test_names_that_differ_in_case_only() -> None:
    assert codes(inventory.judge_names(["gpu", "GPU"])) == [("GPU", "name-repeated")]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (node("a", "gpu1"), "address-missing"),
        (node("a", cluster_ip="192.0.2.300"), "address-malformed"),
        (node("a", cluster_ip="192.0.2.3/24"), "address-malformed"),
        (node("a", "127.0.0.1"), "address-local"),
        (node("a", cluster_ip="::1"), "address-local"),
        (node("a", "2001:db8::1"), "address-not-ipv4"),
        (node("a", "0.0.0.0"), "address-local"),  # noqa: S104
    ],
)
def test_bad_addresses(bad: Any, code: str) -> None:
    assert codes(inventory.judge_addresses([bad])) == [("a", code)]


def test_two_hosts_that_are_one_machine_are_one_finding() -> None:
    assert codes(inventory.judge_addresses([node("a"), node("b")])) == [("b", "node-repeated")]


def test_two_hosts_with_one_cluster_address() -> None:
    nodes = [
        node("a", "192.0.2.9", port="1", cluster_ip="192.0.2.4"),
        node("b", cluster_ip="192.0.2.4"),
    ]
    assert codes(inventory.judge_addresses(nodes)) == [("b", "address-repeated")]


@pytest.mark.parametrize(
    ("variable", "code", "known"),
    [
        ("base_usr_id", "variable-misspelt", "write base_user_id if"),
        ("ssh_trust_dri", "variable-misspelt", "write ssh_trust_dir if"),
        ("stack_colour", "variable-unknown", ": stack_id"),
        ("cluster_interface", "variable-unknown", ": cluster_ip"),
    ],
)
def test_unknown_variables(variable: str, code: str, known: str) -> None:
    (found,) = inventory.judge_variables([node("a", variables=frozenset({variable})), node("b")], DECLARED)
    assert (found.host, found.code) == ("a", code)
    assert variable in found.cause
    assert known in found.cure


def test_a_tag_without_tasks_is_told() -> None:
    found = inventory.judge_tags(["all", "stack", "molecule-notest", "slrum"], ["stack", "slurm"])
    assert [(one.code, one.severity) for one in found] == [("tag-unknown", "warn")]
    assert "the tag slrum" in found[0].cause
    assert "quick, slurm, stack" in found[0].cure


def test_an_option_of_ansible_that_does_nothing_is_refused() -> None:
    own = {
        "node-1": {"ansible_user": "root", "ansible_private_key_file": "/keys/root"},
        "node-2": {"ansible_ssh_user": "alice"},
        "node-3": {},
        "node-4": {"ansible_connection": "local", "ansible_user": "root"},
    }
    typed = {"--user": "alice", "--private-key": "/keys/alice"}
    found = inventory.judge_login(own, typed)
    assert [(one.host, one.code, one.severity) for one in found] == [("node-1", "option-ignored", "stop")] * 2
    assert "-e ansible_user=alice" in found[0].cure
    assert inventory.judge_login(own, {}) == []


def test_a_password_that_is_asked_for_in_vain_is_refused_and_none_is_shown() -> None:
    secret: dict[str, Any] = {"ansible_become_pass": "SECRET", "ansible_ssh_pass": "SECRET"}
    own = {"node-1": secret, "node-2": {"ansible_become_password": "SECRET"}, "here": {"ansible_connection": "local"}}
    found = inventory.judge_passwords(own, ["--ask-become-pass", "--ask-pass"])
    assert [(one.code, one.severity) for one in found] == [("password-ignored", "stop")]
    assert "--ask-become-pass" in found[0].cause
    assert "SECRET" not in report(found)
    # Node-2 needs what is typed.
    assert inventory.judge_passwords({"node-1": secret, "node-2": {}}, ["--ask-become-pass"]) == []


def test_each_role_has_its_name_as_a_tag() -> None:
    def listed(*words: str) -> str:
        command = ["ansible-playbook", "-i", "inventory/example", "site.yml", "playbooks/validate.yml", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    tags = re.findall(r"TAGS: \[(.*)\]", listed("--list-tags"))
    roles = {path.name for path in ROOT.glob("roles/*")}
    assert {tag for line in tags for tag in re.findall(r"\w+", line)} == inventory.TAGS | roles | {"always"}
    # Checked whatever the tags are, so nothing that another task has to find out first.
    checked = re.findall(
        r"^ *farandole\.cluster\.(\w+) : Validating arguments", listed("--list-tasks", "--tags", "none"), re.MULTILINE
    )
    assert {*checked} == {"preflight", "validation"}


def test_a_variable_that_every_host_has_is_one_finding() -> None:
    nodes = [node(name, variables=frozenset({"base_usr"})) for name in ("a", "b")]
    assert [finding.host for finding in inventory.judge_variables(nodes, DECLARED)] == ["all"]


@pytest.mark.parametrize("variable", ["_base_x", "ansible_user", "database_url", "base", "ssh_port", "mine"])
def test_other_variables_are_the_users_own(variable: str) -> None:
    known = preflight.connection_variables()
    assert inventory.judge_variables([node("a", variables=frozenset({variable}))], DECLARED, known) == []


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ansible_hosts", "ansible_host"),
        ("ansible_prot", "ansible_port"),
        ("ansible_usr", "ansible_user"),
        ("ansible_become_passwd", "ansible_become_password"),
        ("ansible_python_interpeter", "ansible_python_interpreter"),
    ],
)
def test_a_misspelt_connection_variable_is_reported_before_the_address(variable: str, meant: str) -> None:
    nodes = [node("a", host="a", variables=frozenset({variable}))]
    found = inventory.judge_inventory(groups(cluster=["a"], head=["a"]), nodes, {}, preflight.connection_variables())
    assert codes(found) == [("all", "variable-misspelt"), ("a", "address-missing")]
    assert found[0].cure.startswith(f"write {meant} if")


def test_no_variable_of_ansible_itself_counts_as_misspelt(tmp_path: Path) -> None:
    """Try every variable that a host has in a play, including facts."""
    show = {"debug": {"msg": "{{ q('varnames', '.') + ansible_facts | map('regex_replace', '^', 'ansible_') }}"}}
    plays = [{"hosts": "localhost", "connection": "local", "gather_facts": True, "tasks": [show]}]
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump(plays))
    done = subprocess.run(
        ["ansible-playbook", "-i", "localhost,", "-e", f"ansible_python_interpreter={sys.executable}", playbook],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    names = set(re.findall(r"\bansible_\w+", done.stdout))
    assert {"ansible_play_hosts", "ansible_memtotal_mb"} < names
    known = preflight.connection_variables()
    assert [name for name in names if inventory.misspelt(name, known)] == []


def test_the_longest_role_owns_a_name() -> None:
    assert inventory.owner_of("ssh_trust_x", ["ssh", "ssh_trust"]) == "ssh_trust"


def test_declared_names_of_all_entry_points() -> None:
    specs: dict[str, Any] = {
        "argument_specs": {"main": {"options": {"a_x": {}}}, "verify": {"options": {"a_y": {}}}, "bare": {}}
    }
    assert inventory.declared_names(specs) == {"a_x", "a_y"}


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZWw2YvoLBN9V2a/VDrDnQrl+Yb9mxSAnxMjZxFTefk"


def people(*persons: dict[str, Any], **variables: Any) -> list[tuple[str, str]]:
    """The codes of the findings about cluster_users, each with its cause."""
    own = {"ansible_user": "admin", "cluster_users": persons, **variables}
    return [(one.code, one.cause) for one in judge_people({"node-1": own, "node-2": own}, ["node-1", "node-2"])]


def test_good_people_have_no_finding() -> None:
    kinds = ["ssh-ed25519", "ecdsa-sha2-nistp256", "sk-ssh-ed25519@openssh.com"]
    assert people() == []
    keys = [KEY, f"{KEY} alice@laptop of hers\n", *(encoded(kind) for kind in kinds[2:])]
    assert people({"name": "alice", "uid": 2001, "ssh_keys": keys}, {"name": "b-o_b2", "uid": 1000}) == []


def test_the_other_name_of_the_login_is_taken_as_well() -> None:
    [(code, _)] = people({"name": "ops", "uid": 2001}, ansible_user=None, ansible_ssh_user="ops")
    assert code == "person-name-taken"


def encoded(kind: str) -> str:
    return f"{kind} {b64encode(len(kind).to_bytes(4, 'big') + kind.encode() + b'the rest').decode()}"


@pytest.mark.parametrize(
    ("person", "code", "words"),
    [
        ({"name": name}, "person-name-malformed", repr(name))
        for name in ("", "Alice", "al ice", "al,ice", "*", "-f", "2alice", "files:alice", "a" * 32, "%sudo", "al/ice")
    ]
    + [
        ({"name": "root"}, "person-name-taken", "root is root"),
        ({"name": "admin"}, "person-name-taken", "admin is the account with which Ansible logs in"),
        ({"name": "trainer"}, "person-name-taken", "trainer is the job user"),
        ({"name": "slurm"}, "person-name-taken", "slurm is the account of a service"),
        ({"name": "farandole-jobs"}, "person-name-taken", "farandole-jobs is a name of Farandole's"),
        ({"name": "carol"}, "person-name-taken", "carol is already another entry"),
        ({"uid": 0}, "person-uid-wrong", "alice has uid 0;"),
        ({"uid": 999}, "person-uid-wrong", "999"),
        ({"uid": 65534}, "person-uid-wrong", "65534"),
        ({"uid": 2000}, "person-uid-repeated", "uid 2000, which the job user has, too"),
        ({"uid": 2009}, "person-uid-repeated", "which carol has, too"),
        ({"ssh_keys": [KEY, KEY[:-5]]}, "person-key-wrong", "one of the ssh_keys of alice is 'ssh-ed25519 AAAA"),
        ({"ssh_keys": [f"{KEY}\n{KEY}"]}, "person-key-wrong", "several lines"),
        ({"ssh_keys": [f'command="id" {KEY}']}, "person-key-wrong", "command="),
        ({"ssh_keys": [encoded("sk-ssh-ed25519@openssh.com")[3:]]}, "person-key-wrong", "ssh-ed25519"),
        ({"ssh_keys": ["~/.ssh/id_ed25519.pub"]}, "person-key-wrong", "'~/.ssh/id_ed25519.pub'"),
    ],
)
def test_bad_people(person: dict[str, Any], code: str, words: str) -> None:
    carol = {"name": "carol", "uid": 2009}
    (found,) = people(carol, {"name": "alice", "uid": 2001, **person})
    assert (found[0], words in found[1]) == (code, True), found


def test_nothing_of_a_private_key_is_shown() -> None:
    (found,) = people({"name": "alice", "uid": 2001, "ssh_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----\nsecret"]})
    assert found == ("person-key-wrong", found[1])
    assert "a private key, which you should replace now" in found[1]
    assert "secret" not in found[1]


def test_people_are_the_same_on_all_nodes() -> None:
    own: dict[str, Any] = {"cluster_users": [{"name": "alice", "uid": 2001}]}
    findings = judge_people({"node-1": own, "node-2": own, "node-3": {}}, ["node-1", "node-2", "node-3"])
    assert codes(findings) == [("node-3", "people-uneven")]


def test_a_good_node_has_no_finding() -> None:
    assert judged(answer()) == []
    assert judged(answer(**account(user_id=2000, group_id=2000, id_owner="trainer", group_id_owner="trainer"))) == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"os_id": "ubuntu", "os_version": "20.04"}, "system-unsupported", "Ubuntu 20.04"),
        ({"os_id": "", "os_version": ""}, "system-unsupported", "an unknown system"),
        ({"arch": "riscv64"}, "architecture-unsupported", "riscv64"),
        ({"init": "bash"}, "systemd-missing", "bash"),
        ({"machine_id": ""}, "machine-id-missing", ""),
        ({"machine_id": "uninitialized"}, "machine-id-missing", ""),
        ({"addresses": None}, "ip-missing", ""),
        ({"addresses": ["127.0.0.1", "10.0.0.1", "fe80::1"]}, "address-absent", " 10.0.0.1"),
        ({"addresses": ["127.0.0.1"]}, "address-absent", "none"),
        (account(id_owner="bob"), "id-taken", "bob already has uid 2000, meant for trainer"),
        (account(group_id_owner="staff"), "id-taken", "staff already has gid 2000"),
        (account(id_owner="bob", group_id_owner="bob"), "id-taken", "bob already has uid and gid 2000"),
        (account(user_id=1001), "id-differs", "trainer already has uid 1001, not 2000"),
        (account(user_id=7, group_id=7), "id-differs", "uid and gid 7"),
        (
            account("alice", id_owner="bob"),
            "id-taken",
            "bob already has uid 2001, meant for alice",
        ),
        (account("alice", user_id=33), "id-differs", "alice already has uid 33, not 2001"),
        ({"skew": 400.0}, "clock-wrong", "400 s ahead of"),
        ({"skew": -3600.0}, "clock-wrong", "3600 s behind"),
        ({"root": False, "sshd_drop_ins": False}, "not-root", ""),
        ({"sshd_drop_ins": False}, "drop-ins-unread", ""),
    ],
)
def test_bad_nodes(changes: dict[str, Any], code: str, words: str) -> None:
    finding = found(answer(**changes))
    assert (finding.host, finding.code) == ("node-1", code)
    assert words in finding.cause


def test_a_node_s_words_are_in_the_cause_and_not_in_the_cure() -> None:
    assert "10.9.8.7" not in found(answer(addresses=["10.9.8.7"])).cure
    assert "1001" not in found(answer(**account(user_id=1001))).cure


def test_python_apt_matters_in_check_mode_only() -> None:
    reply = answer(python_apt=False)
    assert judged(reply) == []
    assert judged(reply, check_mode=True) == [("node-1", "python-apt-missing")]


def test_a_cloned_image() -> None:
    probes = {name: probe(addresses=[f"192.0.2.{n}"]) for n, name in enumerate("abc")}
    clones = list(nodes.judge_machine_ids(probes))
    assert codes(clones) == [("b", "machines-shared"), ("c", "machines-shared")]
    assert {clone.cause for clone in clones} == {"a, b, c have the same machine id"}


def test_one_machine_under_two_names() -> None:
    assert codes(nodes.judge_machine_ids({"a": probe(), "b": probe()})) == [("b", "node-repeated")]


CHANGED = """Failed to connect to the host via ssh: @@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
  remove with:
  ssh-keygen -f "/root/.ssh/known_hosts" -R "[192.0.2.1]:2222"
Host key for [192.0.2.1]:2222 has changed and you have requested strict checking.
Host key verification failed."""


REVOKED = "ED25519-CERT host key for 192.0.2.1 was revoked and you have requested strict checking."
FAILED = "\nHost key verification failed."


@pytest.mark.parametrize(
    ("said", "code", "command"),
    [
        ("ssh: connect to host a port 22: Connection refused", "login-refused", "systemctl enable --now ssh"),
        ("ssh: connect to host a port 22: Connection timed out", "login-timeout", "ssh root@192.0.2.1"),
        ("Connection timed out during banner exchange", "login-timeout", "ssh root@192.0.2.1"),
        ("ssh: connect to host a port 22: No route to host", "login-no-route", "ansible_host"),
        ("ssh: connect to host a port 22: Network is unreachable", "login-no-route", "ansible_host"),
        ("ssh: Could not resolve hostname a: Name or service not known", "login-name-unknown", "ansible_host"),
        ("root@a: Permission denied (publickey,password).", "login-denied", "ssh-copy-id root@192.0.2.1"),
        (f"No ED25519 host key is known for a.{FAILED}", "login-host-key-unknown", "ssh root@192.0.2.1 and"),
        (CHANGED, "login-host-key-changed", "ssh-keygen -R 192.0.2.1, then ssh root@192.0.2.1"),
        (f"{REVOKED}{FAILED}", "login-host-key-revoked", "ssh-keygen -R 192.0.2.1"),
        ("Missing sudo password", "sudo-password-missing", "--ask-become-pass"),
        ("sudo: a password is required", "sudo-password-missing", "--ask-become-pass"),
        ("Incorrect sudo password", "sudo-password-wrong", "ansible_become_password"),
        ("bob is not in the sudoers file.", "sudo-denied", "root ALL=(ALL) NOPASSWD"),
        ("/bin/sh: 1: sudo: not found", "sudo-missing", "apt-get install sudo"),
        ("sh: 1: /usr/bin/python3: not found\nThe module interpreter was not found.", "python-missing", "python3"),
        ("ansible-core requires a minimum of Python version 3.8. Current: 3.6.9", "python-too-old", "install"),
        ("kex_exchange_identification: read", "login-failed", "ssh -v root@192.0.2.1"),
        ("", "login-failed", "ssh -v root@192.0.2.1"),
    ],
)
def test_a_node_that_does_not_answer(said: str, code: str, command: str) -> None:
    finding = found({"unreachable_reason": answers.reason(said), "login": login()})
    assert (finding.host, finding.code) == ("node-1", code)
    assert command in finding.cure


def test_a_command_uses_only_the_inventory() -> None:
    said = "Host key for $(id) has changed, ssh-keygen -f $(touch${IFS}/tmp/x) -R x, {ssh} \x1b[2J"
    common = "-o 'UserKnownHostsFile=/a b/known;id' -o StrictHostKeyChecking=yes"
    odd = login(host="$(id)", port="2222", user="a;b", key="/k y", common_args=common)
    finding = found({"unreachable_reason": answers.reason(said), "login": odd})
    assert finding.code == "login-host-key-changed"
    assert "Host key for $(id) has changed" in finding.cause
    assert finding.cure.endswith(
        "ssh-keygen -f /a -R '[$(id)]:2222', then ssh -o 'UserKnownHostsFile=/a b/known;id' "
        "-o StrictHostKeyChecking=yes -p 2222 -i '/k y' 'a;b@$(id)'"
    )
    assert "touch" not in finding.cure
    assert "{ssh}" not in finding.cure


def test_a_malformed_answer_is_one_finding() -> None:
    finding = found({"unfit": "probe.time is 'now\x1b'", "login": login()})
    assert finding.code == "answer-malformed"
    assert r"probe.time is 'now\x1b'" in finding.cause
    assert "now" not in finding.cure


def test_a_host_that_was_never_contacted() -> None:
    finding = found({})
    assert finding.code == "login-failed"
    assert finding.cure.startswith("ssh -v node-1 ")


def test_an_odd_port_is_in_every_command() -> None:
    fields = unreachable.login_fields(login(port=2222))
    assert fields["ssh"] == "ssh -p 2222 root@192.0.2.1"
    assert fields["forget"] == "ssh-keygen -R '[192.0.2.1]:2222'"
    assert fields["port_option"] == " -p 2222"


def test_the_ssh_command_is_the_one_that_ansible_uses() -> None:
    command = login(common_args="-o UserKnownHostsFile=known", key="key", port=22)["command"]
    assert command == "ssh -o UserKnownHostsFile=known -p 22 -i key root@192.0.2.1"


def test_the_ssh_command_knows_the_hosts_that_ansible_knows() -> None:
    options = {"ssh_common_args": "-o A=b", "ssh_extra_args": "-o 'C=\"d e\" f'", "host": "192.0.2.1"}
    action = SimpleNamespace(_option=options.get, _shared=list)
    assert asking.ActionModule._login(action, {})["command"] == "ssh -o A=b -o 'C=\"d e\" f' 192.0.2.1"


def test_a_command_on_the_same_connection_has_no_password_and_prompts_for_none() -> None:
    words = ["sshpass", "-d5", "/usr/bin/ssh", "-vvv", "-o", "ControlPath=/x", "-p", "22", "192.0.2.1"]
    ours = ["/usr/bin/ssh", "-T", "-o", "BatchMode=yes", "-o", "ControlPath=/x", "-p", "22", "192.0.2.1"]
    assert answers.shared_connection(words, "/usr/bin/ssh") == ours


def test_debug_output_is_not_a_reason() -> None:
    assert answers.reason("OpenSSH_9.2p1\ndebug1: Reading\r\nssh: no\n") == "ssh: no"


OFF = [Finding(f"node-{n}", "off", "it is off", "switch it on") for n in range(7)]
ODD = Finding("x", "odd", "strange", "even", "warn")


def test_hosts_with_the_same_finding_share_a_number() -> None:
    text = report([*OFF, ODD])
    assert "1. node-0 to node-6: it is off [off]\n   cure: switch it on\n" in text
    assert "2. x: warning: strange [odd]" in text


def test_what_one_cure_mends_is_one_item_with_a_line_for_each_value() -> None:
    values = {"node-1": 100, "node-2": 200, "node-3": 100}
    text = report(finding("memory-small", name, seen=seen, wanted=1024) for name, seen in values.items())
    assert text.startswith("preflight found 1 warning;")
    assert text.count("cure: ") == 1
    assert [line.partition(": ")[0] for line in text.splitlines() if "[memory-small]" in line] == [
        "1. node-1, node-3",
        "   node-2",
    ]
    assert all(OWN.match(line) for line in text.splitlines() if "[memory-small]" in line)
    # What is mended in another way is another item.
    text = report(finding("variable-misspelt", "node-1", seen=one, known=one.upper()) for one in ("abc", "xyz"))
    assert text.startswith("preflight found 2 problems;")
    assert text.count("cure: ") == 2


def test_nodes_that_are_off_are_one_item_although_each_has_a_login_of_its_own() -> None:
    answer = {"unreachable_reason": "ssh: connect to host 192.0.2.1 port 22: No route to host"}
    found = [
        unreachable.judge_unreachable(f"node-{number}", {**answer, "login": login(host=f"192.0.2.{number}")})
        for number in range(1, 9)
    ]
    assert {one.code for one in found} == {"login-no-route"}
    text = report(found)
    assert text.count("cure: ") == 1
    assert "1. node-1 to node-8: " in text
    assert "ssh root@192.0.2.1 (so for node-1; likewise for node-2 to node-8)" in text


def test_findings_are_listed_worst_first() -> None:
    severities: tuple[Severity, ...] = ("note", "warn", "stop")
    text = report([Finding("node-1", one, "it is so", "mend it", one) for one in severities])
    assert text.splitlines()[0] == "preflight found 1 problem, 1 warning and 1 note; nothing was changed."
    assert [line[:2] for line in text.splitlines() if "node-1" in line] == ["1.", "2.", "3."]
    assert text.index("[stop]") < text.index("warning: it is so [warn]") < text.index("note: it is so [note]")


def test_a_warning_refuses_nothing() -> None:
    assert refused([*OFF, ODD])
    assert not refused([ODD])
    assert not refused([])


def test_one_line_says_which_nodes_answered() -> None:
    probes = {"a": probe(), "b": probe(), "c": probe(os_id="ubuntu", os_version="24.04")}
    assert nodes.about(probes) == "3 nodes, Debian 12 and Ubuntu 24.04"
    assert nodes.about({"a": probe()}) == "1 node, Debian 12"


def link(address: str) -> dict[str, Any]:
    return {"name": "eth0", "address": address, "prefix": 24}


def cluster(**changes: Any) -> dict[str, Any]:
    """What preflight knows of two nodes in one network, of which the second is to be changed."""
    hostvars = {}
    for name, address, own in (("node-1", "192.0.2.1", {}), ("node-2", "192.0.2.2", changes)):
        other = {"machine_id": name, "addresses": [address], "interfaces": [link(address)], **own}
        reply = {**answer(**other), "skew": own.get("skew", 0.0)}
        hostvars[name] = {"ansible_host": address, "_preflight_probe": reply}
    return {"hostvars": hostvars, "groups": {"cluster": [*hostvars]}, "ansible_play_hosts_all": [*hostvars]}


checked = partial(hosts_phase, accounts=ACCOUNTS)


def recorded(verdict: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["host"], one["code"]) for one in verdict["findings"]]


def test_success_is_one_line_and_the_network_is_recorded(tmp_path: Path) -> None:
    verdict = checked(cluster(), tmp_path)
    assert (verdict["failed"], verdict["msg"]) == (False, "2 nodes, Debian 12: no finding")
    assert verdict["fabric"] == {"network": "192.0.2.0/24", "interfaces": {"node-1": "eth0", "node-2": "eth0"}}


@pytest.mark.parametrize("skew", [7200.0, -172800.0])
def test_nodes_that_agree_are_not_set_by_a_wrong_clock_here(tmp_path: Path, skew: float) -> None:
    variables = cluster(skew=skew + 100)
    variables["hostvars"]["node-1"]["_preflight_probe"]["skew"] = skew
    assert recorded(checked(variables, tmp_path)) == [("all", "clock-wrong-here")]
    # Nodes that do not agree, or one alone, are wrong themselves.
    variables["hostvars"]["node-1"]["_preflight_probe"]["skew"] = -skew
    assert recorded(checked(variables, tmp_path)) == [("node-1", "clock-wrong"), ("node-2", "clock-wrong")]
    variables["hostvars"]["node-1"]["_preflight_probe"]["skew"] = 0.0
    assert recorded(checked(variables, tmp_path)) == [("node-2", "clock-wrong")]


def test_a_network_that_is_not_shared_is_in_the_first_list(tmp_path: Path) -> None:
    other = {"addresses": ["10.0.0.2"], "interfaces": [link("10.0.0.2")], "skew": 400.0}
    variables = cluster(**other)
    variables["hostvars"]["node-2"]["cluster_ip"] = "10.0.0.2"
    verdict = checked(variables, tmp_path)
    assert verdict["failed"]
    assert recorded(verdict) == [("node-2", "clock-wrong"), ("all", "network-not-shared")]
    assert verdict["fabric"] == {}
    # Limited to the first node, it is still the same network of all nodes.
    del variables["hostvars"]["node-2"]["_preflight_probe"]
    variables["ansible_play_hosts_all"] = ["node-1"]
    assert recorded(checked(variables, tmp_path)) == [("all", "network-not-shared")]
    # A revoked node has no part in jobs.
    assert recorded(checked({**variables, "ssh_trust_revoked": ["node-2"]}, tmp_path)) == []


def test_an_absent_address_is_one_finding(tmp_path: Path) -> None:
    other = cluster(addresses=["10.0.0.2"], interfaces=[link("10.0.0.2")])
    assert recorded(checked(other, tmp_path)) == [("node-2", "address-absent")]


def test_the_network_is_not_reported_if_no_node_answers(tmp_path: Path) -> None:
    silent = cluster()
    for own in silent["hostvars"].values():
        own["_preflight_probe"] = {
            "unreachable_reason": "ssh: connect to host a port 22: Connection refused",
            "login": login(),
        }
    assert recorded(checked(silent, tmp_path)) == [("node-1", "login-refused"), ("node-2", "login-refused")]


def test_an_nccl_that_does_not_fit_is_in_the_first_list(tmp_path: Path) -> None:
    variables = cluster(nvidia_driver="470.57.02", arch="riscv64")
    variables["hostvars"]["node-2"]["nccl_version"] = "2.27.3-1+cuda12.9"
    verdict = checked(variables, tmp_path)
    assert recorded(verdict) == [("node-2", "architecture-unsupported"), ("node-2", "nccl-driver-old")]
    assert recorded(checked(variables, tmp_path, stack=False)) == [("node-2", "architecture-unsupported")]
    # The version is that of the lock, which is not known yet.
    del variables["hostvars"]["node-2"]["nccl_version"]
    variables["hostvars"]["node-2"]["nccl_install"] = True
    assert recorded(checked(variables, tmp_path)) == [("node-2", "architecture-unsupported")]


def test_a_warning_is_shown_and_does_not_fail(tmp_path: Path) -> None:
    variables = cluster()
    variables["hostvars"]["node-2"] |= {"nccl_version": "2.27.3-1+cuda12.9", "nccl_install": True}
    verdict = checked(variables, tmp_path)
    assert recorded(verdict) == [("node-2", "nccl-driver-missing")]
    assert not verdict["failed"]
    assert verdict["msg"].startswith("2 nodes, Debian 12: 1 warning\n\n1. node-2: warning: ")


def test_the_record_is_private_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "preflight.json"
    for findings in ([Finding("a", "b", "c", "d")], []):
        write_private(path, nodes.record(findings, {"a": probe()}, Fabric("192.0.2.0/24", {"a": "eth0"})))
    fabric = {"network": "192.0.2.0/24", "interfaces": {"a": "eth0"}}
    assert json.loads(path.read_text()) == {
        "schema": 1,
        "findings": [],
        "fabric": fabric,
        "links": {},
        "hosts": {"a": probe()},
    }
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)] == [0o700, 0o600]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ("Port 22\nInclude /etc/ssh/sshd_config.d/*.conf\n", True),
        ('  include="sshd_config.d/*.conf"\n', True),
        ("Include /etc/other /etc/ssh/sshd_config.d/*.conf", True),
        ("#Include /etc/ssh/sshd_config.d/*.conf\n", False),
        ("Match User git\n  Include /etc/ssh/sshd_config.d/*.conf\n", False),
        ("\n", False),
    ],
)
def test_sshd_drop_ins(config: str, read: bool) -> None:
    assert probing.includes_drop_ins(config) is read


@pytest.mark.parametrize(
    ("content", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
        ("", ""),
    ],
)
def test_the_nvidia_driver(content: str, version: str) -> None:
    assert probing.driver_version(content) == version


def test_the_cuda_toolkit() -> None:
    assert probing.toolkit_version("Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0") == "13.0"
    assert probing.toolkit_version("nvcc fatal") == ""


def test_the_link_names_the_version_of_the_system_python(tmp_path: Path) -> None:
    (tmp_path / "python3.11").touch()
    (tmp_path / "python3").symlink_to("python3.11")
    assert probing.system_python(tmp_path / "python3") == "3.11"


def test_free_space_of_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert probing.free_mib(tmp_path / "no" / "where") == pytest.approx(probing.free_mib(tmp_path), rel=0.01)


def test_a_value_that_a_role_would_refuse_is_reported_before_the_role_runs() -> None:
    options = {"mesh": {"type": "bool", "description": "Whether."}, "days": {"type": "int", "description": "How many."}}
    values = {"a": {"mesh": "maybe", "days": "7"}, "b": {"mesh": "maybe", "days": "week"}}
    first, second = inventory.judge_values(values, options)
    assert codes([first, second]) == [("all", "value-wrong"), ("b", "value-wrong")]
    assert "mesh is wrong" in first.cause
    assert "valid boolean" in first.cause
    assert first.cure.endswith("; Whether.")
    assert "days is wrong" in second.cause
    assert inventory.judge_values({"a": {"mesh": "yes", "days": 7}}, options) == []


@pytest.mark.parametrize("bars", [{"acuracy": 0.9}, {"accuracy": "high"}, 0.9])
def test_a_wrong_threshold_is_refused_and_not_all_have_to_be_set(bars: object) -> None:
    specs = yaml.safe_load((ROOT / "roles/validation/meta/argument_specs.yml").read_text())
    options = inventory.declared_options(specs)
    (finding,) = inventory.judge_values({"a": {"validation_bars": bars}}, options)
    assert (finding.host, finding.code) == ("all", "value-wrong")
    assert "validation_bars" in finding.cause
    assert "Pass thresholds for measured values" in finding.cure
    assert inventory.judge_values({"a": {"validation_bars": {"accuracy": 0.9}}}, options) == []


def test_a_string_in_place_of_a_list_is_refused() -> None:
    """node-1 is a substring of node-17, and would count as revoked."""
    options = {"ssh_trust_revoked": {"type": "list", "elements": "str"}}
    (found,) = inventory.judge_values({"a": {"ssh_trust_revoked": "node-17"}}, options)
    assert found.code == "value-not-list"
    assert found.cure.endswith("""-e '{"ssh_trust_revoked": ["node-17"]}'""")
    assert inventory.judge_values({"a": {"ssh_trust_revoked": ["node-17"]}}, options) == []
