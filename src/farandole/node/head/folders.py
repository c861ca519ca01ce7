"""What a run gets of a folder, from the head or from a control machine, and what is refused before."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from pathlib import Path
from typing import NoReturn

from farandole.node.head import runs
from farandole.node.head.fetched import STAGED, is_git
from farandole.node.head.runs import chosen
from farandole.node.head.system import RefusedError, ran, reason


def filters(folder: Path) -> tuple[list[str], str]:
    """What a run does not get of a folder, as options and input of rsync: what git ignores, and .farandoleignore."""
    options = ["--exclude=.git", f"--exclude={STAGED}*", "--filter=:- .farandoleignore", "--exclude-from=-"]
    listed = ignored(folder)
    if listed is None:
        # Not a checkout, but .gitignore means the same.
        with tempfile.TemporaryDirectory() as empty:
            git("init", "--quiet", "--bare", empty)
            listed = ignored(folder, f"--git-dir={empty}", f"--work-tree={folder}")
    if listed is None:
        # There is no git; rsync reads most of it in the same way.
        return [*options, "--filter=:- .gitignore"], ""
    paths = (re.sub(r"([\\*?[])", r"\\\1", path) for path in listed.split("\0") if path)
    return options, "".join(f"/{path}\n" for path in paths if "\n" not in path)


def ignored(folder: Path, *where: str) -> str | None:
    """What git ignores in a folder."""
    asked = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    return git("-C", str(folder), *where, *asked)


def git(*arguments: str) -> str | None:
    """What git prints; None if it fails, or is not there."""
    try:
        done = ran("git", *arguments)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout


def refuse_early(command: list[str], fetch: list[str], folder: Path) -> None:
    """Refuse what cannot work before anything is copied."""
    python = re.fullmatch(r"python[\d.]*", Path(command[0]).name)
    script = next((word for word in command[1:] if not word.startswith("-")), "") if python else command[0]
    if python and command[1:2] and command[1] in ("-m", "-c"):
        script = ""
    if ("/" in script or script.endswith(".py")) and not (folder / script).exists():
        raise RefusedError(f"there is no {script} in this folder, and every node gets this folder alone")
    refuse_outside(fetch)


def refuse_outside(fetch: list[str]) -> None:
    """Refuse results that are not below a run's folder."""
    for path in fetch:
        parts = Path(path).parts
        if Path(path).is_absolute() or not parts or ".." in parts or any(map(is_git, parts)):
            raise RefusedError(f"--fetch {path}: name something below this folder")


def sent(name: str) -> Path:
    """The folder that a control machine has sent, by what it calls it."""
    if not re.fullmatch("[0-9a-f]{16}", name):
        raise RefusedError(f"{name} is no folder that was sent")
    return runs.RUNS / ".sent" / name


def locked(folder: Path) -> int:
    """Lock a folder that was sent, so that it is not copied while it changes."""
    handle = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def copy(folder: Path, code: Path, options: list[str], patterns: str) -> None:
    """Copy a folder to a new run."""
    done = ran("rsync", "--archive", *options, f"{folder}/", f"{code}/", input=patterns)
    if done.returncode:
        raise RefusedError(f"{folder} could not be copied: {reason(done.stderr)}")


def receive(name: str, arguments: list[str]) -> NoReturn:
    """Be the rsync that gets the files of a control machine."""
    folder = sent(name)
    for path in (folder.parents[1], folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    # rsync keeps it until it ends.
    os.set_inheritable(locked(folder), True)
    become_rsync(folder, arguments)


def give(name: str, arguments: list[str]) -> NoReturn:
    """Be the rsync that sends the results of a run."""
    become_rsync(chosen(name).code, arguments)


def become_rsync(folder: Path, arguments: list[str]) -> NoReturn:
    os.chdir(folder)
    os.execvp("rsync", ["rsync", *arguments])  # noqa: S606
