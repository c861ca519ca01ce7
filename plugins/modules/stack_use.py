#!/usr/bin/python
DOCUMENTATION = """
module: stack_use
short_description: Find the jobs and builds that use the stack, and end them on request
description:
  - Finds processes that were started from the stack, by a run or by the queue, commands that hold a job of the queue,
    and builds that are still running.
  - Jobs of the queue are not ended.
options:
  end: {description: End them., type: bool, default: false}
  wait: {description: "Seconds to wait until they have ended, and fail if they have not.", type: int, default: 0}
  node:
    description:
      - On the head, find instead the runs and the jobs of the queue that have this node. They may have no process there
        just now, as before their first one, or between two steps.
    type: str
  queue: {description: "Whether the queue knows O(node).", type: bool, default: false}
"""

import fcntl
import json
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
from ansible_collections.farandole.cluster.plugins.module_utils.slurm import patient

ROOT, COMMAND = b"/opt/farandole/", b"/usr/local/bin/farandole"
# In the environment of every process of a run.
MARK = b"FARANDOLE_JOB="
UNITS = "farandole-build*.service"
# As Slurm's process beside each step of a job calls itself: slurmstepd: [7.0]
STEP = re.compile(rb"slurmstepd: \[(\d+)")
# Whose job ends with them, wherever it runs.
CLIENTS = (b"srun", b"salloc")
STATES = "running,suspended,stopped,configuring,completing"
# As node/head/slots.py writes there which slots a run has: by its user's number and its own, locked while it runs.
CLAIMS, CLAIM = Path("/run/farandole/slots"), re.compile(r"\d+-(\d{1,9})-\w+")
# Seconds that squeue may take, and within which slurmctld has to answer, as after it was restarted.
SQUEUE_S, PATIENCE_S = 20, 60
# Seconds that a run has to end on all of its nodes; it takes up to 10 there, and some more here.
GRACE_S = 20
# Seconds between two looks.
LOOK_S = 2


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
    owner = account(entry.stat().st_uid)
    number = re.search(r"/runs/(\d+)/", f"{(entry / 'cwd').readlink()}/")
    if b"_job" in argv[:-2]:
        return f"run {argv[argv.index(b'_job') + 1].decode(errors='replace')} of {owner}"
    program = Path(os.fsdecode(next(iter(argv[1:2] if argv[0].endswith(b"python") else argv)) or argv[0])).name
    return f"run {number[1]} of {owner}" if number else f"{program} of {owner}"


def account(uid: int) -> str:
    """The name of an account."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def builds(module: AnsibleModule) -> list[str]:
    """The units of running builds."""
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--state=running", UNITS]
    return [line.split()[0] for line in module.run_command(command)[1].splitlines()]


def queued() -> Iterator[str]:
    """The jobs of the queue that have a step here, or a command that holds them; Slurm itself ends them."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            if step := STEP.match(argv[0]):
                yield f"job {step[1].decode()} of the queue"
            elif argv[0].rpartition(b"/")[2] in CLIENTS:
                yield job(entry, argv)


def claims(node: str) -> Iterator[str]:
    """The runs that have slots of a node."""
    for path in CLAIMS.iterdir() if CLAIMS.is_dir() else ():
        # Everybody can put anything there.
        with suppress(OSError, ValueError, RecursionError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(handle) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    slots, run = json.loads(file.read(1 << 20)), CLAIM.fullmatch(path.name)
                    if run and isinstance(slots, dict) and slots.get(node):
                        yield f"run {run[1]} of {account(os.fstat(handle).st_uid)}"


def allocated(module: AnsibleModule, node: str) -> Iterator[str]:
    """The jobs to which the queue has given a node."""
    command = ["squeue", "--noheader", "--format=%A", f"--states={STATES}", f"--nodelist={node}"]
    code, out, err = patient(module, ["timeout", str(SQUEUE_S), *command], PATIENCE_S)
    if code:
        why = err.strip() or f"squeue ended with {code}"
        module.fail_json(msg=f"the queue does not say who has {node}: {why}; on the head, journalctl --unit slurmctld")
    yield from (f"job {number} of the queue" for number in out.split())


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
    """What uses the stack, or has the node."""
    if node := module.params["node"]:
        return sorted({*claims(node), *(allocated(module, node) if module.params["queue"] else ())})
    jobs = {process.job for process in processes()} | {*queued()}
    return sorted(jobs | {f"build {unit}" for unit in builds(module)})


def main() -> None:
    """Look, and end what is found if that is wanted."""
    module = AnsibleModule(
        argument_spec={
            "end": {"type": "bool", "default": False},
            "wait": {"type": "int", "default": 0},
            "node": {"type": "str"},
            "queue": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    until = time.monotonic() + module.params["wait"]
    while running := found(module):
        if module.check_mode or time.monotonic() > until:
            break
        time.sleep(LOOK_S)
    if running and module.params["wait"] and not module.check_mode:
        module.fail_json(msg=f"this still runs after {module.params['wait']} s: {', '.join(running)}", running=running)
    changed = bool(running) and module.params["end"]
    if changed and not module.check_mode:
        end(module)
    module.exit_json(changed=changed, running=running)


if __name__ == "__main__":
    main()
