#!/usr/bin/python
"""Write down on the head which run changes the cluster, unless another one does."""

from __future__ import annotations

DOCUMENTATION = """
module: run_lock
short_description: Let one run at a time change a cluster
description:
  - The run is written down in the state folder on the control machine, and on the head, where runs of other control
    machines find it. It is refused while another run goes on.
  - Nothing has to be given back. On the control machine a run is over when its process is gone; on the head, when the
    connection is that the run holds open.
  - Does nothing in check mode.
options:
  state_dir:
    description: The cluster's state folder on the control machine.
    type: path
  run:
    description: The action plugin fills it in, as all that follows.
    type: dict
    default: {}
  holder:
    description: The process on the head that lives as long as the run; 0 to look only.
    type: int
    default: 0
  over:
    description: The run which the control machine knows to be dead.
    type: dict
author: Farandole
"""

EXAMPLES = """
- name: Keep other runs out
  run_lock:
    state_dir: "{{ base_state_dir }}"
  delegate_to: "{{ groups['head'][0] }}"
  run_once: true
"""

RETURN = """ # """

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from ansible.module_utils.basic import AnsibleModule

# Only root can write there; in a container /run may be open to all.
FILE = Path("/var/lib/farandole-run")
# A run that has just ended elsewhere is noticed within a second.
GRACE = 3.0


def started(pid: int) -> str | None:
    """The boot, and when a process began in it; none for one that is dead or only waits to be reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if state in "ZX" else f"{boot} {rest[18]}"


def holding(file: TextIO) -> Any:
    """The run that is written down there, as long as its process on this node lives."""
    file.seek(0)
    try:
        record = json.load(file)
        now = started(int(record["holder"]))
        return record["run"] if now is not None and now == record["started"] else None
    except (ValueError, TypeError, KeyError):
        return None


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are one run."""
    return all(one.get(name) == other.get(name) for name in ("place", "pid", "started"))


def held_by_another(file: TextIO, run: dict[str, Any], over: Any) -> Any:
    """The run that keeps this one out."""
    deadline = time.monotonic() + GRACE
    while (found := holding(file)) and not same(found, run) and not (over and same(found, over)):
        # Of its own machine the control machine knows at once who is dead.
        if found.get("place") == run["place"] or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
    return None


def write(file: TextIO, run: dict[str, Any], holder: int) -> None:
    """Put the run in the place of whatever is there."""
    file.seek(0)
    file.truncate()
    json.dump({"run": run, "holder": holder, "started": started(holder)}, file)
    file.flush()


def main() -> None:
    """Refuse, or write the run down."""
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path"},
            "run": {"type": "dict", "default": {}},
            "holder": {"type": "int", "default": 0},
            "over": {"type": "dict"},
        },
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
