#!/usr/bin/python
"""Fetch a file of known size and sha256 from the depot."""

from __future__ import annotations

DOCUMENTATION = """
module: depot_fetch
short_description: Fetch a file of known size and sha256 from the depot
description:
  - Instead of get_url, which writes whatever comes before it looks at the sha256, however much that is.
options:
  url:
    description: Where the file is.
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
  path:
    description: Where it goes.
    type: path
    required: true
author: Farandole
"""

EXAMPLES = """
- name: Fetch a deb
  depot_fetch:
    url: http://node-1:8480/debs/libnccl2_2.27.3-1+cuda12.9_amd64.deb
    sha256: 3b1f...
    size: 200000000
    path: /var/cache/apt/archives/libnccl2_2.27.3-1+cuda12.9_amd64.deb
"""

RETURN = ""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.contents import sha256
from ansible.module_utils.depot import FILE, fetch


def main() -> None:
    """Fetch where it is not there."""
    module = AnsibleModule(argument_spec={**FILE, "path": {"type": "path", "required": True}}, supports_check_mode=True)
    path = Path(module.params["path"])
    changed = not path.is_file() or path.is_symlink() or sha256(str(path)) != module.params["sha256"]
    if changed and not module.check_mode:
        draft = path.with_name(f".{path.name}.part")
        try:
            fetch(module, draft)
            draft.chmod(0o644)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()
