"""Nodes get another Debian release, one after the other, as docs/nodes.md says: they move to a second cluster."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from clusters import ENVIRONMENT, LONG, PREPARED, ROOT, Cluster

NODES = 4
KIND = PREPARED
SITE = ()
STAYING, MOVING = ("node-1", "node-2"), ("node-3", "node-4")
# As in scenario trixie, so that a machine that has run it has this stack.
SETTINGS = {"stack_frameworks": ["tensorflow"]}
# As Debian's release notes say.
UPGRADE = """
set -eu
export DEBIAN_FRONTEND=noninteractive
sed --in-place s/bookworm/trixie/g /etc/apt/sources.list
apt-get --quiet update
apt-get --quiet --yes --option Dpkg::Options::=--force-confold upgrade --without-new-pkgs
apt-get --quiet --yes --option Dpkg::Options::=--force-confold full-upgrade
"""
GOES_ON = """
import pathlib, time
import horovod.torch as hvd, torch
hvd.init()
while not pathlib.Path.home().joinpath("go").exists():
    time.sleep(1)
print("sum", int(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
"""


@pytest.fixture
def other() -> Iterator[Cluster]:
    """The second cluster, whose inventory is not there yet."""
    cluster = Cluster("test-release-13")
    yield cluster
    shutil.rmtree(cluster.inventory, ignore_errors=True)
    shutil.rmtree(cluster.state, ignore_errors=True)


def farandole(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command without an inventory."""
    command = [sys.executable, "-m", "farandole", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False)


def release_of(cluster: Cluster, node: str) -> str:
    return cluster.shell(node, ". /etc/os-release; echo $VERSION_CODENAME").stdout.strip()


@LONG
def test_nodes_move_to_a_cluster_with_another_release_while_a_job_goes_on(
    site: Cluster, other: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "goes_on.py").write_text(GOES_ON)
    options = ("--detach", "--hosts", ",".join(STAYING))
    begun = site.farandole("run", *options, "--", "python", "goes_on.py", folder=tmp_path)
    assert begun.returncode == 0, begun.stderr
    # They leave the first cluster.
    for node in MOVING:
        left_out = site.farandole("node exclude", node, "--why", "gets Debian 13")
        assert left_out.returncode == 0, left_out.stderr
    site.play_ok()
    removed = site.farandole("remove", "--hosts", ",".join(MOVING), "--yes")
    assert removed.returncode == 0, removed.stdout + removed.stderr
    text = (site.inventory / "hosts.yml").read_text()
    hosts = yaml.safe_load(text)
    moved = {node: hosts["cluster"]["hosts"].pop(node)["ansible_host"] for node in MOVING}
    # Its first line says that it is the lab's.
    (site.inventory / "hosts.yml").write_text(f"{text.splitlines()[0]}\n{yaml.safe_dump(hosts)}")
    site.play_ok()
    # They get the other release.
    for node in MOVING:
        upgraded = site.shell(node, UPGRADE)
        assert upgraded.returncode == 0, upgraded.stdout + upgraded.stderr
        site.lab("fault", "reboot", node)
    assert [release_of(site, node) for node in (*STAYING, *MOVING)] == ["bookworm", "bookworm", "trixie", "trixie"]
    # They become a cluster of their own.
    keys = [
        site.ssh(node, "ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").stdout.split()[1] for node in MOVING
    ]
    known = [argument for key in keys for argument in ("--host-key", key)]
    named = [f"{node}={address}" for node, address in moved.items()]
    key = str(site.inventory / ".ssh/id_ed25519")
    made = farandole("init", other.name, *named, "--private-key", key, *known)
    assert made.returncode == 0, made.stdout + made.stderr
    builds = hosts["cluster"]["vars"]["stack_builds"]
    with (other.inventory / "group_vars/all.yml").open("a") as settings:
        settings.write(yaml.safe_dump({**SETTINGS, "stack_builds": builds}))
    other.play_ok()
    validated = other.farandole("validate", "--quick")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    # In the first cluster nothing has noticed, and the next job runs, too.
    for node in STAYING:
        site.shell(node, "touch /home/trainer/go")
    ended = site.farandole("attach", "1", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("sum 2") == len(STAYING)
    validated = site.farandole("validate", "--quick")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert not site.play_ok().changes
