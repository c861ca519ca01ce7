"""What can go wrong with a node, and how it is undone."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.lab.lab import SSH_SECONDS, Node, node, subnet, wait_for_ssh
from farandole.lab.podman import podman
from farandole.lab.shell import run

_MTU = 1500
_TABLE = "inet farandole_fault"
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
# What cgroups limit here, and how the second version of them says that it is unlimited.
_CONTROLLERS = {"cpu": f"max {_PERIOD_US}", "memory": "max"}
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
new=$(mktemp --directory)
mount -t tmpfs -o "size=$((used + used / 4 + 64))m,nr_inodes=$((files + 1000))" farandole-fill "$new"
cp --archive --one-file-system "$path/." "$new"
if [ "$inodes" = 1 ]; then
    mkdir "$new/filler"
    (cd "$new/filler" && seq 2000 | xargs touch) 2>/dev/null || :
else
    dd if=/dev/zero of="$new/filler" bs=64k 2>/dev/null || :
fi
mount --move "$new" "$path"
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
_UNSKEW = """
[ -e /etc/faketimerc ] || exit 0
rm -f /etc/ld.so.preload
systemctl restart ssh
apt-get purge --quiet=2 libfaketime >/dev/null
rm -f /etc/faketimerc /dev/shm/*faketime*
"""


class Link(StrEnum):
    """The interfaces of a node in the networks of its lab."""

    eth0 = "eth0"
    eth1 = "eth1"


def cut(target: Node, link: str) -> None:
    """Unplug the network cable."""
    _in_network(target, "ip", "link", "set", link, "down")


def throttle(target: Node, mbit: int, link: str) -> None:
    """Limit the rate of a node's link, in each direction."""
    # A bucket that the kernel's timer can fill in time, even at 100 ticks per second.
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(max(65536, mbit * 1250)), "latency", "50ms")
    _in_network(target, "tc", "qdisc", "replace", "dev", link, *limit)
    run("tc", "qdisc", "replace", "dev", _host_side(target, link), *limit)


def block(target: Node, sender: Node | None, port: int | None, *, all_but_ssh: bool, reject: bool) -> None:
    """Let a node accept no new connection: from one other node or from all, to one port, to all but 22, or to any."""
    source = f"ip saddr {sender.address} " if sender else ""
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
        *(f"add rule {chain} {source}{match} {verdict}" for match in matches),
    ]
    _in_network(target, "nft", "; ".join(script))


def mtu(target: Node, size: int) -> None:
    """Let a node's link carry only packets up to this size, while the other nodes still send larger ones."""
    _in_network(target, "ip", "link", "set", Link.eth0, "mtu", str(size))


def slow(target: Node, percent: int) -> None:
    """Limit all that a node computes to a share of one processor."""
    quota = percent * _PERIOD_US // 100
    if tree := _tree("cpu"):
        _confine(target, tree, {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota})
    else:
        (_unified_group(target) / "cpu.max").write_text(f"{quota} {_PERIOD_US}")


def memory(target: Node, mib: int) -> None:
    """Let the kernel kill what uses more memory than this on a node, together with all else there."""
    if tree := _tree("memory"):
        _confine(target, tree, {"memory.limit_in_bytes": mib << 20})
    else:
        (_unified_group(target) / "memory.max").write_text(str(mib << 20))


def fill(target: Node, path: str, *, inodes: bool) -> None:
    """Use up the disk space or the inodes below a folder, in a small file system of its own."""
    if not path.startswith("/"):
        raise FarandoleError(f"{path} is no absolute path")
    try:
        podman("exec", target.container, "sh", "-c", _FILL, "sh", path, str(int(inodes)), str(_FILL_LIMIT_MIB))
    except FarandoleError as error:  # it contains the whole script
        raise FarandoleError(f"{target.name}: {str(error).rpartition('failed on this machine: ')[2]}") from error


def skew(target: Node, seconds: int) -> None:
    """Let the clock of a node be ahead, or behind if negative."""
    podman("exec", target.container, "sh", "-c", _SKEW, "sh", f"{seconds:+}")


def heal(target: Node) -> None:
    """Undo every fault that leaves the node running."""
    gateway = next(ipaddress.IPv4Network(subnet(target.lab)).hosts())
    for link in [name for name in Link if (target.root / "sys/class/net" / name).exists()]:
        _in_network(target, "ip", "link", "set", link, "mtu", str(_MTU), "up")
        _in_network(target, "tc", "qdisc", "replace", "dev", link, "root", "noqueue")
        run("tc", "qdisc", "replace", "dev", _host_side(target, link), "root", "noqueue")
    _in_network(target, "ip", "route", "replace", "default", "via", str(gateway), "proto", "static", "metric", "100")
    _in_network(target, "nft", f"add table {_TABLE}; delete table {_TABLE}")
    podman("exec", target.container, "sh", "-c", _UNFILL)
    podman("exec", target.container, "sh", "-c", _UNSKEW)
    for controller, unlimited in _CONTROLLERS.items():
        if (tree := _tree(controller)) is None:
            (_unified_group(target) / f"{controller}.max").write_text(unlimited)
        elif (group := tree / target.container).exists():
            _move(_processes(target), tree)
            _remove(group)
    wait_for_ssh([target])


def forget(lab: str) -> None:
    """Remove what faults have left on this machine, once a lab's nodes are gone."""
    for tree in filter(None, map(_tree, _CONTROLLERS)):
        for group in tree.glob(f"farandole-{lab}-node-*"):
            _remove(group)


def pause(target: Node) -> None:
    """Freeze a node: it does not answer, but its connections stay open."""
    podman("pause", target.container)


def resume(target: Node) -> None:
    """Continue a frozen node."""
    podman("unpause", target.container)


def kill(target: Node) -> None:
    """Cut the power."""
    podman("kill", target.container)


def start(target: Node) -> None:
    """Switch a killed node back on."""
    podman("start", target.container)
    wait_for_ssh([target])


def reboot(target: Node) -> None:
    """Reboot a node, as the command `reboot` on it would."""
    podman("exec", target.container, "systemctl", "reboot")
    deadline = time.monotonic() + SSH_SECONDS
    while time.monotonic() < deadline:
        now = node(target.lab, target.name)
        if now.state == "running" and now.pid not in (0, target.pid):
            wait_for_ssh([now])
            return
        time.sleep(0.2)
    raise FarandoleError(f"{target.name} did not come back within {SSH_SECONDS} s; `farandole lab status` shows it")


def _in_network(target: Node, *command: str) -> str:
    return run("nsenter", f"--target={target.pid}", "--net", "--", *command)


def _host_side(target: Node, link: str) -> str:
    """The other end of the node's link, on this machine."""
    index: int = json.loads(_in_network(target, "ip", "-json", "link", "show", link))[0]["link_index"]
    return socket.if_indextoname(index)


def _tree(controller: str) -> Path | None:
    """Where the first version of cgroups has its groups for this; None where the second one is in use."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("cgroup ") and controller in kind.split()[2].split(","):
            return Path(mount.split()[4])
    return None


def _confine(target: Node, tree: Path, limits: dict[str, int]) -> None:
    """Put all that runs on a node into a group of its own."""
    group = tree / target.container
    group.mkdir(exist_ok=True)
    for name, limit in limits.items():
        (group / name).write_text(str(limit))
    # What starts while the first ones are moved inherits the old group.
    for _ in range(3):
        _move(_processes(target), group)


def _unified_group(target: Node) -> Path:
    """The group of a node's container, above those of its systemd."""
    inside = Path(f"/proc/{target.pid}/cgroup").read_text().rpartition("::")[2].strip().strip("/")
    parts = inside.split("/")
    depth = next(index for index, part in enumerate(parts) if part.startswith("libpod-"))
    return _CGROUPS.joinpath(*parts[: depth + 1])


def _processes(target: Node) -> Iterator[str]:
    """All processes of a node, by their ids on this machine."""
    namespace = os.stat(f"/proc/{target.pid}/ns/pid").st_ino  # noqa: PTH116
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (folder / "ns/pid").stat().st_ino == namespace:
                yield folder.name


def _move(processes: Iterator[str], group: Path) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(process)


def _remove(group: Path) -> None:
    """Remove a group once the last process that it had has ended or moved."""
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise FarandoleError(f"{group} still has processes: cat {group}/cgroup.procs")
