"""Start a program on a slot of a run, wait for its end, and tell the head which ranks it has met."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from farandole.node.rank.place import OF_RUN, Place, alone, on_node, place, variables

HOOK = str(Path(__file__).with_name("hook"))
# In front of what a rank tells the head, behind what it has printed; and the variable with what the run is.
SIGN, RUN = "\x02farandole ", "FARANDOLE_RUN"
# By which each launcher numbers what it starts; and all of their variables, which independent programs do not get.
NUMBERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
OF_LAUNCHERS = re.compile(r"(HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_|CONTROLLER|CPU_)|OMPI_|PMIX_|PMI_).*")
MPI = "/opt/farandole/current/mpi/lib"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
# Messages that are read at once.
MOST = 1000


def main() -> int:
    """Start the program; returns its exit status."""
    run = json.loads(os.environ.pop(RUN))
    slots, launcher, mark = run["slots"], run["launcher"], run["mark"]
    number = next(int(os.environ[name]) for name in NUMBERS if name in os.environ)
    # Of a node whose ranks are started there, the first rank.
    per_node = launcher in OF_RUN
    at = place(sum(list(slots.values())[:number]) if per_node else number, slots)
    program = on_node(sys.argv[1:], at, slots, run["port"]) if per_node else sys.argv[1:]
    told: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        # The kernel chooses a name that no other has.
        listener.bind("")
        listener.setblocking(False)
        # Only what runs as the same account may say something.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        status = execute(program, environment(launcher, at, run, listener.getsockname()), listener, told)
    if status < 0 and launcher != "each":
        die(-status)
    # The end of one of many independent programs must not be that of the others.
    report = {"number": number, "told": sorted(set(told)), "status": status if launcher == "each" else 0}
    sys.stdout.write(f"{SIGN}{mark} {json.dumps(report)}\n")
    sys.stdout.flush()
    return 0 if launcher == "each" else status


def environment(launcher: str, at: Place, run: Any, address: bytes) -> dict[str, str]:
    """The environment of the program."""
    inherited: Mapping[str, str] = os.environ
    if launcher == "each":
        own = alone(at, inherited.get("CUDA_VISIBLE_DEVICES", ""))
        return {name: value for name, value in inherited.items() if not OF_LAUNCHERS.fullmatch(name)} | own
    ours = {} if launcher in OF_RUN else variables(at, run["slots"], run["port"])
    if "SLURM_JOB_ID" not in inherited:
        ours = {name: value for name, value in ours.items() if not name.startswith("SLURM_")}
    ours |= {name: value for name, value in network().items() if name not in inherited}
    ours |= {"PYTHONPATH": joined(HOOK, inherited.get("PYTHONPATH")), "FARANDOLE_MEETING": address[1:].decode()}
    # Packages that can use MPI look for it, also in ranks that something else starts.
    return {**inherited, **ours, "LD_LIBRARY_PATH": joined(inherited.get("LD_LIBRARY_PATH"), MPI)}


def joined(*folders: str | None) -> str:
    """A list of folders as a variable holds it."""
    return os.pathsep.join(filter(None, folders))


def network() -> dict[str, str]:
    """The interface of this node, which PyTorch's Gloo needs; its name is another one on other nodes."""
    script = ". /etc/farandole/environment && echo $GLOO_SOCKET_IFNAME"
    asked = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": "/bin"}, check=False)
    name = asked.stdout.strip()
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def execute(program: list[str], variables: dict[str, str], listener: socket.socket, told: list[str]) -> int:
    """Wait for the end of the program, and note what is told meanwhile."""
    # None arrives while there is nothing yet to pass it on to.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        process = subprocess.Popen(program, env=variables, preexec_fn=lambda: begin(before))
    except OSError as error:
        # As a shell says it.
        why = "command not found" if isinstance(error, FileNotFoundError) else str(error.strerror)
        print(f"{program[0]}: {why}", file=sys.stderr)
        return 127

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while not any(key.fd == ended for key, _ in selector.select()):
            told += heard(listener)
    told += heard(listener)
    os.close(ended)
    return process.wait()


def die(number: int) -> None:
    """End as the program did, so that the launcher sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def heard(listener: socket.socket) -> list[str]:
    """The messages that wait, of processes of this account."""
    messages = []
    with suppress(BlockingIOError):
        # Not endlessly, as others can send here.
        for _ in range(MOST):
            data, credentials, *_ = listener.recvmsg(256, socket.CMSG_SPACE(12))
            sender = credentials[0][2] if credentials else b""
            if len(sender) >= 12 and int.from_bytes(sender[4:8], sys.byteorder) == os.getuid():
                messages.append(data.decode(errors="replace"))
    return messages


def begin(blocked: set[signal.Signals | int]) -> None:
    """Before the program: let signals through, and let the kernel kill it if this process is killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
