"""Write to the file systems that this node shares with others, or read what those wrote, each as its user.

Takes {"do": "write", "mark": "0a1b", "host": "node-1", "folders": [{"path": "/data", "user": "trainer", "mounted":
true, "writable": true, "seconds": 20, "peers": ["node-2"]}]}, and prints a line of JSON. Only children touch the file
systems, and nobody waits for one whose server does not answer.
"""

import errno
import hashlib
import json
import os
import pwd
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from farandole.node.mounts import TABLE, mounts_in

# Seconds until another node's file has to be visible.
PATIENCE = 10
Found = dict[str, Any]
# What systemd itself says when it cannot mount something; the line before it says why.
SYSTEMD = re.compile(r"\.mount: |^(Mounting|Mounted|Failed to mount|Unmounting|Unmounted) ")


def mine(task: Found, host: str) -> Path:
    """A file that no earlier validation has left."""
    return Path(f".farandole-{task['mark']}-{host}")


def write(task: Found, folder: Found) -> Found:
    """Write a file, or describe what lies there if nothing may be written."""
    if not folder["writable"]:
        return {"listing": listing()}
    os.umask(0o077)
    try:
        with mine(task, task["host"]).open("x") as file:
            file.write(task["host"])
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        remove(task, {"peers": []})
        raise
    return {}


def listing() -> str:
    """A hash of the names, types, sizes and times of what lies there."""
    entries = []
    for entry in os.scandir():
        status = entry.stat(follow_symlinks=False)
        size = 0 if entry.is_dir(follow_symlinks=False) else status.st_size
        entries.append([entry.name, status.st_mode, size, int(status.st_mtime)])
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def read(task: Found, folder: Found) -> Found:
    """Wait for the files of all other nodes, and look whose they are."""
    missing, until = list(folder["peers"]), time.monotonic() + PATIENCE
    while True:
        for peer in list(missing):
            try:
                with mine(task, peer).open() as file:
                    content, owner = file.read(1000), os.fstat(file.fileno()).st_uid
            except FileNotFoundError:
                continue
            if owner != os.getuid():
                return problem("files-owner", f"the file that {peer} wrote belongs to uid {owner}, not {os.getuid()}")
            # It may have been opened before it was written.
            if content == peer:
                missing.remove(peer)
        if not missing:
            return {}
        if time.monotonic() > until:
            return problem("files-missing", f"what {', '.join(missing)} wrote was not there after {PATIENCE} s")
        time.sleep(0.1)


def remove(task: Found, folder: Found) -> Found:
    """Remove the files of all nodes."""
    for host in [task["host"], *folder["peers"]]:
        mine(task, host).unlink(missing_ok=True)
    return {}


STEPS = {"write": write, "read": read, "remove": remove}


def problem(code: str, seen: str) -> Found:
    return {"code": code, "seen": seen}


def attempt(task: Found, folder: Found) -> Found:
    """Do the step in the folder, as its user."""
    user = pwd.getpwnam(folder["user"])
    if user.pw_uid != os.getuid():
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    try:
        os.chdir(folder["path"])
        if folder["mounted"] and not is_mounted(folder["path"]):
            return problem("files-unmounted", "")
        return STEPS[task["do"]](task, folder)
    except PermissionError as error:
        return problem("files-denied", f"{user.pw_name}: {error.strerror}")
    except OSError as error:
        # The kernel's words for a server that is not there depend on the file system.
        return problem("files-failed", f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}")


def begin(task: Found, folder: Found) -> tuple[int, int]:
    """Start a child for a folder; returns its process id and where it answers."""
    answers, answer = os.pipe()
    child = os.fork()
    if child:
        os.close(answer)
        return child, answers
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        # A child that hangs must not keep the connection open.
        os.dup2(nowhere, standard)
    try:
        result = attempt(task, folder)
    except Exception as error:
        result = problem("files-failed", repr(error))
    os.write(answer, json.dumps(result).encode())
    os._exit(0)


def collect(folder: Found, child: int, answers: int, begun: float) -> Found:
    """What a child found, or that it found nothing in time."""
    left = begun + folder["seconds"] - time.monotonic()
    ready, _, _ = select.select([answers], [], [], max(0, left))
    result = json.loads(os.read(answers, 1 << 16) or b"{}") if ready else None
    os.kill(child, signal.SIGKILL)
    if result is None:
        result = problem("files-silent", f"no answer within {folder['seconds']} s")
    seconds = round(time.monotonic() - begun, 2)
    if folder["mounted"] and not is_mounted(folder["path"]):
        result = problem("files-unmounted", why(folder["path"]))
    return {"code": "", "seen": "", "listing": "", **result, "seconds": seconds}


def is_mounted(path: str) -> bool:
    """Whether something is mounted, which the kernel says without asking a server."""
    return any(mount.point == path and mount.kind != "autofs" for mount in mounts_in(TABLE.read_text()))


def why(path: str) -> str:
    """The last words of what tried to mount it."""
    unit = subprocess.run(["systemd-escape", "--path", "--suffix=mount", path], capture_output=True, text=True).stdout
    command = ["journalctl", "--quiet", "--unit", unit.strip(), "--lines", "20", "--output", "cat"]
    output = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.splitlines()
    told = [line for line in output if line.strip() and not SYSTEMD.search(line)]
    return told[-1][:300] if told else "its units say nothing"


def main() -> None:
    """Take the step in all folders at once."""
    task = json.loads(sys.argv[1])
    begun = time.monotonic()
    children = [(folder, *begin(task, folder)) for folder in task["folders"]]
    results = {folder["path"]: collect(folder, child, answers, begun) for folder, child, answers in children}
    print(json.dumps({"folders": results}))


if __name__ == "__main__":
    main()
