"""The head's command: farandole run, runs, logs, attach, fetch, stop."""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from farandole.core.text import visible
from farandole.node import relay
from farandole.node.arguments import duration, positive
from farandole.node.head import launch, runs, status
from farandole.node.head.folders import (
    copy,
    filters,
    give,
    locked,
    receive,
    refuse_checkpoints,
    refuse_early,
    refuse_outside,
    sent,
)
from farandole.node.head.job import RunKeeper, collect
from farandole.node.head.reap import GRACE
from farandole.node.head.runs import SSH, RefusedError, Run, all_runs, bus, chosen, clock, new_run, ran, systemctl, told
from farandole.node.head.status import others, owner

# Seconds between two questions to systemd whether a run is alive.
ASK_EVERY = 5
# And those in which systemd has to take the order to end one.
STOP_S = 60
COMMAND = "/usr/local/bin/farandole"


def start(arguments: argparse.Namespace) -> int:
    """Start a run, and show it unless it is detached."""
    run = started(arguments)
    if arguments.detach:
        print(run.number)
        return 0
    print(f"run {run.number}", file=sys.stderr)
    try:
        return attach(run)
    except KeyboardInterrupt:
        stop(run)
        return 130


def started(arguments: argparse.Namespace) -> Run:
    """Start a run in a unit of the user's systemd."""
    refuse_upgrade()
    if os.getuid() == 0:
        raise RefusedError("root starts no jobs; as the job user: runuser -u NAME -- farandole run ...")
    folder = sent(arguments.source) if arguments.source else Path.cwd()
    if runs.RUNS.is_relative_to(folder):
        raise RefusedError(
            f"{folder} contains all runs, and each run gets a copy of its folder: start it in another one"
        )
    refuse_early(arguments.program, arguments.fetch, folder)
    refuse_checkpoints(arguments.checkpoints)
    if (arguments.min_nodes or arguments.checkpoints) and not arguments.restarts:
        raise RefusedError("--min-nodes and --checkpoints are for a run with --restarts N")
    arguments.launcher = launch.recognized(arguments.program, arguments.launcher)
    arguments.np = arguments.np or launch.only(arguments.program)
    me = owner(os.getuid())
    if not os.access(bus()["XDG_RUNTIME_DIR"], os.X_OK):
        raise RefusedError(f"systemd does not run for {me}; as root: loginctl enable-linger {me}")
    run = new_run()
    try:
        prepare(run, arguments, folder)
        # Which takes as long as the folder is large.
        refuse_upgrade()
    except BaseException as error:
        # Also if it is interrupted: what was not started is no run.
        shutil.rmtree(run.folder)
        if isinstance(error, OSError):
            raise RefusedError(f"{runs.RUNS}: {error.strerror}") from None
        raise
    done = ran("systemd-run", "--user", "--quiet", "--collect", *unit(run), env=bus())
    if done.returncode:
        shutil.rmtree(run.folder)
        raise RefusedError(f"systemd could not start the run: {done.stderr.strip()}")
    return run


def refuse_upgrade() -> None:
    """Refuse to start a run that would soon be ended."""
    if status.UPGRADING.exists():
        raise RefusedError(
            "the head or the builder is being upgraded, and may reboot: try again later; if not, as root on the head: "
            f"rm {status.UPGRADING}"
        )


def prepare(run: Run, arguments: argparse.Namespace, folder: Path) -> None:
    """Copy the folder to a new run, and write down what is wanted of it."""
    # What a control machine sent has been filtered there.
    options, patterns = ([], "") if arguments.source else filters(folder)
    lock = locked(folder) if arguments.source else -1
    copy(folder, run.code, options, patterns)
    if lock >= 0:
        os.close(lock)
    wish = {name: value for name, value in vars(arguments).items() if name != "call"}
    run.write("run", **{**wish, "source": arguments.source or str(folder), "created": time.time()})
    run.output.touch(0o600)
    run.reserve("ended")


def unit(run: Run) -> list[str]:
    """The unit that keeps a run, and its command."""
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
    options = [f"--unit={run.unit}", f"--description=Run {run.number} of farandole"]
    options += [f"--property={name}={value}" for name, value in properties.items()]
    return [*options, sys.executable, "-I", COMMAND, "_job", str(run.number)]


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


def logs(run: Run) -> None:
    """Print what a run has printed so far."""
    with run.printed() as file:
        shutil.copyfileobj(file, sys.stdout.buffer)


def stop(run: Run) -> None:
    """End a run on all of its nodes."""
    if run.end():
        raise RefusedError(f"run {run.number} has already ended: {told(run)}")
    asked, until = systemctl("stop", "--no-block", run.unit), time.monotonic() + STOP_S
    while not run.end():
        # It may be too busy to answer.
        if asked.returncode:
            if time.monotonic() > until:
                raise RefusedError(f"run {run.number} is not ended, systemd says: {asked.stderr.strip()}")
            asked = systemctl("stop", "--no-block", run.unit)
        time.sleep(0.2)
    print(f"run {run.number}: {told(run)}")


def state(run: Run) -> None:
    """Print what is known of a run."""
    launcher = run.read("run").get("launcher", "")
    print(json.dumps({"number": run.number, "launcher": launcher, "started": run.read("started"), "ended": run.end()}))


def fetch(arguments: argparse.Namespace) -> None:
    """Get results of a run from its first node, even while it runs."""
    run = arguments.run
    refuse_outside(arguments.paths)
    failures = list(collect(run, arguments.paths))
    failures += [f"run {run.number} has no {path}" for path in arguments.paths if not (run.code / path).exists()]
    if failures:
        raise RefusedError("\n".join(failures))
    print("\n".join(str(run.code / path) for path in arguments.paths))


def show(_: argparse.Namespace) -> None:
    """List the runs, and those of other people that use slots."""
    for run in all_runs():
        if wish := run.read("run"):
            stack = run.read("started").get("stack", "-")
            begun, program = clock(wish["created"]), shlex.join(wish["program"])
            print(f"{run.number:>4}  {begun:12}  {stack:12}  {told(run)}: {visible(program)}")
    for number, who, since, uses in others():
        if who != owner(os.getuid()):
            print(f"      {clock(since):12}  run {number} of {who} on {', '.join(uses)}")


def listed(_: argparse.Namespace) -> None:
    """Print what is known of all runs."""
    for run in all_runs():
        # One whose record is damaged hides no other.
        with suppress(KeyError, TypeError, AttributeError):
            wish, slots = run.read("run"), run.read("started").get("slots")
            known = {"number": run.number, "owner": owner(os.getuid()), "created": wish["created"], "slots": slots}
            print(json.dumps({**known, "program": shlex.join(wish["program"]), "how": told(run)}))


def connect(arguments: argparse.Namespace) -> None:
    """Become what connects standard input and output with a port of a run's first node."""
    node = next(iter(arguments.run.read("started").get("slots", {})), "")
    if not node or arguments.run.end():
        raise RefusedError(f"run {arguments.run.number} has no node")
    command = ["python3", "-I", "-c", Path(relay.__file__).read_text(), str(arguments.port)]
    if node != runs.HERE:
        command = [*SSH.split(), node, shlex.join(command)]
    os.execvp(command[0], command)  # noqa: S606


# What is done with a run; those without words are called by the control machine and by systemd.
ON_RUN: dict[str, tuple[Callable[[Run], int | None], str]] = {
    "logs": (logs, "print what a run has printed"),
    "attach": (attach, "print what a run prints until it ends"),
    "stop": (stop, "end a run on all of its nodes"),
    "_job": (lambda run: RunKeeper(run)(), ""),
    "_state": (state, ""),
}


def parsed() -> argparse.Namespace:
    """The arguments of this call."""
    top = argparse.ArgumentParser(prog="farandole", description="Run programs on the cluster's nodes.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    purpose = "send this folder to the nodes and start a program there"
    add_run(commands.add_parser("run", help=purpose, allow_abbrev=False))
    commands.add_parser("runs", help="list your runs").set_defaults(call=show)
    commands.add_parser("_runs").set_defaults(call=listed)
    for name, (act, purpose) in ON_RUN.items():
        command = commands.add_parser(name, help=purpose) if purpose else commands.add_parser(name)
        command.set_defaults(call=lambda arguments, act=act: act(arguments.run))
        # Everybody is the job user, so the latest may be somebody else's.
        if name == "stop":
            command.add_argument("run", type=chosen, help="its number")
        else:
            latest = "its number; the latest, if not given"
            command.add_argument("run", type=chosen, nargs="?", default="", help=latest)
    command = commands.add_parser("fetch", help="get results of a run from its first node")
    command.set_defaults(call=fetch)
    command.add_argument("run", type=chosen, help="its number")
    command.add_argument("paths", nargs="+", metavar="PATH", help="what to get, a path in the run's folder")
    command = commands.add_parser("_connect")
    command.set_defaults(call=connect)
    command.add_argument("run", type=chosen)
    command.add_argument("port", type=positive)
    for name, transfer in (("_receive", receive), ("_give", give)):
        command = commands.add_parser(name)
        command.set_defaults(call=lambda arguments, transfer=transfer: transfer(arguments.name, arguments.arguments))
        command.add_argument("name")
        command.add_argument("arguments", nargs=argparse.REMAINDER)
    return top.parse_args()


def add_run(run: argparse.ArgumentParser) -> None:
    """The options of a run."""
    run.set_defaults(call=start)
    run.add_argument("-np", type=positive, default=0, metavar="N", help="number of ranks; all slots, if not given")
    run.add_argument("--hosts", default="", help="only these nodes, separated by commas")
    how = run.add_mutually_exclusive_group()
    how.add_argument("--launcher", choices=launch.LAUNCHERS, default="", help="what starts the ranks")
    for name, launcher, purpose in launch.SHORT:
        how.add_argument(f"--{name}", dest="launcher", action="store_const", const=launcher, help=purpose)
    run.add_argument(
        "--time", dest="seconds", metavar="TIME", type=duration, default=0, help="end it after 90s, 30m, 2h or 1d"
    )
    run.add_argument("--wait", action="store_true", help="wait for slots that other runs use")
    run.add_argument("--detach", action="store_true", help="print its number and return")
    run.add_argument(
        "--restarts", type=positive, default=0, metavar="N", help="start it again after a failure, so often at most"
    )
    run.add_argument("--min-nodes", type=positive, default=0, metavar="M", help="then, go on with so few nodes")
    run.add_argument("--checkpoints", default="", metavar="DIR", help="where the program finds what it has saved")
    within = "end it if a rank has not met the others in so many seconds; 0 for never"
    run.add_argument("--meet-within", type=int, default=launch.MEET_S, metavar="SECONDS", help=within)
    fetch = "get this from the first node when the run ends"
    run.add_argument("--fetch", action="append", default=[], metavar="PATH", help=fetch)
    run.add_argument("--source", help=argparse.SUPPRESS)
    run.add_argument("--without", type=lambda text: text.split(","), default=[], help=argparse.SUPPRESS)
    run.add_argument("program", nargs="+", metavar="-- PROGRAM", help="for example python train.py --epochs 3")


def main() -> int:
    """Run the command, and return its exit status."""
    try:
        arguments = parsed()
        return arguments.call(arguments) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os._exit(141)
    except (RefusedError, OSError) as refused:
        sys.exit(f"error: {refused}")
