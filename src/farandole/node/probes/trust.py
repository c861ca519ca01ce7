"""Check that this node reaches every other as a job would: by name and by address, without a prompt or any noise.

Takes {"name": "address", …} as its argument, prints every connection that it tried as one line of JSON, and exits with
1 unless all succeed. A code says what this program saw; the control machine explains what ssh printed.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT = 20
# Characters of output that are passed on.
SHOWN = 2000
ASK = "hostname && cat /etc/machine-id"


def call(target: str) -> tuple[list[str], str, str]:
    """Log in to a target; return its answer, and a code and what was seen if it failed."""
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


def judge(name: str, target: str) -> dict[str, Any]:
    """Try one connection to one node."""
    begun = time.monotonic()
    answer, code, seen = call(target)
    if not code and (len(answer) != 2 or answer[0] != name):
        code, seen = "peer-stranger", repr(" ".join(answer))
    machine = answer[1] if len(answer) == 2 else ""
    seconds = round(time.monotonic() - begun, 2)
    tried = {"host": name, "target": target, "seconds": seconds, "machine": machine}
    return {**tried, "code": code, "seen": seen[-SHOWN:]}


def main() -> int:
    """Try all connections at once, then count the machines behind them."""
    nodes = json.loads(sys.argv[1])
    ways = [(name, target) for name, address in nodes.items() for target in (name, address)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        tried = list(pool.map(lambda way: judge(*way), ways))
    print(json.dumps({"connections": tried}))
    machines = {attempt["machine"] for attempt in tried} - {""}
    return int(any(attempt["code"] for attempt in tried) or len(machines) != len(nodes))


if __name__ == "__main__":
    sys.exit(main())
