"""What can go wrong with a node, and how it is undone."""

import ipaddress
import json
import socket
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from farandole.core.errors import FarandoleError
from farandole.lab import cgroups
from farandole.lab.cgroups import PERIOD_US
from farandole.lab.host import Kernel
from farandole.lab.lab import SSH_SECONDS, LabNode, node, subnet, wait_for_ssh
from farandole.lab.podman import podman
from farandole.lab.shell import run

_MTU, _IPV6_MTU = 1500, 1280
_TABLE = "inet farandole_fault"
_FILL_LIMIT_MIB = 512

# Mounts a small file system with the folder's present content over it, and uses up its bytes or its inodes. Its source
# tells it from others.
_FILL = """
set -eu
path=$1 inodes=$2 limit=$3
[ -d "$path" ] || { echo "$path is not a folder" >&2; exit 1; }
if findmnt --noheadings --source farandole-fill --mountpoint "$path" >/dev/null; then
    echo "$path is full already" >&2; exit 1
fi
used=$(du --summarize --one-file-system --block-size=1M "$path" | cut -f 1)
files=$(du --summarize --one-file-system --inodes "$path" | cut -f 1)
[ "$used" -le "$limit" ] || {
    echo "$path has $used MiB, and this copies at most $limit MiB: choose another folder" >&2; exit 1
}
new=$(mktemp --directory --tmpdir=/run)
mount -t tmpfs -o "size=$((used + used / 4 + 64))m,nr_inodes=$((files + 1000))" farandole-fill "$new"
cp --archive --one-file-system "$path/." "$new"
if [ "$inodes" = 1 ]; then
    mkdir "$new/filler"
    (cd "$new/filler" && seq 2000 | xargs touch) 2>/dev/null || :
else
    dd if=/dev/zero of="$new/filler" bs=64k 2>/dev/null || :
fi
mount --bind "$new" "$path"
umount "$new"
rmdir "$new"
"""
_UNFILL = (
    "findmnt --raw --noheadings --output TARGET --source farandole-fill | while read path; do umount -l $path; done"
)

# Debian's libfaketime, in each process that starts from now on; those that run keep the right time. sshd has to have it
# before a login does, where what it begins with is forbidden.
_SKEW = """
set -eu
apt-get install --quiet=2 --no-install-recommends libfaketime >/dev/null
echo "$1" >/etc/faketimerc
dpkg --listfiles libfaketime | grep MT >/etc/ld.so.preload
systemctl restart ssh
"""
_SKEW_CLOCK = "date --set=@$(($(date +%s) + $1)) >/dev/null"
_UNSKEW = """
[ -e /etc/faketimerc ] || exit 0
rm -f /etc/ld.so.preload
systemctl restart ssh
apt-get purge --quiet=2 libfaketime >/dev/null
rm -f /etc/faketimerc /dev/shm/*faketime*
"""


# Only IPv4: the lab comes by IPv6.
_NETEM = """
link=$1; shift
tc qdisc replace dev "$link" root handle 1: prio priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
tc qdisc replace dev "$link" parent 1:1 netem limit 100000 "$@" || { tc qdisc delete dev "$link" root; exit 1; }
tc filter replace dev "$link" parent 1: protocol ip prio 1 u32 match u32 0 0 flowid 1:1
"""
_UNDISTURB = """
for link in eth0 eth1; do
    [ ! -e /sys/class/net/$link ] || ip link set $link mtu 1500
    tc qdisc delete dev $link root 2>/dev/null || :
done
"""


# How the lab itself comes to a node with a kernel of its own.
_OF_LAB = ("ip6 saddr fe80::/10 tcp dport 22", "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }")


class Link(StrEnum):
    """The interfaces of a node in the networks of its lab."""

    eth0 = "eth0"
    eth1 = "eth1"


Interface = Annotated[Link, typer.Option("--link", help="The interface; eth1 is in the second network.")]


def cut(target: LabNode, link: Interface = Link.eth0) -> None:
    """Unplug the network cable."""
    _in_network(target, "ip", "link", "set", link, "down")


def throttle(
    target: LabNode,
    mbit: Annotated[int, typer.Option(min=1, max=100_000, help="Megabits per second.")] = 100,
    link: Interface = Link.eth0,
) -> None:
    """Limit the rate of the node's link, in each direction."""
    # A bucket that the kernel's timer can fill in time, even at 100 ticks per second.
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(max(65536, mbit * 1250)), "latency", "50ms")
    _in_network(target, "tc", "qdisc", "replace", "dev", link, *limit)
    run("tc", "qdisc", "replace", "dev", _host_side(target, link), *limit)


def block(
    target: LabNode,
    sender: Annotated[str, typer.Option("--from", help="Only what this other node sends.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Only this TCP and UDP port.")] = 0,
    *,
    all_but_ssh: Annotated[bool, typer.Option("--all-but-ssh", help="Everything except TCP port 22.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="Refuse it, instead of dropping it silently.")] = False,
) -> None:
    """Let a firewall on the node accept no new connection; without an option, none at all.

    A second call adds to the first. Connections of the node's own, and those that exist, are left alone.
    """
    if target.kernel is Kernel.own:
        raise FarandoleError("a kernel in user mode has no firewall for IP; nodes with another --kernel have")
    if port and all_but_ssh:
        raise FarandoleError("--port and --all-but-ssh exclude each other")
    source = f"ip saddr {node(target.lab, sender).address} " if sender else ""
    verdict = "reject" if reject else "drop"
    if port:
        matches = [f"tcp dport {port}", f"udp dport {port}"]
    elif all_but_ssh:
        matches = ["tcp dport != 22", "meta l4proto != tcp"]
    else:
        matches = [""]
    chain = f"{_TABLE} input"
    script = [
        f"add table {_TABLE}",
        f"add chain {chain} {{ type filter hook input priority 0; }}",
        f"add rule {chain} iif lo accept",
        f"add rule {chain} ct state established,related accept",
        *(f"add rule {chain} {match} accept" for match in (_OF_LAB if target.kernel is not Kernel.shared else ())),
        *(f"add rule {chain} {source}{match} {verdict}" for match in matches),
    ]
    _nft(target, "; ".join(script))


def mtu(
    target: LabNode,
    size: Annotated[int, typer.Option("--bytes", min=576, max=9000, help="Bytes of the largest packet.")] = 1400,
) -> None:
    """Give the node's link another MTU than the other nodes have."""
    if target.kernel is not Kernel.shared and size < _IPV6_MTU:
        raise FarandoleError(f"the lab reaches a node with a kernel of its own by IPv6: at least {_IPV6_MTU} bytes")
    _on_node(target, "ip", "link", "set", Link.eth0, "mtu", str(size))


def slow(
    target: LabNode, percent: Annotated[int, typer.Option(min=1, max=100, help="Per cent of one processor.")] = 20
) -> None:
    """Limit what the node computes."""
    quota = percent * PERIOD_US // 100
    limits = {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota}
    cgroups.limit(target, "cpu", limits, f"{quota} {PERIOD_US}")


def netem(
    target: LabNode,
    link: Interface = Link.eth0,
    delay: Annotated[float, typer.Option(min=0, max=10_000, help="Milliseconds by which a packet is late.")] = 0,
    jitter: Annotated[float, typer.Option(min=0, max=10_000, help="Milliseconds by which that differs.")] = 0,
    loss: Annotated[float, typer.Option(min=0, max=100, help="Per cent of the packets that are lost.")] = 0,
    duplicate: Annotated[float, typer.Option(min=0, max=100, help="Per cent that come twice.")] = 0,
    reorder: Annotated[float, typer.Option(min=0, max=100, help="Per cent that overtake others; needs a delay.")] = 0,
) -> None:
    """Delay, lose, repeat or reorder what the node sends."""
    if (jitter or reorder) and not delay:
        raise FarandoleError("--jitter and --reorder need a --delay")
    settings = {
        "delay": [f"{delay}ms", *([f"{jitter}ms"] if jitter else [])] if delay else [],
        "loss": [f"{loss}%"] if loss else [],
        "duplicate": [f"{duplicate}%"] if duplicate else [],
        "reorder": [f"{reorder}%"] if reorder else [],
    }
    words = [word for name, values in settings.items() if values for word in (name, *values)]
    if not words:
        raise FarandoleError("say what happens to packets: --delay, --loss, --duplicate or --reorder")
    try:
        _on_node(target, "sh", "-ec", _NETEM, "sh", link, *words)
    except FarandoleError as error:
        if "qdisc kind is unknown" not in str(error):
            raise
        raise FarandoleError(
            "this machine's kernel has no netem; nodes of `farandole lab up --kernel own` have it"
        ) from None


def memory(
    target: LabNode,
    mib: Annotated[
        int, typer.Option(min=64, max=1 << 20, help="MiB that all its processes may use from now on.")
    ] = 1024,
) -> None:
    """Give the node little memory, so that the kernel kills what wants more."""
    if target.kernel is not Kernel.shared:
        raise FarandoleError("a node with a kernel of its own keeps its memory: start one with lab up --memory MIB")
    cgroups.limit(target, "memory", {"memory.limit_in_bytes": mib << 20}, str(mib << 20))


def fill(
    target: LabNode,
    path: Annotated[str, typer.Argument(help="The folder on the node.")] = "/opt",
    *,
    inodes: Annotated[bool, typer.Option("--inodes", help="Use up the inodes and leave space.")] = False,
) -> None:
    """Fill a folder up; it gets a small file system of its own, so this machine's disk is not filled."""
    if not path.startswith("/"):
        raise FarandoleError(f"{path} is not an absolute path")
    try:
        target.execute("sh", "-c", _FILL, "sh", path, str(int(inodes)), str(_FILL_LIMIT_MIB))
    except FarandoleError as error:  # it contains the whole script
        reason = str(error).rpartition("failed on this machine: ")[2].removeprefix(f"{target.name}: ")
        raise FarandoleError(f"{target.name}: {reason}") from error


def skew(
    target: LabNode, seconds: Annotated[int, typer.Option(help="How far it is ahead; behind, if negative.")] = 3600
) -> None:
    """Give the node a wrong clock: all that starts on it from now on, each ssh session too, sees another time."""
    script = _SKEW if target.kernel is Kernel.shared else _SKEW_CLOCK
    target.execute("sh", "-c", script, "sh", f"{seconds:+}")


def heal(target: LabNode) -> None:
    """Undo cut, throttle, block, mtu, netem, slow, memory, fill and skew."""
    gateway = next(ipaddress.IPv4Network(subnet(target.lab)).hosts())
    cgroups.lift(target)
    for link in [name for name in Link if Path(f"/proc/{target.pid}/root/sys/class/net/{name}").exists()]:
        _in_network(target, "ip", "link", "set", link, "mtu", str(_MTU), "up")
        _in_network(target, "tc", "qdisc", "replace", "dev", link, "root", "noqueue")
        run("tc", "qdisc", "replace", "dev", _host_side(target, link), "root", "noqueue")
    if target.kernel is Kernel.shared:
        route = ("default", "via", str(gateway), "proto", "static", "metric", "100")
        _in_network(target, "ip", "route", "replace", *route)
        target.execute("sh", "-c", _UNSKEW)
    else:
        target.execute("sh", "-c", _UNDISTURB)
        # When timesyncd starts, it sets the clock to the time of this file, at least.
        script = 'date --set="@$1" && if [ -e "$2" ]; then touch "$2"; fi'
        target.execute("sh", "-c", script, "sh", str(time.time()), "/var/lib/systemd/timesync/clock")
    if target.kernel is not Kernel.own:
        _nft(target, f"add table {_TABLE}; delete table {_TABLE}")
    target.execute("sh", "-c", _UNFILL)
    wait_for_ssh([target])


def pause(target: LabNode) -> None:
    """Freeze the node: it does not answer, but its connections stay open."""
    podman("pause", target.container)


def resume(target: LabNode) -> None:
    """Continue a frozen node."""
    podman("unpause", target.container)


def kill(target: LabNode) -> None:
    """Cut the node's power."""
    podman("kill", target.container)


def start(target: LabNode) -> None:
    """Switch a killed node back on."""
    podman("start", target.container)
    wait_for_ssh([target])


def reboot(target: LabNode) -> None:
    """Reboot the node."""
    if target.kernel is not Kernel.shared:
        _reboot_machine(target)
        return
    target.execute("systemctl", "reboot")
    most = SSH_SECONDS[Kernel.shared]
    deadline = time.monotonic() + most
    while time.monotonic() < deadline:
        now = node(target.lab, target.name)
        if now.state == "running" and now.pid not in (0, target.pid):
            wait_for_ssh([now])
            return
        time.sleep(0.2)
    raise FarandoleError(f"{target.name} did not come back within {most} s; `farandole lab status` shows it")


def _reboot_machine(target: LabNode) -> None:
    """Its case stays."""
    look = ("cat", "/proc/sys/kernel/random/boot_id")
    before = target.execute(*look)
    # Its network may be gone before it has answered.
    with suppress(FarandoleError):
        target.execute("systemctl", "reboot")
    deadline = time.monotonic() + SSH_SECONDS[target.kernel]
    while time.monotonic() < deadline:
        with suppress(FarandoleError):
            if target.execute(*look) != before:
                return
        time.sleep(0.5)
    raise FarandoleError(f"{target.name} did not come back; `farandole lab status` shows it")


# Those for a node that runs, as commands in this order.
FAULTS = (cut, throttle, block, mtu, netem, slow, memory, fill, skew, heal, pause, kill, reboot)


def _in_network(target: LabNode, *command: str) -> str:
    return run("nsenter", f"--target={target.pid}", "--net", "--", *command)


def _on_node(target: LabNode, *command: str) -> None:
    """Change the node's own network, by this machine's programs if it has no kernel of its own."""
    if target.kernel is Kernel.shared:
        _in_network(target, *command)
    else:
        target.execute(*command)


def _nft(target: LabNode, script: str) -> None:
    """Change the node's rules, with its own program if it has one: that of Debian 12 crashes at rules of Debian 13."""
    if Path(f"/proc/{target.pid}/root/usr/sbin/nft").exists():
        target.execute("nft", script)
    else:
        _on_node(target, "nft", script)


def _host_side(target: LabNode, link: str) -> str:
    """The other end of the node's link, on this machine."""
    index: int = json.loads(_in_network(target, "ip", "-json", "link", "show", link))[0]["link_index"]
    return socket.if_indextoname(index)
