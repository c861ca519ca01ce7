"""What a sound node says about its hardware, for tests."""

from __future__ import annotations

from typing import Any


def place(**changes: Any) -> dict[str, Any]:
    return {
        "mount": "/",
        "noexec": False,
        "read_only": False,
        "free_mb": 90_000,
        "free_inodes": 9_000_000,
    } | changes


def shell(**changes: Any) -> dict[str, Any]:
    return {
        "commands": {},
        "libraries": [],
        "packages": [],
        "variables": [],
        "nofile": 20_000,
    } | changes


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
        "shells": {},
    } | changes
