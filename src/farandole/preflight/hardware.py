"""Validation of what a node reports about its hardware, its disks and the job user's shells."""

from collections.abc import Mapping
from typing import Any

from farandole.core.schema import UnfitError, fields, many, named, optional, row, text, whole, words, yes_or_no

SIZE = whole(1 << 53)
NAME = words(r"[\w.:@+~-]{1,64}")
FLAG = words(r"[a-z0-9_]{1,16}")
SHOWN_PATH = text(160)
# A GPU's address on the bus, and the number of the error.
XID = row(NAME, whole(10_000))
PLACE = fields(
    {
        "mount": SHOWN_PATH,
        "noexec": yes_or_no,
        "read_only": yes_or_no,
        "free_mb": optional(SIZE),
        "free_inodes": optional(whole((1 << 64) - 1)),
    }
)
SHELL = fields(
    {
        "commands": named(FLAG, SHOWN_PATH),
        "libraries": many(SHOWN_PATH),
        "packages": many(SHOWN_PATH),
        "variables": many(words("LD_PRELOAD|PYTHONHOME")),
        "nofile": optional(SIZE),
    }
)


def shell(value: Any) -> Mapping[str, Any] | None:
    """What a job user's shell has said; anything else than that is silence, as its owner decides what it prints."""
    try:
        said: Mapping[str, Any] = SHELL(value)
    except UnfitError:
        return None
    return said


MACHINE = fields(
    {
        "up_s": SIZE,
        "cpu": optional(many(FLAG)),
        "memory_mb": SIZE,
        "places": fields(dict.fromkeys(("/opt", "/tmp", "/var", "home", "shm"), PLACE)),  # noqa: S108
        "ceiling": fields({"nofile": optional(SIZE), "memlock": optional(SIZE)}),
        "links": named(NAME, fields({"mtu": SIZE, "speed": optional(SIZE), "duplex": words("|half|full")})),
        "loopback_names": many(text(64)),
        "own_queue": words(r"|/etc/slurm(-llnl)?/slurm\.conf"),
        "packages": named(NAME, words(r"[\w.:+~-]{1,100}")),
        "kernel": words(r"[\w.+~-]{1,64}"),
        "gpus": fields(
            {
                "found": whole(1024),
                "library": words(r"|\d{1,9}(\.\d{1,9}){0,5}"),
                "ecc": named(NAME, SIZE),
                "xids": many(XID),
            }
        ),
        "rdma": named(words(r"[\w.-]{1,64}/\d{1,3}"), fields({"active": yes_or_no, "card": words(r"|[\w.-]{1,15}")})),
        "sshd": optional(
            fields(dict.fromkeys(("own", "AllowUsers", "DenyUsers", "AllowGroups", "DenyGroups"), many(text(300))))
        ),
        "shells": named(words("login|ssh"), shell),
    }
)
