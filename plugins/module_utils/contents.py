"""Lists of the contents of folders, by which an incomplete or modified folder is recognised.

Modules on a node import this file, and the builder runs it as a program: python3 -c "$CONTENTS" TREE writes the list if
it is missing, and otherwise verifies the tree by it. With --beside STACK TREE... it prints what STACK lacks of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIST = "contents"
# Not listed: the list itself, and the file that marks a stack as complete.
NOT_LISTED = (LIST, "manifest.json", f"{LIST}.new", "manifest.json.new")
BLOCK = 1 << 20
# The kernel's clock for files goes in steps, which are shorter than this.
STEP_NS = 50_000_000
# The time of all files in an archive, 2020-01-01 UTC.
PACKED_S = 1_577_836_800
Entry = tuple[str, str, str]


def walk(tree: Path, skip: Collection[str] = NOT_LISTED) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below a folder with its relative path; symlinks are not followed."""
    pending = [(str(tree), "")]
    while pending:
        folder, prefix = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                if path in skip:
                    continue
                yield path, entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, f"{path}/"))


def sha256(path: str) -> str:
    """The sha256 of a file; a symlink is an error."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def entry_of(entry: os.DirEntry[str]) -> Entry:
    """The kind and mode of an entry, and the sha256 of a file or the target of a link."""
    mode = entry.stat(follow_symlinks=False).st_mode
    bits = f"{stat.S_IMODE(mode):04o}"
    if stat.S_ISREG(mode):
        return "file", bits, sha256(entry.path)
    if stat.S_ISLNK(mode):
        return "link", "", str(Path(entry.path).readlink())
    return ("folder" if stat.S_ISDIR(mode) else "device"), bits, ""


def scan(tree: Path, known: Mapping[str, Entry] | None = None, since: int = 0) -> dict[str, Entry]:
    """The entries of a tree by path, hashed in threads, because hashing releases the GIL.

    Those that are known are not read if neither they nor their folders were touched since then."""
    paths = dict(walk(tree))
    late = {path for path, entry in paths.items() if entry.stat(follow_symlinks=False).st_ctime_ns > since}
    if tree.stat().st_ctime_ns > since:
        late.add("")
    kept = {path for path in known or () if path in paths and not late & {path, path.rpartition("/")[0]}}
    read = [path for path in paths if path not in kept]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = pool.map(entry_of, [paths[path] for path in read])
        # Both have the same length; zip can check that only from Python 3.10 on.
        return dict(sorted([*zip(read, entries), *((path, (known or {})[path]) for path in kept)]))  # noqa: B905


def text(entries: Mapping[str, Entry]) -> str:
    """Format the entries as a list with one line of JSON each."""
    return "".join(f"{json.dumps([path, *entry])}\n" for path, entry in entries.items())


def digest(listed: str) -> str:
    """The sha256 that identifies a list."""
    return hashlib.sha256(listed.encode()).hexdigest()


def listed(tree: Path) -> str | None:
    """The list in a tree; None if it has none."""
    path = tree / LIST
    return path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else None


def parse(lines: str) -> dict[str, Entry] | None:
    """Parse a list into entries; None if it is damaged."""
    try:
        rows = [[str(word) for word in json.loads(line)] for line in lines.splitlines()]
        return {path: (kind, mode, what) for path, kind, mode, what in rows}
    except (ValueError, TypeError, RecursionError):
        return None


def differences(wanted: Mapping[str, Entry], present: Mapping[str, Entry]) -> list[str]:
    """Describe every difference, each with its path."""
    problems = []
    for path in sorted({*wanted, *present}):
        want, have = wanted.get(path), present.get(path)
        if want == have:
            continue
        if have is None:
            problems.append(f"{path} is missing")
        elif want is None:
            problems.append(f"{path} is unexpected")
        elif want[0] != have[0]:
            problems.append(f"{path} is a {have[0]} instead of a {want[0]}")
        elif want[2] != have[2]:
            problems.append(f"{path} has different content")
        else:
            problems.append(f"{path} has mode {have[1]} instead of {want[1]}")
    return problems


def verify(tree: Path, known: Collection[str] = (), since: int = 0) -> list[str] | None:
    """Verify a tree by its list, whose valid digests are in `known` if they are known; return what is wrong with it.

    What was not touched since then, if that is told, is taken to be what the list says, unless the list was touched.
    None means that it cannot be verified: it has no list, and no digest is known."""
    if not tree.is_dir():
        return [f"{tree.name} is missing"]
    lines = listed(tree)
    if lines is None and not known:
        return None
    trusted = since and lines is not None and (tree / LIST).lstat().st_ctime_ns <= since
    present = scan(tree, parse(lines or "") if trusted else None, since)
    if digest(text(present)) in known:
        return []
    if lines is None:
        return ["it is not what was built; without a list of its contents, the differences are unknown"]
    wanted = parse(lines)
    if wanted is None:
        return [f"{LIST} is damaged"]
    if problems := differences(wanted, present):
        return problems
    return [f"{LIST} differs from the list written at build time"] if known else []


def touched(tree: Path, since: int) -> bool:
    """Whether anything below a folder was changed, added or removed later: its ctime is, which nobody can set back."""
    return any(entry.stat(follow_symlinks=False).st_ctime_ns > since for _, entry in walk(tree))


def trees(folder: Path) -> list[Path]:
    """The folders of an installed stack: its own, its OpenMPI, and the stack to which it adds packages, if any."""
    links = [folder / "mpi", *([folder / "base"] if (folder / "base").is_symlink() else [])]
    return [folder, *(link.resolve() for link in links)]


def proven(manifest: Path) -> int:
    """Since when a stack is known to be whole: since it was unpacked, or as was noted later."""
    status = manifest.stat()
    # Earlier versions left the time of the archive.
    return status.st_ctime_ns if status.st_mtime == PACKED_S else min(status.st_ctime_ns, status.st_mtime_ns)


def drift(root: Path, stack: str, *, note: bool = False) -> list[str]:
    """What has changed in an installed stack since it was known to be whole; if it is nothing, that may be noted."""
    folder = root / "stacks" / stack
    since, now = proven(folder / "manifest.json"), time.time_ns()
    # If nothing was touched, this takes a fraction of a second.
    found = {tree: verify(tree, since=since) for tree in trees(folder) if not tree.is_dir() or touched(tree, since)}
    # Not of a tree that cannot be verified.
    if note and found and all(problems == [] for problems in found.values()):
        os.utime(folder / "manifest.json", ns=(now - STEP_NS, now - STEP_NS))
    return [
        f"in {tree.parent.name}/{tree.name}, {problem}"
        for tree, problems in found.items()
        for problem in problems or ()
    ]


def beside(stack: Path, names: Sequence[str]) -> Iterator[str]:
    """What of these trees has to be sent to a machine that has a stack: all but files with contents that it has."""
    having = {what for tree in trees(stack) for kind, _, what in entries(tree).values() if kind == "file"}
    for name in names:
        yield name
        yield from (f"{name}/{mark}" for mark in (LIST, "manifest.json") if Path(name, mark).exists())
        for path, (kind, _, what) in entries(Path(name)).items():
            if kind != "file" or what not in having:
                yield f"{name}/{path}"


def entries(tree: Path) -> dict[str, Entry]:
    """What the list of a tree says; nothing if there is none, or a damaged one."""
    return parse(listed(tree) or "") or {}


def short(problems: list[str], shown: int = 3) -> str:
    """Format the first few problems as printable ASCII, whatever the files are called."""
    more = f"; {len(problems) - shown} more" if len(problems) > shown else ""
    return ascii("; ".join(problems[:shown]))[1:-1] + more


def write(tree: Path) -> str:
    """Write the list of a tree and return its sha256."""
    lines = text(scan(tree))
    draft = tree / f"{LIST}.new"
    draft.write_text(lines)
    draft.replace(tree / LIST)
    return digest(lines)


def main() -> None:
    """Write the list of a tree, or verify the tree by its list; print the list's sha256."""
    if sys.argv[1] == "--beside":
        sys.stdout.write("".join(f"{path}\0" for path in beside(Path(sys.argv[2]), sys.argv[3:])))
        return
    tree = Path(sys.argv[1])
    lines = listed(tree)
    if lines is None:
        print(write(tree))
    elif problems := verify(tree):
        sys.exit(f"error: {tree} is not what was built: {short(problems)}")
    else:
        print(digest(lines))


if __name__ == "__main__":
    main()
