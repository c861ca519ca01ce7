#!/usr/bin/python
DOCUMENTATION = """
module: stack_install
short_description: Install a packed stack next to the existing ones
description:
  - Fetches the archive, checks its sha256, unpacks it to a separate folder, checks its contents, and moves it into
    place. A stack counts as installed once it has its C(manifest.json), which is added last, after its programs have
    run as O(user), never as root.
  - An archive may contain only O(id) and O(mpi), as plain files, folders and links that only root can change. With
    O(base), which must be installed, it contains O(id) only, which adds packages to that stack.
  - A stack, or an OpenMPI, whose contents have changed is replaced.
  - Leftovers of a killed run are removed first.
  - With O(former), the archive has only what that installed stack does not, and the rest is copied from it. Where that
    fails, O(whole) is fetched.
  - With O(peers), the archive is fetched from other nodes, piece by piece, and from O(url) only if none of them is of
    use. An unprivileged process passes it on to others; it ends by itself once they have it, or if none asks.
options:
  id: {description: Id of the stack., type: str, required: true}
  mpi: {description: Key of its OpenMPI., type: str, required: true}
  base: {description: Id of the stack to which it adds packages; empty for a stack of its own., type: str, default: ""}
  user: {description: Account that tests the stack., type: str, required: true}
  url: {description: URL of the archive., type: str, required: true}
  sha256: {description: Expected sha256 of the archive., type: str, required: true}
  size: {description: Size of the archive in bytes., type: int, required: true}
  unpacked: {description: Size in bytes once unpacked., type: int, required: true}
  former: {description: Id of the installed stack that has the rest; empty for none., type: str, default: ""}
  contents: {description: "With O(former), the digest of each tree's list.", type: dict, default: {}}
  whole: {description: "With O(former), the O(url), O(sha256) and O(size) of the whole archive.", type: dict}
  modules: {description: Python modules that must load., type: list, elements: str, default: []}
  pieces: {description: The sha256 of each piece of the archive., type: list, elements: str, default: []}
  peers:
    description: How this node takes part in passing the archive on.
    type: dict
    suboptions:
      address: {description: The address by which the others know this node., type: str, required: true}
      port: {description: The port of all of them., type: int, required: true}
      patience: {description: Seconds in which a source must have sent enough., type: int, required: true}
      sources:
        description: "Nodes to fetch it from, in this order, each with C(name) and C(address)."
        type: list
        elements: dict
        required: true
      children: {description: Addresses to which to send it., type: list, elements: str, required: true}
      grandchildren:
        description: Addresses to which to send it if what is between is of no use to them.
        type: list
        elements: str
        required: true
  root: {description: Folder that contains the stacks., type: path, default: /opt/farandole}
"""

import os
import shutil
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils import unprivileged
from ansible_collections.farandole.cluster.plugins.module_utils.contents import (
    LIST,
    digest,
    drift,
    scan,
    short,
    text,
    walk,
)
from ansible_collections.farandole.cluster.plugins.module_utils.depot import FILE, fetch
from ansible_collections.farandole.cluster.plugins.module_utils.folders import alone, aside, flush, remove, sweep
from ansible_collections.farandole.cluster.plugins.module_utils.peers import PEERS, Shared
from ansible_collections.farandole.cluster.plugins.module_utils.reuse import complete

# Disk space left for the rest of the machine.
RESERVE = 256 << 20
FREE_SPACE = "free some space there, or lower stack_keep to keep fewer stacks"


def refuse_without_space(module: AnsibleModule, root: Path) -> None:
    """Refuse before anything is fetched."""
    need = module.params["size"] + module.params["unpacked"] + RESERVE
    free = shutil.disk_usage(root).free
    if free < need:
        module.fail_json(
            msg=f"{root} has {free >> 20} MiB free, and the stack needs {need >> 20} MiB while it is installed: "
            f"{FREE_SPACE}"
        )


def unpack(module: AnsibleModule, archive: Path, folder: Path, root: Path) -> None:
    """Unpack an archive to a folder that other accounts cannot enter yet, complete it, and check its contents."""
    extract(module, archive, folder)
    archive.unlink()
    if former := module.params["former"]:
        wanted = {name: known for name, known in module.params["contents"].items() if (folder / name).is_dir()}
        try:
            why = complete(folder, root / "stacks" / former, wanted)
        except (OSError, ValueError) as error:
            why = str(error)
        if why:
            module.warn(f"the whole stack {module.params['id']} is fetched, as not all of it was in {former}: {why}")
            remove(folder)
            fetch(module, module.params["whole"], archive, full=FREE_SPACE)
            extract(module, archive, folder)
            archive.unlink()
    if wrong := misfit(folder, module.params["id"], module.params["mpi"], module.params["base"]):
        module.fail_json(
            msg=f"the archive of stack {module.params['id']} is refused: {wrong}. Nothing in it was used. Root on the "
            "builder decides what is in it: inspect that node before you build again"
        )


def extract(module: AnsibleModule, archive: Path, folder: Path) -> None:
    folder.mkdir()
    code, _, err = module.run_command(
        ["tar", "--extract", "--zstd", "--no-same-owner", "--file", str(archive), "--directory", str(folder)]
    )
    if code:
        module.fail_json(msg=f"the stack cannot be unpacked to {folder}: {err.strip()[-500:]}")


def misfit(folder: Path, stack: str, mpi: str, base: str = "") -> str:
    """The first thing in an archive that does not belong in a stack; empty if there is none."""
    allowed = {"stacks", f"stacks/{stack}"} if base else {"stacks", f"stacks/{stack}", "mpi", f"mpi/{mpi}"}
    hard: Counter[int] = Counter()
    links: dict[int, tuple[str, int]] = {}
    for path, entry in walk(folder, ()):
        about = entry.stat(follow_symlinks=False)
        if wrong := out_of_place(path, about, allowed) or unsafe(about):
            return f"{path!a} {wrong}"
        if stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
            hard[about.st_ino] += 1
            links[about.st_ino] = path, about.st_nlink
    for inode, (path, count) in links.items():
        if hard[inode] != count:
            return f"{path!a} is a hard link to something outside"
    manifest = folder / "stacks" / stack / "manifest.json"
    missing = [path for path in sorted(allowed) if not (folder / path).is_dir()]
    if missing or manifest.is_symlink() or not manifest.is_file():
        return f"{(missing or ['its manifest.json'])[0]} is not in it"
    for link, target in {"mpi": f"../../mpi/{mpi}", "base": f"../{base}" if base else None}.items():
        place = manifest.with_name(link)
        if (str(place.readlink()) if place.is_symlink() else None) != target:
            return f"its {link} points elsewhere"
    return ""


def out_of_place(path: str, about: os.stat_result, allowed: set[str]) -> str:
    """Why a path does not belong in an archive, which has its trees and the folders that contain them."""
    if path in allowed:
        return "" if stat.S_ISDIR(about.st_mode) else "is not a folder"
    return "" if path.count("/") > 1 and "/".join(path.split("/")[:2]) in allowed else "does not belong in it"


def unsafe(about: os.stat_result) -> str:
    """Why an entry is not allowed in any stack; empty if it is."""
    mode = about.st_mode
    if stat.S_ISLNK(mode):
        return ""
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "is not a file, folder or link"
    if mode & (stat.S_ISUID | stat.S_ISGID):
        return f"has mode {stat.S_IMODE(mode):04o}, which would run it as another account"
    if mode & stat.S_IWOTH:
        return f"has mode {stat.S_IMODE(mode):04o}, which lets every account change it"
    return "" if about.st_uid == os.geteuid() else f"belongs to user {about.st_uid}"


def place_mpi(source: Path, root: Path, target: Path) -> None:
    """Move an unpacked OpenMPI into place."""
    if same(source, target):
        # An OpenMPI from a version without lists gets one.
        if (source / LIST).is_file():
            (source / LIST).replace(target / LIST)
    else:
        aside(root, target)
        source.rename(target)


def place(incoming: Path, root: Path, stack: str, mpi: str) -> None:
    """Move the unpacked trees into place, without the manifest."""
    if (incoming / "mpi").exists():
        place_mpi(incoming / "mpi" / mpi, root, root / "mpi" / mpi)
    target = root / "stacks" / stack
    # An unfinished build, or a stack that has lost its manifest.
    aside(root, target)
    (incoming / "stacks" / stack).rename(target)
    sweep(root)


def same(tree: Path, other: Path) -> bool:
    """Whether two trees have the same contents."""
    return other.is_dir() and not other.is_symlink() and digest(text(scan(tree))) == digest(text(scan(other)))


def test(module: AnsibleModule, target: Path, incoming: Path) -> None:
    """Test as the job user that the unpacked programs start on this machine; root never runs them."""
    # Triton, which comes with a PyTorch for CUDA, crashes a process that has loaded TensorFlow before it.
    modules = sorted(module.params["modules"], key="horovod.tensorflow".__eq__)
    imports = "; ".join(f"import {name}" for name in modules)
    commands = [[str(target / "mpi/bin/mpirun"), "--version"], [str(target / "venv/bin/python"), "-c", imports]]
    environment = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    for command in commands:
        began = time.monotonic()
        try:
            code, output = unprivileged.run(command, module.params["user"], incoming, environment=environment)
            ending = unprivileged.ending(code, began) if code else ""
        except OSError as error:
            # For example, the environment links to a Python that this machine does not have.
            output, ending = str(error), "It did not start."
        if ending:
            module.fail_json(
                msg=f"the stack was unpacked but does not run here, so it is not used: {' '.join(command)}: "
                f"{unprivileged.plain(output) or 'it printed nothing.'}\n{ending}"
            )


def fetch_archive(module: AnsibleModule, archive: Path) -> dict[str, Any]:
    """Fetch the archive, from other nodes if they are to pass it on, and return from where it came."""
    if not (order := module.params["peers"]):
        fetch(module, module.params, archive, full=FREE_SPACE)
        return {}
    shared = Shared(module.params["pieces"], order, module.warn)
    fetch(module, module.params, archive, full=FREE_SPACE, get=shared.get)
    return {"source": shared.source, "retries": shared.retries}


def install(module: AnsibleModule, root: Path) -> dict[str, Any]:
    """Install the stack and return how long each part took, and from where it came."""
    stack, incoming = module.params["id"], root / "incoming"
    for folder in (root / "stacks", root / "mpi"):
        folder.mkdir(parents=True, exist_ok=True)
    remove(incoming)
    sweep(root)
    refuse_without_space(module, root)
    incoming.mkdir(mode=0o700)
    marks = [time.monotonic()]
    archive, folder, target = incoming / "archive", incoming / "tree", root / "stacks" / stack
    try:
        came = fetch_archive(module, archive)
        marks.append(time.monotonic())
        unpack(module, archive, folder, root)
        manifest = folder / "stacks" / stack / "manifest.json"
        manifest.rename(incoming / "manifest.json")
        place(folder, root, stack, module.params["mpi"])
        # What counts as installed must survive a power cut.
        flush(root)
        marks.append(time.monotonic())
        test(module, target, incoming)
        # That this is the time at which it was whole stays known if something touches all files.
        os.utime(incoming / "manifest.json")
        (incoming / "manifest.json").rename(target / "manifest.json")
        marks.append(time.monotonic())
    finally:
        remove(incoming)
    names = ("fetch", "unpack", "prove")
    parts = zip(names, marks, marks[1:], strict=False)
    return {**came, "seconds": {name: round(end - begin, 1) for name, begin, end in parts}}


def main() -> None:
    """Install the stack unless it is installed."""
    options: dict[str, Any] = {
        "id": {"type": "str", "required": True},
        "mpi": {"type": "str", "required": True},
        "user": {"type": "str", "required": True},
        "base": {"type": "str", "default": ""},
        **FILE,
        "unpacked": {"type": "int", "required": True},
        "former": {"type": "str", "default": ""},
        "contents": {"type": "dict", "default": {}},
        "whole": {"type": "dict"},
        "modules": {"type": "list", "elements": "str", "default": []},
        "pieces": {"type": "list", "elements": "str", "default": []},
        "peers": {"type": "dict", "options": PEERS},
        "root": {"type": "path", "default": "/opt/farandole"},
    }
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    os.umask(0o022)
    root = Path(module.params["root"])
    manifest = root / "stacks" / module.params["id"] / "manifest.json"
    try:
        changes = drift(root, module.params["id"]) if manifest.exists() else []
        if changes:
            module.warn(f"stack {module.params['id']} is installed again, because it was changed: {short(changes)}")
        missing = bool(changes) or not manifest.exists()
        if module.check_mode or not missing:
            module.exit_json(changed=missing)
        with alone(root):
            if changes:
                manifest.unlink(missing_ok=True)
            if manifest.exists():
                module.exit_json(changed=False)
            done = install(module, root)
    except KeyError:
        module.fail_json(msg=f"there is no account {module.params['user']} here to test the stack with: run site.yml")
    except OSError as error:
        module.fail_json(msg=f"the stack cannot be written to {root}: {error}")
    module.exit_json(changed=True, **done)


if __name__ == "__main__":
    main()
