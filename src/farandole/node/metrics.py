"""Write what Prometheus's node exporter cannot see: a node's health, units, certificates and GPUs; the head's slots.

A timer starts this every minute, as root.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from farandole.node.head import status
from farandole.node.health import CHECKS, LIMIT, faults

FILE = Path("/var/lib/farandole/metrics/node.prom")
HOST_KEY = Path("/etc/ssh/ssh_host_ed25519_key")
# Of the job user, of people, and of root, who mounts homes of the head.
KEYS, OTHER_KEYS = Path("/etc/farandole/ssh"), ("id_job", "id_jobs/*", "id_files")
REBOOT = Path("/run/reboot-required")
GPU = {
    "farandole_gpu_busy_percent": "utilization.gpu",
    "farandole_gpu_memory_used_mib": "memory.used",
    "farandole_gpu_celsius": "temperature.gpu",
    "farandole_gpu_ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
}
# More units, queued jobs or GPUs are no longer told one by one.
MOST = 50
Sample = tuple[str, dict[str, str], float]


def said(*command: str) -> list[str] | None:
    """The lines that a command prints; None if it fails, is missing, or takes too long."""
    with suppress(OSError, subprocess.TimeoutExpired):
        begun = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        try:
            printed, _ = begun.communicate(timeout=LIMIT)
        finally:
            # And not waited for, as what hangs in a driver ends by nothing.
            begun.kill()
        return printed.splitlines() if not begun.returncode else None
    return None


def certificates() -> list[str]:
    """Where the certificates of this node's keys have to be; private keys are the files without a suffix."""
    others = [path for pattern in OTHER_KEYS for path in sorted(KEYS.glob(pattern)) if not path.suffix]
    return [f"{key}-cert.pub" for key in (HOST_KEY, *others)]


def of_node(now: float) -> Iterator[Sample]:
    """What this node says of itself."""
    failed = said("systemctl", "--failed", "--plain", "--no-legend")
    read = {file: said("ssh-keygen", "-L", "-f", file) for file in certificates()}
    # The head tells who has booted and is not proven.
    found = faults({name: check for name, check in CHECKS.items() if name != "boot"})
    # Otherwise silence would count as health.
    if failed is None:
        found.append("systemctl does not say which units have failed; run  systemctl --failed")
    found += [f"{file} cannot be read; run site.yml" for file, lines in read.items() if lines is None]
    yield from (("farandole_fault", {"what": why}, 1) for why in found[:MOST])
    units = [line.split()[0] for line in failed or [] if line.strip()]
    yield from (("farandole_failed_unit", {"unit": unit}, 1) for unit in units[:MOST])
    yield "farandole_reboot_required", {}, float(REBOOT.exists())
    for file, lines in read.items():
        if valid := re.search(r"Valid: from (\d\S+) to (\d\S+)", "\n".join(lines or [])):
            begin, end = (datetime.fromisoformat(time).timestamp() for time in valid.groups())
            yield "farandole_certificate_days", {"file": file}, round((end - now) / 86400, 2)
            yield "farandole_certificate_lifetime_days", {"file": file}, round((end - begin) / 86400, 2)
    asked = f"--query-gpu=index,{','.join(GPU.values())}"
    for line in (said("nvidia-smi", asked, "--format=csv,noheader,nounits") or [])[:MOST]:
        index, *values = (word.strip() for word in line.split(","))
        for name, value in zip(GPU, values, strict=False):
            # A GPU that does not count errors says so in words.
            with suppress(ValueError):
                yield name, {"gpu": index}, float(value)


def of_head(depot: Path) -> Iterator[Sample]:
    """What only the head knows: who has which slots, how the queue is, and how large the depot is."""
    if not status.HOSTFILE.exists():
        return
    if status.QUEUE.exists():
        states = Counter(said("squeue", "--noheader", "--format=%T") or [])
        yield from (("farandole_head_jobs", {"state": state.lower()}, number) for state, number in states.items())
    nodes = status.of_queue()
    used = status.used(nodes)
    yield from (("farandole_head_unproven", {"node": name}, 1) for name in status.lost(status.no_jobs(nodes)))
    for name, number in status.hostfile().items():
        yield "farandole_head_slots", {"node": name}, number
        if used is not None:
            yield "farandole_head_slots_used", {"node": name}, used.get(name, 0)
    files = [path for path in depot.rglob("*") if path.is_file() and not path.is_symlink()]
    yield "farandole_head_depot_bytes", {}, sum(path.stat().st_size for path in files)


def exposed(samples: Iterator[Sample]) -> str:
    """Samples in the form that Prometheus reads."""
    lines = []
    for name, labels, value in samples:
        printable = {key: re.sub(r"[^ -~]", "?", text) for key, text in labels.items()}
        # Of these, JSON escapes the same.
        quoted = [f"{key}={json.dumps(text)}" for key, text in printable.items()]
        lines.append(f"{name}{{{','.join(quoted)}}} {value:g}\n")
    # One metric's samples follow each other.
    return "".join(sorted(dict.fromkeys(lines)))


def main() -> None:
    """Write the file, which is whole at any time; the head is told where its depot is."""
    samples = [*of_node(time.time()), *(sample for folder in sys.argv[1:] for sample in of_head(Path(folder)))]
    draft = FILE.with_suffix(".new")
    draft.write_text(exposed(iter(samples)))
    draft.replace(FILE)
