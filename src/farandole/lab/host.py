"""What the lab needs of the machine it runs on, and how the machine gets it back."""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from farandole.errors import FarandoleError
from farandole.lab import firewall
from farandole.lab.shell import run

RUN = Path("/run/farandole")
STORE = Path("/var/lib/farandole")
_RECORD = RUN / "host.json"
# Beside RUN, which goes while it is held; not in /run/lock, where everybody may leave a link of this name.
_LOCK = Path("/run/farandole-lab.lock")
_NAMESPACE = RUN / "namespace" / "mnt"
_CGROUP = Path("/sys/fs/cgroup")
_LEDGERS = Path("/run/containers")
PODMAN_RUN = (RUN / "podman", RUN / "containers")

# program or file -> Debian package that brings it
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
    "nsenter": "util-linux",
}
# What podman and its helpers make in places that no setting moves.
_FOLDERS = ("/run/containers/networks", "/run/containers", "/run/crun", "/run/netns", "/run/podman")
# netavark turns forwarding on, which turns redirects off.
_SYSCTLS = ("net.ipv4.ip_forward", "net.ipv4.conf.all.accept_redirects")


@dataclass
class Record:
    """The machine as it was before the first lab."""

    sysctls: dict[str, str] = field(default_factory=dict)
    firewall: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def missing_packages() -> list[str]:
    """The Debian packages that have to be installed before a lab can run."""
    return sorted({package for need, package in _NEEDS.items() if not (shutil.which(need) or Path(need).is_file())})


def install_command(packages: list[str]) -> list[str]:
    """The one command that installs them."""
    return ["apt-get", "install", "--yes", "--no-install-recommends", *packages]


def check_packages() -> None:
    """Refuse with the command that mends it."""
    if missing := missing_packages():
        command = " ".join(install_command(missing))
        raise FarandoleError(f"the lab needs Debian packages: run `sudo apt-get update && sudo {command}`")


def is_root() -> bool:
    """Whether this command may change the machine."""
    return os.geteuid() == 0


def check() -> None:
    """Refuse before anything is touched."""
    check_packages()
    if not is_root():
        raise FarandoleError("the lab makes network interfaces and mounts and so needs root: run the same with sudo")
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        raise FarandoleError(
            "the lab changes settings of the kernel, and root here is root of a user namespace only: "
            "run it on the machine itself"
        )
    STORE.mkdir(parents=True, exist_ok=True)
    if run("stat", "--file-system", "--format=%T", str(STORE)).strip() == "overlayfs":
        raise FarandoleError(
            f"podman cannot lay the nodes' disks over an overlayfs: mount a disk or a tmpfs at {STORE}"
        )


@contextmanager
def locked(wait: Callable[[], None]) -> Iterator[None]:
    """One lab command at a time changes the machine; `wait` is called when there is another."""
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(_open_lock())
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _LOCK.exists() and _LOCK.samefile(f"/proc/self/fd/{lock.fileno()}"):
                break  # else the one before removed it: the next file counts
        try:
            yield
        finally:
            if not ready():
                _LOCK.unlink()


def _open_lock() -> BinaryIO:
    """The lock's file, made where it is not there; no link is followed and nothing is written."""
    try:
        return os.fdopen(os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "rb")
    except OSError as error:
        raise FarandoleError(
            f"the lab cannot open its lock ({error.strerror}): remove {_LOCK} and run the same again"
        ) from error


def prepare() -> None:
    """Remember how the machine was, and make the namespace in which podman works."""
    if not _load():
        folders = [folder for folder in _FOLDERS if Path(folder).is_dir()]
        _save(Record({name: _sysctl(name) for name in _SYSCTLS}, firewall.names(), folders))
    _make_namespace()


def make_room(nodes: int) -> None:
    """Raise what limits the number of nodes, as far as so many need it."""
    wanted = _needed(nodes)
    record = _load() or Record()
    for name in wanted:
        record.sysctls.setdefault(name, _sysctl(name))
    _save(record)
    for name, value in wanted.items():
        if int(_sysctl(name)) < value:
            _set_sysctl(name, str(value))


def restore() -> list[str]:
    """Give the machine back as it was; says what was put back."""
    record = _load()
    done = []
    if record:
        # All are compared first: to set one may change another.
        changed = {name: value for name, value in record.sysctls.items() if _sysctl(name) != value}
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
    """The names of network namespaces and the notes of containers that are gone; folders that are empty then."""
    for name in Path("/run/netns").glob("netns-*"):
        if not _mounted(name):
            name.unlink()
    for notes in Path("/run/crun").glob("*"):
        if not _alive(notes / "status"):
            shutil.rmtree(notes, ignore_errors=True)
    for folder in map(Path, _FOLDERS):
        if str(folder) not in before and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _alive(status: Path) -> bool:
    """Whether the container runs of which crun keeps this note; one that was killed early has none."""
    try:
        note = json.loads(status.read_text())
        # Numbers of processes are used again; field 22 is when this one began.
        began = Path(f"/proc/{note['pid']}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, KeyError):
        return False
    return began == str(note["process-start-time"])


def changes() -> list[str]:
    """What is different on this machine while labs are up."""
    record = _load()
    if not record:
        return []
    now = {name: _sysctl(name) for name in record.sysctls}
    found = [f"{name}: {was} → {now[name]}" for name, was in record.sysctls.items() if was != now[name]]
    if chains := set(firewall.names()) - set(record.firewall):
        found.append(f"{len(chains)} firewall tables and chains of podman's network")
    if ready():
        found.append(f"mount namespace {_NAMESPACE}")
    return found


def ready() -> bool:
    """Whether the lab's namespace is there; without it no node runs."""
    return _mounted(_NAMESPACE)


def enter() -> list[str]:
    """The prefix of a command that runs in the lab's namespace."""
    return ["nsenter", f"--mount={_NAMESPACE}", "--"]


def inhabitants() -> list[tuple[int, list[str]]]:
    """The processes in the lab's namespace, with their command lines; the nodes' own are children of these."""
    here = _NAMESPACE.stat().st_ino
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            words = (folder / "cmdline").read_text().split("\0")
            if (folder / "ns/mnt").stat().st_ino == here and words[0]:
                found.append((int(folder.name), words))
    return found


def end(pid: int) -> None:
    """Kill a process and its children, children first."""
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def systemd_runs_cgroups() -> bool:
    """Whether podman may ask systemd for cgroups, as it does on an ordinary machine."""
    return not _on_cgroup_v1() and Path("/run/systemd/system").is_dir()


def _needed(nodes: int) -> dict[str, int]:
    """A node's systemd takes about six inotify instances and a handful of kernel keys."""
    return {
        "fs.inotify.max_user_instances": 128 + 16 * nodes,
        "kernel.keys.maxkeys": 200 + 50 * nodes,
        "kernel.keys.maxbytes": 20000 + 2000 * nodes,
    }


def _on_cgroup_v1() -> bool:
    return not (_CGROUP / "cgroup.controllers").exists()


def _make_namespace() -> None:
    """A persistent mount namespace for podman: it loses its state when every command has one of its own.

    Its ledgers of addresses and locks lie there, apart from those of a podman beside the lab. On a machine with the
    hybrid cgroup tree, which podman refuses, it sees a pure cgroup2 tree.
    """
    if ready():
        if inhabitants():
            return
        _end_namespace()  # nothing runs in it: its making may have been interrupted, or mounts be of yesterday
    # To podman this is a boot: whatever it believes to be running is not.
    for folder in PODMAN_RUN:
        shutil.rmtree(folder, ignore_errors=True)
    parent = _NAMESPACE.parent
    parent.mkdir(parents=True, exist_ok=True)
    if not _mounted(parent):
        run("mount", "--bind", str(parent), str(parent))
    run("mount", "--make-private", str(parent))
    _NAMESPACE.touch()
    _LEDGERS.mkdir(exist_ok=True)
    steps = [f"mount -t tmpfs tmpfs {folder}" for folder in (_LEDGERS, "/dev/shm")]  # noqa: S108
    if _on_cgroup_v1():
        steps += [f"umount --recursive {_CGROUP}", f"mount -t cgroup2 cgroup2 {_CGROUP}"]
    command = ["unshare", f"--mount={_NAMESPACE}", "--propagation", "private", "sh", "-c", " && ".join(steps)]
    # Out of a namespace that is not the first one the kernel accepts only a higher number, and draws numbers per CPU.
    for cpu in os.sched_getaffinity(0):
        with suppress(FarandoleError):
            run("taskset", "--cpu-list", str(cpu), *command)
            return
    run(*command)


def _end_namespace() -> None:
    for pid, _ in inhabitants():
        end(pid)
    run("umount", str(_NAMESPACE))


def power_cycle() -> None:
    """End everything that podman runs, with all its mounts and ledgers; disks stay."""
    _end_namespace()
    _make_namespace()


def _mounted(path: Path) -> bool:
    """Path.is_mount sees neither files nor binds within one file system."""
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _load() -> Record | None:
    return Record(**json.loads(_RECORD.read_text())) if _RECORD.exists() else None


def _save(record: Record) -> None:
    RUN.mkdir(exist_ok=True)
    draft = _RECORD.with_suffix(".new")
    draft.write_text(json.dumps(asdict(record), indent=2))
    draft.replace(_RECORD)


def _sysctl_file(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def _sysctl(name: str) -> str:
    return _sysctl_file(name).read_text().strip()


def _set_sysctl(name: str, value: str) -> None:
    _sysctl_file(name).write_text(value)
