"""What a cluster is after site.yml, beside what each role's own scenario proves."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_validation_play_proves_every_way(inventory_path):
    done = subprocess.run(
        ["ansible-playbook", "-i", inventory_path, "playbooks/validate.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "machines: 2 of 2, clean ways: 4 of 4" in done.stdout


def test_the_decoy_is_there_and_names_do_not_lead_to_it(host, addresses):
    assert host.interface("docker0").addresses[0] == "172.17.0.1"
    for name, address in addresses.items():
        assert host.check_output("getent ahostsv4 %s", name).split()[0] == address


def test_the_head_builds_and_the_worker_does_not(nodes):
    assert nodes["node-1"].exists("g++")
    assert not nodes["node-2"].exists("g++")


def test_nothing_failed_on_the_node(host):
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
