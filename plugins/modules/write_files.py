#!/usr/bin/python
"""The node's part of action write_files: write a group of files, each validated first and replaced atomically."""

import grp
import os
import pwd
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import replacing

File = dict[str, Any]


def current(path: Path) -> bytes:
    """The present content of a file; empty if it does not exist."""
    return path.read_bytes() if path.exists() else b""


def ids(module: AnsibleModule, file: File) -> tuple[int, int]:
    """The uid and gid for a file; in check mode a bare node does not have the job user yet."""
    what, name = "user", file["owner"]
    try:
        entry = pwd.getpwnam(name)
        if not file["group"]:
            return entry.pw_uid, entry.pw_gid
        what, name = "group", file["group"]
        return entry.pw_uid, grp.getgrnam(name).gr_gid
    except KeyError:
        if not module.check_mode:
            module.fail_json(msg=f"there is no {what} {name} to own the files")
    return -1, -1


def wanted(file: File) -> bytes:
    """The text to write; if only some lines are ours, it replaces them and keeps the others."""
    ours: bytes = file["content"].encode()
    if not file["own"]:
        return ours
    own = re.compile(file["own"].encode())
    lines = current(Path(file["path"])).splitlines()
    others = [b"%s\n" % line for line in lines if not own.search(line)]
    place = next((number for number, line in enumerate(lines) if own.search(line)), len(others))
    return b"".join([*others[:place], ours, *others[place:]])


def differs(file: File, owner: tuple[int, int]) -> bool:
    """Whether the content, mode or owner of a file is not as requested."""
    path = Path(file["path"])
    if not path.exists():
        return True
    status = path.stat()
    return (
        current(path) != wanted(file)
        or status.st_mode & 0o7777 != int(file["mode"], 8)
        or (status.st_uid, status.st_gid) != owner
    )


def write(module: AnsibleModule, file: File, owner: tuple[int, int]) -> None:
    """Write a draft next to the target, validate it, then replace the target with it."""
    path = Path(file["path"])
    with replacing(path, int(file["mode"], 8)) as draft:
        draft.write(wanted(file))
        draft.flush()
        if file["validate"]:
            code, out, err = module.run_command(file["validate"].replace("%s", draft.name))
            if code:
                module.fail_json(msg=f"{path} was not written, because its validation failed: {(err or out).strip()}")
        os.fchown(draft.fileno(), *owner)


def unlisted(folder: Path, files: list[File]) -> list[Path]:
    """The files in a folder that are not among the given ones."""
    ours = {Path(file["path"]) for file in files}
    inside = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in inside if path not in ours and path.parent.name != "__pycache__"]


def remove(path: Path, folder: Path) -> None:
    """Remove a file, and the folders that this leaves empty."""
    path.unlink()
    for parent in path.parents:
        if parent == folder or any(parent.iterdir()):
            break
        parent.rmdir()


OPTIONS = {
    "path": {"type": "path", "required": True},
    "content": {"type": "str", "required": True},
    "mode": {"type": "str", "default": "0644"},
    "owner": {"type": "str", "default": "root"},
    "group": {"type": "str"},
    "validate": {"type": "str"},
    "own": {"type": "str"},
}


def difference(path: str, before: str, after: str) -> dict[str, str]:
    """What Ansible shows with --diff."""
    return {"before_header": path, "after_header": path, "before": before, "after": after}


def main() -> None:
    """Compare, write, report."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True, "options": OPTIONS},
            "sweep": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    # Others have to find their way to the files.
    os.umask(0o022)
    diffs = []
    for file in module.params["files"]:
        owner = ids(module, file)
        if not differs(file, owner):
            continue
        before, after = (text.decode(errors="replace") for text in (current(Path(file["path"])), wanted(file)))
        diffs.append(difference(file["path"], before, after))
        if not module.check_mode:
            write(module, file, owner)
    written, swept = [diff["after_header"] for diff in diffs], []
    for folder in map(Path, module.params["sweep"]):
        for path in unlisted(folder, module.params["files"]):
            swept.append(str(path))
            diffs.append(difference(str(path), "there\n", ""))
            if not module.check_mode:
                remove(path, folder)
    module.exit_json(changed=bool(diffs), written=written, swept=swept, diff=diffs)


if __name__ == "__main__":
    main()
