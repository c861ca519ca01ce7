"""Complete a stack of which only that was sent what another installed stack does not have."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ansible_collections.farandole.cluster.plugins.module_utils.contents import digest, entries, listed, trees, verify


def complete(folder: Path, stack: Path, wanted: Mapping[str, str]) -> str:
    """Add the files that are missing in trees below a folder, from an installed stack; returns why that fails, if so.

    `wanted` are the digests of the lists of the trees, which decide what each file has to be."""
    having = {
        what: f"{tree}/{path}"
        for tree in trees(stack)
        for path, (kind, _, what) in entries(tree).items()
        if kind == "file"
    }
    for name, known in wanted.items():
        tree = Path(os.path.realpath(folder)) / name
        if digest(listed(tree) or "") != known:
            return f"the list of {name} is not the one that was made with it"
        for path, (kind, mode, what) in entries(tree).items():
            if kind == "file" and not os.path.lexists(f"{tree}/{path}"):
                if what not in having:
                    return f"stack {stack.name} does not have {path!a}"
                if not _copy(having[what], f"{tree}/{path}", int(mode, 8)):
                    return f"{path!a} leads to elsewhere"
        # The installed stack may have been changed, too.
        if problems := verify(tree, {known}):
            return problems[0]
    return ""


def _copy(source: str, target: str, mode: int) -> bool:
    """Copy a file to where nothing is, in a folder that is what its name says."""
    folder = os.path.dirname(target)  # noqa: PTH120, which would tidy the name up
    if os.path.realpath(folder) != folder:
        return False
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(reading, "rb") as old, os.fdopen(writing, "wb") as new:
        shutil.copyfileobj(old, new, 1 << 20)
        os.fchmod(writing, mode)
        # What is still in memory is written now, as that would set the time.
        new.flush()
        times = os.fstat(reading)
        os.utime(writing, ns=(times.st_atime_ns, times.st_mtime_ns))
    return True
