"""Role preflight: bad input is reported with host, cause and cure, and nothing changes on any node."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(inventory_path, tmp_path):
    """Run site.yml on an inventory with a mistake in it."""

    def run(change=None):
        inventory = yaml.safe_load((inventory_path / "hosts.yml").read_text())
        if change:
            change(inventory)
        folder = tmp_path / "molecule-broken"
        folder.mkdir(exist_ok=True)
        (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        return subprocess.run(
            ["ansible-playbook", "-i", folder, ROOT / "site.yml"],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"},
        )  # fmt: skip

    yield run
    shutil.rmtree(ROOT / ".farandole" / "molecule-broken", ignore_errors=True)


def node(inventory, name):
    return inventory["cluster"]["hosts"][name]


def no_head(inventory):
    del inventory["head"]


def bad_name(inventory):
    inventory["cluster"]["hosts"]["node_3"] = {"ansible_host": "10.94.255.1"}


def duplicate_address(inventory):
    node(inventory, "node-2")["ansible_host"] = node(inventory, "node-1")["ansible_host"]


def no_address(inventory):
    node(inventory, "node-2")["ansible_host"] = "somewhere"


def misspelt(inventory):
    inventory["cluster"]["vars"]["ssh_trust_messh"] = True


def wrong_type(inventory):
    inventory["cluster"]["vars"]["ssh_trust_mesh"] = "maybe"


def foreign_cluster_ip(inventory):
    node(inventory, "node-2")["cluster_ip"] = "10.94.255.1"


def taken_uid(inventory):
    inventory["cluster"]["vars"]["base_user_id"] = 33


def wrong_port(inventory):
    node(inventory, "node-2")["ansible_port"] = 1


def incomplete_version(inventory):
    inventory["cluster"]["vars"].update(nccl_install=True, nccl_version="2.27")


FINDINGS = [
    (no_head, "inventory: group head", "head-not-one"),
    (bad_name, "node_3", "name-malformed"),
    (duplicate_address, "node-2", "node-repeated"),
    (no_address, "node-2", "address-missing"),
    (misspelt, "ssh_trust_messh", "variable-misspelt"),
    (wrong_type, "ssh_trust_mesh", "value-wrong"),
    (foreign_cluster_ip, "node-2", "address-absent"),
    (taken_uid, "www-data", "id-taken"),
    (wrong_port, "node-2", "login-refused"),
    (incomplete_version, "node-1, node-2", "nccl-version-inexact"),
]


@pytest.mark.parametrize(("change", "seen", "code"), FINDINGS, ids=[change.__name__ for change, _, _ in FINDINGS])
def test_bad_input_is_reported_and_changes_nothing(site, nodes, change, seen, code):
    done = site(change)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "nothing was changed" in output
    assert seen in output
    assert f"[{code}]" in output
    for host in nodes.values():
        assert not host.user("trainer").exists


def test_nodes_in_different_networks_are_in_the_same_list_as_other_findings(site, nodes):
    def change(inventory):
        node(inventory, "node-2")["cluster_ip"] = "192.0.2.2"
        taken_uid(inventory)

    nodes["node-2"].check_output("ip address add 192.0.2.2/24 dev eth0")
    try:
        done = site(change)
    finally:
        nodes["node-2"].check_output("ip address del 192.0.2.2/24 dev eth0")
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "preflight found 2 problems; nothing was changed." in output
    assert "[id-taken]" in output
    assert "[network-not-shared]" in output


def test_an_unreachable_node_is_reported_and_the_others_are_unchanged(site, nodes):
    fault, lab = ["farandole", "lab", "fault"], ["--name", "molecule-preflight"]
    subprocess.run([*fault, "cut", "node-2", *lab], check=True)
    try:
        done = site()
    finally:
        subprocess.run([*fault, "heal", "node-2", *lab], check=True)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "node-2" in output
    assert "[login-no-route]" in output or "[login-timeout]" in output
    assert not nodes["node-1"].user("trainer").exists


def test_good_input_has_no_findings_and_is_recorded(inventory_path):
    record = json.loads((ROOT / ".farandole" / inventory_path.name / "preflight.json").read_text())
    assert record["findings"] == []
    assert sorted(record["hosts"]) == ["node-1", "node-2"] == sorted(record["fabric"]["interfaces"])
    assert record["fabric"]["network"]


def test_a_warning_is_shown_and_refuses_nothing(inventory_path):
    settings = json.dumps({"nccl_install": True, "nccl_version": "2.27.3-1+cuda12.9"})
    command = ["ansible-playbook", "-i", inventory_path, "-e", settings, "playbooks/preflight.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 warning" in done.stdout
    assert "[nccl-driver-missing]" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster:\n  hosts:\n    node-1: {}\n    node-1: {}\n", "duplicate mapping key"),
        ("cluster:\n  hosts\n    node-1: {}\n", "failed to parse"),
    ],
    ids=["a node listed twice", "a missing colon"],
)
def test_a_mistake_in_the_file_is_reported(tmp_path, text, message):
    (tmp_path / "hosts.yml").write_text(text)
    done = subprocess.run(
        ["ansible-playbook", "-i", tmp_path, "site.yml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert message in (done.stdout + done.stderr).lower()
    assert "PLAY" not in done.stdout


def test_an_account_newly_allowed_to_use_sudo_is_accepted(nodes, inventory_path):
    """The connection left open by the refused run still has the account's old groups."""
    for host in nodes.values():
        host.check_output("apt-get install --yes --no-install-recommends sudo && useradd --create-home admin")
        host.check_output("cp -r /root/.ssh ~admin/ && chown -R admin ~admin/.ssh && echo admin:x | chpasswd")
        host.check_output("echo '%adm ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/adm")

    def preflight():
        command = ["ansible-playbook", "-i", inventory_path, "-e", "ansible_user=admin", "playbooks/preflight.yml"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    refused = preflight()
    assert refused.returncode != 0
    assert "--ask-become-pass" in refused.stdout + refused.stderr
    for host in nodes.values():
        host.check_output("usermod --append --groups adm admin")
    accepted = preflight()
    assert accepted.returncode == 0, accepted.stdout
