"""How a run is started: its folder, and the unit that keeps it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from farandole.node.head import runs
from farandole.node.head.folders import copy, filters, locked, refuse_early, sent
from farandole.node.head.runs import Run, bus, new_run
from farandole.node.head.status import owner
from farandole.node.head.system import GRACE, RefusedError, ran

COMMAND = "/usr/local/bin/farandole"


def start(given: argparse.Namespace) -> Run:
    """Start a run."""
    if os.getuid() == 0:
        raise RefusedError("root starts no jobs; as the job user: runuser -u NAME -- farandole run ...")
    folder = sent(given.source) if given.source else Path.cwd()
    refuse_early(given.program, given.fetch, folder)
    me = owner(os.getuid())
    if not os.access(bus()["XDG_RUNTIME_DIR"], os.X_OK):
        raise RefusedError(f"systemd does not run for {me}; as root: loginctl enable-linger {me}")
    run = new_run()
    try:
        prepare(run, given, folder)
    except (RefusedError, OSError) as error:
        shutil.rmtree(run.folder)
        why = f"{runs.RUNS}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise RefusedError(why) from None
    done = ran("systemd-run", "--user", "--quiet", "--collect", *unit(run), env=bus())
    if done.returncode:
        raise RefusedError(f"systemd could not start the run: {done.stderr.strip()}")
    return run


def prepare(run: Run, given: argparse.Namespace, folder: Path) -> None:
    """Copy the folder to a new run, and write down what is wanted of it."""
    # What a control machine sent has been filtered there.
    options, patterns = ([], "") if given.source else filters(folder)
    lock = locked(folder) if given.source else -1
    copy(folder, run.code, options, patterns)
    if lock >= 0:
        os.close(lock)
    run.write(
        "run", program=given.program, source=given.source or str(folder), np=given.np, hosts=given.hosts,
        mpi=given.mpi, seconds=given.time, wait=given.wait, fetch=given.fetch,
        without=given.without, created=time.time(),
    )  # fmt: skip
    run.output.touch(0o600)
    run.reserve("ended")


def unit(run: Run) -> list[str]:
    """The unit that keeps a run, and its command."""
    properties = {
        "WorkingDirectory": run.code,
        "StandardOutput": f"append:{run.output}",
        "StandardError": f"append:{run.output}",
        # The job's processes are ended in order, by this program.
        "KillMode": "mixed",
        # A rank that runs out of memory is the job's failure, and no reason to stop this program.
        "OOMPolicy": "continue",
        "TasksMax": "infinity",
        "TimeoutStopSec": 6 * GRACE,
    }
    words = [f"--unit={run.unit}", f"--description=Run {run.number} of farandole"]
    words += [f"--property={name}={value}" for name, value in properties.items()]
    return [*words, sys.executable, "-I", COMMAND, "_job", str(run.number)]
