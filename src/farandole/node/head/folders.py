"""What a run gets of a folder, and what comes back, whose links, modes and owners are not trusted: jobs wrote it."""

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from farandole.core.text import visible
from farandole.node.head import runs
from farandole.node.head.runs import RefusedError, chosen, ran, reason

# What git or a file system takes for .git: they ignore case, characters of no width, and some at the end.
NO_WIDTH = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
OF_GIT = re.compile(r"(\.git|git~\d)[ .]*(:.*)?", re.IGNORECASE | re.DOTALL)
# What git and this program obey in every folder.
OBEYED = {".gitignore", ".gitattributes", ".gitmodules", ".farandoleignore"}
# What rsync puts in front of what links lead to, so that nothing follows them.
MUNGED = "/rsyncd-munged/"
# What a command may take as JSON, in one variable of the environment.
LONGEST = 100 << 10
# With these options, rsync lists what is there, whether it copies it or not.
LISTING = ("--itemize-changes", "--itemize-changes", "--out-format=%i|%n")
# The folders into which it is fetched first.
STAGED = ".farandole-fetch-"


def filters(folder: Path) -> tuple[list[str], str]:
    """What a run does not get of a folder, as options and input of rsync: what git ignores, and .farandoleignore."""
    options = ["--exclude=.git", f"--exclude={STAGED}*", "--filter=:- .farandoleignore", "--exclude-from=-"]
    listed = ignored(folder)
    if listed is None:
        # There is no git; rsync reads most of it in the same way.
        return [*options, "--filter=:- .gitignore"], ""
    paths = (re.sub(r"([\\*?[])", r"\\\1", path) for path in listed.split("\0") if path)
    return options, "".join(f"/{path}\n" for path in paths if "\n" not in path)


def ignored(folder: Path) -> str | None:
    """What git ignores in a folder; None if there is no git."""
    here = ("git", "-C", str(folder))
    asked = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    try:
        done = ran(*here, *asked)
        if done.returncode:
            refuse_unread(folder, done.stderr)
            # Not a checkout, but .gitignore means the same.
            with tempfile.TemporaryDirectory() as empty:
                ran("git", "init", "--quiet", "--bare", empty)
                done = ran(*here, f"--git-dir={empty}", f"--work-tree={folder}", *asked)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout


def refuse_unread(folder: Path, said: str) -> None:
    """Refuse a checkout that git does not read: without its index, files that it tracks might count as ignored."""
    repository = next((at / ".git" for at in (folder, *folder.parents) if os.path.lexists(at / ".git")), None)
    if repository:
        raise RefusedError(
            f"there is {repository}, but git cannot tell which files it ignores in {folder}: "
            f"{(said.splitlines() or ['it says nothing'])[0]}. Run `git status` in this folder and mend what it says, "
            f"or remove {repository} if this is no checkout"
        )


def refuse_early(command: list[str], fetch: list[str], folder: Path) -> None:
    """Refuse what cannot work before anything is copied."""
    if len(json.dumps(command)) > LONGEST:
        raise RefusedError(f"the command is longer than {LONGEST >> 10} KiB: write a script into this folder")
    python = re.fullmatch(r"python[\d.]*", Path(command[0]).name)
    script = (
        next((word for word in command[1:] if word in ("-m", "-c") or word[:1] != "-"), "") if python else command[0]
    )
    # The nodes may have what is named by a whole path, and this machine may not.
    is_here = not script.startswith("/") and ("/" in script or script.endswith(".py"))
    if is_here and not (folder / script).exists():
        raise RefusedError(f"there is no {script} in this folder, and every node gets this folder alone")
    refuse_outside(fetch)


def refuse_outside(fetch: list[str]) -> None:
    """Refuse results that are not below a run's folder."""
    for path in fetch:
        parts = Path(path).parts
        if Path(path).is_absolute() or not parts or ".." in parts or any(map(is_git, parts)):
            raise RefusedError(f"--fetch {path}: name something below this folder")


def refuse_checkpoints(path: str) -> None:
    """Refuse checkpoints that are neither below a run's folder nor on storage that has a path of its own."""
    if path and not Path(path).is_absolute() and ({"..", "."} & {*Path(path).parts} or not Path(path).parts):
        raise RefusedError(f"--checkpoints {path}: name something below this folder, or a path that all nodes see")


def sent(name: str) -> Path:
    """The folder that a control machine has sent, by what it calls it."""
    if not re.fullmatch("[0-9a-f]{16}", name):
        raise RefusedError(f"{name} is not a folder that was sent")
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


def is_git(name: str) -> bool:
    """Whether git takes this name for that of a repository."""
    return OF_GIT.fullmatch(NO_WIDTH.sub("", name)) is not None


def deepest(folder: Path, path: str) -> Path:
    """The last folder on a path, without following links."""
    for part in Path(path).parts:
        if (folder / part).is_symlink() or not (folder / part).is_dir():
            break
        folder /= part
    return folder


@contextmanager
def staging(where: Path, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """A private folder for what is fetched, and the options with which rsync brings what another folder lacks."""
    try:
        forget_staged(where)
        staged = Path(tempfile.mkdtemp(prefix=STAGED, dir=where))
        handle = os.open(staged, os.O_RDONLY)
    except OSError as error:
        raise RefusedError(f"{where}: {error.strerror}") from None
    fcntl.flock(handle, fcntl.LOCK_EX)
    options = ["--relative", "--munge-links", "--no-perms", "--chmod=D777,F666", "--no-owner", "--no-group"]
    try:
        yield staged, [*options, "--no-devices", "--whole-file", f"--compare-dest={folder}"]
    finally:
        # An rsync that was interrupted may still write for a moment.
        for _ in range(20):
            shutil.rmtree(staged, ignore_errors=True)
            if not staged.exists():
                break
            time.sleep(0.1)
        os.close(handle)


def forget_staged(where: Path) -> None:
    """Remove what was left by a program that was killed while it fetched; those that are at work lock theirs."""
    for old in where.glob(f"{STAGED}*"):
        with suppress(OSError):
            handle = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                # Between its creation and its lock, it is empty.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid() and any(old.iterdir()):
                    shutil.rmtree(old)
            finally:
                os.close(handle)


def paths_in(listed: str) -> set[str]:
    """The paths that rsync lists, in which it writes some bytes as numbers."""
    paths = (os.fsencode(line.partition("|")[2].removesuffix("/")) for line in listed.split("\n"))
    return {os.fsdecode(re.sub(rb"\\#([0-7]{3})", lambda byte: bytes([int(byte[1], 8)]), path)) for path in paths}


def drop_older(staged: Path, folder: Path) -> None:
    """Remove what was fetched and is newer in a folder, as a rank that works there has written it since."""
    for path in staged.rglob("*"):
        with suppress(OSError):
            here = (folder / path.relative_to(staged)).lstat()
            if path.is_file() and here.st_mtime_ns > path.stat().st_mtime_ns:
                path.unlink()


def place(staged: Path, folder: Path, top: Path) -> Iterator[str]:
    """Move what was fetched into a folder, each file at once; yields what is refused, and what to do."""
    waiting = [Path()]
    if is_repository(staged, folder):
        waiting = []
        yield f"{top} is refused: with it, git would take {folder} for a repository, and run what is written there"
    for at in waiting:
        for name in sorted(os.listdir(staged / at)):  # noqa: PTH208
            here = at / name
            try:
                mode = (staged / here).lstat().st_mode
                if not (why := refusal(staged / here, folder / here, here, top)):
                    put(staged / here, folder / here, mode)
            except OSError as error:
                mode, why = 0, str(error.strerror)
            if why:
                yield visible(f"{here} is refused: {why}")
            elif stat.S_ISDIR(mode):
                waiting.append(here)


def refusal(source: Path, target: Path, here: Path, top: Path) -> str:
    """Why something that was fetched is refused, and what to do; empty if it is not."""
    mode = source.lstat().st_mode
    if not (here in top.parents or here.is_relative_to(top)):
        return f"it is not in {top}"
    if is_git(here.name) or (stat.S_ISDIR(mode) and is_repository(source, target)):
        return "git would take it for a repository, and run what is written there; let the program pack it with tar"
    if here.name.casefold() in OBEYED:
        return "it would say which files of this folder are sent or kept; give it another name, or copy it by hand"
    there = stat.S_IFMT(target.lstat().st_mode) if os.path.lexists(target) else 0
    if there and stat.S_ISDIR(mode) != (there == stat.S_IFDIR):
        return "here, a link, a file or a folder has that name; rename or remove it"
    if stat.S_ISLNK(mode):
        text = os.readlink(source).removeprefix(MUNGED)  # noqa: PTH115, a Path has lost the slash behind the mark
        inside = not leads_out(text, len(here.parts) - len(top.parts) - 1)
        return "" if inside else f"it is a link to {text}, which is not in {top}; let the program copy that there"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "it is not a regular file"


def is_repository(*folders: Path) -> bool:
    """Whether git would take for a repository what is in these folders together."""
    names = {name.casefold() for folder in folders if folder.is_dir() for name in os.listdir(folder)}  # noqa: PTH208
    return "head" in names and ("commondir" in names or {"objects", "refs"} <= names)


def leads_out(text: str, depth: int) -> bool:
    """Whether a link leads out of what is fetched, in which it lies so deep, or into a repository."""
    parts = Path(text).parts
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return text.startswith("/") or up > depth or ".." in parts[up:] or any(map(is_git, parts))


def put(source: Path, target: Path, mode: int) -> None:
    """Put something in its place; a file or a link replaces what is there, which is not followed."""
    if stat.S_ISDIR(mode):
        target.mkdir(exist_ok=True)
        return
    if stat.S_ISLNK(mode):
        text = os.readlink(source).removeprefix(MUNGED)  # noqa: PTH115
        source.unlink()
        source.symlink_to(text)
    source.replace(target)
