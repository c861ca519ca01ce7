"""Nodes with kernels of their own; tests/lab/test_kernels.py runs them."""

import ipaddress
import os
import re
import socket
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.lab import host, machine
from farandole.lab.host import Kernel
from farandole.lab.lab import answers

ADDRESS = ipaddress.IPv4Interface("10.94.4.11/22")
LINKS = [(ADDRESS, ipaddress.IPv4Address("10.94.4.1")), (ipaddress.IPv4Interface("10.94.8.11/22"), None)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which such nodes could run."""
    for name, text in (("TUN", ""), ("IPV6", "0\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(machine, name, tmp_path / name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "MACHINES", tmp_path / "machines")
    monkeypatch.setattr(machine, "_KEY", tmp_path / "machines/key")
    return tmp_path / "machines"


@pytest.mark.parametrize(
    ("free", "nodes", "mib", "cure"), [(4096, 4, 2048, "--memory 1024"), (1000, 8, 2048, "at most 3 more nodes")]
)
def test_too_little_memory_is_found_before_anything_starts(
    free: int, nodes: int, mib: int, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_mib", lambda: free)
    with pytest.raises(FarandoleError, match=cure):
        machine.check_memory(Kernel.own, nodes, mib)
    # Containers share the memory, and nodes that are there have theirs.
    machine.check_memory(Kernel.shared, nodes, mib)
    machine.check_memory(Kernel.own, 0, mib)


@pytest.mark.parametrize(("name", "text", "cure"), [("TUN", None, "modprobe tun"), ("IPV6", "1\n", "sysctl net.ipv6")])
def test_what_this_machine_lacks_is_found_before_anything_starts(
    name: str, text: str | None, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "check_packages", lambda _: None)
    machine.check(Kernel.own)
    place: Path = getattr(machine, name)
    place.unlink()
    with pytest.raises(FarandoleError, match=cure):
        machine.check(Kernel.own)
    if text:
        place.write_text(text)
        with pytest.raises(FarandoleError, match=cure):
            machine.check(Kernel.own)
    machine.check(Kernel.shared)


@pytest.mark.parametrize(("kernel", "package"), [(Kernel.own, "user-mode-linux"), (Kernel.stock, "qemu-system-x86")])
def test_missing_programs_are_named(kernel: Kernel, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None if program.startswith(("linux", "qemu-s")) else program)
    assert host.missing_packages(kernel) == [*host.missing_packages(), package]
    with pytest.raises(FarandoleError, match=f"apt-get install .*{package}"):
        machine.check(kernel)


def test_a_full_disk_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/none")
    with pytest.raises(FarandoleError, match=r"/proc/none has 0 MiB free, and the lab needs 50: .*; du -xh /proc "):
        host.check_space()
    monkeypatch.delenv("TMPDIR")
    host.check_space()


def test_a_stack_that_no_lab_has_built_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("farandole.lab.inventory.builds", lambda: tmp_path)
    done = CliRunner().invoke(app, ["lab", "up", "--kernel", "own", "--stack", "072a94ace1c9"])
    assert "no lab with bookworm has built stack 072a94ace1c9 (there are: none)" in str(done.exception)


def test_what_a_machine_has_of_its_own(folder: Path) -> None:
    mask = os.umask(0o077)
    for lab in ("lab", "lab-node-1", "lab"):
        machine.prepare(f"farandole-{lab}-node-1", "node-1", LINKS, decoy=True)
    os.umask(mask)
    assert folder.stat().st_mode & 0o777 == 0o700
    packed = folder / "farandole-lab-node-1/case/seed.tar"
    assert packed.stat().st_mode & 0o777 == 0o644
    with tarfile.open(packed) as seed:
        files = {entry.name: entry for entry in seed}
        assert files["./etc"].mode == 0o755
        assert files["./etc/hosts"].mode == 0o644
        assert files["./root/.ssh"].mode == 0o700
        assert files["./etc/ssh/ssh_host_ed25519_key"].mode == 0o600
        interfaces = seed.extractfile("./etc/network/interfaces")
        assert interfaces
        lines = interfaces.read().decode()
    assert "eth0 inet static\n    address 10.94.4.11/22\n    gateway 10.94.4.1\n" in lines
    assert lines.endswith("eth1 inet static\n    address 10.94.8.11/22\n")
    assert "./etc/network/interfaces.d/docker0" in files
    machine.remove("lab")
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["farandole-lab-node-1-node-1"]


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


def test_a_case_opens_nothing_that_its_machine_has_chosen(tmp_path: Path) -> None:
    """The machine can write to its folder; root starts the case again after the machine has ended."""
    for program in ("find", "chown", "chmod", "mount", "ip"):
        path = tmp_path / program
        path.write_text(f'#!/bin/sh\necho {program} "$@" >>{tmp_path}/asked\n')
        path.chmod(0o755)
    for program in ("rm", "cat"):
        (tmp_path / program).symlink_to(f"/bin/{program}")
    victim, console = tmp_path / "victim", tmp_path / "console"
    console.symlink_to(victim)
    script = machine._CASE.replace("/machine", str(tmp_path)) + "echo printed\n"
    subprocess.run(["/bin/sh", "-c", script, "sh", "940000"], env={"PATH": str(tmp_path)}, check=True)
    assert not victim.exists()
    assert (console.is_symlink(), console.read_text()) == (False, "printed\n")
    asked = (tmp_path / "asked").read_text()
    assert all(f"mount -o remount,bind,ro {place}\n" in asked for place in ("/proc/sys", "/sys"))


def test_machines_in_user_mode_share_this_machines_processors_evenly() -> None:
    def processor(number: int) -> str:
        links: list[machine.Link] = [(ipaddress.IPv4Interface(f"10.94.4.{number}/22"), None)]
        script = machine.command(Kernel.own, Path("/x/bookworm"), links, 512)[2]
        return str(re.findall(r"--cpu-list (\d+)", script)[0])

    present = os.sched_getaffinity(0)
    assert {processor(number) for number in range(len(present))} == {str(number) for number in present}


def test_a_slow_ssh_server_is_not_asked_again_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(socket, "create_connection", lambda _, timeout: connect(server.getsockname(), timeout))
        answered = pool.submit(answers, "127.0.0.1", time.monotonic() + 15)
        with server.accept()[0] as connection:
            time.sleep(3)
            connection.sendall(b"SSH-2.0-slow\r\n")
            assert answered.result()
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
