"""Nodes with kernels of their own; tests/lab/test_kernels.py runs them."""

from __future__ import annotations

import ipaddress
import tarfile
from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.lab import host, machine
from farandole.lab.host import Kernel

ADDRESS = ipaddress.IPv4Interface("10.94.4.11/22")
LINKS = [(ADDRESS, ipaddress.IPv4Address("10.94.4.1")), (ipaddress.IPv4Interface("10.94.8.11/22"), None)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "MACHINES", tmp_path / "machines")
    monkeypatch.setattr(machine, "_KEY", tmp_path / "machines/key")
    return tmp_path / "machines"


@pytest.mark.parametrize(
    ("free", "nodes", "mib", "cure"),
    [(4096, 4, 2048, "--memory 1024"), (1000, 8, 2048, "at most 3 nodes")],
)
def test_too_little_memory_is_found_before_anything_starts(
    free: int, nodes: int, mib: int, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "check_packages", lambda _: None)
    monkeypatch.setattr(host, "available_mib", lambda: free)
    with pytest.raises(FarandoleError, match=cure):
        machine.check(Kernel.own, nodes, mib)
    # Containers share the memory, and nodes that are there have theirs.
    machine.check(Kernel.shared, nodes, mib)
    machine.check(Kernel.own, 0, mib)


@pytest.mark.parametrize(("kernel", "package"), [(Kernel.own, "user-mode-linux"), (Kernel.stock, "qemu-system-x86")])
def test_missing_programs_are_named(kernel: Kernel, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None if program.startswith(("linux", "qemu-s")) else program)
    assert host.missing_packages(kernel) == [*host.missing_packages(), package]
    with pytest.raises(FarandoleError, match=f"apt-get install .*{package}"):
        machine.check(kernel, 1, 300)


def test_what_a_machine_has_of_its_own(folder: Path) -> None:
    machine.prepare("farandole-lab-node-1", "node-1", LINKS, decoy=True)
    assert folder.stat().st_mode & 0o777 == 0o700
    with tarfile.open(folder / "farandole-lab-node-1/seed.tar") as seed:
        files = {entry.name: entry for entry in seed}
        assert files["./root/.ssh"].mode == 0o700
        assert files["./etc/ssh/ssh_host_ed25519_key"].mode == 0o600
        interfaces = seed.extractfile("./etc/network/interfaces")
        assert interfaces
        lines = interfaces.read().decode()
    assert "eth0 inet static\n    address 10.94.4.11/22\n    gateway 10.94.4.1\n" in lines
    assert lines.endswith("eth1 inet static\n    address 10.94.8.11/22\n")
    assert "./etc/network/interfaces.d/docker0" in files
    machine.remove(["farandole-lab-node-1", "farandole-lab-node-2"])
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []


def test_the_lab_reaches_a_machine_by_the_address_that_it_gives_itself() -> None:
    assert machine.mac(ADDRESS.ip) == "02:00:0a:5e:04:0b"
    assert str(machine._link_local(ADDRESS.ip)) == "fe80::aff:fe5e:40b"


@pytest.mark.parametrize("kernel", [Kernel.own, Kernel.stock])
def test_each_network_has_a_card(kernel: Kernel) -> None:
    script = machine.command(kernel, Path("/x/bookworm"), LINKS, 512)[2]
    assert "/disks/bookworm" in script
    for number, (address, _) in enumerate(LINKS):
        assert f"ifname=tap{number}" in script
        assert f"mac={machine.mac(address.ip)}" in script
