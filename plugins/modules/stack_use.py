#!/usr/bin/python
DOCUMENTATION = """
module: stack_use
short_description: Find the jobs and builds that use the stack, and end them on request
description:
  - Finds processes that were started from the stack, by a run or by the queue, and builds that are still running.
  - Jobs of the queue are not ended.
options:
  end: {description: End them., type: bool, default: false}
  wait: {description: "Seconds to wait until they have ended, and fail if they have not.", type: int, default: 0}
"""

import os
import pwd
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule

ROOT, COMMAND = b"/opt/farandole/", b"/usr/local/bin/farandole"
# In the environment of every process of a run.
MARK = b"FARANDOLE_JOB="
UNITS = "farandole-build*.service"
# As Slurm's process beside each step of a job calls itself: slurmstepd: [7.0]
STEP = re.compile(rb"slurmstepd: \[(\d+)")
# Seconds that a run has to end on all of its nodes; it takes up to 10 there, and some more here.
GRACE_S = 20


class Process(NamedTuple):
    """A process, and what it belongs to."""

    pid: int
    job: str


def processes() -> list[Process]:
    """The processes of jobs."""
    running = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv, marked = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "environ").read_bytes()
            runs = COMMAND in argv[:3] and b"_job" in argv
            if runs or any(word.startswith(ROOT) for word in argv[:2]) or b"\0" + MARK in b"\0" + marked:
                running.append(Process(int(entry.name), job(entry, argv)))
    return running


def job(entry: Path, argv: list[bytes]) -> str:
    """Whose job a process belongs to, and which."""
    uid = entry.stat().st_uid
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = str(uid)
    number = re.search(r"/runs/(\d+)/", f"{(entry / 'cwd').readlink()}/")
    if b"_job" in argv[:-2]:
        return f"run {argv[argv.index(b'_job') + 1].decode(errors='replace')} of {owner}"
    program = Path(os.fsdecode(next(iter(argv[1:2] if argv[0].endswith(b"python") else argv)) or argv[0])).name
    return f"run {number[1]} of {owner}" if number else f"{program} of {owner}"


def builds(module: AnsibleModule) -> list[str]:
    """The units of running builds."""
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--state=running", UNITS]
    return [line.split()[0] for line in module.run_command(command)[1].splitlines()]


def queued() -> Iterator[str]:
    """The jobs of the queue that have a step here; Slurm itself ends them."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if step := STEP.match((entry / "cmdline").read_bytes()):
                yield f"job {step[1].decode()} of the queue"


def end(module: AnsibleModule) -> None:
    """End all of it, in order if possible."""
    for unit in builds(module):
        module.run_command(["systemctl", "stop", unit], check_rc=True)
    deadline, told = time.monotonic() + GRACE_S, set()
    while running := processes():
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + GRACE_S:
            left = ", ".join(str(process.pid) for process in running)
            module.fail_json(msg=f"some processes do not end: {left}; reboot")
        for process in running:
            if late or process.pid not in told:
                told.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.2)


def found(module: AnsibleModule) -> list[str]:
    """What uses the stack."""
    jobs = {process.job for process in processes()} | {*queued()}
    return sorted(jobs | {f"build {unit}" for unit in builds(module)})


def main() -> None:
    """Look, and end what is found if that is wanted."""
    module = AnsibleModule(
        argument_spec={"end": {"type": "bool", "default": False}, "wait": {"type": "int", "default": 0}},
        supports_check_mode=True,
    )
    until = time.monotonic() + module.params["wait"]
    while running := found(module):
        if module.check_mode or time.monotonic() > until:
            break
        time.sleep(2)
    if running and module.params["wait"] and not module.check_mode:
        module.fail_json(msg=f"this still runs after {module.params['wait']} s: {', '.join(running)}", running=running)
    changed = bool(running) and module.params["end"]
    if changed and not module.check_mode:
        end(module)
    module.exit_json(changed=changed, running=running)


if __name__ == "__main__":
    main()
