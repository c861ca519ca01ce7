"""What a sound node says of itself, and what preflight makes of such answers, for tests."""

import json
from pathlib import Path
from typing import Any

from farandole.inventory import facts
from farandole.preflight.answer import ssh_command

from .loading import act


def place(**changes: Any) -> dict[str, Any]:
    return {"mount": "/", "noexec": False, "read_only": False, "free_mb": 90_000, "free_inodes": 9_000_000} | changes


def shell(**changes: Any) -> dict[str, Any]:
    return {"commands": {}, "libraries": [], "packages": [], "variables": [], "nofile": 20_000} | changes


def machine(**changes: Any) -> dict[str, Any]:
    return {
        "up_s": 5_000,
        "cpu": ["avx", "avx2", "f16c", "fma"],
        "memory_mb": 16_000,
        "places": {name: place() for name in ("/opt", "/tmp", "/var", "home")}  # noqa: S108
        | {"shm": place(mount="/dev/shm", noexec=True)},  # noqa: S108
        "ceiling": {"nofile": None, "memlock": None},
        "links": {"eth0": {"mtu": 1500, "speed": 10_000, "duplex": "full"}},
        "loopback_names": ["node-1"],
        "own_queue": "",
        "packages": {"libc6": "2.36-9"},
        "kernel": "6.1.0-40-amd64",
        "gpus": {"found": 0, "library": "", "ecc": {}, "xids": []},
        "rdma": {},
        "sshd": None,
        "shells": {},
    } | changes


def probe(name: str = "node-1", address: str = "192.0.2.1", **changes: Any) -> dict[str, Any]:
    return {
        "os_id": "debian", "os_version": "12", "arch": "x86_64", "init": "systemd",
        "hostname": name, "machine_id": name, "addresses": ["127.0.0.1", address, "fe80::1"],
        "interfaces": [{"name": "eth0", "address": address, "prefix": 24}], "accounts": {}, "root": True,
        "sshd_drop_ins": True, "disk_free_mb": 100_000, "time": 1.0, "firewall": None, "gpus": 0,
        "stacks": {"current": "", "former": "", "installed": [], "late": False, "left": False},
        "nvidia_driver": "", "machine": machine(), **changes,
    }  # fmt: skip


def hosts_phase(variables: dict[str, Any], state: Path, *, check_mode: bool = False, **changes: Any) -> dict[str, Any]:
    """What preflight says of nodes that have answered, with what it has recorded."""
    given = {
        "phase": "hosts", "accounts": {}, "state_dir": str(state), "fabric_network": "", "stack": True,
        "cluster": facts.plain(facts.describe(variables["groups"], state, variables.get("ssh_trust_revoked", ()))),
        "network": "nothing", "on_bad_node": "stop", "bandwidth_share": 0.85, "bandwidth_floor": 0.0,
    }  # fmt: skip
    recorded = state / "preflight.json"
    result = act("preflight", {**given, **changes}, variables, check_mode=check_mode)
    return {**result, **(json.loads(recorded.read_text()) if recorded.exists() else {})}


def login(**changes: Any) -> dict[str, Any]:
    """How preflight logs in to a node."""
    plain = {"host": "192.0.2.1", "port": None, "user": "root", "key": None, "common_args": ""} | changes
    return {**plain, "command": ssh_command(plain), "account": plain["user"]}
