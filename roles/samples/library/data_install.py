#!/usr/bin/python
"""Fetch a folder of data, check it, put it in place as a whole."""

from __future__ import annotations

DOCUMENTATION = """
module: data_install
short_description: Install a folder of data from a plain tar
description:
  - Fetches the tar, checks its sha256 before anything is unpacked, unpacks it beside the folder, and puts it in the
    place of the folder. Where the folder has just these files already, nothing is fetched.
  - One module instead of get_url and unarchive, which cannot foretell anything before the depot is there.
options:
  url:
    description: Where the tar is.
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
  files:
    description: The sha256 of each file in it.
    type: dict
    required: true
  path:
    description: The folder.
    type: path
    required: true
author: Farandole
"""

EXAMPLES = """
- name: Install the data
  data_install:
    url: http://node-1:8480/data/mnist.0123456789ab.tar
    sha256: 0123...
    size: 808960
    files: {SOURCE: 3b1f...}
    path: /opt/farandole/data/mnist
"""

RETURN = ""

import hashlib
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.depot import FILE, fetch
from ansible.module_utils.folders import alone


def sums(folder: Path) -> dict[str, str]:
    """The sha256 of everything in a folder."""
    return {path.name: checksum(path) for path in folder.iterdir()} if folder.is_dir() else {}


def checksum(path: Path) -> str:
    """Empty for what is no file of ours: those are small."""
    ours = path.is_file() and path.stat().st_size < 1 << 26
    return hashlib.sha256(path.read_bytes()).hexdigest() if ours else ""


def unpack(archive: Path, folder: Path) -> None:
    """Plain files into a folder of its own; what the tar says of owners and modes does not count."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            source = tar.extractfile(member) if "/" not in member.name else None
            if source:
                (folder / member.name).write_bytes(source.read())


def install(module: AnsibleModule, path: Path) -> None:
    """Whatever a run that was killed left behind is swept away first."""
    incoming = path.with_name(f".{path.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    try:
        fetch(module, incoming / "archive")
        unpack(incoming / "archive", incoming / "new")
        if sums(incoming / "new") != module.params["files"]:
            module.fail_json(msg=f"{module.params['url']} has other files than {', '.join(module.params['files'])}")
        # It must survive a loss of power once it has its name.
        os.sync()
        if path.exists():
            path.rename(incoming / "old")
        (incoming / "new").rename(path)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def main() -> None:
    """Install where it is not installed."""
    options: dict[str, Any] = {
        **FILE,
        "files": {"type": "dict", "required": True},
        "path": {"type": "path", "required": True},
    }
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    os.umask(0o022)
    path, wanted = Path(module.params["path"]), module.params["files"]
    if module.check_mode or sums(path) == wanted:
        module.exit_json(changed=sums(path) != wanted)
    try:
        with alone(path.parent):
            if sums(path) == wanted:
                module.exit_json(changed=False)
            install(module, path)
    except (OSError, tarfile.TarError) as error:
        module.fail_json(msg=f"{path} cannot take the data: {error}")
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
