#!/usr/bin/python
"""Fetch a packed stack, check it, unpack it beside the others, prove that it starts."""

from __future__ import annotations

DOCUMENTATION = """
module: stack_install
short_description: Install a packed stack beside those that are there
description:
  - Fetches the archive, checks its sha256 before anything is unpacked, unpacks it in a folder of its own, and moves it
    into place. It counts as installed when its C(manifest.json) is there; that comes last, after its programs have run.
  - Whatever a run that was killed left behind is swept away first.
options:
  id:
    description: The stack.
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

import errno
import fcntl
import hashlib
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

BLOCK = 1 << 20
# Room that the rest of the machine keeps.
RESERVE = 256 << 20


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keep others off meanwhile: a control machine that was killed leaves this module at work on the node."""
    root.mkdir(parents=True, exist_ok=True)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def refuse_without_room(module: AnsibleModule, root: Path) -> None:
    """Before the first byte is fetched."""
    need = module.params["size"] + module.params["unpacked"] + RESERVE
    free = shutil.disk_usage(root).free
    if free < need:
        module.fail_json(
            msg=f"{root} has {free >> 20} MiB free, and the stack needs {need >> 20} MiB while it is installed: make "
            "room there, or lower stack_keep so that older stacks go"
        )


def fetch(module: AnsibleModule, target: Path) -> None:
    """Bring the archive here and be sure of it."""
    url, wanted = module.params["url"], module.params["sha256"]
    digest = hashlib.sha256()
    # The depot is inside of the cluster, where a proxy to the world may not get.
    depot = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with depot.open(url, timeout=60) as answer, target.open("wb") as file:
            while block := answer.read(BLOCK):
                digest.update(block)
                file.write(block)
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            module.fail_json(
                msg=f"{target.parent} is full: make room there, or lower stack_keep so that older stacks go"
            )
        module.fail_json(
            msg=f"{url} cannot be fetched: {getattr(error, 'reason', error)}. Does the depot answer "
            "(systemctl status farandole-depot on the head), and may this node reach it?"
        )
    if digest.hexdigest() != wanted:
        module.fail_json(
            msg=f"{url} is damaged: its sha256 is {digest.hexdigest()}, wanted is {wanted}. Nothing was unpacked; "
            "run again, which checks the depot's copy and sends it anew"
        )


def unpack(module: AnsibleModule, archive: Path, folder: Path) -> None:
    """Into a folder of its own."""
    folder.mkdir()
    code, _, err = module.run_command(
        ["tar", "--extract", "--zstd", "--file", str(archive), "--directory", str(folder)]
    )
    if code:
        module.fail_json(msg=f"the stack does not unpack below {folder}: {err.strip()[-500:]}")


def place(incoming: Path, root: Path, stack: str) -> None:
    """Move what came into its place, all but the manifest."""
    for source in (incoming / "mpi").iterdir():
        if not (root / "mpi" / source.name).exists():
            source.rename(root / "mpi" / source.name)
    target = root / "stacks" / stack
    # A build that was not finished, or a stack whose manifest is gone.
    shutil.rmtree(target, ignore_errors=True)
    (incoming / "stacks" / stack).rename(target)


def prove(module: AnsibleModule, target: Path) -> None:
    """What was unpacked has to start on this machine, too."""
    imports = "; ".join(f"import {name}" for name in module.params["modules"])
    commands = [
        [str(target / "mpi/bin/mpirun"), "--version"],
        [str(target / "venv/bin/python"), "-c", imports],
    ]
    for command in commands:
        environ = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        try:
            code, out, err = module.run_command(command, environ_update=environ, handle_exceptions=False)
        except OSError as error:
            # Such as a Python to which the environment leads and which is not on this machine.
            code, out, err = 1, "", str(error)
        if code:
            module.fail_json(
                msg=f"the stack was unpacked and does not run here, so it is not used: {' '.join(command)}: "
                f"{(err or out).strip()[-1500:]}"
            )


def install(module: AnsibleModule, root: Path) -> dict[str, float]:
    """All of it; how long each part took."""
    stack, incoming = module.params["id"], root / "incoming"
    for folder in (root / "stacks", root / "mpi"):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(incoming, ignore_errors=True)
    refuse_without_room(module, root)
    incoming.mkdir()
    marks = [time.monotonic()]
    archive, folder, target = incoming / "archive", incoming / "tree", root / "stacks" / stack
    try:
        fetch(module, archive)
        marks.append(time.monotonic())
        unpack(module, archive, folder)
        archive.unlink()
        manifest = folder / "stacks" / stack / "manifest.json"
        manifest.rename(incoming / "manifest.json")
        place(folder, root, stack)
        # What counts as installed must survive a loss of power.
        os.sync()
        marks.append(time.monotonic())
        prove(module, target)
        (incoming / "manifest.json").rename(target / "manifest.json")
        marks.append(time.monotonic())
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    names = ("fetch", "unpack", "prove")
    return {name: round(end - begin, 1) for name, begin, end in zip(names, marks, marks[1:], strict=False)}


def main() -> None:
    """Install where it is not installed."""
    options: dict[str, Any] = {
        "id": {"type": "str", "required": True},
        "url": {"type": "str", "required": True},
        "sha256": {"type": "str", "required": True},
        "size": {"type": "int", "required": True},
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
    except OSError as error:
        module.fail_json(msg=f"{root} cannot take the stack: {error}")
    module.exit_json(changed=True, seconds=seconds)


if __name__ == "__main__":
    main()
