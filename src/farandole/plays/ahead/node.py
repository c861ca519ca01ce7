"""The program that calls Ansible modules on a node, each in a process that has its imports already."""

from __future__ import annotations

import atexit
import base64
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from typing import IO, Any

# A call that takes longer, or comes after that time, is left to its own task. The last call is the task's own one, and
# has its own time. Together they take less than the time that a probe may take.
CALL_S, ALL_S, OWN_S = 5, 8, 20


def run(call: dict[str, Any], archive: str) -> None:
    """Run a module as Ansible does; it exits."""
    from ansible.module_utils._internal._ansiballz import _loader

    os.environ.update(call["environment"])
    _loader.run_module(
        json_params=call["arguments"].encode(),
        profile=call["profile"],
        module_fqn=call["module"],
        modlib_path=archive,
        extensions={},
    )


def become(call: dict[str, Any], archive: str, output: IO[bytes]) -> None:
    """Turn this process into the one of a module."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (output.fileno(), 1), (null, 2)):
        os.dup2(source, target)
    try:
        run(call, archive)
    finally:
        # Not the clean-up of the process that this one was copied from.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def ask(call: dict[str, Any], archive: str, until: float) -> str:
    """What a module prints; empty if it does not end in time."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            become(call, archive, output)
        # The process does so as well, but may not have come to it when it is killed.
        os.setpgid(pid, pid)
        process = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([process], [], [], max(0, until - time.monotonic()))
            if not ended:
                os.killpg(pid, signal.SIGKILL)
        finally:
            os.close(process)
            os.waitpid(pid, 0)
        output.seek(0)
        return output.read().decode(errors="replace") if ended else ""


def main(packed: str, calls: list[dict[str, Any]]) -> None:
    """Print what the modules print, as JSON."""
    # Like Ansible: nothing is imported from the current folder.
    sys.path = [path for path in sys.path if path not in ("", ".")]
    folder = tempfile.mkdtemp(prefix="ansible_farandole_")
    try:
        archive = os.path.join(folder, "modules.zip")  # noqa: PTH118
        with open(archive, "wb") as file:  # noqa: PTH123
            file.write(base64.b64decode(packed))
        sys.path.insert(0, archive)
        import ansible.module_utils.basic  # noqa: F401

        until = time.monotonic() + ALL_S
        outputs = [ask(call, archive, min(until, time.monotonic() + CALL_S)) for call in calls[:-1]]
        outputs.append(ask(calls[-1], archive, time.monotonic() + OWN_S))
        print(json.dumps({"outputs": outputs}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
