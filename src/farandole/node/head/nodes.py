"""How a run's folder reaches its nodes, and how results come back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from farandole.node.head import system
from farandole.node.head.fetched import place, staging
from farandole.node.head.runs import Run, all_runs
from farandole.node.head.status import owner
from farandole.node.head.system import RefusedError, ran, reason

# Whose homes all nodes see, so that nothing has to be copied to them.
SHARED = Path("/etc/farandole/storage/home")
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"


def has_shared_home() -> bool:
    """Whether all nodes see this home."""
    return SHARED.exists() and owner(os.getuid()) in SHARED.read_text().split()


def rsync(*words: str) -> subprocess.CompletedProcess[str]:
    return ran("rsync", "--archive", *words, env={**os.environ, "RSYNC_RSH": SSH})


def former(run: Run, source: str) -> list[Run]:
    """The latest earlier runs of the same folder."""
    return [one for one in all_runs() if one.number < run.number and one.read("run").get("source") == source][-3:]


def send(run: Run, node: str, before: list[Run]) -> str:
    """Copy a run's code to a node; of files that an earlier run has there, only the changes. Returns why it failed."""
    same = [f"--copy-dest=../../{one.number}/code" for one in before]
    there = ["--delete", "--mkpath", "--rsync-path=umask 077 && rsync", *same]
    done = rsync(*there, f"{run.code}/", f"{node}:runs/{run.number}/code/")
    return f"{node}: {reason(done.stderr)}" if done.returncode else ""


def collect(run: Run, paths: list[str]) -> Iterator[str]:
    """Get results from the node of rank 0, which usually writes them; yields why one cannot be had."""
    first = next(iter(run.read("started").get("slots", {})), system.HERE)
    for path in paths if first != system.HERE and not has_shared_home() else ():
        failed = f"{path} could not be fetched from {first}"
        try:
            with staging(run.folder, run.code) as (staged, options):
                done = rsync(*options, f"{first}:runs/{run.number}/code/./{path}", f"{staged}/")
                if done.returncode:
                    yield f"{failed}: {reason(done.stderr)}"
                yield from place(staged, run.code, Path(path))
        except RefusedError as error:
            yield f"{failed}: {error}"
