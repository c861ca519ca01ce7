#!/usr/bin/python
"""Fetch a packed stack, check it, unpack it beside the others, prove that it starts."""

from __future__ import annotations

DOCUMENTATION = """
module: stack_install
short_description: Install a packed stack beside those that are there
description:
  - Fetches the archive, checks its sha256 before anything is unpacked, unpacks it in a folder of its own, looks at what
    came, and moves it into place. It counts as installed when its C(manifest.json) is there; that comes last, after its
    programs have run, as O(user) and never as root.
  - An archive brings O(id) and O(mpi) and nothing else, as plain files, folders and links that only root can change.
  - An OpenMPI that is there already and has other contents is replaced.
  - Whatever a run that was killed left behind is swept away first.
options:
  id:
    description: The stack.
    type: str
    required: true
  mpi:
    description: The key of its OpenMPI.
    type: str
    required: true
  user:
    description: The account that tries it.
    type: str
    required: true
  url:
    description: Where the archive is.
    type: str
    required: true
  sha256:
    description: What it must be.
    type: str
    required: true
  size:
    description: Its bytes.
    type: int
    required: true
  unpacked:
    description: Its bytes when it is unpacked.
    type: int
    required: true
  modules:
    description: The Python modules that have to load.
    type: list
    elements: str
    default: []
  root:
    description: Below which stacks live.
    type: path
    default: /opt/farandole
author: Farandole
"""

EXAMPLES = """
- name: Install the stack
  stack_install:
    id: 0123456789ab
    mpi: ba9876543210
    user: trainer
    url: http://node-1:8480/stacks/0123456789ab.debian-12-x86_64.tar.zst
    sha256: 3b1f...
    size: 500000000
    unpacked: 2000000000
    modules: [horovod.torch]
"""

RETURN = """
seconds:
  description: How long fetching, unpacking and proving took.
  type: dict
  returned: when something was installed
"""

import os
import shutil
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ansible.module_utils import unprivileged
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.contents import LIST, digest, found, text, walk
from ansible.module_utils.depot import FILE, fetch
from ansible.module_utils.folders import alone, aside, remove, sweep

# Room that the rest of the machine keeps.
RESERVE = 256 << 20
OLDER = "make room there, or lower stack_keep so that older stacks go"


def refuse_without_room(module: AnsibleModule, root: Path) -> None:
    """Before the first byte is fetched."""
    need = module.params["size"] + module.params["unpacked"] + RESERVE
    free = shutil.disk_usage(root).free
    if free < need:
        module.fail_json(
            msg=f"{root} has {free >> 20} MiB free, and the stack needs {need >> 20} MiB while it is installed: {OLDER}"
        )


def unpack(module: AnsibleModule, archive: Path, folder: Path) -> None:
    """Into a folder of its own, which nobody else may enter yet."""
    folder.mkdir()
    code, _, err = module.run_command(
        ["tar", "--extract", "--zstd", "--no-same-owner", "--file", str(archive), "--directory", str(folder)]
    )
    if code:
        module.fail_json(msg=f"the stack does not unpack below {folder}: {err.strip()[-500:]}")
    if wrong := misfit(folder, module.params["id"], module.params["mpi"]):
        module.fail_json(
            msg=f"the archive of stack {module.params['id']} is refused: {wrong}. Nothing of it was used; whoever is "
            "root on the builder decides what is in it: look at that node before you build again"
        )


def misfit(folder: Path, stack: str, mpi: str) -> str:
    """The first thing in an archive that does not belong in a stack; empty if there is none."""
    due = {"stacks", f"stacks/{stack}", "mpi", f"mpi/{mpi}"}
    hard: Counter[int] = Counter()
    links: dict[int, tuple[str, int]] = {}
    for path, entry in walk(folder, ()):
        about = entry.stat(follow_symlinks=False)
        if wrong := out_of_place(path, about, due) or unsafe(about):
            return f"{path!a} {wrong}"
        if stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
            hard[about.st_ino] += 1
            links[about.st_ino] = path, about.st_nlink
    for inode, (path, count) in links.items():
        if hard[inode] != count:
            return f"{path!a} is a link to something outside"
    manifest = folder / "stacks" / stack / "manifest.json"
    missing = [path for path in sorted(due) if not (folder / path).is_dir()]
    if missing or manifest.is_symlink() or not manifest.is_file():
        return f"{(missing or ['its manifest.json'])[0]} is not in it"
    link = manifest.with_name("mpi")
    return "" if link.is_symlink() and str(link.readlink()) == f"../../mpi/{mpi}" else "its mpi leads elsewhere"


def out_of_place(path: str, about: os.stat_result, due: set[str]) -> str:
    """Two trees are due, and the folders that lead to them."""
    if path in due:
        return "" if stat.S_ISDIR(about.st_mode) else "is no folder"
    return "" if path.count("/") > 1 and "/".join(path.split("/")[:2]) in due else "does not belong in it"


def unsafe(about: os.stat_result) -> str:
    """What nothing in a stack may be."""
    mode = about.st_mode
    if stat.S_ISLNK(mode):
        return ""
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "is neither file nor folder nor link"
    if mode & (stat.S_ISUID | stat.S_ISGID):
        return f"has mode {stat.S_IMODE(mode):04o}, with which it would run as somebody else"
    if mode & stat.S_IWOTH:
        return f"has mode {stat.S_IMODE(mode):04o}, with which everybody could change it"
    return "" if about.st_uid == os.geteuid() else f"belongs to user {about.st_uid}"


def place(incoming: Path, root: Path, stack: str, mpi: str) -> None:
    """Move what came into its place, all but the manifest."""
    source, target = incoming / "mpi" / mpi, root / "mpi" / mpi
    if same(source, target):
        # What was made before there were lists gets its own.
        if (source / LIST).is_file():
            (source / LIST).replace(target / LIST)
    else:
        aside(root, target)
        source.rename(target)
    target = root / "stacks" / stack
    # A build that was not finished, or a stack whose manifest is gone.
    aside(root, target)
    (incoming / "stacks" / stack).rename(target)
    sweep(root)


def same(one: Path, other: Path) -> bool:
    """Whether two trees have the same contents."""
    return other.is_dir() and not other.is_symlink() and digest(text(found(one))) == digest(text(found(other)))


def prove(module: AnsibleModule, target: Path, incoming: Path) -> None:
    """Check that the unpacked programs start on this machine, as the job user: root never runs them."""
    imports = "; ".join(f"import {name}" for name in module.params["modules"])
    commands = [
        [str(target / "mpi/bin/mpirun"), "--version"],
        [str(target / "venv/bin/python"), "-c", imports],
    ]
    environment = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    for command in commands:
        try:
            code, words = unprivileged.run(command, module.params["user"], incoming, environment=environment)
        except OSError as error:
            # Such as a Python to which the environment leads and which is not on this machine.
            code, words = 1, str(error)
        if code:
            module.fail_json(
                msg=f"the stack was unpacked and does not run here, so it is not used: {' '.join(command)}: {words}"
            )


def install(module: AnsibleModule, root: Path) -> dict[str, float]:
    """All of it; how long each part took."""
    stack, incoming = module.params["id"], root / "incoming"
    for folder in (root / "stacks", root / "mpi"):
        folder.mkdir(parents=True, exist_ok=True)
    remove(incoming)
    sweep(root)
    refuse_without_room(module, root)
    incoming.mkdir(mode=0o700)
    marks = [time.monotonic()]
    archive, folder, target = incoming / "archive", incoming / "tree", root / "stacks" / stack
    try:
        fetch(module, module.params, archive, full=OLDER)
        marks.append(time.monotonic())
        unpack(module, archive, folder)
        archive.unlink()
        manifest = folder / "stacks" / stack / "manifest.json"
        manifest.rename(incoming / "manifest.json")
        place(folder, root, stack, module.params["mpi"])
        # What counts as installed must survive a loss of power.
        os.sync()
        marks.append(time.monotonic())
        prove(module, target, incoming)
        (incoming / "manifest.json").rename(target / "manifest.json")
        marks.append(time.monotonic())
    finally:
        remove(incoming)
    names = ("fetch", "unpack", "prove")
    return {name: round(end - begin, 1) for name, begin, end in zip(names, marks, marks[1:], strict=False)}


def main() -> None:
    """Install where it is not installed."""
    options: dict[str, Any] = {
        "id": {"type": "str", "required": True},
        "mpi": {"type": "str", "required": True},
        "user": {"type": "str", "required": True},
        **FILE,
        "unpacked": {"type": "int", "required": True},
        "modules": {"type": "list", "elements": "str", "default": []},
        "root": {"type": "path", "default": "/opt/farandole"},
    }
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    os.umask(0o022)
    root = Path(module.params["root"])
    manifest = root / "stacks" / module.params["id"] / "manifest.json"
    if module.check_mode or manifest.exists():
        module.exit_json(changed=not manifest.exists())
    try:
        with alone(root):
            if manifest.exists():
                module.exit_json(changed=False)
            seconds = install(module, root)
    except KeyError:
        module.fail_json(msg=f"there is no account {module.params['user']} here that could try the stack: run site.yml")
    except OSError as error:
        module.fail_json(msg=f"{root} cannot take the stack: {error}")
    module.exit_json(changed=True, seconds=seconds)


if __name__ == "__main__":
    main()
