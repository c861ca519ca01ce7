"""What a tree holds, line by line, so that a torn or changed one is told from a whole one.

A node's modules use it, and the builder runs it: python3 -c "$CONTENTS" TREE writes the list that is missing, and
holds the tree against one that is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIST = "contents"
# What is no part of it: the list itself, and the mark that a stack is whole.
APART = (LIST, "manifest.json", f"{LIST}.new", "manifest.json.new")
BLOCK = 1 << 20
Entry = tuple[str, str, str]


def walk(tree: Path, apart: Collection[str] = APART) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a folder by its path in it; links are not followed."""
    left = [(str(tree), "")]
    while left:
        folder, prefix = left.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                if path in apart:
                    continue
                yield path, entry
                if entry.is_dir(follow_symlinks=False):
                    left.append((entry.path, f"{path}/"))


def sha256(path: str) -> str:
    """Of a file and not of what a link leads to."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def entry_of(entry: os.DirEntry[str]) -> Entry:
    """Kind, mode, and the sha256 of a file or the target of a link."""
    mode = entry.stat(follow_symlinks=False).st_mode
    bits = f"{stat.S_IMODE(mode):04o}"
    if stat.S_ISREG(mode):
        return "file", bits, sha256(entry.path)
    if stat.S_ISLNK(mode):
        return "link", "", str(Path(entry.path).readlink())
    return ("folder" if stat.S_ISDIR(mode) else "device"), bits, ""


def found(tree: Path) -> dict[str, Entry]:
    """What is there; hashing lets other threads run."""
    paths = dict(walk(tree))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Of Python 3.10 on it has an argument that says so: they are equally long.
        return dict(sorted(zip(paths, pool.map(entry_of, paths.values()))))  # noqa: B905


def text(entries: Mapping[str, Entry]) -> str:
    """The list: a line of JSON each."""
    return "".join(f"{json.dumps([path, *entry])}\n" for path, entry in entries.items())


def digest(listed: str) -> str:
    """By which a list is known."""
    return hashlib.sha256(listed.encode()).hexdigest()


def listed(tree: Path) -> str | None:
    """The list that a tree brought, None without one."""
    path = tree / LIST
    return path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else None


def parse(lines: str) -> dict[str, Entry] | None:
    """A list as entries; None when it is damaged."""
    try:
        rows = [[str(word) for word in json.loads(line)] for line in lines.splitlines()]
        return {path: (kind, mode, what) for path, kind, mode, what in rows}
    except (ValueError, TypeError, RecursionError):
        return None


def differences(wanted: Mapping[str, Entry], there: Mapping[str, Entry]) -> list[str]:
    """Path and what is wrong with it."""
    words = []
    for path in sorted({*wanted, *there}):
        want, have = wanted.get(path), there.get(path)
        if want == have:
            continue
        if have is None:
            words.append(f"{path} is missing")
        elif want is None:
            words.append(f"{path} is none of it")
        elif want[0] != have[0]:
            words.append(f"{path} is a {have[0]} and was a {want[0]}")
        elif want[2] != have[2]:
            words.append(f"{path} has other contents")
        else:
            words.append(f"{path} has mode {have[1]} and had {want[1]}")
    return words


def proof(tree: Path, known: Collection[str] = ()) -> list[str] | None:
    """What is wrong with a tree, by what is known elsewhere of its list and by the list that it has; None when it was
    made without a list, so that nothing tells."""
    if not tree.is_dir():
        return [f"{tree.name} is missing"]
    there, lines = found(tree), listed(tree)
    if digest(text(there)) in known:
        return []
    if lines is None:
        return ["it is not what was built, and has no list of its contents that tells where"] if known else None
    wanted = parse(lines)
    if wanted is None:
        return [f"{LIST} is damaged"]
    if words := differences(wanted, there):
        return words
    return [f"{LIST} is not the list that was made with it"] if known else []


def short(words: list[str], shown: int = 3) -> str:
    """The first few, as plain text whatever a file is called."""
    more = f"; {len(words) - shown} more" if len(words) > shown else ""
    return ascii("; ".join(words[:shown]))[1:-1] + more


def write(tree: Path) -> str:
    """Make the list; its sha256."""
    lines = text(found(tree))
    draft = tree / f"{LIST}.new"
    draft.write_text(lines)
    draft.replace(tree / LIST)
    return digest(lines)


def main() -> None:
    """Write the list, or hold the tree against the one that it has; its sha256."""
    tree = Path(sys.argv[1])
    lines = listed(tree)
    if lines is None:
        print(write(tree))
    elif words := proof(tree):
        sys.exit(f"error: {tree} is not what was built: {short(words)}")
    else:
        print(digest(lines))


if __name__ == "__main__":
    main()
