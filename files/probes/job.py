"""Run one job on the cluster as its job user, within a time limit, and print its result as a line of JSON.

python3 job.py '{"argv": ["horovodrun", …], "nodes": ["node-1"], "seconds": 120, "patterns": ["No space left"]}'
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

# Lines that jobs print in any case; they show no cause.
NOISE = re.compile(
    r"^\s*$|\{\"losses\"|WARNING: All log messages before absl|oneDNN|cpu_feature_guard|rebuild TensorFlow"
)
SHOWN = 25
PATIENCE = 10
# Seconds that a process may take to exit after its job has ended.
GRACE = 3
MARK = "FARANDOLE_JOB"
# Kills what still runs of a job on a node, found by the mark that its processes inherit, and prints its names.
REAP = """
import os, pathlib, signal, time

def found():
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if MARK in (entry / "environ").read_bytes().split(b"\\0"):
                yield int(entry.name), (entry / "comm").read_text().strip()
        except (OSError, ValueError):
            pass

until = time.monotonic() + GRACE
while (left := list(found())) and time.monotonic() < until:
    time.sleep(0.1)
for number, _ in left:
    try:
        os.kill(number, signal.SIGKILL)
    except ProcessLookupError:
        pass
print(*(name for _, name in left), sep="\\n")
"""


def run(task, mark):
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
        code = job.wait() if ends(job, task["seconds"]) else end(job)
        log.seek(0)
        return code, log.read()


def ends(job, seconds):
    """Whether it ends by itself in so many seconds, while somebody waits for it."""
    watch = select.poll()
    watch.register(os.pidfd_open(job.pid), select.POLLIN)
    # Without flags, it only tells that nobody reads any more: the run was interrupted, or its connection is lost.
    watch.register(sys.stdout, 0)
    return any(event == select.POLLIN for _, event in watch.poll(seconds * 1000))


def end(job):
    """End a job that takes too long, or that nobody waits for."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def reap(node, mark):
    """Kill the processes that a job left on a node, and return their names; None if the node does not answer."""
    script = f"MARK = {f'{MARK}={mark}'.encode()!r}; GRACE = {GRACE}{REAP}"
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", node, "python3", "-"]
    if node == socket.gethostname():
        # Here an ssh login would only cost time.
        command = ["python3", "-"]
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.split() if done.returncode == 0 else None


def records(output):
    """Parse the lines of JSON that ranks printed, after any prefix of the launcher."""
    for line in output.splitlines():
        start = line.find('{"')
        if start >= 0:
            try:
                yield json.loads(line[start:])
            except ValueError:
                continue


def results(output):
    """Collect what ranks printed: their descriptions and results, and the errors they found."""
    found = {"ranks": [], "wrong": []}
    for record in records(output):
        if "rank" in record:
            found["ranks"].append(record)
        elif "round" in record:
            found.setdefault("rounds", []).append(record["round"])
        elif "losses" in record:
            found.setdefault("losses", []).extend(record["losses"])
        elif "ranks" in record:
            found["ranks"] += record.pop("ranks")
            found.update(record)
        elif "code" in record and len(found["wrong"]) < SHOWN:
            found["wrong"].append(record)
    found["ranks"].sort(key=lambda rank: rank["rank"])
    return found


def excerpt(output, patterns):
    """The end of a log; before it, the first lines that match each pattern, or long tracebacks would hide the cause."""
    lines = [line if len(line) <= 300 else f"{line[:299]}…" for line in output.splitlines() if not NOISE.search(line)]
    earlier = lines[:-SHOWN]
    telling = {at for one in patterns for at in islice(matching(one, earlier), SHOWN)}
    return [earlier[at] for at in sorted(telling)] + lines[-SHOWN:]


def matching(pattern, lines):
    """The places of the lines that match a pattern."""
    return (at for at, line in enumerate(lines) if re.search(pattern, line))


def main():
    """Run a job and print its result."""
    task = json.loads(sys.argv[1])
    mark = uuid.uuid4().hex
    begun = time.monotonic()
    code, output = run(task, mark)
    seconds = round(time.monotonic() - begun, 1)
    with ThreadPoolExecutor(max_workers=32) as pool:
        left = dict(zip(task["nodes"], pool.map(lambda node: reap(node, mark), task["nodes"]), strict=True))
    said = excerpt(output, task["patterns"])
    print(json.dumps({**results(output), "code": code, "seconds": seconds, "left": left, "said": said}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
