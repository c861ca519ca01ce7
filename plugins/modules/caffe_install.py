#!/usr/bin/python
DOCUMENTATION = """
module: caffe_install
short_description: Install the user's Intel Caffe
description:
  - Fetches the archive, checks its sha256 and each path in it, unpacks it to a separate folder and moves that into
    place.
  - Everything belongs to root, and nothing can be changed by others. Links may not lead out of the folder.
  - Keeps the one that was in use before, for jobs that still run.
  - Leftovers of a killed run are removed first.
options:
  url: {description: URL of the archive., type: str, required: true}
  sha256:
    description: Expected sha256 of the archive, whose first 16 digits name the folder.
    type: str
    required: true
  size: {description: Size of the archive in bytes., type: int, required: true}
  root: {description: Folder for it., type: path, default: /opt/farandole/caffe}
"""

import os
import posixpath
import shutil
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.contents import LIST, touched, verify, write
from ansible_collections.farandole.cluster.plugins.module_utils.depot import FILE, fetch
from ansible_collections.farandole.cluster.plugins.module_utils.folders import alone, aside, flush, link, remove, sweep

RESERVE = 256 << 20
PROGRAM = "bin/caffe"


class RefusedError(Exception):
    """Why an archive is not unpacked."""


def inner(path: str) -> str:
    """A path in the archive without needless parts; refused if it leads out of it."""
    plain = posixpath.normpath(path)
    if plain.startswith("/") or plain.split("/")[0] == "..":
        raise RefusedError(f"{path!a} leads out of it")
    return plain


def wanted(members: list[tarfile.TarInfo]) -> list[tarfile.TarInfo]:
    """The members with the paths, modes and owner that they get; refused if one of them is not safe."""
    members_by_name: dict[str, tarfile.TarInfo] = {}
    for member in members:
        member.name = inner(member.name)
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise RefusedError(f"{member.name!a} is not a file, folder or link")
        if member.issym():
            inner(posixpath.join(posixpath.dirname(member.name), member.linkname))
        elif member.islnk():
            member.linkname = inner(member.linkname)
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o111 else 0o644
        if member.name in members_by_name and not member.isdir():
            raise RefusedError(f"{member.name!a} is in it twice")
        members_by_name[member.name] = member
    links = {name for name, member in members_by_name.items() if member.issym()}
    for name, member in members_by_name.items():
        above = [name, *([member.linkname] if member.islnk() else [])]
        for path in above:
            if through := next((parent for parent in parents(path) if parent in links), None):
                raise RefusedError(f"{name!a} would be written through the link {through!a}")
        if member.islnk() and not (member.linkname in members_by_name and members_by_name[member.linkname].isreg()):
            raise RefusedError(f"{name!a} is a hard link to something outside")
    return list(members_by_name.values())


def parents(path: str) -> list[str]:
    """The folders above a path."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]


def folder_inside(names: set[str]) -> str:
    """The folder that contains bin/caffe: the archive itself, or the only one in it."""
    tops = {name.split("/")[0] for name in names if name != "."}
    for folder in ("", f"{next(iter(tops))}/" if len(tops) == 1 else ""):
        if f"{folder}{PROGRAM}" in names:
            return folder
    raise RefusedError(f"there is no {PROGRAM} in it")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive to a folder that other accounts cannot enter yet, and return what belongs in its place."""
    with tarfile.open(archive) as tar:
        members = wanted(tar.getmembers())
        top = folder_inside({member.name for member in members})
        need = sum(member.size for member in members) + RESERVE
        if (free := shutil.disk_usage(folder).free) < need:
            raise RefusedError(f"it needs {need >> 20} MiB and {folder.parent} has {free >> 20} MiB free")
        # Each member was checked above.
        tar.extractall(folder, members=members)  # noqa: S202
    program = folder / top / PROGRAM
    if not program.is_file() or not os.access(program, os.X_OK):
        raise RefusedError(f"its {PROGRAM} is not a program")
    place: Path = (folder / top).resolve()
    # By way of other links, it may lead elsewhere than it reads.
    for name in (member.name for member in members if member.issym()):
        if not Path(os.path.realpath(folder / name)).is_relative_to(place):
            raise RefusedError(f"the link {name!a} leads out of it")
    place.chmod(0o755)
    return place


def install(module: AnsibleModule, root: Path, target: Path) -> None:
    """Fetch the archive, unpack it and move it into place."""
    incoming = root / "incoming"
    remove(incoming)
    sweep(root)
    incoming.mkdir(mode=0o700)
    try:
        archive, tree = incoming / "archive", incoming / "tree"
        tree.mkdir()
        fetch(module, module.params, archive)
        try:
            made = unpack(archive, tree)
        except (RefusedError, tarfile.TarError, EOFError) as error:
            module.fail_json(
                msg=f"caffe_archive is refused: {error}. Nothing in it was used, and what was installed before stays. "
                f"Pack a folder with {PROGRAM} and its libraries in lib"
            )
        write(made)
        flush(root)
        aside(root, target)
        made.rename(target)
    finally:
        remove(incoming)
        sweep(root)


def whole(target: Path) -> bool:
    """Whether it is installed and unchanged; it is read only if something was touched."""
    try:
        since = (target / LIST).stat().st_ctime_ns
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not touched(target, since) or not verify(target)


def points(path: Path, target: str) -> bool:
    return path.is_symlink() and str(path.readlink()) == target


def main() -> None:
    """Install the archive unless it is installed, and switch to it."""
    module = AnsibleModule(
        argument_spec={**FILE, "root": {"type": "path", "default": "/opt/farandole/caffe"}}, supports_check_mode=True
    )
    os.umask(0o022)
    root = Path(module.params["root"])
    target, current = root / module.params["sha256"][:16], root / "current"
    # The names of the MPICH ABI and of Debian's library differ.
    abi, library = root / "abi" / "libmpi.so.12", f"/usr/lib/{os.uname().machine}-linux-gnu/libmpich.so.12"

    try:
        changed = not (whole(target) and points(current, target.name) and points(abi, library))
        if changed and not module.check_mode:
            with alone(root):
                if not whole(target):
                    install(module, root, target)
                abi.parent.mkdir(exist_ok=True)
                link(abi, library)
                former = current.readlink().name if current.is_symlink() else target.name
                link(current, target.name)
                # The one before stays if this one was only mended.
                for old in root.iterdir() if former != target.name else ():
                    if len(old.name) == 16 and old.name not in (former, target.name):
                        aside(root, old)
                sweep(root)
    except OSError as error:
        module.fail_json(msg=f"Intel Caffe cannot be written to {root}: {error}")
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()
