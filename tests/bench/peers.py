"""`make bench-peers`: measure what the head sends, and how long nodes fetch, if they pass an archive on or do not.

    peers.py [NODES ...]

Each node's link carries 1 Gbit/s in each direction. The archive is random, and nothing is unpacked. Ratios can be
compared between machines; seconds cannot.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAB = "bench-peers"
SIZES = (2, 8, 16, 32, 64)
MBIT = 1000
BYTES = 150_000_000
# The role's own tasks that bring the archive to the depot, and that choose who takes it from whom.
PLAY: list[dict[str, Any]] = [
    {
        "hosts": "head",
        "gather_facts": False,
        "become": True,
        "tasks": [
            {"ansible.builtin.import_role": {"name": "farandole.cluster.depot"}},
            {"ansible.builtin.import_role": {"name": "farandole.cluster.depot", "tasks_from": "put"}},
        ],
    },
    {
        "hosts": "cluster",
        "gather_facts": False,
        "become": True,
        "tasks": [
            {
                "ansible.builtin.set_fact": {
                    "orders": "{{ [part] | farandole.cluster.stack_peers("
                    "ansible_play_batch, hostvars, cluster_facts.head, ansible_forks, 8480) if share else {} }}"
                },
                "run_once": True,
            },
            {
                "fetch_it": {
                    "url": "http://{{ address }}:8480/{{ part.archive | farandole.cluster.stack_place }}",
                    "sha256": "{{ part.archive.sha256 }}",
                    "size": "{{ part.archive.size }}",
                    "pieces": "{{ orders.it.pieces | default(omit) }}",
                    "peers": "{{ orders.it.nodes[inventory_hostname] | default(omit) }}",
                },
                "when": "inventory_hostname != cluster_facts.head",
            },
        ],
    },
]
MODULE = """
import tempfile
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.depot import FILE, fetch
from ansible_collections.farandole.cluster.plugins.module_utils.peers import PEERS, Shared

peers = {"type": "dict", "options": PEERS}
pieces = {"type": "list", "elements": "str"}
module = AnsibleModule({**FILE, "pieces": pieces, "peers": peers})
order = module.params["peers"]
get = {"get": Shared(module.params["pieces"], order, module.warn).get} if order else {}
with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    begun = time.monotonic()
    fetch(module, module.params, Path(folder, "archive"), **get)
    module.exit_json(seconds=time.monotonic() - begun)
"""


def lab(verb: str, arguments: str = "") -> str:
    """Run a `farandole lab` command on the benchmark's lab; returns what it prints."""
    line = f"lab {verb} --name {LAB} {arguments}"
    command = [sys.executable, "-m", "farandole", *line.split()]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def sent() -> int:
    """The bytes that the head has sent over the network."""
    return int(lab("ssh", "node-1 -- cat /sys/class/net/eth0/statistics/tx_bytes"))


def fetched(folder: Path, size: int, share: bool) -> list[float]:
    """The seconds for which each node fetches an archive that nobody has yet."""
    content = os.urandom(BYTES)
    path = folder / "stacks/archive"
    path.write_bytes(content)
    archive = {"path": str(path), "size": BYTES, "sha256": sha256(content).hexdigest()}
    lacking = [f"node-{number}" for number in range(2, size + 1)]
    values = {
        "part": {"id": "it", "archive": archive, "lacking": lacking},
        "depot_files": [{**archive, "name": "stacks/archive"}],
        "address": lab("ssh", "node-1 -- hostname -I").split()[0],
        "share": share,
    }
    (folder / "values.json").write_text(json.dumps(values))
    command = ["ansible-playbook", "-v", "-i", f"inventory/{LAB}", str(folder / "play.yml")]
    for file in (ROOT / "playbooks/group_vars/all/cluster.yml", folder / "values.json"):
        command += ["--extra-vars", f"@{file}"]
    # All at once.
    settings = {"ANSIBLE_FORKS": str(size), "ANSIBLE_NOCOLOR": "1"}
    settings["ANSIBLE_CALLBACKS_ENABLED"] = "farandole.cluster.plain_terminal"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, text=True, capture_output=True, check=False
    )
    seconds = [float(number) for number in re.findall(r"seconds\W+([\d.]+)", done.stdout)]
    if done.returncode or len(seconds) != len(lacking):
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return seconds


def measure(folder: Path, size: int) -> None:
    """Print the rows of a lab of this size."""
    lab("up", f"--nodes {size}")
    for number in range(1, size + 1):
        lab("fault throttle", f"node-{number} --mbit {MBIT}")
    for share, how in ((True, "passed on"), (False, "from the head alone")):
        before = sent()
        seconds = fetched(folder, size, share)
        archives = (sent() - before) / BYTES
        times = f"{statistics.median(seconds):6.1f} s {max(seconds):6.1f} s"
        print(f"{size:>3} nodes  {how:<20} {archives:5.1f}  {times}", flush=True)


def main() -> None:
    """Measure, the smallest lab first."""
    sizes = [int(word) for word in sys.argv[1:]] or SIZES
    print(f"{BYTES / 1e6:.0f} MB, {MBIT} Mbit/s: archives that the head sent; fetched in: the median, the last node")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("library", "stacks"):
            (folder / file).mkdir()
        (folder / "library/fetch_it.py").write_text(MODULE)
        (folder / "play.yml").write_text(json.dumps(PLAY))
        try:
            for size in sizes:
                measure(folder, size)
        finally:
            lab("down")


if __name__ == "__main__":
    main()
