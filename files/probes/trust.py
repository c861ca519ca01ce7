"""Does this node reach every other as a job would: by name and by address, asked nothing, told nothing?

Reads {"name": "address", …} as its argument; prints every connection that it tried, in one line of JSON; leaves 1
unless all are clean. A code says what this program saw; the control machine explains what ssh said.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

LIMIT = 20
# Characters of what was said that are handed on.
SAID = 2000
ASK = "hostname && cat /etc/machine-id"


def call(target):
    """What one ssh answered, and a code and words if it is not clean."""
    command = ["ssh", "-o", "BatchMode=yes", target, ASK]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return [], "peer-silent", f"no answer within {LIMIT} s"
    noise = done.stderr.strip()
    if done.returncode or noise:
        return [], "peer-failed", noise or f"exit status {done.returncode}"
    return done.stdout.split(), "", ""


def judge(name, target):
    """One connection to one node."""
    begun = time.monotonic()
    answer, code, seen = call(target)
    if not code and (len(answer) != 2 or answer[0] != name):
        code, seen = "peer-stranger", repr(" ".join(answer))
    machine = answer[1] if len(answer) == 2 else ""
    seconds = round(time.monotonic() - begun, 2)
    told = {"host": name, "target": target, "seconds": seconds, "machine": machine}
    return {**told, "code": code, "seen": seen[-SAID:]}


def main():
    """All connections at once; then the count of machines behind them."""
    nodes = json.loads(sys.argv[1])
    ways = [(name, target) for name, address in nodes.items() for target in (name, address)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        tried = list(pool.map(lambda way: judge(*way), ways))
    print(json.dumps({"connections": tried}))
    machines = {one["machine"] for one in tried} - {""}
    return int(any(one["code"] for one in tried) or len(machines) != len(nodes))


if __name__ == "__main__":
    sys.exit(main())
