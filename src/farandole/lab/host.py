"""Prepare the machine for labs, and restore it afterwards."""

import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.lab import firewall
from farandole.lab.shell import run
from farandole.node.mounts import TABLE, mounts_in

RUN = Path("/run/farandole")
STORE = Path("/var/lib/farandole")
# The beginning of a GRUB that starts like a kernel.
GRUB = Path("/usr/lib/grub/i386-pc/lnxboot.img")
_RECORD = RUN / "host.json"
# Not in RUN, which is removed while the lock is held; not in /run/lock, where any user could plant a symlink.
_LOCK = Path("/run/farandole-lab.lock")
_NAMESPACE = RUN / "namespace" / "mnt"
_CGROUP = Path("/sys/fs/cgroup")
_PODMAN_RECORDS = Path("/run/containers")
PODMAN_RUN = (RUN / "podman", RUN / "containers")


class Kernel(StrEnum):
    """What runs on a node: this machine's kernel, one in user mode, or the one of its distribution."""

    shared = "shared"
    own = "own"
    stock = "stock"


# program or file -> Debian package that contains it
_NEEDS = {
    "podman": "podman",
    "crun": "crun",
    "conmon": "conmon",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
    "iptables": "iptables",
    "nft": "nftables",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "ssh": "openssh-client",
    # For `farandole run`.
    "rsync": "rsync",
    "nsenter": "util-linux",
}
# The same for nodes with kernels of their own.
_MORE_NEEDS = {
    Kernel.shared: {},
    Kernel.own: {"linux.uml": "user-mode-linux", "mke2fs": "e2fsprogs"},
    Kernel.stock: {
        "mke2fs": "e2fsprogs",
        "qemu-img": "qemu-utils",
        "qemu-system-x86_64": "qemu-system-x86",
        "grub-mkimage": "grub-common",
        str(GRUB): "grub-pc-bin",
    },
}
# Seconds that a killed node may take to end.
_ENDING_S = 20
# Folders that podman, its helpers and mount create in fixed places.
_FOLDERS = ("/run/containers/networks", "/run/containers", "/run/crun", "/run/mount", "/run/netns", "/run/podman")
# A kernel in user mode maps each page of its processes by itself.
_MAPS = {"vm.max_map_count": 4_194_304}
# netavark enables forwarding, which disables redirects; the systemd of each node allows more open files.
_SYSCTLS = ("net.ipv4.ip_forward", "net.ipv4.conf.all.accept_redirects", "fs.file-max")


@dataclass
class Record:
    """The machine's settings before the first lab, and the limits that labs have raised."""

    sysctls: dict[str, str] = field(default_factory=dict)
    firewall: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    raised: dict[str, str] = field(default_factory=dict)


def missing_packages(kernel: Kernel = Kernel.shared) -> list[str]:
    """The Debian packages that a lab with such nodes needs and that are not installed."""
    needs = {**_NEEDS, **_MORE_NEEDS[kernel]}
    return sorted({package for need, package in needs.items() if not (shutil.which(need) or Path(need).is_file())})


def install_command(packages: list[str]) -> list[str]:
    return ["apt-get", "install", "--yes", "--no-install-recommends", *packages]


def check_packages(kernel: Kernel = Kernel.shared) -> None:
    """Refuse if packages are missing, and name the command that installs them."""
    if missing := missing_packages(kernel):
        command = " ".join(install_command(missing))
        raise FarandoleError(f"the lab needs Debian packages: run `sudo apt-get update && sudo {command}`")


def is_root() -> bool:
    """Whether this command may change the machine."""
    return os.geteuid() == 0


def check() -> None:
    """Refuse before anything is changed."""
    if not is_root():
        raise FarandoleError("the lab creates network interfaces and mounts, so it needs root: run it with sudo")
    check_packages()
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        raise FarandoleError(
            "the lab changes kernel settings, and root here is only root in a user namespace: "
            "run it on the machine itself"
        )
    STORE.mkdir(parents=True, exist_ok=True)
    if run("stat", "--file-system", "--format=%T", str(STORE)).strip() == "overlayfs":
        raise FarandoleError(f"podman cannot put the nodes' disks on an overlayfs: mount a disk or a tmpfs at {STORE}")


@contextmanager
def locked(wait: Callable[[], None]) -> Iterator[None]:
    """Let one lab command at a time change the machine; `wait` is called if another one is running."""
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(_open_lock())
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _LOCK.exists() and _LOCK.samefile(f"/proc/self/fd/{lock.fileno()}"):
                break  # otherwise the previous holder removed it: lock the new file
        try:
            yield
        finally:
            if not ready():
                _LOCK.unlink()


def _open_lock() -> BinaryIO:
    """Open or create the lock file without following symlinks."""
    try:
        return os.fdopen(os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "rb")
    except OSError as error:
        raise FarandoleError(
            f"the lab cannot open its lock ({error.strerror}): remove {_LOCK} and try again"
        ) from error


def prepare() -> None:
    """Record the machine's settings, and create the mount namespace for podman."""
    if not _load():
        folders = [folder for folder in _FOLDERS if Path(folder).is_dir()]
        _save(Record({name: _sysctl(name) for name in _SYSCTLS}, firewall.names(), folders))
    _make_namespace()


def make_room(nodes: int, *, user_mode: bool) -> None:
    """Raise the kernel limits that this many nodes need, some of which may run kernels in user mode."""
    wanted = _needed(nodes) | (_MAPS if user_mode else {})
    record = _load() or Record()
    for name in wanted:
        record.sysctls.setdefault(name, _sysctl(name))
    more = {name: str(value) for name, value in wanted.items() if int(_sysctl(name)) < value}
    record.raised |= more
    _save(record)
    for name, value in more.items():
        _set_sysctl(name, value)


def restore() -> list[str]:
    """Restore the machine; returns what was restored."""
    record = _load()
    done = []
    if record:
        # Compare all of them first: setting one may change another. A limit that somebody else has set since stays.
        now = {name: _sysctl(name) for name in record.sysctls}
        ours = now | record.raised
        changed = {name: value for name, value in record.sysctls.items() if value != now[name] == ours[name]}
        for name, value in changed.items():
            done.append(f"{name} = {value}")
            _set_sysctl(name, value)
        done += firewall.clean(record.firewall)
    if ready():
        _end_namespace()
        done.append("mount namespace of the lab")
    if _mounted(_NAMESPACE.parent):
        run("umount", str(_NAMESPACE.parent))
    _remove_leftovers(record.folders if record else [])
    shutil.rmtree(RUN, ignore_errors=True)
    return done


def _remove_leftovers(before: list[str]) -> None:
    """Remove what the dead leave, and folders that are then empty."""
    _remove_dead()
    for folder in map(Path, _FOLDERS):
        # Others may have come to use it meanwhile.
        with suppress(OSError):
            if str(folder) not in before:
                folder.rmdir()


def _remove_dead() -> None:
    """Remove names of dead network namespaces and files of dead containers, which could not be started again."""
    for name in Path("/run/netns").glob("netns-*"):
        if not _mounted(name):
            name.unlink()
    for container in Path("/run/crun").glob("*"):
        if not _alive(container / "status"):
            shutil.rmtree(container, ignore_errors=True)


def _alive(status: Path) -> bool:
    """Whether the container with this crun status file is running; one that was killed early has no file."""
    try:
        recorded = json.loads(status.read_text())
        # Process ids are reused; field 22 is the start time.
        return _facts(recorded["pid"])[19:20] == [str(recorded["process-start-time"])]
    except (OSError, ValueError, KeyError):
        return False


def _facts(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty if it has ended."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if facts[0] in "ZX" else facts


def check_space() -> None:
    """Refuse before anything is changed, if there is too little room for temporary files, images and disks."""
    for place, least in ((Path(os.environ.get("TMPDIR", "/tmp")), 50), (STORE, 2000)):  # noqa: S108
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(there).free >> 20
        if free < least:
            raise FarandoleError(
                f"{place} has {free} MiB free, and the lab needs {least}: remove something there; "
                f"du -xh {there} | sort -h | tail shows what is large"
            )


def available_mib() -> int:
    """The memory that is free here."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) >> 10 if found else 0


def changes() -> list[str]:
    """What labs have changed on this machine."""
    record = _load()
    if not record:
        return []
    now = {name: _sysctl(name) for name in record.sysctls}
    changed = [f"{name}: {was} → {now[name]}" for name, was in record.sysctls.items() if was != now[name]]
    if chains := set(firewall.names()) - set(record.firewall):
        changed.append(f"{len(chains)} firewall tables and chains of podman's network")
    if ready():
        changed.append(f"mount namespace {_NAMESPACE}")
    return changed


def ready() -> bool:
    """Whether the lab's namespace exists; without it no node runs."""
    return _mounted(_NAMESPACE)


def enter() -> list[str]:
    """The prefix that runs a command in the lab's namespace."""
    return ["nsenter", f"--mount={_NAMESPACE}", "--"]


def processes() -> list[tuple[int, list[str]]]:
    """The processes in the lab's namespace, with their command lines; the nodes' processes are their children."""
    here = _NAMESPACE.stat().st_ino
    running = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (folder / "cmdline").read_text(errors="replace").split("\0")
            if (folder / "ns/mnt").stat().st_ino == here and command[0]:
                running.append((int(folder.name), command))
    return running


def end(*pids: int) -> None:
    """Kill processes and their children, children first, and wait for their end."""
    ending: list[int] = []
    for pid in pids:
        with suppress(OSError):
            ending += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        ending.append(pid)
    for pid in ending:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    # The first process of a node ends after all others.
    until = time.monotonic() + _ENDING_S
    while any(map(_facts, ending)) and time.monotonic() < until:
        time.sleep(0.05)


def systemd_runs_cgroups() -> bool:
    """Whether podman can let systemd manage cgroups, as on an ordinary machine."""
    return not _on_cgroup_v1() and Path("/run/systemd/system").is_dir()


def _needed(nodes: int) -> dict[str, int]:
    """A node's systemd uses about six inotify instances and a few kernel keys; each node's kernel knows all others."""
    return {
        "net.ipv4.neigh.default.gc_thresh2": 512 + 2 * nodes**2,
        "net.ipv4.neigh.default.gc_thresh3": 1024 + 2 * nodes**2,
        "fs.inotify.max_user_instances": 128 + 16 * nodes,
        "kernel.keys.maxkeys": 200 + 50 * nodes,
        "kernel.keys.maxbytes": 20000 + 2000 * nodes,
    }


def _on_cgroup_v1() -> bool:
    return not (_CGROUP / "cgroup.controllers").exists()


def _make_namespace() -> None:
    """Create a persistent mount namespace for podman, which would lose its state in one namespace per command.

    It holds podman's records of addresses and locks, separate from those of the user's own podman. On a machine with
    the hybrid cgroup tree, which podman refuses, it has a pure cgroup2 tree.
    """
    if ready():
        if processes():
            return
        _end_namespace()  # nothing runs in it: its creation may have been interrupted, or its mounts may be stale
    # To podman this is a boot: nothing that it has recorded as running still is.
    for folder in PODMAN_RUN:
        shutil.rmtree(folder, ignore_errors=True)
    parent = _NAMESPACE.parent
    parent.mkdir(parents=True, exist_ok=True)
    if not _mounted(parent):
        run("mount", "--bind", str(parent), str(parent))
    run("mount", "--make-private", str(parent))
    _NAMESPACE.touch()
    _PODMAN_RECORDS.mkdir(exist_ok=True)
    steps = [f"mount -t tmpfs tmpfs {folder}" for folder in (_PODMAN_RECORDS, "/dev/shm")]  # noqa: S108
    if _on_cgroup_v1():
        steps += [f"umount --recursive {_CGROUP}", f"mount -t cgroup2 cgroup2 {_CGROUP}"]
    # What is unmounted here is unmounted there as well.
    command = ["unshare", f"--mount={_NAMESPACE}", "--propagation", "slave", "sh", "-c", " && ".join(steps)]
    # From a non-initial namespace the kernel accepts only namespaces with higher ids, and it allocates ids per CPU.
    for cpu in os.sched_getaffinity(0):
        with suppress(FarandoleError):
            run("taskset", "--cpu-list", str(cpu), *command)
            return
    run(*command)


def _end_namespace() -> None:
    end(*(pid for pid, _ in processes()))
    run("umount", str(_NAMESPACE))


def power_cycle() -> None:
    """Kill everything that podman runs, and drop its mounts and records; the nodes' disks stay."""
    _end_namespace()
    _remove_dead()
    _make_namespace()


def _mounted(path: Path) -> bool:
    """Like Path.is_mount, but also for files and for binds within one file system."""
    return any(mount.point == str(path) for mount in mounts_in(TABLE.read_text()))


def _load() -> Record | None:
    return Record(**json.loads(_RECORD.read_text())) if _RECORD.exists() else None


def _save(record: Record) -> None:
    RUN.mkdir(exist_ok=True)
    files.write(_RECORD, json.dumps(asdict(record), indent=2))


def _sysctl_file(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def _sysctl(name: str) -> str:
    return _sysctl_file(name).read_text().strip()


def _set_sysctl(name: str, value: str) -> None:
    _sysctl_file(name).write_text(value)
