"""What a node says about its hardware, its disks, and the shells of the account that runs jobs; changes nothing."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible_collections.farandole.cluster.plugins.module_utils.accounts import account as find_account
from ansible_collections.farandole.cluster.plugins.module_utils.mounts import REMOTE, TABLE, mounts_in

CPU_FLAGS = ("avx", "avx2", "avx512f", "f16c", "fma")
# What an unattended upgrade may change under a running cluster.
PACKAGES = ("libc6", "openssh-server", "libnccl2", "libibverbs1", "rdma-core")
# Libraries that would be loaded instead of the stack's.
SHADOWS = ("libmpi.so*", "libopen-rte.so*", "libnccl.so*", "libcudnn.so*", "libstdc++.so*")
PLACES = {"/opt": "/opt", "/tmp": "/tmp", "/var": "/var", "shm": "/dev/shm"}  # noqa: S108
CAP_SYS_RESOURCE = 24
OURS = "# Managed by Farandole"
SSHD_CONFIG = Path("/etc/ssh/sshd_config")
# By which of its settings sshd lets somebody in, and the group of all who start jobs.
ADMITTING = ("AllowUsers", "DenyUsers", "AllowGroups", "DenyGroups")
GROUP = "farandole-jobs"
# What makes that depend on where they come from.
BY_PLACE = re.compile(r"^\s*match\b.*\b(address|host|local\w+|rdomain)\b", re.IGNORECASE | re.MULTILINE)
NVIDIA, DISPLAY = "0x10de", "0x03"
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
# Seconds that shells and nvidia-smi have, all at the same time, and how much they may print.
COMMAND_S, LONGEST = 5, 1 << 16
MARK = "farandole-shell-answer"
LOGIN_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"
# Runs in the account's shell, as this account: what a job would find there.
IN_SHELL = r"""
import glob, json, os, resource
env, ours = os.environ, ("/opt/farandole/", "/usr/local/lib/farandole")
paths = [path for path in env.get("PATH", "").split(":") if path.startswith("/")]
before = paths[:paths.index("/usr/local/bin")] if "/usr/local/bin" in paths else paths
def first(name):
    for path in before:
        if path.startswith(ours):
            return None
        if os.access(path + "/" + name, os.X_OK):
            return path + "/" + name
def inside(variable, names):
    folders = [path for path in env.get(variable, "").split(":") if path.startswith("/") and not path.startswith(ours)]
    wanted = [glob.escape(path) + "/" + name for path in folders[:64] for name in names]
    return sorted({found for pattern in wanted for found in glob.glob(pattern)})
def limit(kind):
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
names = ("mpirun", "mpiexec", "orted", "horovodrun", "python", "python3")
packages = ("torch", "tensorflow", "keras", "tf_keras", "horovod", "numpy", "mpi4py")
answer = {
    "commands": {name: found for name in names if (found := first(name))},
    "libraries": inside("LD_LIBRARY_PATH", SHADOWS)[:16],
    "packages": inside("PYTHONPATH", packages)[:16],
    "variables": [name for name in ("LD_PRELOAD", "PYTHONHOME") if env.get(name)],
    "nofile": limit(resource.RLIMIT_NOFILE),
}
print("\n" + MARK + json.dumps(answer) + MARK, flush=True)
"""


def read(path: Path | str) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def machine(user: str, root: bool) -> dict[str, Any]:
    """All of it; the shells only if the account exists and this is root."""
    account = find_account(user) if user else None
    gpus = nvidia_devices()
    commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
    if account and root and (runuser := shutil.which("runuser")):
        commands |= shell_commands(account, runuser)
    if gpus and (smi := shutil.which("nvidia-smi")):
        query = "--query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total"
        commands["gpus"] = ([smi, query, "--format=csv,noheader"], {"PATH": LOGIN_PATH})
    if user and root and (sshd := shutil.which("sshd", path="/usr/sbin:/usr/bin")):
        commands["sshd"] = ([sshd, "-T", "-C", f"user={user}"], {"PATH": LOGIN_PATH})
    said = outputs(commands)
    mounts = mount_table(read(TABLE))
    home = account.pw_dir if account else "/home"
    return {
        "up_s": up_s(),
        "cpu": cpu_flags(read("/proc/cpuinfo")),
        "memory_mb": memory_mb(read("/proc/meminfo")),
        "places": {name: place(path, mounts) for name, path in {**PLACES, "home": home}.items()},
        "ceiling": ceiling(),
        "links": links(),
        "loopback_names": loopback_names(read("/etc/hosts")),
        "own_queue": own_queue(Path("/etc")),
        "packages": packages(read("/var/lib/dpkg/status")),
        "kernel": os.uname().release,
        "gpus": {
            "found": gpus,
            "library": driver_library(),
            "ecc": ecc_errors(said.get("gpus", "")),
            "xids": xids(kernel_log()) if gpus else [],
        },
        "rdma": rdma_ports(),
        "sshd": admission(said.get("sshd", ""), groups(user, account)),
        "shells": {kind: shell_answer(said[kind]) for kind in ("login", "ssh") if kind in said},
    }


def admission(said: str, own: list[str]) -> dict[str, list[str]] | None:
    """Whom sshd lets in by its lists, and the groups that an account will have; null if sshd does not say."""
    settings = "\n".join(map(read, (SSHD_CONFIG, *SSHD_CONFIG.parent.glob("sshd_config.d/*.conf"))))
    if not re.search("^authorizedkeysfile ", said, re.MULTILINE) or len(said) >= LONGEST or BY_PLACE.search(settings):
        return None
    return {"own": own} | {
        name: re.findall(rf"^{name} (.+)$", said, re.IGNORECASE | re.MULTILINE) for name in ADMITTING
    }


def groups(user: str, account: pwd.struct_passwd | None) -> list[str]:
    """The groups of an account once the node is set up."""
    names = [GROUP] if account else [GROUP, user]
    for number in os.getgrouplist(user, account.pw_gid) if account else ():
        with suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return names


def own_queue(folder: Path) -> str:
    """The settings of a Slurm that is not Farandole's; empty without one."""
    files = (folder / name / "slurm.conf" for name in ("slurm", "slurm-llnl"))
    return next((str(file) for file in files if file.exists() and OURS not in read(file)), "")


def up_s() -> int:
    """Seconds since process 1 started: a container starts later than its kernel."""
    begun = int(read("/proc/1/stat").rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0, int(float(read("/proc/uptime").split()[0]) - begun))


def cpu_flags(cpuinfo: str) -> list[str] | None:
    """Those instruction sets of x86 that matter; null if the processor names none."""
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return [flag for flag in CPU_FLAGS if flag in match[1].split()] if match else None


def memory_mb(meminfo: str) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) >> 10 if match else 0


def mount_table(mountinfo: str) -> dict[str, tuple[str, set[str]]]:
    """The type and the options of what is mounted, by mount point; of several at one point the last."""
    return {mount.point: (mount.kind, mount.options) for mount in mounts_in(mountinfo)}


def mount_of(path: str, mounts: Mapping[str, Any]) -> str:
    return max((point for point in mounts if f"{path}/".startswith(f"{point.rstrip('/')}/")), key=len, default="/")


def place(path: str, mounts: Mapping[str, tuple[str, set[str]]]) -> dict[str, Any]:
    """Where a folder, which need not exist, lies; free space and inodes are null if a server provides them."""
    point = mount_of(path, mounts)
    if not REMOTE.match(mounts.get(point, ("",))[0]):
        path = os.path.realpath(path)
        point = mount_of(path, mounts)
    kind, options = mounts.get(point, ("", set()))
    known: dict[str, Any] = {"mount": point, "noexec": "noexec" in options, "read_only": "ro" in options}
    if REMOTE.match(kind):
        return {**known, "free_mb": None, "free_inodes": None}
    space = os.statvfs(point)
    # Some file systems, such as btrfs, have no fixed number of inodes.
    inodes = space.f_favail if space.f_files else None
    return {**known, "free_mb": space.f_bavail * space.f_frsize >> 20, "free_inodes": inodes}


def ceiling() -> dict[str, int | None]:
    """The highest limits that sshd can give a session: open files, and locked memory in KiB; null for any."""
    effective = re.search(r"^CapEff:\s*(\w+)", read("/proc/1/status"), re.MULTILINE)
    if effective and int(effective[1], 16) >> CAP_SYS_RESOURCE & 1:
        return {"nofile": int(read("/proc/sys/fs/nr_open") or 0) or None, "memlock": None}
    limits = read("/proc/1/limits")
    return {"nofile": hard_limit(limits, "Max open files", 1), "memlock": hard_limit(limits, "Max locked memory", 1024)}


def hard_limit(limits: str, name: str, unit: int) -> int | None:
    match = re.search(rf"^{name}\s+\S+\s+(\d+)", limits, re.MULTILINE)
    return int(match[1]) // unit if match else None


def links() -> dict[str, dict[str, Any]]:
    """The MTU of each interface, and its speed in Mb/s and duplex where it has any."""
    by_name = {}
    for folder in sorted(Path("/sys/class/net").iterdir()):
        if mtu := number(read(folder / "mtu")):
            speed = number(read(folder / "speed"))
            duplex = read(folder / "duplex")
            by_name[folder.name] = {"mtu": mtu, "speed": speed, "duplex": duplex if duplex in ("half", "full") else ""}
    return by_name


def number(text: str) -> int | None:
    """A positive number; a link without a speed says -1 or nothing."""
    return int(text) if text.isdecimal() and int(text) else None


def loopback_names(hosts: str) -> list[str]:
    """The names that /etc/hosts gives to addresses of the loopback network, without localhost's own."""
    lines = [line.partition("#")[0].split() for line in hosts.splitlines()]
    names = {name for line in lines if line and line[0].startswith("127.") for name in line[1:]}
    return sorted(name for name in names if not name.startswith(("localhost", "ip6-")))[:64]


def packages(status: str) -> dict[str, str]:
    """The versions of the packages that matter, as far as they are installed."""
    entries = re.findall(
        rf"^Package: ({'|'.join(map(re.escape, PACKAGES))})\nStatus: \S+ ok installed\n(.*?)(?:\n\n|\Z)",
        status,
        re.MULTILINE | re.DOTALL,
    )
    versions = [(name, re.search(r"^Version: (\S+)", entry, re.MULTILINE)) for name, entry in entries]
    return {name: version[1] for name, version in versions if version}


def nvidia_devices() -> int:
    """The number of NVIDIA's GPUs on the bus, with or without a driver."""
    classes = [read(path.parent / "class") for path in Path("/sys/bus/pci/devices").glob("*/vendor") if nvidia(path)]
    return sum(kind.startswith(DISPLAY) for kind in classes)


def nvidia(vendor: Path) -> bool:
    return read(vendor) == NVIDIA


def driver_library() -> str:
    """The version of the driver's library, which differs from the loaded driver's after an upgrade without a reboot."""
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
        match = re.fullmatch(r"libcuda\.so\.(\d+(\.\d+)+)", Path(os.path.realpath(f"{folder}/libcuda.so.1")).name)
        if match:
            return match[1]
    return ""


def ecc_errors(text: str) -> dict[str, int]:
    """The GPUs with uncorrected errors since the driver was loaded, from nvidia-smi, and how many."""
    rows = [line.split(", ") for line in text.splitlines()]
    return {row[0].strip(): int(row[1]) for row in rows if len(row) == 2 and number(row[1].strip())}


def kernel_log() -> str:
    """The kernel's messages since it started, as far as it still has them."""
    lines: list[bytes] = []
    with suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while len(lines) < 1 << 16:
                lines.append(os.read(log, 8192))
        finally:
            os.close(log)
    return b"".join(lines).decode(errors="replace")


def xids(log: str) -> list[list[Any]]:
    """The errors that the driver has reported, as pairs of a GPU and a number."""
    return [[bus, int(code)] for bus, code in sorted(set(XID.findall(log)))][:64]


def rdma_ports(folder: Path = Path("/sys/class/infiniband")) -> dict[str, dict[str, Any]]:
    """Whether each port is active, and the network interface that it belongs to on Ethernet."""
    return {
        f"{port.parts[-3]}/{port.name}": {
            "active": read(port / "state").strip().endswith("ACTIVE"),
            "card": read(port / "gid_attrs/ndevs/0").strip() if read(port / "link_layer").strip() == "Ethernet" else "",
        }
        for port in sorted(folder.glob("*/ports/*"))
    }


def shell_commands(account: pwd.struct_passwd, runuser: str) -> dict[str, tuple[Sequence[str], Mapping[str, str]]]:
    """How sshd starts a login shell and a command, in a session with the limits that PAM sets."""
    shell = account.pw_shell or "/bin/sh"
    python = """exec /usr/bin/python3 -ISc 'import os; exec(os.environ.pop("FARANDOLE_ASK"))'"""
    environment = {
        "PATH": LOGIN_PATH,
        **pam_environment(read("/etc/environment")),
        "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, "SHELL": shell,
        # Makes bash read ~/.bashrc.
        "SSH_CLIENT": "127.0.0.1 1 22", "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22",
        "FARANDOLE_ASK": f"MARK = {MARK!r}\nSHADOWS = {SHADOWS!r}\n{IN_SHELL}",
    }  # fmt: skip
    enter = [runuser, "-u", account.pw_name, "--", shell]
    return {"login": ([*enter, "-l", "-c", python], environment), "ssh": ([*enter, "-c", python], environment)}


def pam_environment(text: str) -> dict[str, str]:
    """The variables of /etc/environment, which every session gets."""
    pairs = re.findall(r"^\s*(?:export\s+)?(\w+)=(.*?)\s*$", text, re.MULTILINE)
    return {name: value.strip("\"'") for name, value in pairs}


def shell_answer(output: str) -> Any:
    """What the program in the shell has printed; null if it did not come so far, or something else printed it."""
    with suppress(IndexError, ValueError, AttributeError, RecursionError):
        answer = json.loads(output.split(MARK)[1])
        # The user, who may have printed it, must not make the node's answer unfit.
        parts = [part.values() if isinstance(part, dict) else part for part in answer.values()]
        leaves = [one for part in parts for one in (part if isinstance(part, Iterable) else [part])]
        if all(isinstance(one, (str, int, type(None))) for one in leaves):
            return answer
    return None


def outputs(commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]) -> dict[str, str]:
    """What commands print, all running at the same time; after COMMAND_S their sessions are ended."""
    until = time.monotonic() + COMMAND_S
    said = dict.fromkeys(commands, b"")
    running: dict[str, subprocess.Popen[bytes]] = {}
    waiting = selectors.DefaultSelector()
    try:
        for name, (command, environment) in commands.items():
            with suppress(OSError):
                running[name] = process = subprocess.Popen(
                    command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
                if process.stdout:
                    waiting.register(process.stdout, selectors.EVENT_READ, name)
        while waiting.get_map() and (rest := until - time.monotonic()) > 0:
            for key, _ in waiting.select(rest):
                block = os.read(key.fd, LONGEST)
                said[key.data] += block
                # A program that the shell has left behind may keep the pipe open.
                if not block or len(said[key.data]) > LONGEST or said[key.data].count(MARK.encode()) > 1:
                    waiting.unregister(key.fileobj)
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        waiting.close()
    return {name: text.decode(errors="replace") for name, text in said.items()}
