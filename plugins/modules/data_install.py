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
    files: {SOURCE: 3b1f...}
    path: /opt/farandole/data/mnist
"""

RETURN = ""

import fcntl
import hashlib
import os
import shutil
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def sums(folder: Path) -> dict[str, str]:
    """The sha256 of everything in a folder."""
    return {path.name: checksum(path) for path in folder.iterdir()} if folder.is_dir() else {}


def checksum(path: Path) -> str:
    """Empty for what is no file of ours: those are small."""
    ours = path.is_file() and path.stat().st_size < 1 << 26
    return hashlib.sha256(path.read_bytes()).hexdigest() if ours else ""


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep others off meanwhile: a control machine that was killed leaves this module at work on the node."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file of root's own: who can read a file or a folder can hold its lock for ever.
    opened = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def fetch(module: AnsibleModule, target: Path) -> None:
    """Bring the tar here and be sure of it."""
    url, wanted = module.params["url"], module.params["sha256"]
    # The depot is inside of the cluster, where a proxy to the world may not get.
    depot = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with depot.open(url, timeout=60) as answer:
            content = answer.read()
    except (OSError, HTTPException) as error:
        module.fail_json(
            msg=f"{url} cannot be fetched: {getattr(error, 'reason', error)}. Does the depot answer "
            "(systemctl status farandole-depot on the head), and may this node reach it?"
        )
    if (got := hashlib.sha256(content).hexdigest()) != wanted:
        module.fail_json(
            msg=f"{url} is damaged: its sha256 is {got}, wanted is {wanted}. Nothing was unpacked; run again, which "
            "checks the depot's copy and sends it anew"
        )
    target.write_bytes(content)


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
        "url": {"type": "str", "required": True},
        "sha256": {"type": "str", "required": True},
        "files": {"type": "dict", "required": True},
        "path": {"type": "path", "required": True},
    }
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    os.umask(0o022)
    path, wanted = Path(module.params["path"]), module.params["files"]
    if module.check_mode or sums(path) == wanted:
        module.exit_json(changed=sums(path) != wanted)
    try:
        with alone(path):
            if sums(path) == wanted:
                module.exit_json(changed=False)
            install(module, path)
    except (OSError, tarfile.TarError) as error:
        module.fail_json(msg=f"{path} cannot take the data: {error}")
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
