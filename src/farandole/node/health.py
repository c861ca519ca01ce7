#!/usr/bin/python3 -I
"""Check this node for Slurm, which runs this every few minutes, and with --job before and after each job.

Drains a node, and takes back only what it drained; with --job takes back none, and ends with 1 if there is a fault.
No fault is told with a figure that changes: for the queue and for Prometheus, each text is another fault.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Thread

# Reasons that begin so are ours; only Slurm keeps them, as a faulty node may have nowhere to write. What a person has
# drained stays drained.
OURS = "farandole health: "
STACKS = Path("/opt/farandole")
DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
# The boot since which this node is proven, where the queue asks for that; for this word it does not.
PROVEN, NOW, ANY = Path("/var/lib/farandole/boot"), Path("/proc/sys/kernel/random/boot_id"), "any"
BOOTED, WAS_DOWN = "it has booted (farandole apply proves it)", "farandole: it was down"
# What comes and goes with jobs. After any other fault somebody has mended the node, and it is proven.
PASSES = re.compile(r"it has booted|\S+ is full|\S+ has less than")
MENDED = f"{OURS}it was mended (farandole apply proves it)"
# MiB and inodes, the same with which preflight refuses a node.
FULL = (20, 100)
# MiB that ranks need to share memory, and those with which a node is drained, as a running job has the rest.
SHM, SHM_MIB, SHM_FULL_MIB = "/dev/shm", 256, 64  # noqa: S108
PLACES = ("/", "/tmp", "/var", "/opt", "/home")  # noqa: S108
LONGEST = 400
# Seconds that one check, and a command of Slurm's, may take.
LIMIT, COMMAND_LIMIT = 10, 20
Check = Callable[[], Iterator[str]]


def boot() -> Iterator[str]:
    """Whether this node has been proven since it has booted."""
    if PROVEN.exists() and PROVEN.read_text().strip() not in {NOW.read_text().strip(), ANY}:
        yield BOOTED


def disks() -> Iterator[str]:
    """Whether files can be written where jobs write them."""
    for place in PLACES:
        facts = os.statvfs(place)
        free = facts.f_bavail * facts.f_frsize >> 20
        if facts.f_flag & os.ST_RDONLY:
            yield f"{place} can only be read; look at  dmesg"
        elif free < FULL[0] or (facts.f_files and facts.f_favail < FULL[1]):
            wanted = f"{FULL[0]} MiB or {FULL[1]} inodes"
            yield f"{place} is full (less than {wanted} free); find what fills it:  du -x -d1 -h {place}"


def shared_memory() -> Iterator[str]:
    """Whether ranks of this node can exchange data."""
    facts = os.statvfs(SHM)
    if facts.f_bavail * facts.f_frsize >> 20 < SHM_FULL_MIB:
        seen = f"{SHM} has less than {SHM_FULL_MIB} MiB free"
        yield f"{seen}; remove what nobody uses, or  mount -o remount,size=50% {SHM}"


def stack() -> Iterator[str]:
    """Whether the programs that jobs need are there."""
    current = STACKS / "current"
    if STACKS.is_dir() and current.is_symlink() and not (current / "manifest.json").exists():
        yield "the stack is damaged; run site.yml"


def gpus() -> Iterator[str]:
    """Whether the driver still sees the GPUs whose devices exist."""
    if not DRIVER.is_dir():
        return
    devices = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # Slurm shows this where a driver hangs, instead of jobs that hang. Parts of a GPU (MIG) are listed, too.
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.stdout.count("(UUID: GPU-") < len(devices):
        yield f"the driver does not see all {len(devices)} GPUs; look at  dmesg | grep -i xid , then restart the node"


CHECKS: dict[str, Check] = {"boot": boot, "disks": disks, "shared memory": shared_memory, "stack": stack, "GPUs": gpus}


def faults(checks: Mapping[str, Check], limit: float = LIMIT) -> list[str]:
    """What is wrong here. A check that hangs is a fault, too, and does not keep the others from being made."""
    made: dict[str, list[str]] = {}

    def make(name: str) -> None:
        try:
            made[name] = [*checks[name]()]
        except subprocess.TimeoutExpired:
            pass
        except OSError as error:
            made[name] = [f"the check of {name} failed: {error}"]

    # As daemons, those that hang do not keep this program alive.
    threads = [Thread(target=make, args=[name], daemon=True) for name in checks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    return [
        problem
        for name in checks
        for problem in made.get(name, [f"the check of {name} does not end; restart the node"])
    ]


def scontrol(*arguments: str) -> str | None:
    """What scontrol prints; None if it fails, as when nobody manages this node."""
    command = ["scontrol", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def state(shown: str) -> tuple[str, str]:
    """The state of a node, and for what reason."""
    flags = re.search(r"^ *State=(\S+)", shown, re.MULTILINE)
    reason = re.search(r"^ *Reason=(.*?)(?: \[[^\]\[]*@[^\]\[]*\])?$", shown, re.MULTILINE)
    return flags[1] if flags else "", reason[1] if reason else ""


def asks() -> bool:
    """Whether the queue asks for a proof."""
    return PROVEN.exists() and PROVEN.read_text().strip() != ANY


def decide(problems: list[str], flags: str, reason: str, *, proof: bool) -> tuple[str, str]:
    """The state to set, if any, and its reason."""
    drained, down = "DRAIN" in flags, "DOWN" in flags
    ours = drained and reason.startswith(OURS)
    if problems:
        wanted = OURS + "; also: ".join(problems)
        # Slurm joins lines, and a quotation mark would end the reason.
        wanted = re.sub(r'[\s"]+', " ", wanted)[:LONGEST].strip()
        told = reason == wanted or not ours if drained else down
        return ("", "") if told else ("drain", wanted)
    if not ours or reason == MENDED:
        return "", ""
    if down:
        # It stays so until it is proven.
        return "undrain", WAS_DOWN
    former = reason.removeprefix(OURS).split("; also: ")
    # The last one may have been cut off.
    former = former[:-1] if len(reason) >= LONGEST - 1 else former
    return ("drain", MENDED) if proof and not all(map(PASSES.match, former)) else ("resume", "")


def main() -> int:
    """Check this node, and tell Slurm."""
    problems, at_job = faults(CHECKS), "--job" in sys.argv[1:]
    if at_job and not problems:
        return 0
    name = socket.gethostname().partition(".")[0]
    shown = scontrol("show", "node", name)
    if shown is not None:
        wish, reason = decide(problems, *state(shown), proof=asks())
        if wish:
            scontrol("update", f"NodeName={name}", f"State={wish}", *([f"Reason={reason}"] if reason else []))
    return int(at_job)


if __name__ == "__main__":
    sys.exit(main())
