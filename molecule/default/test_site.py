"""What a cluster is after site.yml, beside what each role's own scenario proves."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_validation_play_proves_every_way_and_every_job(inventory_path, head):
    done = subprocess.run(
        ["ansible-playbook", "-i", inventory_path, "playbooks/validate.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "machines: 2 of 2, clean ways: 4 of 4" in done.stdout
    wanted = json.loads(head.check_output("cat /opt/farandole/current/manifest.json"))["wanted"]
    for framework in wanted["frameworks"]:
        for controller in ("gloo", "mpi"):
            assert f"{framework.replace('pytorch', 'torch')} over {controller}: 2 ranks on 2 machines" in done.stdout


def test_all_nodes_run_the_same_stack_and_nothing_is_left_of_its_making(host, head):
    assert host.check_output("readlink /opt/farandole/current") == head.check_output("readlink /opt/farandole/current")
    assert host.file("/opt/farandole/current/manifest.json").exists
    assert not host.file("/opt/farandole/incoming").exists
    assert not host.file("/var/tmp/farandole-build").exists  # noqa: S108


def test_the_decoy_is_there_and_names_do_not_lead_to_it(host, addresses):
    assert host.interface("docker0").addresses[0] == "172.17.0.1"
    for name, address in addresses.items():
        assert host.check_output("getent ahostsv4 %s", name).split()[0] == address


def test_the_head_builds_and_the_worker_does_not(nodes):
    assert nodes["node-1"].exists("g++")
    assert not nodes["node-2"].exists("g++")


def test_nothing_failed_on_the_node(host):
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
