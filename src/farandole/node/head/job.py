"""Everything of a run from the claim of slots until no process is left, in a unit of the user's systemd."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path

from farandole.node.head import launch, runs, status
from farandole.node.head import reap as reaping
from farandole.node.head.folders import LISTING, drop_older, paths_in, place, staging
from farandole.node.head.launch import ALONE, BEFORE_REPORT, IN_MIDDLE, OF_ALONE, OF_RANK, Reports
from farandole.node.head.reap import MARK, STAYS, end, reap
from farandole.node.head.restarts import Restarts, answers, repeated
from farandole.node.head.runs import SSH, RefusedError, Run, all_runs, ran, reason, say
from farandole.node.head.slots import claimed
from farandole.node.head.slurm import queued
from farandole.node.head.status import Numbers, Slots, counted, owner
from farandole.node.mounts import shared_homes
from farandole.node.rank.place import OF_RUN
from farandole.node.rank.place import place as place_of

TIME_IS_UP = "ended at its limit"
AT_ONCE = 32
# Seconds in which a node may come back, if too few are left without it.
RETURN_S = 120
# Seconds after which it is told for whom others wait to meet, and between two looks.
TELL_S, LOOK_S = 20, 3
# Read at once, as a run may end after this program was replaced; and the seconds that a node has for it.
REAP, REAP_S = Path(reaping.__file__).read_text(), 20
# Those that are under way, and whether they and those that follow have to end.
COPIES: set[subprocess.Popen[str]] = set()
ENDING = threading.Event()


class StoppedError(Exception):
    """The run was stopped before its job began."""


class RunKeeper:
    """A run that is kept by this program."""

    def __init__(self, run: Run) -> None:
        self.run, self.wish = run, run.read("run")
        self.process: subprocess.Popen[bytes] | None = None
        # Why it was ended or refused; why it failed, if its output says that, too.
        self.why, self.reason = "", ""
        # Whether the queue's limit ended it.
        self.timed_out = False
        # Whether it ended because the head did.
        self.with_head = False
        # Nodes that do not answer when it has ended; whether a start was ended.
        self.lost: list[str] = []
        self.broken = False
        # Seconds between two starts.
        self.waited = 0.0
        # Whom the others wait for, once it was said.
        self.late = ""
        # Whether it ended in such a way that its results are wanted, and whether the head has all of them.
        self.fetched, self.complete = False, True
        self.mark = str(uuid.uuid4())
        self.reports = Reports(self.mark, {})
        # The slots that it has now.
        self.numbers: Numbers = {}
        self.restarts = Restarts(run, self.wish)
        signal.signal(signal.SIGTERM, lambda *_: self.terminate())

    def terminate(self) -> None:
        """End it because somebody stops the run, or the machine."""
        # At once, as systemd may answer late.
        if self.process:
            self.end_aside(self.process)
        self.with_head = ran("systemctl", "is-system-running").stdout.strip() == "stopping"
        self.why = self.why or runs.STOPPED[self.with_head]
        if not self.process:
            raise StoppedError

    def stop(self, why: str) -> None:
        """End it; what still has to be done then goes on."""
        self.why = self.why or why
        if self.process:
            self.end_aside(self.process)
        elif threading.current_thread() is threading.main_thread():
            raise StoppedError
        else:
            # Where it is raised as well.
            os.kill(os.getpid(), signal.SIGTERM)

    @staticmethod
    def end_aside(process: subprocess.Popen[bytes]) -> None:
        """End a job while this thread goes on."""
        threading.Thread(target=end, args=(process,), daemon=True).start()

    def end(self) -> None:
        """End the processes of one start, which another may follow."""
        self.broken = True
        if self.process:
            end(self.process)

    def give_up(self, why: str, *, may_start_again: bool = True) -> None:
        """End a start for a reason, and perhaps the run with it."""
        if self.wish["restarts"] and may_start_again:
            say(why)
            self.end()
        else:
            self.stop(why)

    def taken(self, state: str, why: str) -> None:
        """The queue has taken the nodes away."""
        self.timed_out = state == "TIMEOUT"
        self.give_up(why, may_start_again=state == "NODE_FAIL")

    def __call__(self) -> None:
        self.begin()
        code = 1
        try:
            queue = queued(self.run, self.wish, self.taken) if status.QUEUE.exists() else claimed(self.run, self.wish)
            with queue as (slots, finish, others_instead):
                self.begin()
                code, least = self.use(slots), self.wish["min_nodes"]
                while code and (slots := self.again(code, lambda gone: others_instead(gone, least))):
                    code = self.use(slots)
                finish(code)
                self.fetch()
        except RefusedError as error:
            self.why = str(error)
            if not self.restarts.done:
                # It has written nothing there.
                shutil.rmtree(self.run.code, ignore_errors=True)
        except StoppedError:
            pass
        except OSError as error:
            self.why = f"broke off on the head: {error}"
        # A launcher that is told to end may do so with 0.
        code = code or int(bool(self.why))
        self.run.write(
            "ended", status=code, why=self.why, reason=self.reason, lost=self.lost, fetched=self.fetched,
            complete=self.complete, late=self.late, with_head=self.with_head, dropped=runs.OUTPUT.dropped(),
            seconds=round(time.monotonic() - self.since, 1),
        )  # fmt: skip

    def begin(self) -> None:
        """Count its time from here, by a clock that nobody sets."""
        self.begun, self.since = time.time(), time.monotonic()

    def use(self, numbers: Numbers) -> int:
        """Start the job on its slots and wait for its end; returns its exit status."""
        self.numbers, slots = numbers, counted(numbers)
        self.process, self.lost, self.broken, self.late, self.reason = None, [], False, "", ""
        self.reports = Reports(self.mark, {})
        stack = status.STACK.readlink().name if status.STACK.is_symlink() else ""
        self.run.write("started", slots=slots, begun=self.begun, stack=stack)
        self.send(slots)
        if self.lost:
            return 1
        with self.restarts.kept(slots, has_shared_home(), lambda paths: collect(self.run, paths, self.restarts)):
            try:
                with self.restarts.watched(slots, self.end), repeated(LOOK_S, lambda: self.look(slots)):
                    code = self.execute(slots)
            finally:
                self.clean(slots)
        if next(iter(slots)) not in self.lost and self.why not in runs.STOPPED:
            for failure in collect(self.run, self.restarts.copied, self.restarts):
                say(failure)
        return code or int(self.broken)

    def again(self, code: int, others_instead: Callable[[set[str]], Numbers]) -> Numbers:
        """The slots with which a run that failed starts again; empty if it does not."""
        if self.why or not self.wish["restarts"]:
            return {}
        if why := self.restarts.refusal(code, self.lost, began=bool(self.process)):
            say(f"it does not start again: {why}")
            return {}
        # What stops it now ends the wait.
        self.process = None
        begun, told = time.monotonic(), False
        while not self.why and not ((slots := others_instead(self.restarts.gone)) and self.restarts.look(slots)):
            if time.monotonic() > begun + RETURN_S:
                say("it does not start again: too few nodes are left; --min-nodes allows fewer")
                return {}
            if not told:
                say(f"waiting up to {RETURN_S} s for {', '.join(sorted(self.restarts.gone)) or 'slots'}")
                told = True
            self.restarts.take_back()
            time.sleep(1)
        # The limit is for what runs.
        self.waited += time.monotonic() - begun
        left_out = f", without {', '.join(sorted(self.restarts.gone))}" if self.restarts.gone else ""
        none = "" if not self.restarts.copied or self.restarts.here() else f"; {self.wish['checkpoints']} is empty"
        say(f"start {self.restarts.done + 1}{left_out}{none}")
        return {} if self.why else slots

    def fetch(self) -> None:
        """Get the results that are wanted, if it ended in such a way that there may be some."""
        self.fetched = not self.why or self.timed_out or self.why.startswith((TIME_IS_UP, ALONE))
        if self.fetched:
            for failure in collect(self.run, self.wish["fetch"]):
                say(failure)
                self.complete = False

    def send(self, slots: Slots) -> None:
        """Copy the code to the other nodes; those that do not answer are lost, if it may start again without them."""
        if has_shared_home():
            return
        same = former(self.run, self.wish["source"])
        others = [node for node in slots if node != runs.HERE]
        ENDING.clear()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            deleting = self.restarts.deleting()
            try:
                copies = {node: pool.submit(send, self.run, node, same, deleting) for node in others}
                # A signal that comes just before this waits does not end the wait.
                while wait(copies.values(), timeout=1).not_done:
                    pass
                failed = {node: why for node, copy in copies.items() if (why := copy.result())}
            except StoppedError:
                pool.shutdown(wait=False, cancel_futures=True)
                # Before those that are there, as one may be just starting.
                ENDING.set()
                for process in [*COPIES]:
                    process.terminate()
                raise
            asked = [*failed] if self.wish["restarts"] else []
            self.lost = [node for node, answer in zip(asked, pool.map(answers, asked), strict=True) if not answer]
        if failed:
            self.reason = f"the folder could not be copied: {'; '.join(failed.values())}"
            # As output, in which the control machine looks for the cause.
            say(self.reason)
            if not self.lost:
                raise RefusedError

    def execute(self, slots: Slots) -> int:
        """Start the ranks, and pass on what they print until they have ended."""
        launcher, program = self.wish["launcher"], self.wish["program"]
        say(launch.shape(launcher, slots))
        described = {
            "launcher": launcher,
            "slots": slots,
            "numbers": {node: [*numbers] for node, numbers in self.numbers.items()},
            "hostfile": {node: of_node for node, of_node in status.hostfile().items() if node in slots},
            "port": launch.free_port(next(iter(slots))),
            "mark": self.mark,
            "program": program,
        }
        # OpenMPI gives ranks a terminal, so that Python prints line by line; with Gloo it would print at the end.
        unbuffered = {} if launcher == "mpi" else {"PYTHONUNBUFFERED": "1"}
        path = f"/usr/local/lib/farandole:{os.environ['PATH']}"
        own = {MARK: self.mark, "FARANDOLE_RUN": json.dumps(described), "PATH": path, **unbuffered}
        # The one that is recorded, as another may be current by now.
        own["FARANDOLE_STACK"] = str(status.STACK.parent / "stacks" / self.run.read("started").get("stack", ""))
        self.process = subprocess.Popen(
            launch.command(launcher, slots), cwd=self.run.code, env={**os.environ, **own},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        limit = self.wish["seconds"]
        timer = threading.Timer(limit, self.stop, [f"{TIME_IS_UP} of {limit} s (--time)"])
        if limit:
            timer.interval = max(0, self.since + self.waited + limit - time.monotonic())
            timer.daemon = True
            timer.start()
        for line in self.process.stdout or ():
            self.pass_on(line, slots)
        code = self.process.wait()
        timer.cancel()
        # Whoever has not come until now is the cause.
        is_cause = self.late and (code or self.why)
        self.late = self.reports.absent(slots, self.late.rpartition(" ")[2]) if is_cause else ""
        return 128 - code if code < 0 else code or self.judge(slots)

    def pass_on(self, line: bytes, slots: Slots) -> None:
        """Show a line of output, and take out of it what the ranks say of themselves."""
        whole = line.removesuffix(b"\n")
        lines = IN_MIDDLE.split(whole) if self.wish["launcher"] == "mpi" else [whole]
        for part in chain.from_iterable(map(BEFORE_REPORT.split, lines)):
            shown = self.reports.take(OF_RANK.sub(rb"\1[\2] ", part) + b"\n")
            self.restarts.read(shown)
            runs.OUTPUT.write(shown)
            if self.wish["launcher"] != "each":
                for number, ended_by in self.reports.killed:
                    of_node = self.wish["launcher"] in OF_RUN
                    who = f"{self.wish['launcher']} on {[*slots][number]}" if of_node else f"rank {number}"
                    say(f"{who} was ended by signal {ended_by}")
            self.reports.killed.clear()

    def judge(self, slots: Slots) -> int:
        """The exit status of a run whose launcher has not failed."""
        if self.wish["launcher"] == "each":
            if len(self.reports.said) < sum(slots.values()):
                say("not all of the programs have said how they ended")
                return 1
            failed = {number: code for number, code in self.reports.failed().items() if number < sum(slots.values())}
            for number, code in failed.items():
                say(f"program {number} on {[*slots][place_of(number, slots).node]} ended with exit status {code}")
            return next(iter(failed.values()), 0)
        started, size = launch.starts(self.wish["launcher"], slots), sum(slots.values())
        alone, note = self.reports.verdict(size, sum(started.values()), len(slots))
        # Of a program that was only asked for its options, nothing else was wanted.
        if "--help" in self.wish["program"]:
            alone = note = ""
        if alone:
            self.why = self.why or ALONE
            say(f"{size} ranks were started, and each worked by itself: {alone}")
        if note:
            say(note)
        return OF_ALONE if alone else 0

    def look(self, slots: Slots) -> None:
        """Tell whom the others wait for, and end a start in which they wait too long."""
        if self.why or self.broken:
            return
        self.late = self.reports.still(self.late, slots, TELL_S)
        if not self.late and (missing := self.reports.missing(slots, TELL_S)):
            self.late = missing
            say(missing)
        limit = self.wish["meet_within"]
        if limit > 0 and (missing := self.reports.missing(slots, limit)):
            self.late = missing
            self.give_up(f"ended: {missing} for {limit} s (--meet-within)")

    def clean(self, slots: Slots) -> None:
        """Leave no process on any node."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ended = pool.map(lambda node: reap(node, self.mark, REAP, REAP_S), slots)
        left = dict(zip(slots, ended, strict=True))
        for node, names in left.items():
            if names is None:
                self.lost.append(node)
                say(f"{node} does not answer; what still runs there of this run is not ended")
                continue
            stay = [name.removeprefix(STAYS) for name in names if name.startswith(STAYS)]
            if gone := [name for name in names if not name.startswith(STAYS)]:
                say(f"{node}: ended {', '.join(gone)}, which the job had left")
            if stay:
                say(f"{node}: {', '.join(stay)} of this run cannot be ended, as if storage did not answer there")


def has_shared_home() -> bool:
    """Whether all nodes see this home, so that nothing has to be copied to them."""
    return owner(os.getuid()) in shared_homes()


def rsync(*arguments: str) -> tuple[int, str, str]:
    """Copy to or from a node; returns the exit status, what it lists, and what it says."""
    with subprocess.Popen(
        ["rsync", "--archive", *arguments], env={**os.environ, "RSYNC_RSH": SSH},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="surrogateescape",
    ) as copy:  # fmt: skip
        COPIES.add(copy)
        if ENDING.is_set():
            copy.terminate()
        listed, errors = copy.communicate()
        COPIES.discard(copy)
    return copy.returncode, listed, errors


def former(run: Run, source: str) -> list[Run]:
    """The latest earlier runs of the same folder."""
    earlier = [other for other in all_runs() if other.number < run.number]
    return [other for other in earlier if other.read("run").get("source") == source][-3:]


def send(run: Run, node: str, before: list[Run], deleting: list[str]) -> str:
    """Copy a run's code to a node; of files that an earlier run has there, only the changes. Returns why it failed."""
    same = [f"--copy-dest=../../{other.number}/code" for other in before]
    there = [*deleting, "--mkpath", "--rsync-path=umask 077 && rsync", *same]
    status, _, errors = rsync(*there, f"{run.code}/", f"{node}:runs/{run.number}/code/")
    return f"{node}: {reason(errors)}" if status else ""


def collect(run: Run, paths: list[str], checkpoints: Restarts | None = None) -> Iterator[str]:
    """Get results from the node of rank 0, which usually writes them; yields why one is missing.

    Of checkpoints, only whole copies replace the former one, and what the program has removed there is removed here.
    """
    slots = run.read("started").get("slots", {})
    first = next(iter(slots), runs.HERE)
    more = ["--ignore-missing-args", *LISTING] if checkpoints else []
    for path in paths if first != runs.HERE and not has_shared_home() else ():
        failed = f"{path} could not be fetched from {first}"
        try:
            with staging(run.folder, run.code) as (staged, options):
                code, listed, errors = rsync(*options, *more, f"{first}:runs/{run.number}/code/./{path}", f"{staged}/")
                if code:
                    yield f"{failed}: {reason(errors)}"
                if checkpoints and runs.HERE in slots:
                    drop_older(staged, run.code)
                if code == 0 or not checkpoints:
                    yield from place(staged, run.code, Path(path))
                if code == 0 and checkpoints:
                    checkpoints.forget(paths_in(listed))
        except RefusedError as error:
            yield f"{failed}: {error}"
