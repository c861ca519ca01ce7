"""Run one job on the cluster as its job user, within a time limit, and print its result as a line of JSON.

Its argument is {"argv": ["horovodrun", …], "nodes": ["node-1"], "seconds": 120, "patterns": ["No space left"], "reap":
"the program that ends what a job leaves behind"}.
"""

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from farandole.node.head.reap import MARK, end, reap

# Lines that jobs print in any case; they show no cause.
NOISE = re.compile(
    r"^\s*$|\{\"losses\"|WARNING: All log messages before absl|oneDNN|cpu_feature_guard|rebuild TensorFlow"
)
# Lines, and characters of a line.
SHOWN, LONGEST = 25, 400
PATIENCE = 10


def run(task: dict[str, Any], mark: str) -> tuple[int | None, str]:
    """Its exit status, None when it had to be ended, and its output; its process group is gone afterwards."""
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
        # The launcher enters its own directory on every node, so it has to be one that all of them have.
        job = subprocess.Popen(
            task["argv"],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = ends(job, task["seconds"])
        if not in_time:
            end(job)
        log.seek(0)
        return job.wait() if in_time else None, log.read()


def ends(job: subprocess.Popen[bytes], seconds: int) -> bool:
    """Whether it ends by itself in so many seconds, while somebody waits for it."""
    watch = select.poll()
    watch.register(os.pidfd_open(job.pid), select.POLLIN)
    # Without flags, it only tells that nobody reads any more: the run was interrupted, or its connection is lost.
    watch.register(sys.stdout, 0)
    return any(event == select.POLLIN for _, event in watch.poll(seconds * 1000))


def records(output: str) -> Iterator[dict[str, Any]]:
    """Parse the lines of JSON that ranks printed, after any prefix of the launcher."""
    for line in output.splitlines():
        start = line.find('{"')
        if start >= 0:
            try:
                yield json.loads(line[start:])
            except ValueError:
                continue


def results(output: str) -> dict[str, Any]:
    """Collect what ranks printed: their descriptions and results, and the errors they found."""
    collected: dict[str, Any] = {"ranks": [], "wrong": []}
    for record in records(output):
        if "rank" in record:
            collected["ranks"].append(record)
        elif "round" in record:
            collected.setdefault("rounds", []).append(record["round"])
        elif "losses" in record:
            collected.setdefault("losses", []).extend(record["losses"])
        elif "ranks" in record:
            collected["ranks"] += record.pop("ranks")
            collected.update(record)
        elif "code" in record and len(collected["wrong"]) < SHOWN:
            collected["wrong"].append(record)
    collected["ranks"].sort(key=lambda rank: rank["rank"])
    return collected


def excerpt(output: str, patterns: Sequence[str]) -> list[str]:
    """The end of a log; before it, the first lines that match each pattern, or long tracebacks would hide the cause."""
    lines = [line for line in output.splitlines() if not NOISE.search(line)]
    # The reason of an error is at the end of its line.
    lines = [line if len(line) <= LONGEST else f"{line[:299]}…{line[300 - LONGEST :]}" for line in lines]
    earlier = lines[:-SHOWN]
    telling = {at for pattern in patterns for at in islice(matching(pattern, earlier), SHOWN)}
    return [earlier[at] for at in sorted(telling)] + lines[-SHOWN:]


def matching(pattern: str, lines: Sequence[str]) -> Iterator[int]:
    """The places of the lines that match a pattern."""
    return (at for at, line in enumerate(lines) if re.search(pattern, line))


def main() -> int:
    """Run a job and print its result."""
    task = json.loads(sys.argv[1])
    mark = uuid.uuid4().hex
    begun = time.monotonic()
    code, output = run(task, mark)
    seconds = round(time.monotonic() - begun, 1)
    with ThreadPoolExecutor(max_workers=32) as pool:
        ended = pool.map(lambda node: reap(node, mark, task["reap"], PATIENCE), task["nodes"])
        left = dict(zip(task["nodes"], ended, strict=True))
    tail = excerpt(output, task["patterns"])
    print(json.dumps({**results(output), "code": code, "seconds": seconds, "left": left, "said": tail}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
