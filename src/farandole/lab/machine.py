"""Nodes with kernels of their own: in user mode, or Debian's under QEMU.

Each runs in a container of podman as in a case: that has the node's place in the networks, and is switched on and off,
frozen and slowed like other nodes.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.core.errors import FarandoleError
from farandole.lab import host
from farandole.lab.host import Kernel
from farandole.lab.shell import run

if TYPE_CHECKING:
    from farandole.lab.lab import LabNode


# What a network of a lab gives a node: its address there, and its gateway if the network leads elsewhere.
Link = tuple[ipaddress.IPv4Interface, ipaddress.IPv4Address | None]

MACHINES, DISKS = host.STORE / "machines", host.STORE / "disks"
DISK_GB = 40
ROOTS = {Kernel.own: "/dev/ubda", Kernel.stock: "/dev/vda"}
# In MiB: what a kernel and its idle system need, and what it gets if nothing else is said.
LEAST_MIB, MEMORY_MIB = 256, 2048
_KEY = MACHINES / "key"
# Where a case sees its machine's folder and the disk that all of them start from.
_HERE, _BASES = "/machine", "/disks"
# It must not have the address that its machine has.
_CASE = """
set -eu
exec </dev/null >>/machine/console 2>&1
ip link set lo up
# A kernel in user mode runs what is in its memory, which is there.
mount -o remount,exec /dev/shm
for place in /sys/class/net/eth*; do
    name=${place##*/}
    number=${name#eth}
    address=$(cat "$place/address")
    ip address flush dev "$name"
    ip link set dev "$name" down
    ip link set dev "$name" address "06${address#02}"
    ip link add "br$number" type bridge
    ip tuntap add "tap$number" mode tap
    for link in "$name" "tap$number"; do ip link set dev "$link" master "br$number" up; done
    ip link set dev "br$number" up
done
"""


def check(kernel: Kernel, more: int, mib: int) -> None:
    """Refuse before anything is changed, if so many more machines cannot run here."""
    if kernel is Kernel.shared or not more:
        return
    host.check_packages(kernel)
    if not Path("/dev/net/tun").exists():
        raise FarandoleError("nodes with kernels of their own need /dev/net/tun, which is not there: modprobe tun")
    if Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").read_text().strip() != "0":
        raise FarandoleError(
            "IPv6 is off here, and the lab reaches nodes with kernels of their own by it: "
            "sysctl net.ipv6.conf.default.disable_ipv6=0"
        )
    free = host.available_mib()
    if more * mib > free:
        each = free // more // 64 * 64
        cure = f"--memory {each}" if each >= LEAST_MIB else f"at most {free // LEAST_MIB} nodes"
        raise FarandoleError(f"{more} nodes of {mib} MiB each are more than the {free} MiB that are free here: {cure}")


def seed(container: str) -> Path:
    """What a machine has of its own when it starts for the first time."""
    return MACHINES / container / "seed"


def prepare(container: str, hostname: str, links: list[Link], *, decoy: bool) -> None:
    """Create the folder of a new machine, with its second disk."""
    MACHINES.mkdir(parents=True, exist_ok=True)
    MACHINES.chmod(0o700)
    remove([container])
    own = seed(container)
    for path, text in _seed(hostname, links, decoy=decoy).items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(text)
    for private in ("root", "root/.ssh"):
        (own / private).chmod(0o700)
    (own / "etc/ssh").mkdir()
    key = own / "etc/ssh/ssh_host_ed25519_key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{hostname}", "-f", str(key))
    with tarfile.open(own.with_suffix(".tar"), "w") as archive:
        archive.add(own, ".")


def _seed(hostname: str, links: list[Link], *, decoy: bool) -> dict[str, str]:
    interfaces = ["auto lo", "iface lo inet loopback"]
    names = {}
    for number, (address, gateway) in enumerate(links):
        interfaces += [f"auto eth{number}", f"iface eth{number} inet static", f"    address {address}"]
        interfaces += [f"    gateway {gateway}"] if gateway else []
        match = f"[Match]\nMACAddress={mac(address.ip)}\n[Link]\nName=eth{number}\n"
        names[f"etc/systemd/network/10-eth{number}.link"] = match
    if decoy:
        names["etc/network/interfaces.d/docker0"] = (
            "auto docker0\niface docker0 inet static\n    address 172.17.0.1/16\n"
            "    pre-up ip link add docker0 type bridge\n"
            "    pre-up ip link add decoy0 type veth peer name decoy1\n"
            "    pre-up ip link set decoy0 master docker0 up\n    pre-up ip link set decoy1 up\n"
        )
    return {
        "etc/hostname": f"{hostname}\n",
        "etc/hosts": f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n\n::1\tlocalhost ip6-localhost ip6-loopback\n",
        "etc/network/interfaces": "\n".join(["source /etc/network/interfaces.d/*", *interfaces, ""]),
        "etc/resolv.conf": re.sub(r"(?m)^nameserver (127\.|::1).*\n", "", Path("/etc/resolv.conf").read_text()),
        "root/.ssh/authorized_keys": _key().with_suffix(".pub").read_text(),
        **names,
    }


def options(container: str, mib: int) -> list[str]:
    """What podman gives the case: this machine's programs, the machine's disks, and memory to share among processes."""
    return [
        "--volume=/usr:/usr:ro",
        f"--volume={MACHINES / container}:{_HERE}",
        f"--volume={DISKS}:{_BASES}:ro",
        f"--shm-size={mib + 64}m",
    ]


def command(kernel: Kernel, disk: Path, links: list[Link], mib: int) -> list[str]:
    """The command of the case, which starts its machine."""
    how = _user_mode if kernel is Kernel.own else _emulated
    # The shell takes care of the processes that the machine leaves behind.
    start = how(f"{_BASES}/{disk.name}", [mac(address.ip) for address, _ in links], mib)
    return ["sh", "-c", f"{_CASE}{start} || sleep 5"]


def _user_mode(base: str, macs: list[str], mib: int) -> str:
    words = [
        "linux.uml", f"mem={mib}M", f"root={ROOTS[Kernel.own]}", "rw", f"ubd0={_HERE}/disk,{base}",
        f"ubd1r={_HERE}/seed.tar", "con=null", "con0=null,fd:1", "ssl=null", "umid=machine", f"uml_dir={_HERE}/",
        # It does not see the files of its case.
        f"hostfs={_HERE}/none",
    ]  # fmt: skip
    for number, address in enumerate(macs):
        words.append(f"vec{number}:transport=tap,ifname=tap{number},depth=128,gro=1,mac={address}")
    return shlex.join(words)


def _emulated(base: str, macs: list[str], mib: int) -> str:
    words = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(mib), "-nographic",
        "-kernel", f"{base}.vmlinuz", "-initrd", f"{base}.initrd",
        "-append", f"root={ROOTS[Kernel.stock]} rw console=ttyS0 net.ifnames=0",
        "-drive", f"file={_HERE}/disk,if=virtio",
        "-drive", f"file={_HERE}/seed.tar,if=virtio,format=raw,readonly=on",
    ]  # fmt: skip
    for number, address in enumerate(macs):
        words += ["-netdev", f"tap,id=net{number},ifname=tap{number},script=no,downscript=no"]
        words += ["-device", f"virtio-net-pci,netdev=net{number},mac={address}"]
    create = f"[ -e {_HERE}/disk ] || qemu-img create -q -f qcow2 -F raw -b {base} {_HERE}/disk"
    return f"{create}\n{shlex.join(words)}"


def execute(node: LabNode, *arguments: str) -> str:
    """Run a command on a machine as root, whatever has become of its network."""
    done = subprocess.run(
        [*_console(node), shlex.join(arguments)], text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise FarandoleError(f"`{arguments[0]}` failed on {node.name}: {done.stderr.strip()}")
    return done.stdout


def _console(node: LabNode) -> list[str]:
    """How to log in by the machine's link-local address, from inside its case."""
    keys = node.root.parent / "known_hosts"
    address = f"{_link_local(ipaddress.IPv4Address(node.address))}%br0"
    keys.write_text(f"console {(node.root / 'etc/ssh/ssh_host_ed25519_key.pub').read_text()}")
    options = {
        "HostKeyAlias": "console", "UserKnownHostsFile": keys, "StrictHostKeyChecking": "yes", "IdentityFile": _KEY,
        "IdentitiesOnly": "yes", "LogLevel": "ERROR", "ConnectTimeout": 5, "ServerAliveInterval": 5,
    }  # fmt: skip
    given = [f"-o{name}={value}" for name, value in options.items()]
    return ["nsenter", f"--target={node.pid}", "--net", "--", "ssh", "-F", "none", *given, f"root@{address}"]


def authorize(node: LabNode) -> None:
    """Let in who is let in by the folder of the machine, which is read only once by the machine itself."""
    keys = (node.root / "root/.ssh/authorized_keys").read_text()
    execute(node, "sh", "-c", 'printf %s "$1" >/root/.ssh/authorized_keys && sync', "sh", keys)


def remove(names: Iterable[str]) -> None:
    """Remove the disks of machines."""
    for name in names:
        if (MACHINES / name).exists():
            shutil.rmtree(MACHINES / name)


def mac(address: ipaddress.IPv4Address) -> str:
    """A new MAC address after a restart would make the neighbours' ARP entries stale."""
    return "02:00:" + ":".join(f"{byte:02x}" for byte in address.packed)


def _link_local(address: ipaddress.IPv4Address) -> ipaddress.IPv6Address:
    """The address that an interface with this MAC address gives itself."""
    one, two, three, four = address.packed
    return ipaddress.IPv6Address(bytes([0xFE, 0x80, *[0] * 8, one, 0xFF, 0xFE, two, three, four]))


def _key() -> Path:
    """The key with which the lab itself logs in."""
    # The public part is written last.
    if not _KEY.with_suffix(".pub").exists():
        _KEY.unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "farandole lab", "-f", str(_KEY))
    return _KEY
