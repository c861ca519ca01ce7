#!/usr/bin/python
"""The node's part of action node_probe: report what the node is, without changing it."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import platform
import pwd
import re
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.contents import drift, trees
from ansible_collections.farandole.cluster.plugins.module_utils.machine import SSHD_CONFIG, machine, read

STACK = re.compile("[0-9a-f]{12}")
# If looking at a stack takes longer, the node is asked once more, and may take as long as it needs.
LOOK_S = 8
DROP_INS = {"/etc/ssh/sshd_config.d/*.conf", "sshd_config.d/*.conf"}


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
    """The version of the Python that creates virtual environments, which may not be the one that runs this module."""
    return path.resolve().name[len("python") :]


def driver_version(text: str) -> str:
    """The version in /proc/driver/nvidia/version, of the proprietary or the open kernel module."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else ""


def toolkit_version(text: str) -> str:
    """The version in the output of nvcc --version."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else ""


def cuda(module: AnsibleModule) -> str:
    nvcc = module.get_bin_path("nvcc", opt_dirs=["/usr/local/cuda/bin"])
    return toolkit_version(module.run_command([nvcc, "--version"])[1]) if nvcc else ""


def includes_drop_ins(config: str) -> bool:
    for line in config.splitlines():
        keyword, *values = line.replace("=", " ").split() or [""]
        # What follows a Match line applies to some connections only.
        if keyword.lower() == "match":
            return False
        if keyword.lower() == "include" and DROP_INS & {value.strip('"') for value in values}:
            return True
    return False


def free_mib(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free // 2**20


def stacks(root: Path, *, note: bool = False, patient: bool = False) -> dict[str, Any]:
    current = stack_of(root / "current")
    complete = {path.parent.name for path in root.glob("stacks/*/manifest.json") if STACK.fullmatch(path.parent.name)}
    # A stack that is no longer what was installed is installed again.
    damaged: list[str] | None = []
    if current:
        damaged = changed(root, current, note) if patient else in_time(LOOK_S, lambda: changed(root, current, note))
    complete -= set(damaged or ())
    return {
        "current": current,
        "former": stack_of(root / "former"),
        "installed": sorted(complete),
        "late": damaged is None,
        # As after a run that was killed, or while a job used a surplus stack.
        "left": (root / "removing").exists(),
    }


def changed(root: Path, stack: str, note: bool) -> list[str]:
    """Those of a stack and the one below it that have changed. What was only touched is not read twice."""
    if not drift(root, stack, note=note):
        return []
    names = [tree.name for tree in trees(root / "stacks" / stack)]
    return [name for name in names if (root / "stacks" / name / "manifest.json").exists() and drift(root, name)]


def in_time(seconds: float, work: Callable[[], list[str]]) -> list[str] | None:
    """What a function returns; None if that takes longer, or if it fails."""
    output, target = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(target, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(target)
    try:
        select.select([output], [], [], seconds)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(output) as file:
        said = file.read()
    return json.loads(said) if said else None


def stack_of(link: Path) -> str:
    return link.readlink().name if (link / "manifest.json").exists() and STACK.fullmatch(link.readlink().name) else ""


def sums(folder: Path) -> dict[str, str]:
    return {path.name: checksum(path) for path in folder.iterdir()} if folder.is_dir() else {}


def checksum(path: Path) -> str:
    """The sha256 of a file; empty for anything else, and for files larger than ours."""
    ours = path.is_file() and path.stat().st_size < 1 << 26
    return hashlib.sha256(path.read_bytes()).hexdigest() if ours else ""


def let_in(file: Path) -> list[str] | None:
    """The addresses that our firewall lets in; null without one."""
    return (
        re.findall(r"[0-9a-f.:]+", " ".join(re.findall(r"elements = {(.*?)}", read(file)))) if file.exists() else None
    )


def account(user: str, wanted: int) -> dict[str, Any]:
    """The ids of an account and its group, null without one, and who has the intended ones, null if they are free."""
    return {
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
        "accounts": {user: account(user, int(number)) for user, number in module.params["accounts"].items()},
        "sshd_drop_ins": includes_drop_ins(read(SSHD_CONFIG)),
        "disk_free_mb": free_mib(Path("/opt")),
        "stacks": stacks(
            Path("/opt/farandole"), note=os.geteuid() == 0 and module.params["note"], patient=module.params["patient"]
        ),
        "data": sums(Path("/opt/farandole/data/mnist")),
        "time": time.time(),
        "root": os.geteuid() == 0,
        "firewall": let_in(Path("/etc/farandole/firewall.nft")),
        "machine": machine(module.params["user"], os.geteuid() == 0),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "accounts": {"type": "dict", "required": True},
            "user": {"type": "str", "default": ""},
            "note": {"type": "bool", "default": False},
            "patient": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, probe=probe(module))


if __name__ == "__main__":
    main()
