"""Nodes with kernels of their own: in user mode, or Debian's under QEMU.

Each runs in a container of podman as in a case: that has the node's place in the networks, and is switched on and off,
frozen and slowed like other nodes.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import tarfile
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
TUN, IPV6 = Path("/dev/net/tun"), Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
# Whom systemd-resolved asks, where the other file names only itself.
RESOLVERS = (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf"))
DISK_GB = 40
ROOTS = {Kernel.own: "/dev/ubda", Kernel.stock: "/dev/vda"}
# In MiB: what a kernel and its idle system need, and what it gets if nothing else is said.
LEAST_MIB, MEMORY_MIB = 256, 2048
_KEY = MACHINES / "key"
# Where a case sees its machine's folder and the disk that all of them start from; nobody's user id, which runs it.
_HERE, _BASES, _USER = "/machine", "/disks", 940_000
# It must not have the address that its machine has. Root of the machine can change its kernel, which is a process here.
_CASE = """
set -eu
# As in a node that is a container (node/usr/local/sbin/lab-boot).
find /dev -xdev '(' -type b -o -type c '(' -name kmsg -o -name mem -o -name port -o -name 'loop*' ')' ')' -delete
for place in /proc/sys /proc/sysrq-trigger; do
    [ ! -e "$place" ] || mount --bind "$place" "$place"
    [ ! -e "$place" ] || mount -o remount,bind,ro "$place"
done
mount -o remount,bind,ro /sys
# The case has a /dev of its own.
chown "$1" /machine /dev/net/tun
chmod 700 /machine
# The kernel, which could write there, has ended.
[ ! -L /machine/console ] || rm /machine/console
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
    ip tuntap add "tap$number" mode tap user "$1"
    for link in "$name" "tap$number"; do ip link set dev "$link" master "br$number" up; done
    ip link set dev "br$number" up
done
"""
# Whole even if the power is cut in between.
_AUTHORIZE = """
set -eu
cd /root/.ssh
umask 077
{ cat authorized_keys; echo "$1"; } | awk 'NF && !seen[$0]++' >new
sync new
mv new authorized_keys
sync
"""


def check(kernel: Kernel) -> None:
    """Refuse before anything is changed, if nodes with such a kernel cannot run here."""
    if kernel is Kernel.shared:
        return
    host.check_packages(kernel)
    if not TUN.exists():
        raise FarandoleError("nodes with kernels of their own need /dev/net/tun, which is not there: modprobe tun")
    if not IPV6.exists() or IPV6.read_text().strip() != "0":
        raise FarandoleError(
            "IPv6 is off here, and the lab reaches nodes with kernels of their own by it: "
            "sysctl net.ipv6.conf.default.disable_ipv6=0"
        )


def check_memory(kernel: Kernel, more: int, mib: int) -> None:
    """Refuse more nodes than this machine has memory for."""
    free = host.available_mib()
    if kernel is not Kernel.shared and more * mib > free:
        each = free // more // 64 * 64
        fewer = f"at most {free // LEAST_MIB} more nodes, with --memory {LEAST_MIB}"
        cure = f"--memory {each}" if each >= LEAST_MIB else fewer
        raise FarandoleError(
            f"{more} new nodes of {mib} MiB each need more than the {free} MiB that are free here: {cure}"
        )


def seed(container: str) -> Path:
    """What a machine has of its own when it starts for the first time."""
    return MACHINES / container / "seed"


def prepare(container: str, hostname: str, links: list[Link], *, decoy: bool) -> None:
    """Create the folder of a new machine, with its second disk."""
    MACHINES.mkdir(parents=True, exist_ok=True)
    MACHINES.chmod(0o700)
    own = seed(container)
    if own.parent.exists():  # left by an interrupted start
        shutil.rmtree(own.parent)
    for path, text in _seed(hostname, links, decoy=decoy).items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(text)
    for private in ("root", "root/.ssh"):
        (own / private).chmod(0o700)
    (own / "etc/ssh").mkdir()
    key = own / "etc/ssh/ssh_host_ed25519_key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{hostname}", "-f", str(key))
    case = own.parent / "case"
    case.mkdir()
    with tarfile.open(case / "seed.tar", "w") as archive:
        archive.add(own, ".", filter=_as_on_a_machine)
    (case / "seed.tar").chmod(0o644)
    (own.parent / "known_hosts").write_text(f"console {key.with_suffix('.pub').read_text()}")


def _as_on_a_machine(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Readable by all, whatever this shell's umask is, except what only root reads."""
    if not entry.name.startswith("./root") and not entry.name.endswith("_key"):
        entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


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
        "etc/resolv.conf": next((path.read_text() for path in RESOLVERS if path.exists()), ""),
        "root/.ssh/authorized_keys": _key().with_suffix(".pub").read_text(),
        **names,
    }


def options(container: str, mib: int) -> list[str]:
    """What podman gives the case: this machine's programs, the machine's disks, and memory to share among processes."""
    return [
        "--volume=/usr:/usr:ro",
        f"--volume={MACHINES / container / 'case'}:{_HERE}",
        f"--volume={DISKS}:{_BASES}:ro",
        f"--shm-size={mib + 64}m",
    ]


def command(kernel: Kernel, disk: Path, links: list[Link], mib: int) -> list[str]:
    """The command of the case, which starts its machine."""
    how = _user_mode if kernel is Kernel.own else _emulated
    powerless = "setpriv --reuid=$1 --regid=$1 --clear-groups --no-new-privs --bounding-set=-all"
    start = how(f"{_BASES}/{disk.name}", [address.ip for address, _ in links], mib)
    # The shell takes care of the processes that the machine leaves behind.
    return ["sh", "-c", f"{_CASE}{powerless} sh -ec {shlex.quote(start)} || sleep 5", "sh", str(_USER)]


def _user_mode(base: str, addresses: list[ipaddress.IPv4Address], mib: int) -> str:
    # It hands over to another process in each of its system calls, which takes five times as long from one of this
    # machine's processors to the other.
    processors = sorted(os.sched_getaffinity(0))
    words = [
        "taskset", "--cpu-list", str(processors[int(addresses[0]) % len(processors)]),
        # Of its 640 devices, which udev looks at in each boot, 512 are terminals of long ago.
        "linux.uml", "pty.legacy_count=0", f"mem={mib}M", f"root={ROOTS[Kernel.own]}", "rw",
        f"ubd0={_HERE}/disk,{base}", f"ubd1r={_HERE}/seed.tar", "con=null", "con0=null,fd:1", "ssl=null",
        "umid=machine", f"uml_dir={_HERE}/",
        # It does not see the files of its case.
        f"hostfs={_HERE}/none",
    ]  # fmt: skip
    for number, address in enumerate(addresses):
        words.append(f"vec{number}:transport=tap,ifname=tap{number},depth=128,gro=1,mac={mac(address)}")
    return shlex.join(words)


def _emulated(base: str, addresses: list[ipaddress.IPv4Address], mib: int) -> str:
    words = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(mib), "-nographic",
        "-kernel", f"{base}.loader",
        "-drive", f"file={_HERE}/disk,if=virtio",
        "-drive", f"file={_HERE}/seed.tar,if=virtio,format=raw,readonly=on",
    ]  # fmt: skip
    for number, address in enumerate(addresses):
        words += ["-netdev", f"tap,id=net{number},ifname=tap{number},script=no,downscript=no"]
        words += ["-device", f"virtio-net-pci,netdev=net{number},mac={mac(address)}"]
    new = f"qemu-img create -q -f qcow2 -F raw -b {base} {_HERE}/new && mv {_HERE}/new {_HERE}/disk"
    return f"[ -e {_HERE}/disk ] || {{ {new}; }}\n{shlex.join(words)}"


def execute(node: LabNode, *arguments: str) -> str:
    """Run a command on a machine as root, by its link-local address, which faults leave alone."""
    done = subprocess.run(
        [*_console(node), shlex.join(arguments)], text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise FarandoleError(f"{node.name}: {done.stderr.strip() or f'{arguments[0]} failed'}")
    return done.stdout


def _console(node: LabNode) -> list[str]:
    """How to log in to a machine from inside its case."""
    address = f"{_link_local(ipaddress.IPv4Address(node.address))}%br0"
    options = {
        "HostKeyAlias": "console", "UserKnownHostsFile": node.root.parent / "known_hosts", "IdentityFile": _KEY,
        "StrictHostKeyChecking": "yes", "IdentitiesOnly": "yes", "BatchMode": "yes", "LogLevel": "ERROR",
        "ConnectTimeout": 15, "ServerAliveInterval": 5,
    }  # fmt: skip
    given = [f"-o{name}={value}" for name, value in options.items()]
    return ["nsenter", f"--target={node.pid}", "--net", "--", "ssh", "-F", "none", *given, f"root@{address}"]


def authorize(node: LabNode) -> None:
    """Let in who is let in by the folder of the machine, which is read only once by the machine itself."""
    keys = (node.root / "root/.ssh/authorized_keys").read_text()
    execute(node, "sh", "-c", _AUTHORIZE, "sh", keys)


def remove(lab: str) -> None:
    """Remove the disks of a lab's machines."""
    for folder in MACHINES.glob("*"):
        if re.fullmatch(rf"farandole-{re.escape(lab)}-node-\d+", folder.name):
            shutil.rmtree(folder)


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
