"""A state folder belongs to one inventory, and a lab removes only its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.core import project
from farandole.core.errors import FarandoleError
from farandole.inventory import state
from farandole.lab import inventory

from .loading import ROOT


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A state folder, and two inventories of the same name."""
    first, second = tmp_path / "a" / "prod", tmp_path / "b" / "prod"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    return tmp_path / ".farandole" / "prod", first, second


def test_state_belongs_to_the_first_inventory(folders: tuple[Path, Path, Path]) -> None:
    mine, first, second = folders
    # Reading claims nothing.
    state.claim(mine, first, write=False)
    assert not mine.exists()
    (second / "link").symlink_to(first)
    for inventory_ in (first, first, second / "link"):
        state.claim(mine, inventory_)
    assert state.owner(mine) == first
    assert [(mine / name).stat().st_mode & 0o777 for name in (".", "inventory")] == [0o700, 0o600]
    assert sorted(path.name for path in mine.iterdir()) == ["inventory", "version"]
    for write in (True, False):
        with pytest.raises(FarandoleError, match=r"belongs to the inventory .*/a/prod, .*/b/prod: .*base_state_dir"):
            state.claim(mine, second, write=write)
    assert state.owner(mine) == first


def test_the_suggested_command_moves_an_inventory(tmp_path: Path) -> None:
    mine, old, new = tmp_path / "it's $(touch no)" / "prod", tmp_path / "old", tmp_path / "new $(touch no) 'prod"
    old.mkdir()
    new.mkdir()
    state.claim(mine, old)
    old.rmdir()
    with pytest.raises(FarandoleError, match="if it was moved here, run ") as refused:
        state.claim(mine, new)
    command = str(refused.value).partition("moved here, run  ")[2].partition("  otherwise")[0]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    state.claim(mine, new)
    assert not (tmp_path / "no").exists()


def test_one_of_many_concurrent_claims_wins(folders: tuple[Path, Path, Path]) -> None:
    mine, first, _ = folders
    script = (
        "import sys\nfrom pathlib import Path\nfrom farandole.inventory.state import claim\n"
        "sys.stdin.read()\nclaim(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(mine), str(first.parent / str(index))],
            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for index in range(6)
    ]  # fmt: skip
    for run in runs:
        assert run.stdin
        run.stdin.close()
    assert sorted(run.wait() for run in runs) == [0, 1, 1, 1, 1, 1]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "roles").mkdir()
    (tmp_path / "site.yml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lab(checkout: Path, name: str = "prod") -> tuple[Path, Path]:
    """A lab without nodes, as a playbook leaves it."""
    mine, kept = checkout / "inventory" / name, checkout / ".farandole" / name
    inventory.check(name)
    inventory.write(name, {})
    state.claim(kept, mine)
    (kept / "ca").mkdir()
    (mine / "stack.lock.yml").touch()
    return mine, kept


def test_a_lab_removes_its_state(checkout: Path) -> None:
    for _ in range(2):
        mine, kept = lab(checkout)
        inventory.check("prod")
        assert inventory.remove("prod") == []
        assert not mine.exists()
        assert not kept.exists()


def test_a_labs_state_is_removed_after_an_interruption(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        (path / state.OWNER).unlink()
        raise KeyboardInterrupt

    mine, kept = lab(checkout)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", interrupted)
        inventory.remove("prod")
    assert inventory.remove("prod") == []
    assert not mine.exists() and list(kept.parent.iterdir()) == []


@pytest.mark.parametrize("file", ["hosts.yml", "hosts.yaml", "group_vars/all.yml"])
def test_a_lab_neither_takes_nor_removes_a_users_inventory(checkout: Path, file: str) -> None:
    mine = checkout / "inventory" / "prod" / file
    mine.parent.mkdir(parents=True)
    mine.write_text("cluster: {}\n")
    state.claim(checkout / ".farandole" / "prod", checkout / "inventory" / "prod")
    for act in (inventory.check, inventory.remove):
        with pytest.raises(FarandoleError, match="was not written by the lab"):
            act("prod")
    assert mine.exists()
    assert (checkout / ".farandole" / "prod" / "inventory").exists()


@pytest.mark.parametrize("owner", ["elsewhere/prod", "inventory/prod", None])
def test_a_lab_neither_takes_nor_removes_a_clusters_state(checkout: Path, owner: str | None) -> None:
    """The owner is an inventory elsewhere, one that is currently missing, or unrecorded by an older version."""
    ca = checkout / ".farandole" / "prod" / "ca"
    ca.mkdir(parents=True)
    if owner:
        state.claim(ca.parent, checkout / owner)
    with pytest.raises(FarandoleError, match=r"is the state of .*choose another --name"):
        inventory.check("prod")
    assert str(ca.parent) in inventory.remove("prod")[0]
    # A lab that an older version started beside it.
    inventory.write("prod", {})
    if owner != "inventory/prod":
        assert str(ca.parent) in inventory.remove("prod")[0]
        assert ca.exists()


def test_a_users_files_in_a_labs_inventory_are_kept(checkout: Path) -> None:
    mine, kept = lab(checkout)
    (mine / "group_vars").mkdir()
    assert "group_vars" in inventory.remove("prod")[0]
    assert sorted(path.name for path in mine.iterdir()) == ["group_vars", "hosts.yml"]
    assert not kept.exists()
    inventory.check("prod")


def test_an_interrupted_lab_still_recognises_its_inventory(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(inventory, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inventory.write("prod", {})
    inventory.check("prod")
    assert inventory.remove("prod") == []
    assert not (checkout / "inventory" / "prod").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_checkout_of_another_account_is_not_used(checkout: Path) -> None:
    assert inventory.project() == checkout
    os.chown(checkout, 65534, 65534)
    assert inventory.project() != checkout


def node(root: Path) -> Path:
    """The parts of a node's disk that the lab reads and writes."""
    (root / "etc/ssh").mkdir(parents=True)
    (root / "root/.ssh").mkdir(parents=True)
    (root / "etc/ssh/ssh_host_ed25519_key.pub").write_text("ssh-ed25519 AAAA root@node-1\n")
    (root / "root/.ssh/authorized_keys").touch()
    return root


def test_keys_are_exchanged_through_the_nodes_disk(checkout: Path, tmp_path: Path) -> None:
    disk = node(tmp_path / "node-1")
    for _ in range(2):
        inventory.write("prod", {"node-1": ("192.0.2.1", disk)})
    ssh = checkout / "inventory/prod/.ssh"
    assert (ssh / "known_hosts").read_text() == "node-1,192.0.2.1 ssh-ed25519 AAAA\n"
    assert (disk / "root/.ssh/authorized_keys").read_text() == (ssh / "id_ed25519.pub").read_text()


@pytest.mark.parametrize("link", ["etc", "etc/ssh", "root/.ssh", "root/.ssh/authorized_keys"])
def test_a_symlink_made_by_a_node_is_not_followed(checkout: Path, tmp_path: Path, link: str) -> None:
    disk, here = node(tmp_path / "node-1"), tmp_path / "here"
    node(here)
    victim = here / link
    (disk / link).rename(tmp_path / "away")
    (disk / link).symlink_to(victim)
    with pytest.raises(FarandoleError, match="is not as the lab made it"):
        inventory.write("prod", {"node-1": ("192.0.2.1", disk)})
    assert (here / "root/.ssh/authorized_keys").read_text() == ""
    assert not (checkout / "inventory/prod/.ssh/known_hosts").exists()


def test_the_default_state_is_in_the_checkout_under_the_inventorys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.state_folder("/inventories/mine") == ROOT / ".farandole/mine"
    assert state.state_folder("") == ROOT / ".farandole/inventory"
    monkeypatch.setenv(state.SETTING, "/states")
    assert state.state_folder("/inventories/mine") == Path("/states/mine")
    assert state.state_folder("/inventories/mine", "~/mine") == Path.home() / "mine"


def test_the_state_of_an_installed_package_is_beside_the_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "INSTALLED", True)
    for place in ("inventory/mine", "mine", "inventory/../inventory/mine"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        assert state.state_folder(tmp_path / place) == tmp_path / ".farandole/mine"
    (tmp_path / "mine/hosts.yml").touch()
    assert state.states(tmp_path / "mine/hosts.yml") == tmp_path / ".farandole"
    monkeypatch.chdir(tmp_path)
    assert state.state_folder("") == tmp_path / ".farandole/inventory"


def test_the_state_of_an_older_version_is_taken_and_signed(folders: tuple[Path, Path, Path]) -> None:
    mine, first, _ = folders
    mine.mkdir(parents=True)
    (mine / "inventory").write_text(f"{first}\n")
    (mine / "ca").mkdir()
    state.claim(mine, first, write=False)
    assert not (mine / "version").exists()
    state.claim(mine, first)
    assert (mine / "version").read_text() == f"1 {project.version()}\n"


@pytest.mark.parametrize("write", [True, False])
def test_the_state_of_a_newer_version_is_refused_with_its_name(folders: tuple[Path, Path, Path], write: bool) -> None:
    mine, first, _ = folders
    state.claim(mine, first)
    (mine / "version").write_text("2 7.1.0\n")
    with pytest.raises(FarandoleError, match=r"was written by farandole 7\.1\.0, a newer version"):
        state.claim(mine, first, write=write)
    assert (mine / "version").read_text() == "2 7.1.0\n"


def test_a_checkout_makes_no_second_authority_for_the_inventory_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "inventory/mine"
    mine.mkdir(parents=True)
    monkeypatch.setattr(state, "INSTALLED", True)
    state.claim(kept := state.state_folder(mine), mine)
    monkeypatch.setattr(state, "INSTALLED", False)
    monkeypatch.setattr(state, "ROOT", tmp_path / "checkout")
    with pytest.raises(FarandoleError, match=f"set FARANDOLE_STATE={kept.parent}"):
        state.claim(state.state_folder(mine), mine)
    monkeypatch.setenv(state.SETTING, str(kept.parent))
    state.claim(state.state_folder(mine), mine)


def test_the_settings_of_another_checkout_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "roles/ssh_trust").mkdir(parents=True)
    (tmp_path / "ansible.cfg").touch()
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "ansible.cfg"))
    with pytest.raises(FarandoleError, match="unset ANSIBLE_CONFIG"):
        project.environment()
    (tmp_path / "roles/ssh_trust").rmdir()
    assert project.environment()["ANSIBLE_CONFIG"] == str(tmp_path / "ansible.cfg")


def test_a_home_that_cannot_be_written_is_named_before_ansible_fails_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("ANSIBLE_HOME", raising=False)
    with pytest.raises(FarandoleError, match=r"file/\.ansible.*set ANSIBLE_HOME"):
        project.environment()
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "other"))
    assert project.environment()["ANSIBLE_HOME"] == str(tmp_path / "other")
