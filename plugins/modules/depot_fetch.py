#!/usr/bin/python
DOCUMENTATION = """
module: depot_fetch
short_description: Fetch a folder of files of known size and sha256 from the depot
description:
  - Replaces M(ansible.builtin.get_url), which writes a response of any size before it checks the sha256, and needs a
    round trip for each file.
  - The folder contains exactly these files. It is put in place once all of them are complete; leftovers of a killed run
    are removed.
options:
  url: {description: URL of the depot., type: str, required: true}
  files:
    description: The files, each with its C(name) below O(url), C(sha256) and C(size) in bytes.
    type: list
    elements: dict
    required: true
  path: {description: The folder., type: path, required: true}
"""

import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.depot import fetch
from ansible_collections.farandole.cluster.plugins.module_utils.folders import alone, checksums, flush


def install(module: AnsibleModule, path: Path) -> None:
    """Fetch the files to a folder next to the target, then put that in its place."""
    incoming = path.with_name(f".{path.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    (incoming / "new").mkdir(parents=True)
    try:
        for file in module.params["files"]:
            url = f"{module.params['url']}/{file['name']}"
            size = int(file["size"])
            fetch(module, {**file, "url": url, "size": size}, incoming / "new" / Path(file["name"]).name)
        # Once it is in place, it must survive a power cut.
        flush(incoming)
        if path.is_symlink() or path.exists():
            path.rename(incoming / "old")
        (incoming / "new").rename(path)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def main() -> None:
    """Fetch the files unless they are already there."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "dict", "required": True},
            "path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    path = Path(module.params["path"])
    wanted = {Path(file["name"]).name: file["sha256"] for file in module.params["files"]}
    changed = checksums(path) != wanted
    if changed and not module.check_mode:
        try:
            with alone(path.parent):
                # Another run may have fetched them in the meantime.
                changed = checksums(path) != wanted
                if changed:
                    install(module, path)
        except OSError as error:
            module.fail_json(msg=f"the files cannot be written to {path}: {error}")
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()
