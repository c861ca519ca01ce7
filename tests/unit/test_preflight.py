"""Bad nodes, and the findings about each; test_inventory_judged has bad inventories."""

import json
import shlex
import stat
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.core.files import write_private
from farandole.core.findings import Finding
from farandole.inventory.cluster import Node
from farandole.links.fabric import Fabric
from farandole.preflight import answer as answers
from farandole.preflight import nodes, unreachable

from .loading import load
from .machines import hosts_phase, login
from .machines import probe as sound

asking = load("action", "node_probe")
probing = load("modules", "node_probe")


def node(name: str, host: str = "192.0.2.1", **more: Any) -> Any:
    return Node(name, host, **more)


def codes(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.host, finding.code) for finding in findings]


FREE: dict[str, Any] = {"user_id": None, "group_id": None, "id_owner": None, "group_id_owner": None}
ACCOUNTS = {"trainer": 2000, "alice": 2001}


def probe(**changes: Any) -> dict[str, Any]:
    return sound(**{"machine_id": "0123", "accounts": dict.fromkeys(ACCOUNTS, FREE), **changes})


def account(name: str = "trainer", **changes: Any) -> dict[str, Any]:
    """A node's answer about one account; the others are free."""
    return {"accounts": dict.fromkeys(ACCOUNTS, FREE) | {name: FREE | changes}}


def answer(skew: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {"probe": probe(**changes), "skew": skew, "login": login()}


def judged(reply: dict[str, Any]) -> list[tuple[str, str]]:
    return codes(nodes.judge_hosts([node("node-1")], {"node-1": reply}, ACCOUNTS))


def found(reply: dict[str, Any]) -> Finding:
    (finding,) = nodes.judge_hosts([node("node-1")], {"node-1": reply}, ACCOUNTS)
    return finding


def test_a_good_node_has_no_finding() -> None:
    assert judged(answer()) == []
    assert judged(answer(**account(user_id=2000, group_id=2000, id_owner="trainer", group_id_owner="trainer"))) == []


@pytest.mark.parametrize(
    ("changes", "code", "message"),
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
        (account("alice", id_owner="bob"), "id-taken", "bob already has uid 2001, meant for alice"),
        (account("alice", user_id=33), "id-differs", "alice already has uid 33, not 2001"),
        ({"skew": 400.0}, "clock-wrong", "400 s ahead of"),
        ({"skew": -3600.0}, "clock-wrong", "3600 s behind"),
        ({"root": False, "sshd_drop_ins": False}, "not-root", ""),
        ({"sshd_drop_ins": False}, "drop-ins-unread", ""),
    ],
)
def test_bad_nodes(changes: dict[str, Any], code: str, message: str) -> None:
    finding = found(answer(**changes))
    assert (finding.host, finding.code) == ("node-1", code)
    assert message in finding.cause


def test_the_account_of_the_operator_does_not_run_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "alice")
    settings = tmp_path / "config"
    settings.write_text("Host 192.0.2.1\n  User trainer\nHost 192.0.2.2\n  User root\n")
    assert judged(answer()) == []

    def refused(user: str | None, *shared: str) -> list[tuple[str, str]]:
        action = SimpleNamespace(_option={"remote_user": user, "host": "node-1"}.get, _shared=lambda: [*shared])
        return judged(answer() | {"login": asking.ActionModule._login(action, {})})

    named = [("node-1", "login-for-jobs")]
    ssh = ("ssh", "-F", str(settings), "-T", "-o", "BatchMode=yes")
    assert refused("trainer", *ssh, "-o", 'User="trainer"', "192.0.2.2") == refused(None, *ssh, "192.0.2.1") == named
    assert refused("root", *ssh, "-o", 'User="root"', "192.0.2.1") == refused(None, *ssh, "192.0.2.2") == []
    # Not by ssh, or by one that does not say.
    assert refused(None) == refused(None, "/missing/ssh", "192.0.2.1") == refused(None, "false", "192.0.2.1") == named
    finding = found(answer() | {"login": login(user="alice")})
    assert "as alice," in finding.cause


def test_a_node_s_words_are_not_in_the_cure() -> None:
    assert "10.9.8.7" not in found(answer(addresses=["10.9.8.7"])).cure
    assert "1001" not in found(answer(**account(user_id=1001))).cure


def test_a_cloned_image_and_one_machine_under_two_names() -> None:
    clones = list(nodes.judge_machine_ids({name: probe(addresses=[f"192.0.2.{n}"]) for n, name in enumerate("abc")}))
    assert codes(clones) == [("b", "machines-shared"), ("c", "machines-shared")]
    assert {clone.cause for clone in clones} == {"a, b, c have the same machine id"}
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
    ("output", "code", "command"),
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
def test_a_node_that_does_not_answer(output: str, code: str, command: str) -> None:
    finding = found({"unreachable_reason": answers.reason(output), "login": login()})
    assert (finding.host, finding.code) == ("node-1", code)
    assert command in finding.cure


def test_a_command_uses_only_the_inventory() -> None:
    message = "Host key for $(id) has changed, ssh-keygen -f $(touch${IFS}/tmp/x) -R x, {ssh} \x1b[2J"
    common = "-o 'UserKnownHostsFile=/a b/known;id' -o StrictHostKeyChecking=yes"
    odd = login(host="$(id)", port="2222", user="a;b", key="/k y", common_args=common)
    finding = found({"unreachable_reason": answers.reason(message), "login": odd})
    assert finding.code == "login-host-key-changed"
    assert "Host key for $(id) has changed" in finding.cause
    assert finding.cure.endswith(
        "ssh-keygen -f /a -R '[$(id)]:2222', then ssh -o 'UserKnownHostsFile=/a b/known;id' "
        "-o StrictHostKeyChecking=yes -p 2222 -i '/k y' 'a;b@$(id)'"
    )
    assert "touch" not in finding.cure and "{ssh}" not in finding.cure
    # An answer of another form, and a host that was never contacted.
    finding = found({"unfit": "probe.time is 'now\x1b'", "login": login()})
    assert (finding.code, r"probe.time is 'now\x1b'" in finding.cause) == ("answer-malformed", True)
    assert "now" not in finding.cure
    finding = found({})
    assert (finding.code, finding.cure.startswith("ssh -v node-1 ")) == ("login-failed", True)
    assert answers.reason("OpenSSH_9.2p1\ndebug1: Reading\r\nssh: no\n") == "ssh: no"


def test_the_ssh_command_is_the_one_that_ansible_uses_and_knows_the_hosts_that_it_knows() -> None:
    command = login(common_args="-o UserKnownHostsFile=known", key="key", port=22)["command"]
    assert command == "ssh -o UserKnownHostsFile=known -p 22 -i key root@192.0.2.1"
    options = {"ssh_common_args": "-o A=b", "ssh_extra_args": "-o 'C=\"d e\" f'", "host": "192.0.2.1"}
    action = SimpleNamespace(_option=options.get, _shared=list)
    assert asking.ActionModule._login(action, {})["command"] == "ssh -o A=b -o 'C=\"d e\" f' 192.0.2.1"
    fields = unreachable.login_fields(login(port=2222))
    assert [fields[name] for name in ("ssh", "forget", "port_option")] == [
        "ssh -p 2222 root@192.0.2.1", "ssh-keygen -R '[192.0.2.1]:2222'", " -p 2222",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ("-o 'UserKnownHostsFile=\"/a b/known\" /c'", "/a b/known"),
        ("-o 'UserKnownHostsFile = \"/a b/known\"' -o Port=9", "/a b/known"),
        # Two files without quotes.
        ("-o 'UserKnownHostsFile=/a b/known'", "/a"),
        ("-oUserKnownHostsFile=~/known -oPort=9", str(Path.home() / "known")),
    ],
)
def test_a_key_is_forgotten_in_the_file_that_ssh_reads(options: str, file: str) -> None:
    assert unreachable.known_hosts(options) == ["-f", file]
    shown = subprocess.run(["ssh", "-G", *shlex.split(options), "a"], capture_output=True, text=True, check=True)
    assert f"userknownhostsfile {file}" in shown.stdout
    assert unreachable.known_hosts("") == []


def test_a_command_on_the_same_connection_has_no_password_and_prompts_for_none() -> None:
    command = ["sshpass", "-d5", "/usr/bin/ssh", "-vvv", "-o", "ControlPath=/x", "-p", "22", "192.0.2.1"]
    ours = ["/usr/bin/ssh", "-T", "-o", "BatchMode=yes", "-o", "ControlPath=/x", "-p", "22", "192.0.2.1"]
    assert answers.shared_connection(command, "/usr/bin/ssh") == ours


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
    return [(finding["host"], finding["code"]) for finding in verdict["findings"]]


@pytest.mark.parametrize(
    ("hostname", "own", "refused"),
    [
        ("server.example.org", {"base_set_hostname": False}, True),
        ("server.example.org", {"base_set_hostname": "false"}, True),
        ("server.example.org", {"base_set_hostname": True}, False),
        ("server.example.org", {}, False),
        ("node-2", {"base_set_hostname": False}, False),
    ],
)
def test_a_name_that_is_not_the_inventory_s_is_refused_unless_it_will_be_set(
    tmp_path: Path, hostname: str, own: dict[str, Any], refused: bool
) -> None:
    variables = cluster(hostname=hostname)
    variables["hostvars"]["node-2"] |= own
    assert recorded(checked(variables, tmp_path)) == [("node-2", "hostname-differs")] * refused


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


def test_a_limited_run_keeps_what_was_known_of_the_others(tmp_path: Path) -> None:
    variables = cluster(gpus=4)
    assert "elsewhere" not in checked(variables, tmp_path)
    known = nodes.last_known(tmp_path)
    assert [known["node-2"][fact] for fact in ("gpus", "interfaces")] == [4, [link("192.0.2.2")]]
    del variables["hostvars"]["node-2"]["_preflight_probe"]
    variables["ansible_play_hosts_all"] = ["node-1"]
    for _ in range(2):
        verdict = checked(variables, tmp_path)
        assert [[*verdict[place]] for place in ("hosts", "elsewhere")] == [["node-1"], ["node-2"]]
    assert nodes.last_known(tmp_path) == known
    (tmp_path / "preflight.json").write_text('{"hosts": {"node-1": {"gpus": "many"}}}')
    assert nodes.last_known(tmp_path) == {}


def test_the_network_is_not_reported_if_no_node_answers(tmp_path: Path) -> None:
    silent, reason = cluster(), "ssh: connect to host a port 22: Connection refused"
    for own in silent["hostvars"].values():
        own["_preflight_probe"] = {"unreachable_reason": reason, "login": login()}
    assert recorded(checked(silent, tmp_path)) == [("node-1", "login-refused"), ("node-2", "login-refused")]
    # Nor if an address is absent.
    other = cluster(addresses=["10.0.0.2"], interfaces=[link("10.0.0.2")])
    assert recorded(checked(other, tmp_path)) == [("node-2", "address-absent")]


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
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path)] == [0o700, 0o600]
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


def test_versions_on_a_node(tmp_path: Path) -> None:
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    assert [probing.driver_version(text) for text in (closed, opened, "")] == ["535.129.03", "580.95.05", ""]
    assert probing.toolkit_version("Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0") == "13.0"
    assert probing.toolkit_version("nvcc fatal") == ""
    (tmp_path / "python3.11").touch()
    (tmp_path / "python3").symlink_to("python3.11")
    assert probing.system_python(tmp_path / "python3") == "3.11"
    # Of a folder that does not exist yet, what its place has.
    assert probing.free_mib(tmp_path / "no" / "where") == pytest.approx(probing.free_mib(tmp_path), rel=0.01)
