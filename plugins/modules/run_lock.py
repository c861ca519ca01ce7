#!/usr/bin/python
"""The head's part of action run_lock: record which run is changing the cluster, unless another one is."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from ansible.module_utils.basic import AnsibleModule

# Only root can write there; in a container every account may be able to write to /run.
FILE = Path("/var/lib/farandole-run")
# The head notices within a second that a run from elsewhere has ended; wait a little longer.
GRACE = 3.0


def started(pid: int) -> str | None:
    """The boot id and a process's start time; None if the process is dead or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if state in "ZX" else f"{boot} {rest[18]}"


def active_run(file: TextIO) -> Any:
    """The recorded run, if its process on this node is still alive."""
    file.seek(0)
    try:
        record = json.load(file)
        now = started(int(record["holder"]))
        return record["run"] if now is not None and now == record["started"] else None
    except (ValueError, TypeError, KeyError):
        return None


def same(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are the same run."""
    return all(run.get(name) == other.get(name) for name in ("place", "pid", "started"))


def held_by_another(file: TextIO, run: dict[str, Any], over: Any) -> Any:
    """The active run that blocks this one; None if there is none. `over` is a run known to have ended."""
    deadline = time.monotonic() + GRACE
    while (active := active_run(file)) and not same(active, run) and not (over and same(active, over)):
        # A control machine knows which of its own runs are dead, so waiting would not help.
        if active.get("place") == run["place"] or time.monotonic() > deadline:
            return active
        time.sleep(0.2)
    return None


def write(file: TextIO, run: dict[str, Any], holder: int) -> None:
    """Replace the recorded run."""
    file.seek(0)
    file.truncate()
    json.dump({"run": run, "holder": holder, "started": started(holder)}, file)
    file.flush()


def main() -> None:
    """Record the run, or return the one that blocks it."""
    module = AnsibleModule(
        argument_spec={
            "run": {"type": "dict", "required": True},
            "holder": {"type": "int", "default": 0},
            "over": {"type": "dict"},
        }
    )
    run, holder = module.params["run"], module.params["holder"]
    with os.fdopen(os.open(FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if held := held_by_another(file, run, module.params["over"]):
            module.exit_json(changed=False, held=held)
        if holder:
            write(file, run, holder)
    module.exit_json(changed=False, held=None)


if __name__ == "__main__":
    main()
