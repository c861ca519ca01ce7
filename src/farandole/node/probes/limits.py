"""Whether the queue ends a job that takes more memory than it asked for, and one over its time.

python3 limits.py node-1,node-2

The first runs on the last of these nodes, the second on all of them, both at the same time. job.py finds what the
second leaves behind.
"""

import os
import subprocess
import sys
import time
from typing import Any

from farandole.node.probes import ranks

ASKED_MIB, TAKEN_MIB = 100, 600
HOG = f"""
import time
kept = []
for _ in range({TAKEN_MIB // 10}):
    kept.append(bytearray(10 << 20))
    time.sleep(0.2)
"""
# One rank of a job that does not end, nor does its child.
ENDLESS = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
machine = Path("/etc/machine-id").read_text().strip()
rank, size = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS"))
found = {"rank": rank, "size": size, "host": socket.gethostname(), "machine": machine}
sys.stdout.write(json.dumps(found) + "\\n")
sys.stdout.flush()
subprocess.Popen(["sleep", "600"])
time.sleep(600)
"""
# Seconds that the accounting may be behind.
BEHIND = 20


def start(name: str, nodes: list[str], *options: str, script: str, output: Any = None) -> subprocess.Popen[str]:
    """Start a job with a rank on each of these nodes."""
    count = str(len(nodes))
    where = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]
    command = ["srun", "--quiet", f"--job-name={name}", *where, *options, "python3", "-c", script]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True)


def state(name: str) -> str:
    """The state of an ended job in the accounting."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}", "--format=state"]
    until = time.monotonic() + BEHIND
    while True:
        seen = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if seen not in ("", "PENDING", "RUNNING", "COMPLETING") or time.monotonic() > until:
            return seen or "nothing"
        time.sleep(0.5)


def main() -> int:
    """Run both jobs, and print what did not hold."""
    nodes, errors = sys.argv[1].split(","), []
    names = {limit: f"farandole-validate-{limit}-{os.getpid()}" for limit in ("memory", "time")}
    hog = start(names["memory"], nodes[-1:], f"--mem={ASKED_MIB}", "--time=5", script=HOG, output=subprocess.PIPE)
    endless = start(names["time"], nodes, "--time=1", script=ENDLESS)
    output, _ = hog.communicate()
    seen = state(names["memory"])
    if hog.returncode == 0 or seen == "COMPLETED":
        errors.append(ranks.error("limit-loose", f"a job that asked for {ASKED_MIB} MiB of memory took {TAKEN_MIB}"))
    elif not any(
        message in output for message in ("exceeded memory limit", "oom-kill", "Out Of Memory", "Out of memory")
    ):
        errors.append(ranks.error("limit-loose", f"a job over its memory ended as {seen}, without an explanation"))
    if errors:
        sys.stderr.write(output)
    endless.wait()
    if (seen := state(names["time"])) != "TIMEOUT":
        errors.append(ranks.error("limit-loose", f"a job over its time ended as {seen}, not as TIMEOUT"))
    for error in errors:
        ranks.show(error)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
