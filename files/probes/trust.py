"""Does this node reach every other as a job would: by name and by address, asked nothing, told nothing?

Reads {"name": "address", …} as its argument; prints a line per way and leaves 1 when one of them is not clean.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

LIMIT = 20
ASK = "hostname && cat /etc/machine-id"
# What ssh says, and what it means.
CAUSES = {
    "revoked by file": "its host key is revoked",
    "Host key verification failed": "its host key carries no signature of this cluster's CA",
    "Permission denied": "it does not accept the job user's certificate",
    "timed out": "nothing answers at that address",
    "No route to host": "there is no route to that address",
    "Connection refused": "no sshd listens there",
    "Could not resolve": "the name is not known here",
    "closed by": "its sshd closed the connection, MaxStartups may be too low",
}


def explain(noise):
    """What it means, and the words that say so."""
    for words, cause in CAUSES.items():
        for line in noise:
            if words in line:
                return f"{cause} ({line.strip()})"
    return f"unexpected words from ssh ({noise[-1].strip()})"


def call(target):
    """Answer, complaint and seconds of one ssh."""
    begun = time.monotonic()
    command = ["ssh", "-o", "BatchMode=yes", target, ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [], f"no answer within {LIMIT} s", LIMIT
    noise = done.stderr.strip()
    if done.returncode or noise:
        return [], explain(noise.splitlines() or [f"exit status {done.returncode}"]), time.monotonic() - begun
    return done.stdout.split(), "", time.monotonic() - begun


def judge(name, target):
    """One way to one node: the complaint, if any, its machine id, and a line to read."""
    answer, complaint, seconds = call(target)
    if not complaint and (len(answer) != 2 or answer[0] != name):
        complaint = f"said {' '.join(answer)!r}, not its name: a login script prints, or it is another machine"
    machine = answer[1] if len(answer) == 2 else ""
    return complaint, machine, f"  {name:<20} {target:<20} {complaint or f'{seconds:.2f} s'}"


def main():
    """Every way at once; then the count of machines behind them."""
    nodes = json.loads(sys.argv[1])
    ways = [(name, target) for name, address in nodes.items() for target in (name, address)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        results = list(pool.map(lambda way: judge(*way), ways))
    bad = sum(1 for complaint, _, _ in results if complaint)
    names = {}
    for (name, _), (_, machine, _) in zip(ways, results, strict=True):
        names.setdefault(machine, set()).add(name)
    names.pop("", None)
    print("\n".join(line for _, _, line in results))
    for shared in (sorted(same) for same in names.values() if len(same) > 1):
        print(f"  {' and '.join(shared)} are one machine: they have the same machine id")
    print(f"  machines: {len(names)} of {len(nodes)}, clean ways: {len(ways) - bad} of {len(ways)}")
    return int(bad > 0 or len(names) != len(nodes))


if __name__ == "__main__":
    sys.exit(main())
