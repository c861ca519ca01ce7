"""What is mounted, which the kernel says without asking a server; also farandole.node.mounts, for other programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path("/proc/self/mountinfo")
# On the head: whose homes all nodes mount from here.
SHARED = Path("/etc/farandole/storage/home")
# A file system that a server provides may hang, so nothing is asked of it. What is mounted on first use is autofs until
# then.
REMOTE = re.compile(r"nfs|cifs|smb|autofs|fuse|ceph|lustre|gpfs|beegfs|9p|afs|gluster|ocfs2|gfs2|virtiofs")


class Mount(NamedTuple):
    """A mount point, and the type and the options of what is there."""

    point: str
    kind: str
    options: set[str]


def shared_homes() -> list[str]:
    return SHARED.read_text().split() if SHARED.exists() else []


def mounts_in(table: str) -> list[Mount]:
    """The lines of mountinfo, in which blanks in paths are escaped."""
    mounts = []
    for line in table.splitlines():
        own, _, other = line.partition(" - ")
        fields, source = own.split(), other.split()
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        mounts.append(Mount(point, source[0], {*fields[5].split(","), *source[2].split(",")}))
    return mounts
