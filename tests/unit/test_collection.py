"""The repository as a collection: built, installed into an empty folder, and started from there."""

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from elsewhere import SAFE, install, run

from farandole.preflight.settings import lacking

from .loading import ROOT

HIDE = """
import sys

sys.path = [path for path in sys.path if not path.endswith("/src")]
sys.meta_path = [finder for finder in sys.meta_path if "farandole" not in repr(finder)]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed collection, and with the settings that it needs."""
    folder, stray = tmp_path_factory.mktemp("elsewhere"), ROOT / "secret"
    stray.touch()
    try:
        install(folder)
    finally:
        stray.unlink()
    return folder


def site(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inventory = ROOT / "inventory/example"
    return run(folder, "ansible-playbook", "-i", inventory, "farandole.cluster.site", *arguments, **variables)


def test_an_installed_collection_has_the_tasks_of_the_clone(installed: Path) -> None:
    told = site(installed, "--list-tasks")
    here = run(ROOT, "ansible-playbook", "-i", "inventory/example", "--list-tasks", "site.yml")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("farandole.cluster.") > 50
    assert told.stdout.splitlines()[2:] == here.stdout.splitlines()[2:]


def test_an_installed_collection_is_only_what_a_run_needs(installed: Path) -> None:
    collection = installed / "collections/ansible_collections/farandole/cluster"
    wanted = {"files", "meta", "playbooks", "plugins", "roles", "FILES.json", "MANIFEST.json", "ansible.cfg"}
    documents = {"CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md"}
    assert {path.name for path in collection.iterdir()} - documents == wanted
    links = [path for path in collection.rglob("*") if path.is_symlink() and not path.exists()]
    assert links == []
    outside = re.compile(r"role_path \| dirname \| dirname \}?\}?(?: ~ ')?/(\w+/\w+)")
    text = "".join(path.read_text() for path in collection.glob("roles/*/vars/main.yml"))
    assert [path for path in outside.findall(text) if not (collection / path).is_dir()] == []


def test_connections_refuse_what_the_cluster_has_revoked(installed: Path) -> None:
    told = run(
        installed, "ansible", "-i", ROOT / "inventory/example", "head",
        "-m", "debug", "-a", "var=ansible_ssh_extra_args",
        "--playbook-dir", installed / "collections/ansible_collections/farandole/cluster/playbooks",
    )  # fmt: skip
    assert "GlobalKnownHostsFile=" in told.stdout


def test_a_package_that_is_missing_or_of_another_version_is_refused(installed: Path) -> None:
    manifest = installed / "collections/ansible_collections/farandole/cluster/MANIFEST.json"
    right = manifest.read_text()
    manifest.write_text(right.replace(f'"version": "{version("farandole")}"', '"version": "9.8.7"'))
    try:
        other = site(installed, "--syntax-check")
    finally:
        manifest.write_text(right)
    assert other.returncode != 0
    assert f"has version {version('farandole')}, and its collection 9.8.7: " in other.stderr
    assert "install farandole 9.8.7 for " in other.stderr
    # Run as if nothing but Ansible were installed.
    (installed / "sitecustomize.py").write_text(HIDE)
    missing = site(installed, "--syntax-check", PYTHONPATH=str(installed))
    assert missing.returncode != 0, missing.stderr
    assert "has no Python package farandole" in missing.stderr


def test_settings_that_only_help_are_noted(tmp_path: Path) -> None:
    ours, used = ROOT / "ansible.cfg", tmp_path / "ansible.cfg"
    assert lacking(ours, ours) == []
    used.write_text(f"{SAFE}[ssh_connection]\npipelining = true\n")
    lines = lacking(ours, used)
    assert {"[defaults]", "forks = 32", "[inventory]", "retries = 1"} <= {*lines}
    assert not {"pipelining = true", "inject_facts_as_vars = false", "collections_path"} & {*lines}
