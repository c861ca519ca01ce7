"""Run one allreduce job over the cluster as its job user, and say in a line what came of it.

python3 job.py '{"nodes": ["node-1"], "framework": "torch", "controller": "gloo", "seconds": 120, "probe": "<source>"}'
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

LAUNCHER = "/usr/local/bin/horovodrun"
# Lines of a launcher's log that say nothing to the reader of a failure.
NOISE = re.compile(r"^\s*$|WARNING: All log messages before absl|oneDNN|cpu_feature_guard|rebuild TensorFlow")
SHOWN = 12


def command(task):
    """How the job is started."""
    count = str(len(task["nodes"]))
    hosts = ",".join(f"{node}:1" for node in task["nodes"])
    python = ["python", "-c", task["probe"], task["framework"], "--expect", count]
    return [LAUNCHER, f"--{task['controller']}", "-np", count, "-H", hosts, *python]


def run(task):
    """Its exit status, None when time was up, and its output; no process of it is left behind."""
    # The launcher enters its own directory on every node, so it has to be one that all of them have.
    job = subprocess.Popen(
        command(task), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = job.communicate(timeout=task["seconds"])
        return job.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            output, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
        return None, output


def ranks_of(output):
    """What each rank printed of itself."""
    found = []
    for line in output.splitlines():
        start = line.find('{"rank"')
        if start >= 0:
            found.append(json.loads(line[start:]))
    return sorted(found, key=lambda rank: rank["rank"])


def report(ranks, seconds):
    """A job that is right, rank by rank."""
    yield f"{len(ranks)} ranks on {len({rank['machine'] for rank in ranks})} machines in {seconds:.1f} s"
    for rank in ranks:
        sums = ", ".join(map(str, sorted({one["sum"] for one in rank["sums"]})))
        yield f"  rank {rank['rank']}: {rank['host']}, machine {rank['machine']}, sum {sums}"


def complaint(task, code, output):
    """A job that is not: what it said at its end."""
    lines = [line for line in output.splitlines() if not NOISE.search(line)]
    how = f"was ended after {task['seconds']} s" if code is None else f"ended with status {code}"
    yield f"the job {how}; its last words:"
    yield from (f"  {line[:300]}" for line in lines[-SHOWN:])


def main():
    """One job."""
    task = json.loads(sys.argv[1])
    begun = time.monotonic()
    code, output = run(task)
    ranks = ranks_of(output)
    good = code == 0 and len(ranks) == len(task["nodes"]) and not any(rank["wrong"] for rank in ranks)
    lines = report(ranks, time.monotonic() - begun) if good else complaint(task, code, output)
    print(f"{task['framework']} over {task['controller']}: " + "\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
