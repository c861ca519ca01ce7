#!/usr/bin/python
"""Write a group of small files in one go."""

from __future__ import annotations

DOCUMENTATION = """
module: write_files
short_description: Write a group of small files in one go
description:
  - Writes files in the given order, each checked first and moved into place at once, so that none is ever half there.
  - One task instead of one per file, which is what a run costs with many hosts.
options:
  files:
    description: The files.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: "Where.", type: path, required: true}
      content: {description: "The whole text.", type: str, required: true}
      mode: {description: "Permissions.", type: str, default: "0644"}
      owner: {description: "Owning user; its group goes with it.", type: str, default: root}
      validate: {description: "Command that must accept the file, with C(%s) for its path.", type: str}
author: Farandole
"""

EXAMPLES = """
- name: Write the limits of the job user
  write_files:
    files:
      - path: /etc/security/limits.d/90-farandole.conf
        content: "trainer - memlock unlimited\\n"
"""

RETURN = """
written:
  description: The files that changed.
  type: list
  returned: always
"""

import pwd
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

File = dict[str, Any]


def current(path: Path) -> bytes:
    """What is there now."""
    return path.read_bytes() if path.exists() else b""


def ids(module: AnsibleModule, owner: str) -> tuple[int, int]:
    """uid and gid of an owner; in check mode of a bare node the job user is not there yet."""
    try:
        entry = pwd.getpwnam(owner)
    except KeyError:
        if module.check_mode:
            return -1, -1
        module.fail_json(msg=f"there is no user {owner} to own the files")
    return entry.pw_uid, entry.pw_gid


def differs(file: File, owner: tuple[int, int]) -> bool:
    """Whether anything about it is not as asked."""
    path = Path(file["path"])
    if not path.exists():
        return True
    status = path.stat()
    return (
        current(path) != file["content"].encode()
        or status.st_mode & 0o7777 != int(file["mode"], 8)
        or (status.st_uid, status.st_gid) != owner
    )


def write(module: AnsibleModule, file: File, owner: tuple[int, int]) -> None:
    """Validate a draft beside the target, then put it in the target's place."""
    path = Path(file["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
        draft.write(file["content"].encode())
    try:
        if file["validate"]:
            code, out, err = module.run_command(file["validate"].replace("%s", draft.name))
            if code:
                module.fail_json(msg=f"{path} was not written, its check refused it: {(err or out).strip()}")
        Path(draft.name).chmod(int(file["mode"], 8))
        module.set_owner_if_different(draft.name, owner[0], False)
        module.set_group_if_different(draft.name, owner[1], False)
        Path(draft.name).replace(path)
    finally:
        Path(draft.name).unlink(missing_ok=True)


def main() -> None:
    """Compare, write, report."""
    options = {
        "path": {"type": "path", "required": True},
        "content": {"type": "str", "required": True},
        "mode": {"type": "str", "default": "0644"},
        "owner": {"type": "str", "default": "root"},
        "validate": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={"files": {"type": "list", "elements": "dict", "required": True, "options": options}},
        supports_check_mode=True,
    )
    diffs = []
    for file in module.params["files"]:
        owner = ids(module, file["owner"])
        if not differs(file, owner):
            continue
        before = current(Path(file["path"]))
        diffs.append(
            {
                "before_header": file["path"],
                "after_header": file["path"],
                "before": before.decode(errors="replace"),
                "after": file["content"],
            }
        )
        if not module.check_mode:
            write(module, file, owner)
    written = [diff["after_header"] for diff in diffs]
    module.exit_json(changed=bool(diffs), written=written, diff=diffs)


if __name__ == "__main__":
    main()
