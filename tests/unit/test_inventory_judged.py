"""Bad inventories, and the findings about each."""

import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from farandole.core.findings import Finding, report
from farandole.inventory.cluster import Node
from farandole.preflight import inventory
from farandole.preflight.people import judge_people

from .loading import ROOT, load

DECLARED = {
    "base": frozenset({"base_user", "base_user_id"}),
    "ssh_trust": frozenset({"ssh_trust_dir"}),
    "stack": frozenset({"stack_id"}),
}

preflight = load("action", "preflight")


def node(name: str, host: str = "192.0.2.1", **more: Any) -> Any:
    return Node(name, host, **more)


def groups(**named: list[str]) -> dict[str, list[str]]:
    return {"all": sorted({host for hosts in named.values() for host in hosts}), "ungrouped": [], **named}


def codes(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.host, finding.code) for finding in findings]


def test_a_good_inventory_has_no_finding() -> None:
    own = frozenset({"base_user", "cluster_ip", "_base_x", "ansible_user", "database_url", "base", "ssh_port", "mine"})
    nodes = [
        node("node-1", "192.0.2.1", variables=own),
        node("9lives", "gpu2.example.org", cluster_ip="192.0.2.2"),
        node("n" * 63, "gpu2.example.org", port="2222", cluster_ip="192.0.2.33"),
    ]
    named = groups(cluster=[node.name for node in nodes], head=["node-1"], builders=["9lives"])
    assert inventory.judge_inventory(named, nodes, DECLARED, preflight.connection_variables()) == []


@pytest.mark.parametrize(
    ("named", "host", "code", "message"),
    [
        (groups(), "inventory", "inventory-empty", ""),
        (groups(web=["a"]), "inventory", "cluster-missing", ""),
        (groups(clusters=["a"]), "inventory", "cluster-misspelt", ""),
        (groups(cluster=["a"]), "inventory", "head-not-one", ""),
        (groups(cluster=["a", "b"], head=["a", "b"]), "inventory", "head-not-one", "group head has 2 hosts: a, b"),
        (groups(cluster=["a"], head=["x"]), "x", "not-in-cluster", ""),
        (groups(cluster=["a"], head=["a"], builders=["x"]), "x", "not-in-cluster", ""),
    ],
)
def test_groups(named: dict[str, list[str]], host: str, code: str, message: str) -> None:
    (finding,) = inventory.judge_groups(named)
    assert (finding.host, finding.code, message in finding.cause) == (host, code, True)


@pytest.mark.parametrize("group", ["head", "builders"])
def test_a_revoked_node_can_be_neither_head_nor_builder(group: str) -> None:
    named = groups(cluster=["a", "b"], head=["a"], builders=["a"])
    named[group] = ["b"]
    (finding,) = inventory.judge_revoked(named, ["b"])
    assert (finding.host, finding.code) == ("b", "server-revoked")
    assert f"group {group}" in finding.cause
    assert inventory.judge_revoked(named, []) == []


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
    assert codes(inventory.judge_names(["gpu", "GPU"])) == [("GPU", "name-repeated")]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ([node("a", "gpu1")], "address-missing"),
        ([node("a", cluster_ip="192.0.2.300")], "address-malformed"),
        ([node("a", cluster_ip="192.0.2.3/24")], "address-malformed"),
        ([node("a", "127.0.0.1")], "address-local"),
        ([node("a", cluster_ip="::1")], "address-local"),
        ([node("a", "2001:db8::1")], "address-not-ipv4"),
        ([node("a", "0.0.0.0")], "address-local"),  # noqa: S104
        ([node("b"), node("a")], "node-repeated"),
        ([node("b", "192.0.2.9", port="1", cluster_ip="192.0.2.4"), node("a", cluster_ip="192.0.2.4")],
         "address-repeated"),
    ],
)  # fmt: skip
def test_bad_addresses(bad: list[Any], code: str) -> None:
    assert codes(inventory.judge_addresses(bad)) == [("a", code)]


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
    bad = [node(name, variables=frozenset({variable})) for name in ("a", "b")]
    for nodes, host in (([bad[0], node("b")], "a"), (bad, "all")):
        (finding,) = inventory.judge_variables(nodes, DECLARED)
        assert (finding.host, finding.code) == (host, code)
        assert variable in finding.cause and known in finding.cure


def test_a_tag_without_tasks_is_told() -> None:
    findings = inventory.judge_tags(["all", "stack", "molecule-notest", "slrum"], ["stack", "slurm"])
    assert [(finding.code, finding.severity) for finding in findings] == [("tag-unknown", "warn")]
    assert "the tag slrum" in findings[0].cause
    assert "quick, slurm, stack" in findings[0].cure


def test_an_option_of_ansible_that_does_nothing_is_refused() -> None:
    own = {
        "node-1": {"ansible_user": "root", "ansible_private_key_file": "/keys/root"},
        "node-2": {"ansible_ssh_user": "alice"},
        "node-3": {},
        "node-4": {"ansible_connection": "local", "ansible_user": "root"},
    }
    typed = {"--user": "alice", "--private-key": "/keys/alice"}
    findings = inventory.judge_login(own, typed)
    assert [(item.host, item.code, item.severity) for item in findings] == [("node-1", "option-ignored", "stop")] * 2
    assert "-e ansible_user=alice" in findings[0].cure
    assert inventory.judge_login(own, {}) == []


def test_a_password_that_is_asked_for_in_vain_is_refused_and_none_is_shown() -> None:
    secret: dict[str, Any] = {"ansible_become_pass": "SECRET", "ansible_ssh_pass": "SECRET"}
    own = {"node-1": secret, "node-2": {"ansible_become_password": "SECRET"}, "here": {"ansible_connection": "local"}}
    findings = inventory.judge_passwords(own, ["--ask-become-pass", "--ask-pass"])
    assert [(finding.code, finding.severity) for finding in findings] == [("password-ignored", "stop")]
    assert "--ask-become-pass" in findings[0].cause
    assert "SECRET" not in report(findings)
    # Node-2 needs what is typed.
    assert inventory.judge_passwords({"node-1": secret, "node-2": {}}, ["--ask-become-pass"]) == []


def test_each_role_has_its_name_as_a_tag() -> None:
    def listed(*options: str) -> str:
        command = ["ansible-playbook", "-i", "inventory/example", "site.yml", "playbooks/validate.yml", *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    tags = re.findall(r"TAGS: \[(.*)\]", listed("--list-tags"))
    roles = {path.parts[-3] for path in ROOT.glob("roles/*/tasks/main.yml")}
    assert {tag for line in tags for tag in re.findall(r"\w+", line)} == inventory.TAGS | roles | {"always"}
    # Checked whatever the tags are, so nothing that another task has to find out first.
    always = listed("--list-tasks", "--tags", "none")
    checked = re.findall(r"^ *farandole\.cluster\.(\w+) : Validating arguments", always, re.MULTILINE)
    assert {*checked} == {"preflight", "validation"}
    # Nothing is sent to nodes that are left out. Where they are not skipped, no node is changed: the head has the lock.
    plays = re.findall(r"play #\d+ \(cluster\): (.*?)\t(.*?)(?=play #|\Z)", always, re.DOTALL)
    entered = {name for name, tasks in plays if "Skip revoked" not in tasks}
    assert entered == {"Lock the cluster", "Preflight", "Validate the cluster"}
    # Without this task, a play has no others.
    for play in re.split(r"play #", listed("--list-tasks")):
        tasks = [(name, {*tags.split(", ")}) for name, tags in re.findall(r"\n +(.*)\tTAGS: \[(.*)\]", play)]
        for guard in (tags - {"always"} for name, tags in tasks if "Skip revoked" in name):
            assert [name for name, tags in tasks if not guard <= tags] == []


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
    findings = inventory.judge_inventory(groups(cluster=["a"], head=["a"]), nodes, {}, preflight.connection_variables())
    assert codes(findings) == [("all", "variable-misspelt"), ("a", "address-missing")]
    assert findings[0].cure.startswith(f"write {meant} if")


@pytest.mark.parametrize("variable", ["ansible_su_pass", "ansible_sudo_pass", "ansible_doas_pass", "ansible_ssh_pass"])
def test_a_password_of_another_way_to_become_root_is_not_misspelt(variable: str) -> None:
    assert inventory.misspelt(variable, preflight.connection_variables()) is None


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


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZWw2YvoLBN9V2a/VDrDnQrl+Yb9mxSAnxMjZxFTefk"


def people(*persons: dict[str, Any], **variables: Any) -> list[tuple[str, str]]:
    """The codes of the findings about cluster_users, each with its cause."""
    own = {"ansible_user": "admin", "cluster_users": persons, **variables}
    return [(item.code, item.cause) for item in judge_people({"node-1": own, "node-2": own}, ["node-1", "node-2"])]


def test_good_people_have_no_finding() -> None:
    assert people() == []
    keys = [KEY, f"{KEY} alice@laptop of hers\n", encoded("sk-ssh-ed25519@openssh.com")]
    assert people({"name": "alice", "uid": 2001, "ssh_keys": keys}, {"name": "b-o_b2", "uid": 1000}) == []


def test_the_job_user_is_nobody_else() -> None:
    for user, owner in (
        ("admin", "the account with which Ansible logs in"),
        ("root", "root"),
        ("slurm", "the account"),
    ):
        for persons in ((), ({"name": "alice", "uid": 2001},)):
            [(code, cause)] = people(*persons, base_user=user)
            assert (code, cause.startswith(f"base_user: {user} is {owner}")) == ("job-user-taken", True)


def test_root_of_a_node_is_not_to_become_root_of_the_head() -> None:
    bob = {"name": "bob", "uid": 2002, "admin": "yes"}
    [(code, cause)] = people({"name": "alice", "uid": 2001}, bob, ssh_trust_mesh="true")
    assert (code, "as bob," in cause) == ("admin-in-mesh", True)
    assert people(bob, ssh_trust_mesh="false") == people({**bob, "admin": "no"}, ssh_trust_mesh=True) == []


def encoded(kind: str) -> str:
    return f"{kind} {b64encode(len(kind).to_bytes(4, 'big') + kind.encode() + b'the rest').decode()}"


@pytest.mark.parametrize(
    ("person", "code", "message"),
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
        ({"uid": 2000}, "person-uid-repeated", "uid 2000, which the job user also has"),
        ({"uid": 2009}, "person-uid-repeated", "which carol also has"),
        ({"ssh_keys": [KEY, KEY[:-5]]}, "person-key-wrong", "one of the ssh_keys of alice is 'ssh-ed25519 AAAA"),
        ({"ssh_keys": [f"{KEY}\n{KEY}"]}, "person-key-wrong", "several lines"),
        ({"ssh_keys": [f'command="id" {KEY}']}, "person-key-wrong", "command="),
        ({"ssh_keys": [encoded("sk-ssh-ed25519@openssh.com")[3:]]}, "person-key-wrong", "ssh-ed25519"),
        ({"ssh_keys": ["~/.ssh/id_ed25519.pub"]}, "person-key-wrong", "'~/.ssh/id_ed25519.pub'"),
        ({"ssh_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----\nSECRET"]}, "person-key-wrong", "should replace now"),
    ],
)
def test_bad_people(person: dict[str, Any], code: str, message: str) -> None:
    carol = {"name": "carol", "uid": 2009}
    (finding,) = people(carol, {"name": "alice", "uid": 2001, **person})
    assert (finding[0], message in finding[1], "SECRET" in finding[1]) == (code, True, False), finding


def test_keys_for_the_job_user_may_have_options_and_a_private_one_is_not_shown() -> None:
    token = encoded("sk-ssh-ed25519@openssh.com")
    good = [
        KEY,
        f'from="192.0.2.0/24",command="echo \\"a b\\"" {KEY} alice',
        f"restrict {token}",
        "",
        f"# bob\n{KEY}\tbob\r\n",
        f"{KEY} bob\xa0b\u2028",
    ]
    assert people(ssh_trust_login_keys=good) == []
    private = "-----BEGIN OPENSSH PRIVATE KEY-----\nSECRET\n-----END OPENSSH PRIVATE KEY-----\n"
    putty = "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\nSECRET"
    for bad, seen in (
        ([private], "a private key"), (private.splitlines(), "a private key"), ([putty], "'PuTTY-User"),
        ([KEY[:-5]], "'ssh-ed25519 AAAA"),
        ([f"{KEY}\xa0b"], "'ssh-ed25519 AAAA"), ([f"\u2003{KEY}"], "ssh-ed25519 AAAA"),
        ([f'command="a {KEY}'], "'command="), (["~/.ssh/id_ed25519.pub"], "'~/"),
    ):  # fmt: skip
        findings = people(ssh_trust_login_keys=[*good, *bad])
        assert [(code, seen in cause, "SECRET" in cause) for code, cause in findings] == [
            ("login-key-wrong", True, False), ("login-key-wrong", True, False),
        ], bad  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("base_state_dir", "/srv/state", ""),
        ("base_user", "alice", "trainer"),
        ("base_user_id", 2009, 2000),
        ("cluster_users", [{"name": "alice", "uid": 2001}], []),
        ("slurm_enabled", True, False),
        ("ssh_trust_mesh", True, False),
        ("ssh_trust_revoked", ["node-7"], []),
        ("storage_home", "nfs", "none"),
    ],
)
def test_what_counts_for_the_whole_cluster_is_the_same_on_all_nodes(name: str, value: object, default: object) -> None:
    specs = [yaml.safe_load(path.read_text()) for path in ROOT.glob("roles/*/meta/argument_specs.yml")]

    def judged(*given: dict[str, Any], **more: list[str]) -> list[tuple[str, str]]:
        hosts = {f"node-{number}": own for number, own in enumerate(given, 1)}
        nodes = [node(host, variables=frozenset(own)) for host, own in hosts.items()]
        named = groups(cluster=[*hosts], head=["node-1"], **more)
        return codes(inventory.judge_settings(named, nodes, hosts, specs, []))

    own: dict[str, Any] = {name: value}
    assert judged(own, own, {}) == [("node-3", "setting-uneven")]
    assert judged({}, own, {}) == [("node-2", "setting-uneven")]
    assert judged(own, own) == judged({}, {name: default}, {}) == []
    if isinstance(value, bool):
        assert judged({}, {name: "no"}) == judged(own, {name: "yes"}) == []
        assert judged({}, {name: "yes"}) == [("node-2", "setting-uneven")]
    if isinstance(value, int):
        assert judged(own, {name: str(value)}) == []
    by_group = judged({}, own, slurm=["node-2"])
    assert by_group == [("node-2", "setting-uneven")] * (name != "slurm_enabled")


def test_the_login_has_another_name_as_well() -> None:
    [(code, _)] = people({"name": "ops", "uid": 2001}, ansible_user=None, ansible_ssh_user="ops")
    assert code == "person-name-taken"


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


@pytest.mark.parametrize("name", ["ssh_trust_host_days", "ssh_trust_user_days"])
def test_a_certificate_is_valid_for_a_day_at_least(name: str) -> None:
    specs = yaml.safe_load((ROOT / "roles/ssh_trust/meta/argument_specs.yml").read_text())
    options = inventory.declared_options(specs)
    for value in (0, "-1"):
        (finding,) = inventory.judge_values({"a": {name: value}}, options)
        assert (finding.code, f"{name} is wrong: {value} is less than 1" in finding.cause) == ("value-wrong", True)
    assert inventory.judge_values({"a": {name: "1"}}, options) == []
    # No number at all is one finding.
    assert len(inventory.judge_values({"a": {name: "a year"}}, options)) == 1


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
    (finding,) = inventory.judge_values({"a": {"ssh_trust_revoked": "node-17"}}, options)
    assert finding.code == "value-not-list"
    assert finding.cure.endswith("""-e '{"ssh_trust_revoked": ["node-17"]}'""")
    assert inventory.judge_values({"a": {"ssh_trust_revoked": ["node-17"]}}, options) == []
