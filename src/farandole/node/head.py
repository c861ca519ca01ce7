#!/usr/bin/python3 -I
"""Run programs on the cluster's nodes: farandole run, runs, logs, attach, fetch, stop."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

HOSTFILE = Path("/etc/farandole/hostfile")
STACK = Path("/opt/farandole/current")
# Who uses which slots: a file for each run, locked while it runs.
SLOTS_IN_USE = Path("/run/farandole/slots")
OF_SLOTS = re.compile(r"\d+-(\d{1,9})-\w+")
# More slots than a node can have.
MOST_SLOTS = 1 << 16
# More runs than a person looks at.
SHOWN = 100
# Exists where Slurm decides who gets which slots.
QUEUE = Path("/usr/local/lib/farandole/slurm/hosts")
# Whose homes all nodes see, so that nothing has to be copied to them.
SHARED = Path("/etc/farandole/storage/home")
HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)
RUNS = HOME / "runs"
# Folders that a control machine has sent, by what it calls them.
SENT = RUNS / ".sent"
HERE = socket.gethostname()
# What ranks print, behind what horovodrun puts in front of it.
OF_RANK = re.compile(rb"(^|\r)\[(?:1,)?(\d+)\]<std(?:out|err)>: ?")
MARK = "FARANDOLE_JOB"
# Seconds that a job has to end by itself, that an ssh login may take, and that others may lock what all need.
GRACE, LOGIN, PATIENCE = 10, 10, 10
AT_ONCE = 32
# Seconds between two questions to systemd whether a run is alive.
ASK_EVERY = 5
# Bytes that are reserved for how a run ended.
RESERVED = 1 << 16
# The number of slots, or of ranks, of each node.
Slots = dict[str, int]
Given = argparse.Namespace
# Seconds in which the queue has to say what it does.
QUEUE_S = 3
TIME_IS_UP = "ended at its limit"
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class RefusedError(Exception):
    """A message for the user."""


# Runs


class Run:
    """A run's folder, which has the same path on all of its nodes."""

    def __init__(self, number: int) -> None:
        self.number, self.folder = number, RUNS / str(number)
        self.code, self.output = self.folder / "code", self.folder / "output"

    @property
    def unit(self) -> str:
        return f"farandole-run-{self.number}.service"

    def write(self, kind: str, **values: Any) -> None:
        draft = self.folder / f".{kind}"
        # In place, as its space may have been reserved.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(json.dumps(values))
            file.truncate()
        draft.replace(self.folder / f"{kind}.json")

    def reserve(self, kind: str) -> None:
        """Keep the space for what will be written, so that a full disk does not prevent it."""
        handle = os.open(self.folder / f".{kind}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, RESERVED)
        finally:
            os.close(handle)

    def read(self, kind: str) -> Any:
        try:
            return json.loads((self.folder / f"{kind}.json").read_text())
        except (OSError, ValueError):
            return {}

    def printed(self) -> BinaryIO:
        """What it has printed."""
        try:
            return self.output.open("rb")
        except FileNotFoundError:
            raise RefusedError(f"run {self.number} has printed nothing here") from None

    def is_alive(self) -> bool:
        shown = systemctl("show", "--property=ActiveState", self.unit)
        # If systemd does not answer, nothing is known.
        return shown.returncode != 0 or shown.stdout.strip() not in ("ActiveState=inactive", "ActiveState=failed")

    def end(self) -> Any:
        """How it ended; empty while it runs."""
        if found := self.read("ended"):
            return found
        # In this order, as it can end between the two.
        return (
            {}
            if self.is_alive()
            else self.read("ended")
            or {"status": 1, "why": "lost: it ended without a result, as when the head restarts"}
        )


def all_runs() -> list[Run]:
    """All runs, the latest one last."""
    numbers = [number_in(path.name) for path in RUNS.glob("[1-9]*")]
    return [Run(number) for number in sorted(numbers) if number]


def number_in(text: str) -> int:
    """The number of a run; 0 if it is none."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else 0


def chosen(text: str) -> Run:
    """The run with a number, or the latest one."""
    runs = all_runs()
    found = [run for run in runs if str(run.number) == text] if text else runs[-1:]
    if not found:
        known = ", ".join(str(run.number) for run in runs[-5:]) or "none yet"
        raise RefusedError(
            f"there is no run {text}; the latest are: {known} (farandole runs)" if text else "no runs yet"
        )
    return found[0]


def new_run() -> Run:
    """A folder for a new run."""
    RUNS.mkdir(mode=0o700, exist_ok=True)
    # A number is never used again: nodes may still have the folder of a run that was removed here.
    last, known = RUNS / ".last", 0
    with suppress(OSError, ValueError):
        known = number_in(last.read_text())
    while True:
        run = Run(max([known, *(one.number for one in all_runs())]) + 1)
        with suppress(FileExistsError):
            run.folder.mkdir(mode=0o700)
            draft = run.folder / ".last"
            try:
                draft.write_text(str(run.number))
            except OSError:
                shutil.rmtree(run.folder)
                raise
            draft.replace(last)
            return run


def systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemctl", "--user", *arguments], env=bus(), capture_output=True, text=True, check=False)


def bus() -> dict[str, str]:
    """Where the user's systemd listens, which a shell of runuser or sudo does not know."""
    return {**os.environ, "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}


# Slots


def hostfile() -> Slots:
    """The number of slots of each node."""
    lines = [line.split() for line in HOSTFILE.read_text().splitlines() if line.strip()]
    return {line[0]: int(line[1].partition("=")[2]) if line[1:] else 1 for line in lines}


def others() -> Iterator[tuple[str, str, float, Slots]]:
    """The runs that use slots: whose, since when, and how many of which node."""
    nodes = hostfile()
    for path in sorted(SLOTS_IN_USE.iterdir()):
        # Others could have put anything there.
        if not (name := OF_SLOTS.fullmatch(path.name)):
            continue
        with suppress(OSError, ValueError, RecursionError), only_a_file(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                status, found = os.fstat(file.fileno()), slots_in(file.read(1 << 16))
                uses = {node: slots for node, slots in found.items() if node in nodes}
                if any(uses.values()):
                    # Its owner can set its other times.
                    yield name[1], owner(status.st_uid), status.st_ctime, uses


def slots_in(text: str) -> Slots:
    """What a file says that a run uses; empty if it says nothing that can be."""
    found = json.loads(text)
    valid = isinstance(found, dict) and all(type(one) is int and 0 <= one <= MOST_SLOTS for one in found.values())
    return found if valid else {}


def forget_ended() -> None:
    """Remove the files of own runs that were killed."""
    for path in SLOTS_IN_USE.glob(f"{os.getuid()}-*"):
        name = OF_SLOTS.fullmatch(path.name)
        # Others can give theirs such a name. A run that is just starting has not locked its file yet.
        if name and path.lstat().st_uid == os.getuid() and Run(int(name[1])).end():
            with suppress(OSError), only_a_file(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def only_a_file(path: Path) -> TextIO:
    """Open a regular file, and nothing that would block or lead elsewhere."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no file")
    return os.fdopen(handle)


def owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def wanted_hosts(text: str, known: Slots) -> list[str]:
    """The nodes that the user named, or all."""
    names = list(dict.fromkeys(name.strip() for name in text.split(","))) if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise RefusedError(f"--hosts: there is no node {', '.join(unknown)}; the nodes are {', '.join(known)}")
    return names


def fill(count: int, free: Slots) -> Slots:
    """So many ranks on the nodes, in their order; empty if they have too few slots."""
    found = {}
    for node, slots in free.items():
        if slots > 0 and count > 0:
            found[node] = min(slots, count)
            count -= found[node]
    return {} if count else found


def asked(wish: Any) -> tuple[int, Slots]:
    """The number of ranks that a run asks for, and the slots of the nodes that it may use."""
    # The control machine may know better than the hostfile.
    known = {node: slots for node, slots in hostfile().items() if node not in wish.get("without", ())}
    slots = {node: known[node] for node in wanted_hosts(wish["hosts"], known)}
    count = wish["np"] or sum(slots.values())
    if not fill(count, slots):
        raise RefusedError(
            f"-np {count}: {', '.join(slots)} have {sum(slots.values())} slots; "
            "a node's are fabric_slots in the inventory"
        )
    return count, slots


@contextmanager
def claimed(run: Run, wish: Any) -> Iterator[Slots]:
    """Slots of this run, which no other run gets meanwhile; yields the number of ranks of each node."""
    count, slots = asked(wish)
    told = False
    forget_ended()
    handle, path = tempfile.mkstemp(prefix=f"{os.getuid()}-{run.number}-", dir=SLOTS_IN_USE)
    try:
        with os.fdopen(handle, "w") as file:
            # Before others can open and lock it.
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(handle, 0o644)
            while not (found := claim(file, count, slots))[0]:
                if not wish["wait"]:
                    raise RefusedError(f"too few free slots for -np {count}: {found[1]}. To wait for them, add --wait")
                if not told:
                    say(f"waiting for {count} slots: {found[1]}")
                    told = True
                time.sleep(1)
            yield found[0]
    finally:
        Path(path).unlink()


def claim(file: TextIO, count: int, slots: Slots) -> tuple[Slots, str]:
    """The ranks of each node; if there are too few free slots, what is in the way."""
    with (SLOTS_IN_USE / ".lock").open() as lock:
        if not is_locked(lock):
            return {}, holder(lock)
        free = dict(slots)
        for _, _, _, uses in others():
            for node in uses.keys() & free.keys():
                free[node] -= uses[node]
        if found := fill(count, free):
            file.write(json.dumps(found))
            file.flush()
            return found, ""
        return {}, in_the_way(slots)


def is_locked(lock: TextIO) -> bool:
    """Lock a file that anybody can lock, and keep locked."""
    until = time.monotonic() + PATIENCE
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def holder(lock: TextIO) -> str:
    """Who keeps a file locked, and what to do."""
    status = os.fstat(lock.fileno())
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = re.search(rf"^\d+: FLOCK +ADVISORY +\w+ (\d+) {file} ", Path("/proc/locks").read_text(), re.MULTILINE)
    who, end = "somebody", ""
    with suppress(OSError):
        # The folder belongs to root if the process cannot be dumped.
        if found and (uid := re.search(r"^Uid:\t(\d+)", Path(f"/proc/{found[1]}/status").read_text(), re.MULTILINE)):
            who, end = f"process {found[1]} of {owner(int(uid[1]))}", f"kill {found[1]}, or "
    return (
        f"{who} keeps {lock.name} locked, so that nobody gets slots; on the head: {end}as root, rm {lock.name}; "
        "systemd-tmpfiles --create /etc/tmpfiles.d/farandole.conf"
    )


# Prints the allocation that it runs in, and ends with the exit status that it reads.
HOLD = 'env | grep ^SLURM_; echo; read -r status; exit "${status:-1}"'


@contextmanager
def queued(run: Run, wish: Any, lost: Callable[[str], None]) -> Iterator[tuple[Slots, Callable[[int], None]]]:
    """An allocation of Slurm's; yields the ranks of each node, and what the run's exit status has to be told to."""
    holder = subprocess.Popen(
        [*allocate(run, wish), "sh", "-c", HOLD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, start_new_session=True,
    )  # fmt: skip

    def finish(status: int) -> None:
        if holder.stdin:
            with suppress(OSError):
                holder.stdin.write(b"%d\n" % status)

    try:
        given = granted(holder)
    except BaseException:
        end(holder)
        raise
    try:
        # Launchers look for their allocation here.
        os.environ.update(given)
        if not wish["seconds"]:
            say(f"the queue ends this run after {time_limit(given['SLURM_JOB_ID'])}; --time asks for another limit")
        threading.Thread(target=watch, args=(holder, given["SLURM_JOB_ID"], lost), daemon=True).start()
        yield ranks_of(given), finish
    finally:
        finish(1)
        try:
            holder.wait(GRACE)
        except subprocess.TimeoutExpired:
            end(holder)


def allocate(run: Run, wish: Any) -> list[str]:
    """The command that asks Slurm for as many nodes as the ranks fill."""
    count, slots = asked(wish)
    filled = fill(count, slots)
    command = ["salloc", f"--job-name=farandole-run-{run.number}", f"--nodes={len(filled)}", f"--ntasks={count}"]
    command.append(f"--ntasks-per-node={max(filled.values())}")
    if others := [node for node in hostfile() if node not in slots]:
        command.append(f"--exclude={','.join(others)}")
    if wish["seconds"]:
        # This program ends it before the queue does.
        command.append(f"--time={wish['seconds'] // 60 + 2}")
    return command


def time_limit(job: str) -> str:
    """The hours, minutes and seconds that an allocation lasts."""
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%l"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "some time"


def granted(holder: subprocess.Popen[bytes]) -> dict[str, str]:
    """What describes the allocation, as soon as there is one."""
    given: dict[str, str] = {}
    said = []
    for line in holder.stdout or ():
        text = line.decode(errors="replace").strip()
        name, mark, value = text.partition("=")
        if name.startswith("SLURM_") and mark:
            given[name] = value
        elif given and not text:
            return given
        elif text:
            said.append(re.sub(r"^salloc: (error: )?", "", text))
            if waits := re.search(r"job (\d+) queued and waiting", text):
                say(f"waiting in the queue as job {waits[1]}; squeue shows it")
    raise RefusedError(next((one for one in said if "can never run" in one), "; ".join(said) or "salloc says nothing"))


def watch(holder: subprocess.Popen[bytes], job: str, lost: Callable[[str], None]) -> None:
    """Tell when the queue takes the allocation away, and why."""
    if any(b"revoked" in line for line in holder.stdout or ()):
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=state", f"--jobs={job}"]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        lost(f"ended by the queue ({state or 'unknown'}; scontrol show job {job})")


def ranks_of(given: dict[str, str]) -> Slots:
    """The ranks of each node, from what Slurm says of an allocation, such as 2(x3),1."""
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", given["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    )
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", given["SLURM_TASKS_PER_NODE"])
        for _ in range(int(times or 1))
    ]  # fmt: skip
    return dict(zip(shown.stdout.split(), counts, strict=True))


def in_the_way(hosts: Iterable[str]) -> str:
    runs = [
        f"run {number} of {who}, since {clock(since)}, on {', '.join(uses)}"
        for number, who, since, uses in others()
        if uses.keys() & set(hosts)
    ]
    return "; ".join(runs) or "another run is just starting or ending"


def clock(seconds: float) -> str:
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%d %b %H:%M", then)


# The job, in a unit of the user's systemd


class Output:
    """The run's output, which is also this program's; what cannot be kept is counted, and the job goes on."""

    def __init__(self, handle: int) -> None:
        self.handle, self.lock = handle, threading.Lock()
        # Bytes that could not be kept, here and in all, and why.
        self.gap, self.lost, self.why = 0, 0, ""

    def write(self, data: bytes) -> None:
        with self.lock:
            if self.gap and not self.keep(f"\nfarandole: {self.gap} bytes are missing here: {self.why}\n".encode()):
                self.gap = 0
            left = len(data) if self.gap else self.keep(data)
            self.gap, self.lost = self.gap + left, self.lost + left

    def dropped(self) -> str:
        """What could not be kept."""
        return f"{self.lost} bytes of output could not be kept on the head: {self.why}" if self.lost else ""

    def keep(self, data: bytes) -> int:
        """Write as much as possible; returns how many bytes are left."""
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except OSError as error:
            self.why = str(error.strerror)
        return len(data)


OUTPUT = Output(1)


def say(line: str) -> None:
    """Write a line of our own to the run's output."""
    OUTPUT.write(f"farandole: {line}\n".encode(errors="replace"))


class Job:
    """Everything from the claim of slots until no process is left."""

    def __init__(self, run: Run) -> None:
        self.run, self.wish = run, run.read("run")
        self.process: subprocess.Popen[bytes] | None = None
        # Why it was ended or refused; why it failed, if its output says that, too.
        self.why, self.reason = "", ""
        # Nodes that do not answer when it has ended.
        self.lost: list[str] = []
        # Whether it ended in such a way that its results are wanted, and whether the head has all of them.
        self.fetched, self.complete = False, True
        self.mark = str(uuid.uuid4())
        signal.signal(signal.SIGTERM, lambda *_: self.stop(why_stopped()))

    def stop(self, why: str) -> None:
        """End it; what still has to be done then goes on."""
        self.why = self.why or why
        if self.process is None:
            raise StoppedError
        threading.Thread(target=end, args=(self.process,), daemon=True).start()

    def __call__(self) -> None:
        begun, status = time.time(), 1
        try:
            with self.slots() as (slots, finish):
                begun = time.time()
                self.run.write("started", slots=slots, begun=begun, stack=stack())
                self.send(slots)
                try:
                    status = self.execute(slots)
                finally:
                    self.clean(slots)
                finish(status)
                self.fetched = not self.why or self.why.startswith(TIME_IS_UP)
                if self.fetched:
                    for failure in collect(self.run, self.wish["fetch"]):
                        say(failure)
                        self.complete = False
        except RefusedError as error:
            self.why = str(error)
            # It has written nothing there.
            shutil.rmtree(self.run.code, ignore_errors=True)
        except StoppedError:
            pass
        except OSError as error:
            self.why = f"broke off on the head: {error}"
        # A launcher that is told to end may do so with 0.
        status = status or int(bool(self.why))
        seconds = round(time.time() - begun, 1)
        self.run.write(
            "ended", status=status, why=self.why, reason=self.reason, lost=self.lost, fetched=self.fetched,
            complete=self.complete, dropped=OUTPUT.dropped(), seconds=seconds,
        )  # fmt: skip

    @contextmanager
    def slots(self) -> Iterator[tuple[Slots, Callable[[int], None]]]:
        """The ranks of each node, from the queue if there is one, and what takes the exit status."""
        if QUEUE.exists():
            with queued(self.run, self.wish, self.stop) as found:
                yield found
        else:
            with claimed(self.run, self.wish) as slots:
                yield slots, lambda _: None

    def send(self, slots: Slots) -> None:
        """Copy the code to the other nodes; of files that an earlier run of the same folder has, only the changes."""
        if has_shared_home():
            return
        nodes = [node for node in slots if node != HERE]
        same = [
            one
            for one in all_runs()
            if one.number < self.run.number and one.read("run").get("source") == self.wish["source"]
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            failed = [error for error in pool.map(lambda node: self.send_to(node, same[-3:]), nodes) if error]
        if failed:
            self.reason = f"the folder could not be copied: {'; '.join(failed)}"
            # As output, in which the control machine looks for the cause.
            say(self.reason)
            raise RefusedError

    def send_to(self, node: str, same: list[Run]) -> str:
        before = [f"--copy-dest=../../{one.number}/code" for one in same]
        command = ["rsync", "--archive", "--delete", "--mkpath", "--rsync-path=umask 077 && rsync", *before]
        command += [f"{self.run.code}/"]
        target = f"{node}:runs/{self.run.number}/code/"
        done = subprocess.run(
            [*command, target],
            env={**os.environ, "RSYNC_RSH": shlex.join(ssh())},
            capture_output=True,
            text=True,
            check=False,
        )
        return f"{node}: {reason(done.stderr)}" if done.returncode else ""

    def execute(self, slots: Slots) -> int:
        where = ",".join(f"{node}:{ranks}" for node, ranks in slots.items())
        launcher = "--mpi" if self.wish["mpi"] else "--gloo"
        command = ["horovodrun", launcher, "-np", str(sum(slots.values())), "-H", where, *self.wish["program"]]
        environment = {**os.environ, MARK: self.mark}
        if not self.wish["mpi"]:
            # OpenMPI gives ranks a terminal, so that Python prints line by line; here it would print at the end.
            environment["PYTHONUNBUFFERED"] = "1"
        environment["PATH"] = f"/usr/local/lib/farandole:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            command, cwd=self.run.code, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        limit = self.wish["seconds"]
        timer = threading.Timer(limit, self.stop, [f"{TIME_IS_UP} of {limit} s (--time)"])
        if limit:
            timer.daemon = True
            timer.start()
        line = b"\n"
        for line in self.process.stdout or ():
            OUTPUT.write(OF_RANK.sub(rb"\1[\2] ", line))
        if not line.endswith(b"\n"):
            OUTPUT.write(b"\n")
        status = self.process.wait()
        timer.cancel()
        return 128 - status if status < 0 else status

    def clean(self, slots: Slots) -> None:
        """Leave no process on any node."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            left = dict(zip(slots, pool.map(self.reap, slots), strict=True))
        for node, names in left.items():
            if names is None:
                self.lost.append(node)
                say(f"{node} does not answer; what still runs there of this run is not ended")
            elif names:
                say(f"{node}: ended {', '.join(names)}, which the job had left")

    def reap(self, node: str) -> list[str] | None:
        command = ["python3", "-I", "-"] if node == HERE else [*ssh(), node, "python3", "-I", "-"]
        script = REAP.replace("MARK", repr(f"{MARK}={self.mark}".encode()))
        try:
            done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=2 * LOGIN, check=False)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout.split() if done.returncode == 0 else None


def collect(run: Run, paths: list[str]) -> Iterator[str]:
    """Get results from the node of rank 0, which usually writes them; yields why one cannot be had."""
    first = next(iter(run.read("started").get("slots", {})), HERE)
    for path in paths if first != HERE and not has_shared_home() else ():
        source = f"{first}:runs/{run.number}/code/./{path}"
        environment = {**os.environ, "RSYNC_RSH": shlex.join(ssh())}
        try:
            with staging(run.folder, run.code) as (staged, options):
                command = ["rsync", "--archive", *options, source, f"{staged}/"]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    yield f"{path} could not be fetched from {first}: {reason(done.stderr)}"
                yield from place(staged, run.code, Path(path))
        except RefusedError as error:
            yield f"{path} could not be fetched from {first}: {error}"


def why_stopped() -> str:
    """Whether somebody stops the run, or the machine."""
    state = subprocess.run(["systemctl", "is-system-running"], capture_output=True, text=True, check=False).stdout
    return "ended by the shutdown of the head" if state.strip() == "stopping" else "stopped"


class StoppedError(Exception):
    """The run was stopped before its job began."""


# Kills what still runs of a job, found by the mark that its processes inherit, and prints its names.
REAP = """
import os, pathlib, signal, time
def found():
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if MARK in (entry / "environ").read_bytes().split(b"\\0"):
                yield int(entry.name), (entry / "comm").read_text().strip()
        except (OSError, ValueError):
            pass
def left():
    return [one for one in found() if one[0] != os.getpid()]
until, killed = time.monotonic() + 3, {}
while left() and time.monotonic() < until:
    time.sleep(0.1)
while (now := left()) and time.monotonic() < until + 5:
    for number, name in now:
        killed[number] = name
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            pass
print(*killed.values(), sep="\\n")
"""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job's process group, gently at first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE)
            return
        except subprocess.TimeoutExpired:
            continue


def ssh() -> list[str]:
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={LOGIN}"]


def has_shared_home() -> bool:
    """Whether all nodes see this home."""
    return SHARED.exists() and owner(os.getuid()) in SHARED.read_text().split()


def stack() -> str:
    return STACK.readlink().name if STACK.is_symlink() else ""


def reason(text: str) -> str:
    """The line of rsync or ssh that says why."""
    other = ("rsync error: ", "--copy-dest ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(other)]
    # rsync can lose what the other side says when it cannot write.
    return lines[0] if lines else "a file could not be written, as when the disk is full"


# Folders


def filters(folder: Path) -> tuple[list[str], str]:
    """What a run does not get of a folder, as options and input of rsync: what git ignores, and .farandoleignore."""
    options = ["--exclude=.git", f"--exclude={STAGED}*", "--filter=:- .farandoleignore", "--exclude-from=-"]
    listed = ignored(folder)
    if listed is None:
        # Not a checkout, but .gitignore means the same.
        with tempfile.TemporaryDirectory() as empty:
            git("init", "--quiet", "--bare", empty)
            listed = ignored(folder, f"--git-dir={empty}", f"--work-tree={folder}")
    if listed is None:
        # There is no git; rsync reads most of it in the same way.
        return [*options, "--filter=:- .gitignore"], ""
    paths = (re.sub(r"([\\*?[])", r"\\\1", path) for path in listed.split("\0") if path)
    return options, "".join(f"/{path}\n" for path in paths if "\n" not in path)


def ignored(folder: Path, *where: str) -> str | None:
    """What git ignores in a folder."""
    asked = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    return git("-C", str(folder), *where, *asked)


def git(*arguments: str) -> str | None:
    """What git prints; None if it fails, or is not there."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout


def refuse_early(command: list[str], fetch: list[str], folder: Path) -> None:
    """Refuse what cannot work before anything is copied."""
    python = re.fullmatch(r"python[\d.]*", Path(command[0]).name)
    script = next((word for word in command[1:] if not word.startswith("-")), "") if python else command[0]
    if python and command[1:2] and command[1] in ("-m", "-c"):
        script = ""
    if ("/" in script or script.endswith(".py")) and not (folder / script).exists():
        raise RefusedError(f"there is no {script} in this folder, and every node gets this folder alone")
    refuse_outside(fetch)


def refuse_outside(fetch: list[str]) -> None:
    """Refuse results that are not below a run's folder."""
    for path in fetch:
        parts = Path(path).parts
        if Path(path).is_absolute() or not parts or ".." in parts or any(map(is_git, parts)):
            raise RefusedError(f"--fetch {path}: name something below this folder")


def copy(folder: Path, code: Path, options: list[str], patterns: str) -> None:
    """Copy a folder to a new run."""
    command = ["rsync", "--archive", *options, f"{folder}/", f"{code}/"]
    done = subprocess.run(
        command, input=patterns, capture_output=True, text=True, errors="surrogateescape", check=False
    )
    if done.returncode:
        raise RefusedError(f"{folder} could not be copied: {reason(done.stderr)}")


def sent(name: str) -> Path:
    """The folder that a control machine has sent."""
    if not re.fullmatch("[0-9a-f]{16}", name):
        raise RefusedError(f"{name} is no folder that was sent")
    return SENT / name


# What is fetched: jobs wrote it, so neither its links, modes, owners nor special files are believed.

# What git or a file system takes for .git: they ignore case, characters of no width, and some at the end.
NO_WIDTH = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
OF_GIT = re.compile(r"(\.git|git~\d)[ .]*(:.*)?", re.IGNORECASE | re.DOTALL)
# What git and this program obey in every folder.
OBEYED = {".gitignore", ".gitattributes", ".gitmodules", ".farandoleignore"}
# What rsync puts in front of what links lead to, so that nothing follows them.
MUNGED = "/rsyncd-munged/"
# The folders into which it is fetched first.
STAGED = ".farandole-fetch-"


def is_git(name: str) -> bool:
    """Whether git takes this name for that of a repository."""
    return OF_GIT.fullmatch(NO_WIDTH.sub("", name)) is not None


def visible(text: str) -> str:
    """Escape what a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def deepest(folder: Path, path: str) -> Path:
    """The last folder on a path, without following links."""
    for part in Path(path).parts:
        if (folder / part).is_symlink() or not (folder / part).is_dir():
            break
        folder /= part
    return folder


@contextmanager
def staging(where: Path, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """A private folder for what is fetched, and the options with which rsync brings what another folder lacks."""
    try:
        forget_staged(where)
        staged = Path(tempfile.mkdtemp(prefix=STAGED, dir=where))
        handle = os.open(staged, os.O_RDONLY)
    except OSError as error:
        raise RefusedError(f"{where}: {error.strerror}") from None
    fcntl.flock(handle, fcntl.LOCK_EX)
    options = ["--relative", "--munge-links", "--no-perms", "--chmod=D777,F666", "--no-owner", "--no-group"]
    try:
        yield staged, [*options, "--no-devices", "--whole-file", f"--compare-dest={folder}"]
    finally:
        # An rsync that was interrupted may still write for a moment.
        for _ in range(20):
            shutil.rmtree(staged, ignore_errors=True)
            if not staged.exists():
                break
            time.sleep(0.1)
        os.close(handle)


def forget_staged(where: Path) -> None:
    """Remove what was left by a program that was killed while it fetched; those that are at work lock theirs."""
    for old in where.glob(f"{STAGED}*"):
        with suppress(OSError):
            handle = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                # Between its creation and its lock, it is empty.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid() and any(old.iterdir()):
                    shutil.rmtree(old)
            finally:
                os.close(handle)


def place(staged: Path, folder: Path, top: Path) -> Iterator[str]:
    """Move what was fetched into a folder, each file at once; yields what is refused, and what to do."""
    waiting = [Path()]
    if is_repository(staged, folder):
        waiting = []
        yield f"{top} is refused: with it, git would take {folder} for a repository, and run what is written there"
    for at in waiting:
        for name in sorted(os.listdir(staged / at)):  # noqa: PTH208
            here = at / name
            try:
                mode = (staged / here).lstat().st_mode
                if not (why := refusal(staged / here, folder / here, here, top)):
                    put(staged / here, folder / here, mode)
            except OSError as error:
                mode, why = 0, str(error.strerror)
            if why:
                yield visible(f"{here} is refused: {why}")
            elif stat.S_ISDIR(mode):
                waiting.append(here)


def refusal(source: Path, target: Path, here: Path, top: Path) -> str:
    """Why something that was fetched is refused, and what to do; empty if it is not."""
    mode = source.lstat().st_mode
    if not (here in top.parents or here.is_relative_to(top)):
        return f"it is not in {top}"
    if is_git(here.name) or (stat.S_ISDIR(mode) and is_repository(source, target)):
        return "git would take it for a repository, and run what is written there; let the program pack it with tar"
    if here.name.casefold() in OBEYED:
        return "it would say which files of this folder are sent or kept; give it another name, or copy it by hand"
    there = stat.S_IFMT(target.lstat().st_mode) if os.path.lexists(target) else 0
    if there and stat.S_ISDIR(mode) != (there == stat.S_IFDIR):
        return "here, a link, a file or a folder has that name; rename or remove it"
    if stat.S_ISLNK(mode):
        text = os.readlink(source).removeprefix(MUNGED)  # noqa: PTH115, a Path has lost the slash behind the mark
        inside = not leads_out(text, len(here.parts) - len(top.parts) - 1)
        return "" if inside else f"it is a link to {text}, which is not in {top}; let the program copy that there"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "it is no file"


def is_repository(*folders: Path) -> bool:
    """Whether git would take for a repository what is in these folders together."""
    names = {name.casefold() for folder in folders if folder.is_dir() for name in os.listdir(folder)}  # noqa: PTH208
    return "head" in names and ("commondir" in names or {"objects", "refs"} <= names)


def leads_out(text: str, depth: int) -> bool:
    """Whether a link leads out of what is fetched, in which it lies so deep, or into a repository."""
    parts = Path(text).parts
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return text.startswith("/") or up > depth or ".." in parts[up:] or any(map(is_git, parts))


def put(source: Path, target: Path, mode: int) -> None:
    """Put something in its place; a file or a link replaces what is there, which is not followed."""
    if stat.S_ISDIR(mode):
        target.mkdir(exist_ok=True)
        return
    if stat.S_ISLNK(mode):
        text = os.readlink(source).removeprefix(MUNGED)  # noqa: PTH115
        source.unlink()
        source.symlink_to(text)
    source.replace(target)


def locked(folder: Path) -> int:
    """Lock a folder that was sent, so that it is not copied while it changes."""
    handle = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def receive(given: Given) -> None:
    """Be the rsync that gets the files of a control machine."""
    folder = sent(given.name)
    for path in (RUNS, SENT, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    # rsync keeps it until it ends.
    os.set_inheritable(locked(folder), True)
    become_rsync(folder, given.arguments)


def give(given: Given) -> None:
    """Be the rsync that sends the results of a run."""
    become_rsync(chosen(given.name).code, given.arguments)


def become_rsync(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    os.execvp("rsync", ["rsync", *arguments])  # noqa: S606


# Commands


def start(given: Given) -> int:
    """Start a run, and show it unless it is detached."""
    if os.getuid() == 0:
        raise RefusedError("root starts no jobs; as the job user: runuser -u NAME -- farandole run ...")
    folder = sent(given.source) if given.source else Path.cwd()
    refuse_early(given.program, given.fetch, folder)
    me = owner(os.getuid())
    if not os.access(bus()["XDG_RUNTIME_DIR"], os.X_OK):
        raise RefusedError(f"systemd does not run for {me}; as root: loginctl enable-linger {me}")
    run = new_run()
    try:
        prepare(run, given, folder)
    except (RefusedError, OSError) as error:
        shutil.rmtree(run.folder)
        why = f"{RUNS}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise RefusedError(why) from None
    properties = {
        "WorkingDirectory": run.code,
        "StandardOutput": f"append:{run.output}",
        "StandardError": f"append:{run.output}",
        # The job's processes are ended in order, by this program.
        "KillMode": "mixed",
        # A rank that runs out of memory is the job's failure, and no reason to stop this program.
        "OOMPolicy": "continue",
        "TasksMax": "infinity",
        "TimeoutStopSec": 6 * GRACE,
    }
    unit = [f"--unit={run.unit}", f"--description=Run {run.number} of farandole"]
    unit += [f"--property={name}={value}" for name, value in properties.items()]
    job = [sys.executable, "-I", __file__, "_job", str(run.number)]
    done = subprocess.run(
        ["systemd-run", "--user", "--quiet", "--collect", *unit, *job],
        env=bus(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RefusedError(f"systemd could not start the run: {done.stderr.strip()}")
    if given.detach:
        print(run.number)
        return 0
    print(f"run {run.number}", file=sys.stderr)
    try:
        return attach(run)
    except KeyboardInterrupt:
        stop(run)
        return 130


def prepare(run: Run, given: Given, folder: Path) -> None:
    """Copy the folder to a new run, and write down what is wanted of it."""
    # What a control machine sent has been filtered there.
    options, patterns = ([], "") if given.source else filters(folder)
    lock = locked(folder) if given.source else -1
    copy(folder, run.code, options, patterns)
    if lock >= 0:
        os.close(lock)
    run.write(
        "run", program=given.program, source=given.source or str(folder), np=given.np, hosts=given.hosts,
        mpi=given.mpi, seconds=given.time, wait=given.wait, fetch=given.fetch,
        without=given.without, created=time.time(),
    )  # fmt: skip
    run.output.touch(0o600)
    run.reserve("ended")


def attach(run: Run) -> int:
    """Print the output of a run until it ends; returns its exit status."""
    asked = 0.0
    with run.printed() as file:
        while True:
            ended = run.read("ended")
            if not ended and time.monotonic() - asked > ASK_EVERY:
                asked, ended = time.monotonic(), run.end()
            while chunk := file.read(1 << 16):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            if ended:
                break
            time.sleep(0.1)
    print(f"run {run.number}: {told(run)}", file=sys.stderr)
    return int(ended["status"])


def logs(run: Run) -> int:
    """Print what a run has printed so far."""
    with run.printed() as file:
        shutil.copyfileobj(file, sys.stdout.buffer)
    return 0


def stop(run: Run) -> int:
    """End a run on all of its nodes."""
    if run.end():
        raise RefusedError(f"run {run.number} has already ended: {told(run)}")
    systemctl("stop", "--no-block", run.unit)
    while not run.end():
        time.sleep(0.2)
    print(f"run {run.number}: {told(run)}")
    return 0


def fetch(given: Given) -> int:
    """Get results of a run from its first node, even while it runs."""
    run = chosen(given.run)
    refuse_outside(given.paths)
    failures = list(collect(run, given.paths))
    failures += [f"run {run.number} has no {path}" for path in given.paths if not (run.code / path).exists()]
    if failures:
        raise RefusedError("\n".join(failures))
    print("\n".join(str(run.code / path) for path in given.paths))
    return 0


def job(run: Run) -> int:
    """Do everything of a run, in its unit."""
    Job(run)()
    return 0


def state(run: Run) -> int:
    """Print what is known of a run."""
    print(json.dumps({"number": run.number, "started": run.read("started"), "ended": run.end()}))
    return 0


def told(run: Run) -> str:
    """How a run goes or went, in a few words."""
    started, ended = run.read("started"), run.end()
    where = ", ".join(f"{node}:{ranks}" for node, ranks in started.get("slots", {}).items())
    if not ended:
        return f"running on {where}" if where else "waiting"
    how = ended["why"] or ended.get("reason")
    how = how or ("finished" if ended["status"] == 0 else f"failed with exit status {ended['status']}")
    after = f" after {ended['seconds']:.0f} s" if "seconds" in ended else ""
    dropped = f"; {ended['dropped']}" if ended.get("dropped") else ""
    return f"{how}{after}{f' on {where}' if where else ''}{dropped}"


def show(_: Given) -> int:
    """List the runs, and those of other people that use slots."""
    for run in all_runs():
        if wish := run.read("run"):
            stack = run.read("started").get("stack", "-")
            begun, program = clock(wish["created"]), shlex.join(wish["program"])
            print(f"{run.number:>4}  {begun:12}  {stack:12}  {told(run)}: {program}")
    for number, who, since, uses in others():
        if who != owner(os.getuid()):
            print(f"      {clock(since):12}  run {number} of {who} on {', '.join(uses)}")
    return 0


def status(_: Given) -> int:
    """Print what the control machine asks any node: its stack; on the head also who uses which slots, and the queue."""
    found: dict[str, Any] = {"stack": STACK.resolve().name if STACK.exists() else "", "slots": {}, "uses": []}
    if SLOTS_IN_USE.is_dir() and HOSTFILE.exists():
        found["slots"] = hostfile()
        uses = islice(others(), SHOWN)
        found["uses"] = [[int(number), who, since, slots] for number, who, since, slots in uses]
        found["queue"] = in_queue() if QUEUE.exists() else None
    print(json.dumps(found))
    return 0


def in_queue() -> list[list[str]] | str:
    """The jobs of the queue, without what their owners call them; why it does not say."""
    words = ["squeue", "--noheader", "--format=%i|%u|%T|%M|%D"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=QUEUE_S, check=False)
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"squeue said nothing within {QUEUE_S} s"
    return done.stderr if done.returncode else [line.split("|") for line in done.stdout.splitlines()]


def duration(text: str) -> int:
    """Seconds, of a text such as 2h."""
    found = re.fullmatch(r"(\d{1,7})([smhd]?)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 30m, 2h or 1d")
    return int(found[1]) * UNITS[found[2]]


def positive(text: str) -> int:
    """A number of ranks."""
    if not re.fullmatch(r"0*[1-9]\d{0,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    top = argparse.ArgumentParser(prog="farandole", description="Run programs on the cluster's nodes.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="send this folder to the nodes and start a program there", allow_abbrev=False)
    run.add_argument("-np", type=positive, default=0, metavar="N", help="number of ranks; all slots, if not given")
    run.add_argument("--hosts", default="", help="only these nodes, separated by commas")
    run.add_argument("--mpi", action="store_true", help="start the ranks with MPI")
    run.add_argument("--gloo", dest="mpi", action="store_false", help="start the ranks with Gloo, which is the default")
    run.add_argument("--time", type=duration, default=0, help="end it after 90s, 30m, 2h or 1d")
    run.add_argument("--wait", action="store_true", help="wait for slots that other runs use")
    run.add_argument("--detach", action="store_true", help="print its number and return")
    run.add_argument(
        "--fetch", action="append", default=[], metavar="PATH", help="get this from the first node when the run ends"
    )
    run.add_argument("--source", help=argparse.SUPPRESS)
    run.add_argument("--without", type=lambda text: text.split(","), default=[], help=argparse.SUPPRESS)
    run.add_argument("program", nargs="+", metavar="-- PROGRAM", help="for example python train.py --epochs 3")
    run.set_defaults(call=start)
    commands.add_parser("runs", help="list your runs").set_defaults(call=show)
    commands.add_parser("_status").set_defaults(call=status)
    known: dict[str, tuple[str, Callable[[Run], int]]] = {
        "logs": ("print what a run has printed", logs),
        "attach": ("print what a run prints until it ends", attach),
        "stop": ("end a run on all of its nodes", stop),
        "_job": ("", job),
        "_state": ("", state),
    }
    for name, (words, call) in known.items():
        command = commands.add_parser(name, help=words) if words else commands.add_parser(name)
        if name == "stop":
            # Everybody is the job user, so the latest may be somebody else's.
            command.add_argument("run", help="its number")
        else:
            command.add_argument("run", nargs="?", default="", help="its number; the latest, if not given")
        command.set_defaults(call=lambda given, call=call: call(chosen(given.run)))
    command = commands.add_parser("fetch", help="get results of a run from its first node")
    command.add_argument("run", help="its number")
    command.add_argument("paths", nargs="+", metavar="PATH", help="what to get, a path in the run's folder")
    command.set_defaults(call=fetch)
    for name, end in (("_receive", receive), ("_give", give)):
        command = commands.add_parser(name)
        command.add_argument("name")
        command.add_argument("arguments", nargs=argparse.REMAINDER)
        command.set_defaults(call=end)
    return top


def main() -> None:
    """Run the command."""
    given = parser().parse_args()
    try:
        sys.exit(given.call(given))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os._exit(141)
    except (RefusedError, OSError) as refused:
        sys.exit(f"error: {refused}")


if __name__ == "__main__":
    main()
