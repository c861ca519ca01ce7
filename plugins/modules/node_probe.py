#!/usr/bin/python
"""Say in one answer what a node is; change nothing."""

from __future__ import annotations

import grp
import hashlib
import importlib.util
import json
import os
import platform
import pwd
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: node_probe
short_description: Say what a node is
description:
  - Reads, in one round trip, what Farandole must know of a node before it touches it.
  - A node that cannot be reached or cannot run the module is an answer too, given as RV(unreachable_reason);
    the task does not fail, so that M(preflight) can judge all nodes together.
options:
  user:
    description: Name of the account, and of its group, that runs jobs.
    type: str
    required: true
  id:
    description: The uid and gid that this account wants.
    type: int
    required: true
attributes:
  check_mode:
    description: Changes nothing, in check mode or out of it.
    support: full
author: Farandole
"""

EXAMPLES = r"""
- name: Probe the nodes
  node_probe:
    user: trainer
    id: 2000
  register: _preflight_probe
"""

RETURN = r"""
probe:
  description: What the node says of itself. Missing when it gave no answer.
  returned: the node answered
  type: dict
  contains:
    os_id: {description: "ID of /etc/os-release.", type: str, sample: debian}
    os_version: {description: "VERSION_ID of /etc/os-release.", type: str, sample: "12"}
    codename: {description: "VERSION_CODENAME of /etc/os-release.", type: str, sample: bookworm}
    arch: {description: "Machine architecture.", type: str, sample: x86_64}
    python: {description: "Python of the system, major and minor.", type: str, sample: "3.11"}
    glibc: {description: "The C library.", type: str, sample: "2.36"}
    nvidia_driver: {description: "Version of the NVIDIA driver that is loaded; empty without.", type: str}
    cuda: {description: "Version of the CUDA toolkit, by its nvcc; empty without.", type: str, sample: "13.0"}
    hostname: {description: "Host name.", type: str, sample: node-1}
    machine_id: {description: "/etc/machine-id.", type: str}
    addresses: {description: "All its IP addresses; null without the command ip.", type: list, elements: str}
    interfaces: {description: "Name, address and prefix length of each of them.", type: list, elements: dict}
    gpus: {description: "How many NVIDIA GPUs the driver has.", type: int}
    init: {description: "Name of process 1.", type: str, sample: systemd}
    container: {description: "Whether the node is a container.", type: bool}
    user: {description: "The account asked about.", type: str}
    id: {description: "The uid and gid asked about.", type: int}
    user_id: {description: "The uid that the account has; null without the account.", type: int}
    group_id: {description: "The gid that the group has; null without the group.", type: int}
    id_owner: {description: "The account that has the wanted uid; null when it is free.", type: str}
    group_id_owner: {description: "The group that has the wanted gid; null when it is free.", type: str}
    python_apt: {description: "Whether the interpreter has python3-apt.", type: bool}
    sshd_drop_ins: {description: "Whether sshd reads /etc/ssh/sshd_config.d/*.conf.", type: bool}
    disk_free_mb: {description: "Free space where /opt lies, in MiB.", type: int}
    stacks: {description: "Ids of the stacks that are C(installed), C(current) and C(former).", type: dict}
    data: {description: "The sha256 of each file of the sample scripts' data.", type: dict}
    time: {description: "The node's clock, in seconds since 1970.", type: float}
    root: {description: "Whether the module ran as root.", type: bool}
skew:
  description: Seconds by which the node's clock is ahead of the controller's.
  returned: the node answered
  type: float
unreachable_reason:
  description: Why there is no answer, in the words of ssh, sudo or Python, on one line.
  returned: the node gave no answer
  type: str
unfit:
  description: What in its answer is of a form that no node gives; nothing of such an answer is used.
  returned: the node answered, and strangely
  type: str
login:
  description: How Ansible tried to log in, and the same as an ssh command.
  returned: always
  type: dict
"""

CONTAINER_MARKS = (Path("/run/systemd/container"), Path("/run/.containerenv"), Path("/.dockerenv"))
SSHD_CONFIG = Path("/etc/ssh/sshd_config")
STACK = re.compile("[0-9a-f]{12}")
DROP_INS = {"/etc/ssh/sshd_config.d/*.conf", "sshd_config.d/*.conf"}


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def interfaces(ip_json: str) -> list[dict[str, Any]]:
    return [
        {"name": link["ifname"], "address": info["local"], "prefix": info["prefixlen"]}
        for link in json.loads(ip_json)
        for info in link.get("addr_info", ())
        if "local" in info
    ]


def system_python(path: Path) -> str:
    """The one that makes virtual environments, whatever runs this module: Debian names it by its version."""
    return path.resolve().name[len("python") :]


def driver_version(told: str) -> str:
    """From /proc/driver/nvidia/version, of the proprietary and of the open module."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", told)
    return match[1] if match else ""


def toolkit_version(told: str) -> str:
    """From nvcc --version."""
    match = re.search(r"release (\d+\.\d+)", told)
    return match[1] if match else ""


def cuda(module: AnsibleModule) -> str:
    nvcc = module.get_bin_path("nvcc", opt_dirs=["/usr/local/cuda/bin"])
    return toolkit_version(module.run_command([nvcc, "--version"])[1]) if nvcc else ""


def includes_drop_ins(config: str) -> bool:
    for line in config.splitlines():
        keyword, *values = line.replace("=", " ").split() or [""]
        # What follows a Match line counts for some connections only.
        if keyword.lower() == "match":
            return False
        if keyword.lower() == "include" and DROP_INS & {value.strip('"') for value in values}:
            return True
    return False


def free_mib(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free // 2**20


def stacks(root: Path) -> dict[str, Any]:
    return {
        "current": stack_of(root / "current"),
        "former": stack_of(root / "former"),
        "installed": sorted(
            path.parent.name for path in root.glob("stacks/*/manifest.json") if STACK.fullmatch(path.parent.name)
        ),
    }


def stack_of(link: Path) -> str:
    return link.readlink().name if (link / "manifest.json").exists() and STACK.fullmatch(link.readlink().name) else ""


def sums(folder: Path) -> dict[str, str]:
    return {path.name: checksum(path) for path in folder.iterdir()} if folder.is_dir() else {}


def checksum(path: Path) -> str:
    """Empty for what is no file of ours: those are small."""
    ours = path.is_file() and path.stat().st_size < 1 << 26
    return hashlib.sha256(path.read_bytes()).hexdigest() if ours else ""


def account(user: str, wanted: int) -> dict[str, Any]:
    return {
        "user": user,
        "id": wanted,
        "user_id": find(pwd.getpwnam, user, "pw_uid"),
        "group_id": find(grp.getgrnam, user, "gr_gid"),
        "id_owner": find(pwd.getpwuid, wanted, "pw_name"),
        "group_id_owner": find(grp.getgrgid, wanted, "gr_name"),
    }


def find(lookup: Any, key: str | int, field: str) -> Any:
    try:
        return getattr(lookup(key), field)
    except KeyError:
        return None


def host_interfaces(module: AnsibleModule) -> list[dict[str, Any]] | None:
    ip = module.get_bin_path("ip")
    return interfaces(module.run_command([ip, "-j", "addr"], check_rc=True)[1]) if ip else None


def probe(module: AnsibleModule) -> dict[str, Any]:
    release = os_release()
    links = host_interfaces(module)
    return {
        "os_id": release.get("ID", ""),
        "os_version": release.get("VERSION_ID", ""),
        "codename": release.get("VERSION_CODENAME", ""),
        "arch": platform.machine(),
        "python": system_python(Path("/usr/bin/python3")),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2],
        "nvidia_driver": driver_version(read(Path("/proc/driver/nvidia/version"))),
        "cuda": cuda(module),
        "hostname": socket.gethostname(),
        "machine_id": read(Path("/etc/machine-id")),
        "addresses": links and [link["address"] for link in links],
        "interfaces": links or [],
        "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "init": read(Path("/proc/1/comm")),
        "container": any(mark.exists() for mark in CONTAINER_MARKS),
        **account(module.params["user"], module.params["id"]),
        "python_apt": importlib.util.find_spec("apt") is not None,
        "sshd_drop_ins": includes_drop_ins(read(SSHD_CONFIG)),
        "disk_free_mb": free_mib(Path("/opt")),
        "stacks": stacks(Path("/opt/farandole")),
        "data": sums(Path("/opt/farandole/data/mnist")),
        "time": time.time(),
        "root": os.geteuid() == 0,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "id": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, probe=probe(module))


if __name__ == "__main__":
    main()
