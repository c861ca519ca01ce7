"""Start a program on a slot of a run, wait for its end, and tell the head which ranks it has met."""

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
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from farandole.node.head.reap import STAYS, kill_all
from farandole.node.health import CHECKS, DRIVER, Check, faults
from farandole.node.rank.place import (
    OF_RUN,
    PATIENCE,
    Place,
    alone,
    on_node,
    on_processors,
    place,
    variables,
    words_of_env,
)

HOOK = str(Path(__file__).with_name("hook"))
# In front of what a rank tells the head, behind what it has printed; and the variable with what the run is.
SIGN, RUN = "\x02farandole ", "FARANDOLE_RUN"
# By which each launcher numbers what it starts; and all of their variables, which independent programs do not get.
NUMBERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
OF_LAUNCHERS = re.compile(r"(HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_|CONTROLLER|CPU_)|OMPI_|PMIX_|PMI_).*")
STACK = "/opt/farandole/current"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Number, name, state and parent of a process that has not ended.
STAT = re.compile(r"(\d+) \((.*)\) [^ZX] (\d+) .*", re.DOTALL)
# How a process tells that a rank waits for the others, or no longer.
MOVED = re.compile(r"(enters|leaves) ([\w.]+) (-|\d{1,6}) (\d{1,10})")
# Where processes of other accounts cannot write; and messages that are read at once.
FOLDER, MOST = "/tmp/farandole-{}-{}", 1000  # noqa: S108


def main() -> int:
    """Start the program; returns its exit status."""
    # horovodrun may kill a shell that is just starting this, and would then wait for this without end.
    end_with_parent()
    run = json.loads(os.environ.pop(RUN))
    slots, launcher, mark = run["slots"], run["launcher"], run["mark"]
    number = next(int(os.environ[name]) for name in NUMBERS if name in os.environ)
    # Of a node whose ranks are started there, the first rank.
    per_node = launcher in OF_RUN
    at = place(sum(list(slots.values())[:number]) if per_node else number, slots)
    program = run["program"] if launcher == "each" else [*with_hook(run["program"])]
    program = on_node(program, at, slots, run["port"]) if per_node else program
    # Once on each node, unless the others would start all the same.
    checks = {} if at.local_rank and launcher != "each" else {**CHECKS}
    if "SLURM_JOB_ID" in os.environ:
        # A job may see only some of the node's GPUs; the queue has checked all of them.
        checks.pop("GPUs", None)
    if is_at_fault(checks):
        report(mark, sys.stdout, number=number, told=[], status=1)
        return int(launcher != "each")
    with meeting(FOLDER.format(mark, os.urandom(8).hex())) as listener:
        # Meanwhile the program prints, which is rarely a part of a line there.
        told = Told(
            listener, lambda **said: report(mark, sys.stderr, number=number, **said), None if per_node else at.rank
        )
        status = execute(program, environment(launcher, at, run, listener.getsockname()), told)
    is_at_fault(checks)
    report(mark, sys.stdout, number=number, told=sorted(told.words), status=status)
    if status < 0 and launcher != "each":
        die(-status)
    # The end of one of many independent programs must not be that of the others.
    return 0 if launcher == "each" else status


def is_at_fault(checks: Mapping[str, Check]) -> bool:
    """Whether something is wrong with this node, which is told."""
    found = faults(checks)
    for fault in found:
        print(f"{socket.gethostname()} is not fit for jobs: {fault}", file=sys.stderr, flush=True)
    return bool(found)


def with_hook(program: list[str]) -> Iterator[str]:
    """The words of a program, with the hook in a PYTHONPATH that env in front of it sets."""
    before = words_of_env(program)
    for word in program[:before]:
        name, is_set, value = word.partition("=")
        yield f"{name}={joined(HOOK, value)}" if name == "PYTHONPATH" and is_set else word
    yield from program[before:]


def report(mark: str, stream: TextIO, **said: object) -> None:
    """Tell the head something."""
    stream.write(f"{SIGN}{mark} {json.dumps(said)}\n")
    stream.flush()


@contextmanager
def meeting(folder: str) -> Iterator[socket.socket]:
    """A socket for what the processes of the program tell, in a folder that the head also removes after the run."""
    path = Path(folder, "meeting")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        # Without it, as on a full disk, the program runs all the same, and nothing is known of it.
        with suppress(OSError):
            path.parent.mkdir(mode=0o700)
            listener.bind(str(path))
        listener.setblocking(False)
        yield listener
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


class Told:
    """What the processes of a program tell."""

    def __init__(self, listener: socket.socket, report: Callable[..., None], rank: int | None) -> None:
        self.listener, self.report, self.rank = listener, report, rank
        self.words: set[str] = set()
        # The ranks that wait for others, through what, in which process and since when; and those that have stopped.
        self.waiting: dict[tuple[int, str], tuple[int, float]] = {}
        self.left: set[tuple[int, str]] = set()
        # Those that wait, as far as the head knows.
        self.known: set[tuple[int, str]] = set()

    def hear(self) -> None:
        """Read the messages that wait."""
        with suppress(BlockingIOError):
            # Not endlessly, as a program may send without end.
            for _ in range(MOST):
                message = self.listener.recv(256).decode(errors="replace")
                if not (moved := MOVED.fullmatch(message)):
                    self.words.add(message)
                    continue
                what, framework, rank, process = moved.groups()
                who = (int(rank) if self.rank is None and rank != "-" else self.rank or 0, framework)
                if what == "enters":
                    self.waiting[who] = (int(process), time.monotonic())
                else:
                    self.waiting.pop(who, None)
                    self.left.add(who)

    def watch(self) -> float | None:
        """Tell the head who waits for long, and who no longer; returns the seconds after which to look again."""
        now = time.monotonic()
        self.waiting = {who: what for who, what in self.waiting.items() if Path(f"/proc/{what[0]}").exists()}
        late = {who: round(now - since) for who, (_, since) in self.waiting.items() if now - since >= PATIENCE}
        # Nothing is told of ranks that meet at once, as a report may come into the middle of a line.
        if {*late} != self.known:
            self.known = {*late}
            self.report(waits=[[*who, seconds] for who, seconds in late.items()], left=sorted(self.left))
        return 1 if self.waiting else None


def environment(launcher: str, at: Place, run: Any, address: str) -> dict[str, str]:
    """The environment of the program."""
    # What the user has chosen stays.
    inherited = {**gpus(run, at), **os.environ}
    if launcher == "each":
        own = alone(at, inherited.get("CUDA_VISIBLE_DEVICES", ""))
        return {name: value for name, value in inherited.items() if not OF_LAUNCHERS.fullmatch(name)} | own
    ours = {} if launcher in OF_RUN else variables(at, run["slots"], run["port"])
    if "SLURM_JOB_ID" not in inherited:
        ours = {name: value for name, value in ours.items() if not name.startswith("SLURM_")}
    ours |= {name: value for name, value in (network() | on_processors()).items() if name not in inherited}
    ours |= {"PYTHONPATH": joined(HOOK, inherited.get("PYTHONPATH")), "FARANDOLE_MEETING": address}
    # Packages that can use MPI look for it, also in ranks that something else starts.
    stack = inherited.get("FARANDOLE_STACK", STACK)
    stack = stack if Path(stack).exists() else STACK
    return {**inherited, **ours, "LD_LIBRARY_PATH": joined(inherited.get("LD_LIBRARY_PATH"), f"{stack}/mpi/lib")}


def gpus(run: Any, at: Place) -> dict[str, str]:
    """Which GPUs of this node are the run's, if its slots stand for GPUs, and the queue does not choose them."""
    node = [*run["slots"]][at.node]
    # A run of an earlier head says neither.
    own, of_node = (run.get(what, {}).get(node) for what in ("numbers", "hostfile"))
    is_chosen = "SLURM_JOB_ID" in os.environ or not own or of_node != len([*DRIVER.glob("*")])
    return {} if is_chosen else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}


def joined(*folders: str | None) -> str:
    """A list of folders as a variable holds it."""
    return os.pathsep.join(filter(None, folders))


def network() -> dict[str, str]:
    """The interface of this node, which PyTorch's Gloo needs; its name is another one on other nodes."""
    script = ". /etc/farandole/environment && echo $GLOO_SOCKET_IFNAME"
    asked = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": "/bin"}, check=False)
    name = asked.stdout.strip()
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def execute(program: list[str], variables: dict[str, str], told: Told) -> int:
    """Wait for the end of the program, and note what is told meanwhile."""
    # What the program leaves behind becomes a child of this process.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # What the launcher has put beside this one, which ends by itself.
    beside = {str(number) for number, _ in processes_below()}
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
    signal.signal(signal.SIGCHLD, lambda *_: bury_others(process.pid))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        selector.register(told.listener, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while not any(key.fd == ended for key, _ in selector.select(told.watch())):
            told.hear()
    os.close(ended)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process.wait()
    # It would keep the output open, for whose end the launcher waits.
    if gone := ", ".join(name for name in kill_all(lambda: processes_below(beside)) if not name.startswith(STAYS)):
        print(f"{socket.gethostname()}: ended {gone}, which the program had left", file=sys.stderr, flush=True)
    told.hear()
    return process.returncode


def bury_others(program: int) -> None:
    """Let children of this process that have ended be gone, but not the program."""
    with suppress(ChildProcessError):
        while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and child.si_pid != program:
            os.waitpid(child.si_pid, 0)


def processes_below(beside: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """The number and the name of each process below this one and not below those beside it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found += STAT.findall(path.read_text(errors="replace"))
    below, known = {str(os.getpid())}, {*beside}
    while more := [(number, name) for number, name, parent in found if parent in below and number not in below | known]:
        below |= {number for number, _ in more}
        yield from ((int(number), name) for number, name in more)


def die(number: int) -> None:
    """End as the program did, so that the launcher sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def begin(blocked: set[signal.Signals | int]) -> None:
    """Before the program: let signals through, and let the kernel kill it if this process is killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    end_with_parent()


def end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
