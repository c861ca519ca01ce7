"""From an empty folder: the wheel, an inventory, a cluster, a job; the checkout has no part in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clusters import ROOT, Cluster

NODES = 2
HELLO = "import horovod.torch as hvd\nhvd.init()\nprint('rank', hvd.rank(), 'of', hvd.size())\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command farandole, installed from a wheel into an environment without pip, as uv makes them."""
    place = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    wheel = next(place.glob("farandole-*.whl"))
    subprocess.run([*pip, "--python", place / "venv/bin/python", "install", wheel], check=True)
    return place / "venv/bin/farandole"


def run(program: Path, folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "FARANDOLE_"))}
    path = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if not part.startswith(str(ROOT)))
    return subprocess.run(
        [program, *arguments], cwd=folder, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL,
        env={**kept, "PATH": path, **more},
    )  # fmt: skip


def fingerprints(cluster: Cluster) -> list[str]:
    """What each node says of its own key."""
    show = ("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub")
    return [cluster.ssh(node, *show).stdout.split()[1] for node in ("node-1", "node-2")]


def test_a_cluster_is_made_from_an_empty_folder(bare: Cluster, program: Path, tmp_path: Path) -> None:
    lab = yaml.safe_load((bare.inventory / "hosts.yml").read_text())["cluster"]
    first_address, two = [own["ansible_host"] for own in lab["hosts"].values()]
    keys = [word for key in fingerprints(bare) for word in ("--host-key", key)]
    arguments = ("mine", "--head", f"a={first_address}", two, "--private-key", str(bare.inventory / ".ssh/id_ed25519"))
    refused = run(program, tmp_path, "init", *arguments, *keys[2:])
    assert "no --host-key has the fingerprint of a;" in refused.stderr
    assert not [*tmp_path.iterdir()]
    made = run(program, tmp_path, "init", *arguments, *keys)
    assert made.returncode == 0, made.stderr
    # What the lab sets for containers on this machine.
    own = {name: value for name, value in lab["vars"].items() if not name.startswith("ansible_")}
    with (tmp_path / "inventory/mine/group_vars/all.yml").open("a") as file:
        yaml.safe_dump(own, file)
    first = run(program, tmp_path, "apply", "-i", "mine")
    assert first.returncode == 0, first.stdout + first.stderr
    again = run(program, tmp_path, "apply")
    assert "nothing changed, nothing failed" in again.stdout, again.stdout + again.stderr
    (tmp_path / "hello.py").write_text(HELLO)
    job = run(program, tmp_path, "run", "--", "python", "hello.py")
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} <= {*job.stdout.splitlines()}, job.stdout + job.stderr
    assert (tmp_path / ".farandole/mine/ca").is_dir()
    assert not (ROOT / ".farandole/mine").exists()
    assert not [*program.parents[1].rglob(".farandole")]


def test_the_settings_of_a_checkout_are_refused(program: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("cluster: {hosts: {a: }}\nhead: {hosts: {a: }}\n")
    done = run(program, tmp_path, "apply", "-i", "hosts.yml", ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))
    assert done.returncode == 1
    assert "unset ANSIBLE_CONFIG" in done.stderr


def test_the_playbooks_of_a_checkout_are_refused(program: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("cluster: {hosts: {a: {ansible_host: 192.0.2.1}}}\nhead: {hosts: {a: }}\n")
    ansible = program.with_name("ansible-playbook")
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = run(ansible, ROOT, "-i", str(tmp_path / "hosts.yml"), "playbooks/preflight.yml", **settings)
    assert done.returncode
    assert "is not that of" in done.stdout + done.stderr
