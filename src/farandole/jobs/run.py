"""`farandole run`, `runs`, `logs`, `attach`, `fetch`, `stop`: send a folder to the head, and run programs there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from farandole.cli.lock import host_variables
from farandole.core.causes import causes
from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.findings import some
from farandole.core.text import on_terminal, one_line
from farandole.explain.diagnosis import Hit, is_raised, of_job
from farandole.inventory import excluded
from farandole.inventory.cluster import login_key, login_name
from farandole.node.head import RefusedError, deepest, duration, filters, place, refuse_early, refuse_outside, staging
from farandole.node.head import reason as why
from farandole.plays.playbook import Login, PrivateKey, User

console = Console(highlight=False, soft_wrap=True, stderr=True)
Inventory = Annotated[Path, typer.Option("--inventory", "-i", help="The cluster's inventory, a folder or a file.")]
Number = Annotated[str, typer.Argument(metavar="[RUN]", help="Its number; the latest, if not given.")]
# From here on the user is asked before a folder is sent.
LARGE = 200 << 20
# Lines in which a cause is searched.
REMEMBERED, LONGEST = 2000, 1 << 16
# The exit statuses of ssh itself, and of a shell that does not find a command.
OF_SSH, NO_COMMAND = 255, 127
# Options of ssh that name keys.
OF_KEY = re.compile(r"-i|-o\s*(IdentityFile|CertificateFile)\b", re.IGNORECASE)
OF_RANK = re.compile(r"\[(\d{1,6})\] (.*)")
# How the launchers say that a rank has ended: Gloo's of each, MPI's of the first one, by itself or by a signal.
ENDED = re.compile(
    r"^Process (\d{1,6}) exit with status code (-?\d{1,3})\.$|"
    r"^  Process name: \[\[\d+,\d+\],(\d{1,6})\]\n  Exit code:\s+(\d{1,3})$|"
    r"^mpirun noticed that process rank (\d{1,6}) with PID \d+ on node \S+ exited on signal (\d{1,2}) ",
    re.MULTILINE,
)
# Ended by the launcher, after another one.
TERMINATED = {143, -15}


@dataclass(frozen=True)
class Head:
    """The node where jobs are started, and how to log in there."""

    name: str
    ssh: tuple[str, ...]
    target: str
    # What makes a command run as the job user there.
    become: tuple[str, ...]

    def command(self, *words: str) -> list[str]:
        """A command of the job user's on the head."""
        return [*self.ssh, self.target, shlex.join([*self.become, *words])]

    def ask(self, *words: str) -> str:
        """Run a command there and return what it prints."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise FarandoleError(self.reason(done.returncode, done.stderr))
        return done.stdout

    def rsync(
        self, through: Sequence[str], arguments: Sequence[str], remote: str, patterns: str = "", to: Path | None = None
    ) -> str:
        """Copy to or from a folder that the head's command enters; returns why it failed."""
        there = ["--rsync-path", f"cd / && {shlex.join([*self.become, 'farandole', *through])}"]
        places = [f"{self.target}:{remote}", *([f"{to}/"] if to else [])]
        done = subprocess.run(
            ["rsync", "--archive", "--rsh", shlex.join(self.ssh), *there, *arguments, *places],
            input=patterns, capture_output=True, text=True, errors="surrogateescape", check=False,
        )  # fmt: skip
        if "sudo: " in done.stderr or self.lacks_command(done.returncode, done.stderr):
            raise FarandoleError(self.reason(NO_COMMAND, done.stderr))
        return one_line(why(done.stderr)) if done.returncode else ""

    @staticmethod
    def lacks_command(status: int, said: str) -> bool:
        """Whether the head's own command is missing there."""
        words = ("farandole: No such file", "farandole: command not found")
        return status == NO_COMMAND or any(one in said for one in words)

    def reason(self, status: int, said: str) -> str:
        """Why a command failed there."""
        if said.startswith("error: "):
            return on_terminal(said.strip().removeprefix("error: "))
        if "sudo: " in said:
            return (
                f"{self.name}: {one_line(said)}; log in as root, as somebody who may use sudo without a password, or, "
                "with --user NAME, as somebody in cluster_users of this inventory"
            )
        if self.lacks_command(status, said):
            return f"{self.name} has no command farandole: run site.yml, without --skip-tags stack"
        return f"{self.name}: {one_line(said)}"


def head_of(inventory: Path, login: Login) -> Head:
    """The head of an inventory's cluster."""
    hosts = host_variables(inventory.absolute(), "head")
    if not hosts:
        raise FarandoleError(f"{inventory}: group head is missing or empty; see inventory/example/hosts.yml")
    return login_to(*next(iter(hosts.items())), login)


def login_to(name: str, known: dict[str, Any], login: Login) -> Head:
    """How to log in to a node, and become the job user there."""
    user = login.user or login_name(known)
    key = login.private_key or login_key(known)
    port = known.get("ansible_port") or known.get("ansible_ssh_port")
    # Where Ansible keeps its own connections, too.
    shared = Path.home() / ".ansible/cp"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"]
    ssh += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    # Somebody else's key opens a connection of its own.
    kind = hashlib.sha256(str(key).encode()).hexdigest()[:8]
    ssh += ["-o", "ControlMaster=auto", "-o", "ControlPersist=120", "-o", f"ControlPath={shared}/farandole-{kind}-%C"]
    # ssh takes the first user that it is told, and tries every key.
    ssh += [*(["-p", str(port)] if port else []), *(["-o", f"User={user}"] if user else [])]
    ssh += ["-i", str(key)] if key else []
    arguments = [
        *shlex.split(str(known.get("ansible_ssh_common_args") or "")),
        *shlex.split(str(known.get("ansible_ssh_extra_args") or "")),
    ]
    ssh += ["-o", "IdentitiesOnly=yes", *without_keys(arguments)] if login.private_key else arguments
    address = str(known.get("ansible_host") or name)
    job_user = str(known.get("base_user") or "trainer")
    # People with accounts of their own start jobs as themselves.
    themselves = {job_user: (), **{str(one["name"]): () for one in known.get("cluster_users") or ()}}
    become = {"root": ("runuser", "-u", job_user, "--"), **themselves}.get(user, ("sudo", "-n", "-u", job_user, "--"))
    return Head(name, tuple(ssh), f"{user}@{address}" if user else address, become)


def without_keys(arguments: Sequence[str]) -> Iterator[str]:
    """Arguments for ssh, without the keys that they name."""
    words = iter(arguments)
    for word in words:
        # The value of these options may be a word of its own.
        option = f"{word} {next(words, '')}" if word in ("-i", "-o") else word
        if not OF_KEY.match(option):
            yield from option.split(" ", 1) if word in ("-i", "-o") else [word]


def run(
    inventory: Inventory,
    command: Annotated[
        list[str], typer.Argument(metavar="-- PROGRAM...", help="For example python train.py --epochs 3.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option("-np", min=1, metavar="N", help="Number of ranks; all slots of the nodes, if not given."),
    ] = None,
    hosts: Annotated[str, typer.Option(help="Only these nodes, separated by commas.")] = "",
    time: Annotated[str, typer.Option("--time", metavar="TIME", help="End it after 90s, 30m, 2h or 1d.")] = "",
    fetch: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Get this back when it ends; may be repeated.")
    ] = None,
    *,
    mpi: Annotated[bool, typer.Option("--mpi/--gloo", help="Start the ranks with MPI, or with Gloo.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for slots that other runs use.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is started.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send even a large folder without asking.")] = False,
    user: User = "",
    private_key: PrivateKey = None,
) -> None:
    """Send this folder to the nodes and start a program there, with one rank per slot.

    Git's ignored files stay here, and what a file .farandoleignore names. Ctrl-C ends the run on every node; a lost
    connection does not.
    """
    if detach and fetch:
        raise FarandoleError("--fetch brings results back when the run ends, so it does not go with --detach")
    if not shutil.which("rsync"):
        raise FarandoleError("rsync is not installed on this machine: apt install rsync")
    again = options(inventory, user, private_key)
    without = left_out(inventory, hosts)
    head, folder = head_of(inventory, Login(user, private_key)), Path.cwd()
    machine = Path("/etc/machine-id")
    here = machine.read_text() if machine.exists() else socket.gethostname()
    source = hashlib.sha256(f"{here} {os.getuid()} {folder}".encode()).hexdigest()[:16]
    try:
        refuse_early(command, fetch or [], folder)
        if time:
            duration(time)
    except (RefusedError, ArgumentTypeError) as refused:
        raise FarandoleError(str(refused)) from None
    send(head, folder, source, yes=yes)
    wish = ["--detach", *(["-np", str(ranks)] if ranks else []), *(["--hosts", hosts] if hosts else [])]
    wish += [*(["--time", time] if time else []), *(["--mpi"] if mpi else []), *(["--wait"] if wait else [])]
    wish += [f"--fetch={path}" for path in fetch or ()]
    wish += [f"--without={','.join(without)}"] if without else []
    number = head.ask("farandole", "run", *wish, f"--source={source}", "--", *command).strip()
    if not number.isdigit():
        raise FarandoleError(f"{head.name} did not start a run: {one_line(number)}")
    if detach:
        console.print(f"run {number} is started; next: farandole attach {again} {number}")
        return
    try:
        status = follow(head, number)
    except Interrupted:
        console.print(f"stopping run {number}")
        try:
            show(head.ask("farandole", "stop", number))
        except Interrupted:
            raise Interrupted(f"run {number} may still be ending; farandole runs {again} shows it") from None
        words = f"; its results: farandole fetch {again} {number} {shlex.join(fetch)}" if fetch else ""
        raise Interrupted(f"run {number} is ended on every node{words}") from None
    if fetch and (state := known(head, number)).fetched:
        got = [get(head, number, path, folder) for path in fetch]
        status = status or int(not (state.complete and all(got)))
    raise typer.Exit(status)


def left_out(inventory: Path, hosts: str) -> list[str]:
    """The nodes that a run does not use; refuses to be told to use them."""
    known = host_variables(inventory.absolute())
    entries = excluded.read(excluded.folder_of(inventory, next(iter(known.values())))) if known else {}
    wanted = [name.strip() for name in hosts.split(",")] if hosts else list(known)
    out = {name: one for name, one in entries.items() if name in wanted}
    for name, one in out.items():
        words = on_terminal(f"{name} is left out: {one.words}")
        if hosts:
            raise FarandoleError(f"--hosts: {words}; to use it again: farandole node include {name} -i {inventory}")
        console.print(words, markup=False)
    return [*out]


def options(inventory: Path, user: str, private_key: Path | None) -> str:
    """The options with which a hint means the same cluster and the same person."""
    words = ["-i", str(inventory), *(["--user", user] if user else [])]
    return shlex.join([*words, *(["--private-key", str(private_key)] if private_key else [])])


def attach(inventory: Inventory, number: Number = "", user: User = "", private_key: PrivateKey = None) -> None:
    """Show what a run prints until it ends; Ctrl-C leaves it running."""
    head, again = head_of(inventory, Login(user, private_key)), options(inventory, user, private_key)
    number = number or known(head, "").number
    try:
        status = follow(head, number)
    except Interrupted:
        raise Interrupted(f"the run goes on; to end it: farandole stop {again} {number}") from None
    raise typer.Exit(status)


def logs(inventory: Inventory, number: Number = "", user: User = "", private_key: PrivateKey = None) -> None:
    """Print what a run has printed so far."""
    head = head_of(inventory, Login(user, private_key))
    status, said, _ = stream(head, "logs", number)
    if status:
        raise FarandoleError(head.reason(status, said))


def runs(inventory: Inventory, user: User = "", private_key: PrivateKey = None) -> None:
    """List the runs: when, with which stack, where, how long, and how they ended."""
    show(head_of(inventory, Login(user, private_key)).ask("farandole", "runs"))


def stop(
    inventory: Inventory,
    number: Annotated[str, typer.Argument(metavar="RUN", help="Its number.")],
    user: User = "",
    private_key: PrivateKey = None,
) -> None:
    """End a run on all of its nodes."""
    show(head_of(inventory, Login(user, private_key)).ask("farandole", "stop", number))


def fetch(
    inventory: Inventory,
    number: Annotated[str, typer.Argument(metavar="RUN", help="Its number.")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="What to get, paths in the run's folder.")],
    user: User = "",
    private_key: PrivateKey = None,
) -> None:
    """Get results of a run, from its first node, into this folder; also while it runs."""
    head, complete = head_of(inventory, Login(user, private_key)), True
    try:
        refuse_outside(paths)
    except RefusedError as refused:
        raise FarandoleError(str(refused)) from None
    try:
        head.ask("farandole", "fetch", number, "--", *paths)
    except FarandoleError as error:
        # What the head has can be had.
        console.print(str(error), markup=False)
        complete = False
    fetched = [get(head, number, path, Path.cwd()) for path in paths]
    if not (complete and all(fetched)):
        raise typer.Exit(1)


def show(text: str) -> None:
    """Print what a node says; a progress bar, which overwrites its line, becomes several lines."""
    sys.stdout.write(on_terminal(text.replace("\r\n", "\n").replace("\r", "\n")))
    sys.stdout.flush()


# Files


def send(head: Head, folder: Path, source: str, *, yes: bool) -> None:
    """Copy a folder to the head; of files that it has, only the changes."""
    options, patterns = filters(folder)
    size, outside = survey(folder, options, patterns)
    if outside:
        console.print(f"warning: the nodes get these links, but not what they lead to: {some(outside)}", markup=False)
    if not yes and size > LARGE:
        console.print(
            f"{folder} has {size / 1e6:.0f} MB, and every node gets a copy. What is large and seldom changes belongs "
            "on storage that all nodes see; a file .farandoleignore names what stays here."
        )
        if not sys.stdin.isatty():
            raise FarandoleError("nothing was sent; to send it: --yes")
        typer.confirm("Send it?", abort=True)
    failed = head.rsync(["_receive", source], [*options, "--delete", "--delete-excluded", f"{folder}/"], "./", patterns)
    if failed:
        raise FarandoleError(f"{folder} could not be sent to {head.name}: {failed}")


def survey(folder: Path, options: Sequence[str], patterns: str) -> tuple[int, list[str]]:
    """The bytes that would be sent if the head had nothing, and the links that lead out of the folder."""
    done = subprocess.run(
        ["rsync", "--archive", "--dry-run", "--out-format=%l %i %n%L", *options, f"{folder}/", "/nonexistent/"],
        input=patterns, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, errors="surrogateescape",
        check=False,
    )  # fmt: skip
    size, outside = 0, []
    for line in done.stdout.splitlines():
        length, kind, name = (*line.split(" ", 2), "", "")[:3]
        if kind.startswith("cL"):
            link, _, target = name.partition(" -> ")
            if not Path(os.path.normpath(folder / Path(link).parent / target)).is_relative_to(folder):
                outside.append(name)
        elif kind[1:2] == "f":
            size += int(length)
    return size, outside


def get(head: Head, number: str, path: str, folder: Path) -> bool:
    """Get a result from the head; whether all of it could be had."""
    failed, refused = "", []
    try:
        with hangup_interrupts(), staging(deepest(folder, path), folder) as (staged, options):
            failed = head.rsync(["_give", number], options, f"./{path}", to=staged)
            refused = list(place(staged, folder, Path(path)))
    except (RefusedError, OSError) as error:
        failed = one_line(error)
    rest = f"{path} is incomplete here" if refused else f"fetched {path}"
    for words in [*refused, f"{path} could not be fetched: {failed}" if failed else rest]:
        console.print(words, markup=False)
    return not (failed or refused)


@contextmanager
def hangup_interrupts() -> Iterator[None]:
    """Let a terminal that is closed interrupt what has to clean up, unless nohup has this ignored."""
    usual = signal.getsignal(signal.SIGHUP)

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted("the terminal was closed; run the same command again")

    if usual == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, usual)


# Output


def follow(head: Head, number: str) -> int:
    """Show what a run prints until it ends, and the cause if it failed; returns its exit status."""
    status, said, lines = stream(head, "attach", number)
    if status == OF_SSH and not has_ended(head, number):
        raise FarandoleError(
            f"the connection to {head.name} was lost; if that node is up, the run goes on there, and "
            "`farandole attach` shows it again"
        )
    sys.stderr.write(on_terminal(said))
    if status and not said.startswith("error: "):
        explain(head, number, lines)
    return status


def stream(head: Head, what: str, number: str) -> tuple[int, str, Sequence[str]]:
    """Show what a command on the head prints; returns its exit status, its errors, and its last lines."""
    lines: deque[str] = deque(maxlen=REMEMBERED)
    # An interrupt is for this process: the run is then ended in order, or goes on.
    with tempfile.TemporaryFile("w+", errors="replace") as said, subprocess.Popen(
        head.command("farandole", what, *([number] if number else [])), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=said, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while line := process.stdout.readline(LONGEST) if process.stdout else "":
                lines.append(line.rstrip("\n"))
                show(line)
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        said.seek(0)
        return status, said.read(1 << 16), lines


def has_ended(head: Head, number: str) -> bool:
    """Whether the run has ended, as far as is known."""
    try:
        return known(head, number).ended
    except FarandoleError:
        return False


@dataclass(frozen=True)
class State:
    """What the head says of a run: how it ended, which nodes were lost, and the ranks of each node."""

    number: str
    ended: bool
    why: str
    fetched: bool
    complete: bool
    lost: tuple[str, ...]
    slots: tuple[tuple[str, int], ...]


def known(head: Head, number: str) -> State:
    """What the head knows of a run."""
    try:
        said = json.loads(head.ask("farandole", "_state", *([number] if number else [])))
        slots = [(str(node), int(ranks)) for node, ranks in said["started"].get("slots", {}).items()]
        lost = tuple(on_terminal(str(node)) for node in said["ended"].get("lost", ()))
        ended = said["ended"]
        return State(
            str(int(said["number"])),
            bool(ended),
            str(ended.get("why", "")),
            ended.get("fetched") is True,
            ended.get("complete") is not False,
            lost,
            tuple(slots),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FarandoleError(f"{head.name} gives no valid description of run {number}") from None


def explain(head: Head, number: str, lines: Sequence[str]) -> None:
    """Say why a run failed."""
    state = known(head, number)
    hit, raised = first_cause(lines)
    first, status = first_end(lines)
    if state.lost and not state.why:
        # The ranks only tell that a connection broke.
        tell("node-silent", state, state.lost[0], seen=some(state.lost))
        return
    if first >= 0 and not state.why and not raised and (hit is None or hit.cause.cascade):
        host = host_of(first, state.slots)
        # Of a worker that a signal has ended on another node, ssh only says 255.
        code = "worker-killed" if killed(status) or status == OF_SSH else "worker-failed"
        tell(code, state, host, f"rank {first} on {host} failed: {in_words(status)}")
        return
    if state.why or not (hit or raised):
        return
    own = OF_RANK.match(raised)
    rank = hit.rank if hit else int(own[1]) if own else None
    host = host_of(rank, state.slots) if rank is not None else "a node"
    # A consequence says nothing of where its cause is.
    where = "" if rank is None or (hit and hit.cause.cascade) else f"rank {rank} on {host}: "
    cause = hit.cause.description({"host": host, **hit.words}) if hit else one_line(own[2] if own else raised)
    code, words = (hit.cause.code, hit.words) if hit else ("worker-failed", {})
    tell(code, state, words.get("host", host), f"{where}{on_terminal(cause)}")


def tell(code: str, state: State, host: str, words: str = "", **fields: str) -> None:
    """Print a cause and its cure, in which only nodes of the run are named."""
    cause = causes()[code]
    there = shlex.quote(host) if host in dict(state.slots) else "that node"
    console.print(f"cause: {words or cause.description(fields)} [{code}]", markup=False)
    console.print(f"cure: {cause.remedy({'host': there})}", markup=False)


def first_cause(lines: Sequence[str]) -> tuple[Hit | None, str]:
    """A cause of the catalogue, or the line of a rank's own exception, of which the others' are often a consequence."""
    verdict = of_job(lines)
    if verdict.roots:
        return verdict.roots[0], ""
    own = (line for line in lines if line.startswith("[") and is_raised(line) and not of_job([line]).cascades)
    raised = next(own, "")
    return None if raised or not verdict.cascades else verdict.cascades[-1], raised


def first_end(lines: Sequence[str]) -> tuple[int, int]:
    """The rank that failed by itself, and its exit status; -1 if the launcher does not say that."""
    others = [line for line in lines if any(not hit.cause.leads for hit in of_job([line]).cascades)]
    innocent = {int(rank[1]) for line in others if (rank := OF_RANK.match(line))}
    for found in ENDED.finditer("\n".join(lines)):
        number, status = (int(text) for text in found.groups() if text)
        status = -status if found[6] else status
        if status and number not in innocent and status not in TERMINATED:
            return number, status
    return -1, 0


def killed(status: int) -> str:
    """The signal that ended a program, if its exit status says so; else empty."""
    number = status - 128 if status > 128 else -status
    return signal.Signals(number).name if number in {*signal.Signals} else ""


def in_words(status: int) -> str:
    """What an exit status means."""
    known = {
        126: "it could not be executed; start a Python program with python",
        127: "it was not found on this node",
        255: "its exit status is not known; see what it printed, or journalctl -k there if the memory was full",
    }
    if status in known:
        return known[status]
    if name := killed(status):
        memory = "; journalctl -k there shows if that was because memory was full" if name == "SIGKILL" else ""
        return f"it was ended by {name}{memory}"
    return f"it ended with exit status {status}"


def host_of(rank: int, slots: Sequence[tuple[str, int]]) -> str:
    """The node of a rank; the launcher fills them in order."""
    for node, ranks in slots:
        if rank < ranks:
            return on_terminal(node)
        rank -= ranks
    return "a node"
