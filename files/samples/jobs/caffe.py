"""Train with Intel Caffe on several nodes, and say whether they trained together; caffe.sh starts it.

Everything that a training needs is checked on every node before it starts. Whether it succeeded is read from its log
and from the model's file, because its launchers end with 0 even if each rank has trained alone.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import queue
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

INSTALLED = "/opt/farandole/caffe/current/bin/caffe"
# Debian has MPICH's library as libmpich.so.12 only; role caffe makes a link with the name of the ABI in this folder.
ABI = "/opt/farandole/caffe/abi"
STACK = "/opt/farandole/current/mpi/lib"
HOSTFILE = "/etc/farandole/hostfile"
# The libraries by which a program shows which MPI it was built for.
KINDS = {"libmpi.so.12": "mpich", "libmpich.so.12": "mpich", "libmpi.so.40": "openmpi"}
NAMES = {"mpich": "MPICH or Intel MPI", "openmpi": "Open MPI"}
LAUNCHERS = {"mpich": ("mpiexec.hydra", "mpirun"), "openmpi": ("mpirun", "mpirun.openmpi")}
ADAPTERS = {"opa": ("hfi1", "Omni-Path"), "mlx": ("mlx", "Mellanox")}
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
PASSED_ON = re.compile(r"(KMP|OMP|MLSL|GLOG|I_MPI|FI|UCX|MKL)_|LD_LIBRARY_PATH$")
# Seconds for a node to answer, for a job to end when asked to, for one with a failed check to end by itself, and for
# one whose ranks are all done: with several ranks per node, Debian's MPICH 4.0.2 sometimes hangs in MPI_Finalize.
ANSWER, PATIENCE, AFTER_FAILURE, AFTER_DONE = 60, 10, 20, 30
DONE = "it did not end"


class RefusedError(Exception):
    """Why nothing was started: problems, each with host, cause and cure."""

    def __init__(self, *problems):
        super().__init__("; ".join(problems))
        self.problems = problems


class Ended(BaseException):
    """A signal asked for the end of the job, or nobody reads what it prints any more."""


def say(text):
    print(f"caffe.sh: {text}", file=sys.stderr, flush=True)


def plain(text, length=300):
    """What a node or a log says, without characters that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in str(text))[:length]


# Options


def limit(text):
    """Parse a time limit. A bare number is refused, as it means minutes to Slurm and seconds to PBS."""
    if clock := re.fullmatch(r"(\d{1,4}):(\d\d):(\d\d)", text):
        hours, minutes, rest = map(int, clock.groups())
        total = hours * 3600 + minutes * 60 + rest
    elif unit := re.fullmatch(r"(\d{1,6})([smh])", text):
        total = int(unit[1]) * {"s": 1, "m": 60, "h": 3600}[unit[2]]
    else:
        total = 0
    if not total:
        raise argparse.ArgumentTypeError(f"{text!r} is no time limit: write 4:00:00, 90m or 4h")
    return total


def positive(text):
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def parser():
    made = argparse.ArgumentParser(
        prog="caffe.sh",
        allow_abbrev=False,
        description="Train with Intel Caffe on several nodes. Further options for `caffe train` follow after --.",
    )
    add = made.add_argument
    add("--hostfile", help=f"host names, one a line; default: $PBS_NODEFILE, Slurm's nodes, {HOSTFILE}")
    add("--caffe_bin", help=f"the program caffe, on all nodes; default: caffe on PATH, {INSTALLED}")
    add("--solver", required=True, help="solver.prototxt, on all nodes")
    add("--network", choices=["tcp", "opa", "mlx"], default="tcp", help="tcp (default), Omni-Path or Mellanox")
    add("--ppn", type=positive, help="processes per node; default: what the hostfile gives, else 1")
    add("--num_omp_threads", type=positive, help="threads per process; default: what the allocation gives")
    add("--time", type=limit, default=4 * 3600, help="end the job after that time; default: 4:00:00")
    add("--mpirun", help="the launcher; default: the one on PATH of the MPI that caffe was built for")
    add("more", nargs="*", help=argparse.SUPPRESS)
    made.set_defaults(ranks=None, psm2=False)
    return made


TAKEN = {"-n": "ranks", "-np": "ranks", "-ppn": "--ppn", "-perhost": "--ppn", "-f": "--hostfile",
         "-hostfile": "--hostfile", "-machinefile": "--hostfile"}  # fmt: skip
FLAGS = {
    "-psm2": "--network opa on nodes that have Omni-Path",
    "-prepend-rank": "each line bears its rank anyway",
    "-l": "each line bears its rank anyway",
}


def translate(words):
    """The guide's mpirun line as our options, and what to say about it; None if it starts anything but caffe train."""
    rest, unknown, given, variables, psm2, said = list(words), "", {}, {}, False, []
    while rest and rest[0].startswith("-"):
        written = rest.pop(0)
        name = f"-{written.lstrip('-')}"
        if name.lower() in FLAGS:
            psm2 = psm2 or name.lower() == "-psm2"
            said.append(f"{written} ({FLAGS[name.lower()]})")
        elif name == "-genv" and len(rest) > 1:
            (variable, value), rest = rest[:2], rest[2:]
            variables[variable] = value
        elif name in TAKEN and rest:
            given[TAKEN[name]] = rest.pop(0)
        else:
            unknown = unknown or written
            # What follows may be its value.
            while rest and not rest[0].startswith("-") and Path(rest[0]).name != "caffe":
                rest.pop(0)
    if len(rest) < 2 or Path(rest[0]).name != "caffe" or rest[1] != "train":
        return None
    if unknown:
        raise RefusedError(f"mpirun's option {plain(unknown)} cannot be translated: leave it out, see caffe.sh --help")
    ranks = given.pop("ranks", None)
    ours, more = ["--caffe_bin", rest[0]] if "/" in rest[0] else [], []
    ours += [word for pair in given.items() for word in pair]
    rest = rest[2:]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in ("--solver", "-solver") and (equals or rest):
            ours += ["--solver", value if equals else rest.pop(0)]
        else:
            more.append(f"{name}{equals}{value}")
    chosen = parser().parse_args([*ours, "--", *more])
    chosen.ranks, chosen.psm2 = positive(ranks) if ranks else None, psm2
    os.environ.update(variables)
    return chosen, said


def read_options(words):
    """Read our options, or those of the guide's mpirun; anything else goes to the next mpirun on PATH."""
    if words[:1] != ["--as-mpirun"]:
        return parser().parse_args(words)
    found = translate(words[1:])
    if not found:
        beyond = next(iter(programs("mpirun")), None)
        if not beyond:
            raise RefusedError("there is no mpirun on PATH, only the one that hands Intel Caffe to its launcher")
        os.execv(beyond, [beyond, *words[1:]])  # noqa: S606
    chosen, said = found
    if said:
        say(f"translated: {'; '.join(said)}")
    return chosen


# Hosts


def read_hosts(text):
    """Each host's number of processes: its lines in a PBS nodefile, its slots in a hostfile of mpirun."""
    hosts, slots = Counter(), {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, colon = words[0].partition(":")
        counts = [colon] if colon else [word[6:] for word in words[1:] if word.startswith("slots=")]
        if not HOST.fullmatch(name) or any(not re.fullmatch(r"[1-9]\d{0,3}", one) for one in counts):
            raise RefusedError(
                f"line {number} of the hostfile is no host: {plain(line, 60)!r}. Write a host name, or NAME slots=N"
            )
        hosts[name] += 1
        if counts:
            slots[name] = int(counts[0])
    return {name: slots.get(name, lines) for name, lines in hosts.items()}, bool(slots)


def expand(text):
    """Parse Slurm's 4(x2),2 into 4, 4, 2."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in parts for _ in range(int(times or 1))]


def allocation():
    """The nodes of the Slurm job in which this runs, each with its number of tasks; empty outside a job."""
    names = os.environ.get("SLURM_JOB_NODELIST")
    if not names:
        return {}
    shown = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True)
    tasks = expand(os.environ.get("SLURM_TASKS_PER_NODE", ""))
    hosts = shown.stdout.split()
    return dict(zip(hosts, tasks if len(tasks) == len(hosts) else [1] * len(hosts)))


def find_hosts(named, allocated):
    """The hosts, what each has place for, whether that is a limit, and where all this was read."""
    if not named and not os.environ.get("PBS_NODEFILE") and allocated:
        return allocated, False, f"Slurm job {os.environ.get('SLURM_JOB_ID')}"
    path = named or os.environ.get("PBS_NODEFILE") or HOSTFILE
    try:
        hosts, slots = read_hosts(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise RefusedError(f"the hostfile {path} cannot be read: {error.strerror}. Name one with --hostfile") from None
    if not hosts:
        raise RefusedError(f"the hostfile {path} names no host")
    if outside := [name for name in hosts if allocated and name not in allocated]:
        raise RefusedError(
            f"{path} names {', '.join(outside)}, which this job does not have: Slurm gave it {', '.join(allocated)}. "
            "Leave --hostfile out"
        )
    # Slots of the cluster's own hostfile count GPUs, which Caffe does not use.
    return hosts, slots and path != HOSTFILE, path


def per_node(hosts, slots, path, asked, ranks):
    """Processes per node, which is the same everywhere."""
    numbers = set(hosts.values())
    if ranks and not asked:
        if ranks % len(hosts):
            raise RefusedError(
                f"{ranks} ranks cannot be shared evenly by the {len(hosts)} nodes of {path}: ask for {len(hosts)}, or "
                "a multiple of it"
            )
        asked = ranks // len(hosts)
    if asked:
        # Lines that name each host once say nothing about how many processes it has place for.
        places = slots or (path != HOSTFILE and max(numbers) > 1)
        full = [name for name, number in hosts.items() if places and asked > number]
        if full:
            raise RefusedError(f"{full[0]} has place for {hosts[full[0]]} in {path}, but --ppn is {asked}")
        if ranks and ranks != asked * len(hosts):
            raise RefusedError(f"{asked} per node on {len(hosts)} nodes are not {ranks} ranks: leave -n out")
        return asked
    if slots or numbers == {1} or path == HOSTFILE:
        return 1
    if len(numbers) > 1:
        seen = ", ".join(f"{name} {number}" for name, number in hosts.items())
        raise RefusedError(f"{path} has lines in different numbers ({seen}), but every node gets as many: say --ppn 1")
    return numbers.pop()


# Solver and nets

TOKEN = re.compile(r'\s+|#[^\n]*|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|[{}<>:;,[\]]|[^\s{}<>:;,[\]"\'#]+)|(.)')
SOURCES = ("source", "mean_file")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def prototxt(text):
    """Parse protobuf's text format into pairs of a name and a value, which is a string or again such pairs."""
    found = list(TOKEN.finditer(text))
    if strange := next((one for one in found if one[2]), None):
        raise ValueError(f"line {text.count(chr(10), 0, strange.start()) + 1} has a quote that does not end")
    return fields(iter([one[1] for one in found if one[1]]), "")


def fields(tokens, closing):
    made = []
    for token in tokens:
        if token == closing:
            return made
        if token in (",", ";"):
            continue
        value = next(tokens, "") if NAME.fullmatch(token) else "}"
        value = next(tokens, "") if value == ":" else value
        if value in ("{", "<"):
            made.append((token, fields(tokens, "}" if value == "{" else ">")))
        elif value == "[":
            made += [(token, one.strip("\"'")) for one in iter(lambda: next(tokens, "]"), "]") if one != ","]
        elif not value or value in "}>:;,]":
            raise ValueError(f"there is no value at {plain(token, 40)!r}")
        else:
            made.append((token, value[1:-1] if value[0] in "\"'" else value))
    if closing:
        raise ValueError(f"a {closing} is missing at the end")
    return made


def every(message, *names):
    return [value for name, value in message if name in names]


def inside(message):
    """All pairs of a message and of those in it."""
    for name, value in message:
        yield name, value
        if isinstance(value, list):
            yield from inside(value)


@dataclass
class Solver:
    """What a solver trains, on what, and what it leaves behind."""

    path: str
    nets: list
    prefix: str
    model: str
    # Whether it tests the net during the training.
    tests: bool
    sources: list = field(default_factory=list)
    # The outputs of the net that are accuracies.
    accuracies: list = field(default_factory=list)


def whole(message, name, default):
    """A number of the solver; the last value counts, as in protobuf."""
    values = every(message, name)
    try:
        return int(values[-1]) if values else default
    except (TypeError, ValueError):
        raise RefusedError(f"the solver's {name} is no number: {plain(values[-1], 40)!r}") from None


def read_text(path, what):
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        raise RefusedError(
            f"{socket.gethostname()}: {what} {path} cannot be read: {error.strerror}. It has to be on all nodes, under "
            "this name"
        ) from None


def parse(path, what):
    try:
        return prototxt(read_text(path, what))
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{what} {path} cannot be parsed: {error}") from None


def read_solver(path):
    message = parse(path, "the solver")
    nets = [one for one in every(message, "net", "train_net", "test_net") if isinstance(one, str)]
    trained = every(message, "net", "train_net", "net_param", "train_net_param")
    prefixes = [one for one in every(message, "snapshot_prefix") if one and isinstance(one, str)]
    most = whole(message, "max_iter", 0)
    lacking = [
        name for name, there in (("net", trained), ("max_iter", most > 0), ("snapshot_prefix", prefixes)) if not there
    ]
    if lacking:
        raise RefusedError(f"the solver {path} has no {' and no '.join(lacking)}: Caffe would not train, or not save")
    step = whole(message, "snapshot", 0)
    after = every(message, "snapshot_after_train")[-1:] != ["false"]
    last = most if after or not step else most - most % step
    if not last or not (after or step):
        raise RefusedError(f"the solver {path} saves no model: leave snapshot_after_train: false out")
    suffix = ".h5" if every(message, "snapshot_format")[-1:] in (["HDF5"], ["0"]) else ""
    interval = whole(message, "test_interval", 0)
    first = every(message, "test_initialization")[-1:] != ["false"]
    tests = bool(every(message, "test_iter") and interval and (first or most >= interval))
    solver = Solver(path, nets, prefixes[-1], f"{prefixes[-1]}_iter_{last}.caffemodel{suffix}", tests)
    for net in [*(parse(one, "the net") for one in nets), *(one for one in trained if isinstance(one, list))]:
        solver.sources += [value for name, value in inside(net) if name in SOURCES and isinstance(value, str)]
        for layer in every(net, "layer", "layers"):
            if isinstance(layer, list) and every(layer, "type")[-1:] in (["Accuracy"], ["ACCURACY"]):
                only = [value for name, value in inside(layer) if name == "phase"]
                solver.accuracies += [] if only == ["TRAIN"] else every(layer, "top")
    return solver


# Launchers


def programs(*names):
    """The programs of these names on PATH, and where the stack and Debian have them, except our own translator."""
    front = Path(__file__).resolve().parent / "intel-caffe"
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/local/bin", "/usr/bin"]
    found = [str(Path(folder, name)) for folder in folders if folder.startswith("/") for name in names]
    return [one for one in dict.fromkeys(found) if os.access(one, os.X_OK) and Path(one).resolve().parent != front]


def kind_of(launcher):
    """Which MPI a launcher belongs to, and the version that it prints."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [launcher, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=20,
        )
        version = asked.stdout + asked.stderr
        if "Open MPI" in version:
            return "openmpi", version
        if "Intel(R) MPI" in version or "HYDRA" in version:
            return "mpich", version
    return "", ""


def separate(kind, caffe, other, ranks):
    """Why a launcher of another MPI is refused."""
    return (
        f"{socket.gethostname()}: {other} is a launcher of {NAMES[kind] if kind else 'no MPI that is known here'}, and "
        f"{caffe} was built for {{wanted}}: it would start {ranks} separate trainings and end with 0"
    )


def choose_launcher(wanted, forced, caffe, library, ranks):
    """The launcher of the MPI that caffe was built for; one of another kind would start N separate trainings."""
    built = f"{NAMES[wanted]} ({library})"
    if forced:
        path = shutil.which(forced)
        if not path:
            raise RefusedError(f"{socket.gethostname()}: there is no program {forced}: mend or leave out --mpirun")
        kind, version = kind_of(path)
        if kind != wanted:
            raise RefusedError(separate(kind, caffe, path, ranks).format(wanted=built) + ". Leave --mpirun out")
        return path, version
    seen = [(path, *kind_of(path)) for path in programs(*LAUNCHERS[wanted])]
    for path, kind, version in seen:
        if kind == wanted:
            if seen[0][0] != path:
                say(f"{seen[0][0]} is not of {NAMES[wanted]}, for which caffe was built, so {path} starts it")
            return path, version
    cure = (
        "Install Debian's mpich on all nodes (caffe_packages: [mpich]), or load Intel MPI"
        if wanted == "mpich"
        else "Run site.yml, which installs it"
    )
    if seen:
        raise RefusedError(f"{separate(seen[0][1], caffe, seen[0][0], ranks).format(wanted=built)}. {cure}")
    raise RefusedError(f"{socket.gethostname()}: {caffe} was built for {built}, and there is no launcher of it: {cure}")


def ldd(program, folders):
    """The libraries that a program loads, and those that it would not find."""
    environment = {**os.environ, "LC_ALL": "C", "LD_LIBRARY_PATH": ":".join(folders)}
    asked = subprocess.run(
        ["ldd", program], capture_output=True, text=True, errors="replace", env=environment, timeout=30
    )
    pairs = re.findall(r"^\s*(\S+) => (.*?)(?: \(0x[0-9a-f]+\))?$", asked.stdout, re.MULTILINE)
    return [name for name, _ in pairs], [name for name, where in pairs if where == "not found"]


def folders_of(caffe):
    """Where a program's libraries are: beside it, where the job says, the stack's MPI, the ABI's other name."""
    beside = Path(caffe).resolve().parent.parent / "lib"
    given = [one for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    return [*given, str(beside), STACK, ABI]


def which_mpi(caffe, folders):
    """The MPI that a program was built for, by the library that it loads."""
    try:
        names, missing = ldd(caffe, folders)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{socket.gethostname()}: ldd {caffe} failed: {error}") from None
    found = {name: KINDS[name] for name in names if name in KINDS}
    others = [name for name in names if re.match(r"libmpi(ch)?\.so", name) and name not in KINDS]
    kinds = set(found.values())
    if len(kinds) == 1 and not others:
        library, kind = next(iter(found.items()))
        return kind, library, "libiomp5.so" in names
    here = f"{socket.gethostname()}: {caffe} "
    if kinds or others:
        raise RefusedError(
            f"{here}loads {', '.join([*found, *others])}: only libmpi.so.12 (MPICH, Intel MPI) or libmpi.so.40 (Open "
            "MPI) is known, and only one of them"
        )
    if missing:
        raise RefusedError(f"{here}does not find {', '.join(missing)}. {LIBRARY_CURE}")
    raise RefusedError(
        f"{here}loads no MPI, so it trains on one node only: bring one that was built with USE_MLSL := 1"
    )


LIBRARY_CURE = "Put it into the folder lib beside its bin, on all nodes, or its folder on LD_LIBRARY_PATH"


# What a node is asked. This file is sent there and run by its Python, so nothing has to be installed for it.


def digest(path):
    """The sha256 of a file, or why it cannot be read."""
    try:
        made = hashlib.sha256()
        with Path(path).open("rb") as file:
            while block := file.read(1 << 20):
                made.update(block)
        return {"sha256": made.hexdigest()}
    except OSError as error:
        return {"error": error.strerror}


def present(pattern):
    """Why a data source cannot be used; a rank's number may stand for %#."""
    folder, name = os.path.split(pattern)
    try:
        if "%#" not in name:
            Path(pattern).stat()
            return "" if os.access(pattern, os.R_OK) else "Permission denied"
        matched = re.compile(re.escape(name).replace("%\\#", r"\d+"))
        there = any(matched.fullmatch(one.name) for one in Path(folder or ".").iterdir())
        return "" if there else "No such file or directory"
    except OSError as error:
        return error.strerror


def writable(folder):
    """Why no file can be made in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror


def signature(path):
    """What changes when a file is written again; empty if it does not exist."""
    try:
        about = Path(path).stat()
    except OSError:
        return []
    return [about.st_mtime_ns, about.st_ino, about.st_size]


def fabric():
    """The network that Farandole has chosen for jobs, and this node's interface in it."""
    script = '. /etc/farandole/environment && echo "$HOROVOD_NETWORK $GLOO_SOCKET_IFNAME"'
    asked = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    return [*asked.stdout.split(), "", ""][:2]


def on_node(request):
    """What a node says about a training that is to start there."""
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        return {"cwd": error.strerror}
    if "solver" not in request:
        return {"model": signature(request["model"])}
    caffe = digest(request["caffe"])
    missing = []
    if "sha256" in caffe:
        if os.access(request["caffe"], os.X_OK):
            missing = ldd(request["caffe"], request["folders"])[1]
        else:
            caffe = {"error": "Permission denied"}
    adapters = Path("/sys/class/infiniband")
    network, interface = fabric()
    return {
        "caffe": caffe,
        "missing": missing,
        "launcher": os.access(request["launcher"], os.X_OK),
        "files": {path: digest(path) for path in (request["solver"], *request["nets"])},
        "sources": {path: why for path in request["sources"] if (why := present(path))},
        "snapshots": writable(request["snapshots"]),
        "model": signature(request["model"]),
        "cores": len(os.sched_getaffinity(0)),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "adapters": [one.name for one in adapters.iterdir()] if adapters.is_dir() else [],
        "network": network,
        "interface": interface,
    }


def ask(node, request, in_slurm):
    """Ask a node; its answer, or a string that says why there is none."""
    program = ["python3", "-", "--on-node", json.dumps(request)]
    if node not in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        if in_slurm:
            step = ["--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mpi=none", f"--nodelist={node}"]
            program = ["srun", "--quiet", *step, *program]
        else:
            careful = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
            program = ["ssh", *careful, node, shlex.join(program)]
    try:
        source = Path(__file__).read_text()
        asked = subprocess.run(program, input=source, capture_output=True, text=True, errors="replace", timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER} seconds"
    except OSError as error:
        return str(error)
    # A shell that greets adds lines before it.
    for line in reversed(asked.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(answer := json.loads(line), dict):
                return answer
    lines = (asked.stderr or asked.stdout).strip().splitlines()
    return plain(lines[-1]) if lines else f"exit status {asked.returncode}"


def ask_all(nodes, request, in_slurm):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return dict(zip(nodes, pool.map(lambda node: ask(node, request, in_slurm), nodes)))


def judge_nodes(answers, request, network):
    """What stands against starting, each with its host."""
    first = next((answer for answer in answers.values() if isinstance(answer, dict) and "caffe" in answer), None)
    problems, machines = [], {}
    for node, answer in answers.items():
        if isinstance(answer, str):
            problems.append(f"{node} cannot be asked: {answer}. Mend `ssh {node}`, or take it out of the hostfile")
            continue
        if "caffe" not in answer:
            why, folder = plain(answer.get("cwd")), request["cwd"]
            problems.append(f"{node}: {folder}, where the job starts, cannot be entered: {why}. Make that folder there")
            continue
        found = [*judge_program(answer, first, request), *judge_files(answer, first, request)]
        if network in ADAPTERS and not has_adapter(answer, network):
            prefix, name = ADAPTERS[network]
            found.append(f"there is no {name} adapter (/sys/class/infiniband/{prefix}*): use --network tcp")
        if (other := machines.setdefault(answer["machine"], node)) != node:
            found.append(f"it is the same machine as {other} (/etc/machine-id): name each machine once")
        problems += [f"{node}: {one}" for one in found]
    return problems


def judge_program(answer, first, request):
    """What is wrong with caffe, its libraries and its launcher on a node, compared with the first node."""
    about, name = answer["caffe"], request["caffe"]
    elsewhere = first["caffe"].get("sha256", about.get("sha256"))
    if "error" in about:
        yield f"{name} cannot be run: {plain(about['error'])}. It has to be on all nodes"
    elif about["sha256"] != elsewhere:
        seen = f"{plain(about['sha256'], 12)}, elsewhere {plain(elsewhere, 12)}"
        yield f"{name} is not the one of the other nodes (sha256 {seen}). Run site.yml, or copy it again"
    if answer["missing"]:
        abi = "libmpi.so.12" in answer["missing"]
        cure = "Set caffe_packages: [mpich] and run site.yml, or load Intel MPI" if abi else LIBRARY_CURE
        yield f"{name} does not find {', '.join(plain(one, 80) for one in answer['missing'])}. {cure}"
    if not answer["launcher"]:
        yield f"there is no {request['launcher']}, which starts the ranks. Install the same MPI as elsewhere"


def judge_files(answer, first, request):
    """What is wrong with the files of a training on a node, compared with the first node."""
    for path, about in answer["files"].items():
        what = "the solver" if path == request["solver"] else "the net"
        if "error" in about:
            yield f"{what} {path} cannot be read: {plain(about['error'])}. Put it there"
        elif about["sha256"] != first["files"][path].get("sha256", about["sha256"]):
            yield f"{what} {path} differs from that of {request['nodes'][0]}. Copy it again"
    for path, why in answer["sources"].items():
        yield f"the data {plain(path)} cannot be read: {plain(why)}. Put it there, or mend its path"
    if why := answer["snapshots"]:
        folder = request["snapshots"]
        yield (
            f"no snapshot can be written to {folder}: {plain(why)}. Caffe would hang for ever after the training. Make "
            f"the folder there: mkdir -p {shlex.quote(folder)}"
        )


def has_adapter(answer, network):
    return any(str(one).startswith(ADAPTERS[network][0]) for one in answer["adapters"])


# Threads, settings, command


def threads(asked, cores, ppn, servers, where):
    """Threads per process: what was asked, else what the allocation gives, within the cores of a process."""
    most = cores // ppn - servers
    less = f" less {servers} for MLSL's servers" if servers else ""
    share = f"{where}: {cores} cores for {ppn} process{'es' * (ppn > 1)} per node{less}"
    if most < 1:
        raise RefusedError(f"{share} leave none for its threads: lower --ppn, or MLSL_NUM_SERVERS")
    sources = (
        ("--num_omp_threads", asked, 0),
        ("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"), 0),
        ("SLURM_CPUS_PER_TASK", os.environ.get("SLURM_CPUS_PER_TASK"), servers),
    )
    for name, value, taken in sources:
        if value:
            if not re.fullmatch(r"[1-9]\d{0,5}", str(value)):
                raise RefusedError(f"{name} is {plain(value, 40)!r}, which is no number of threads")
            number = max(1, int(value) - taken)
            if number > most:
                raise RefusedError(f"{share}, but {name} asks for {number} threads: at most {most}")
            return number
    return most


def mlsl_servers(intel):
    """MLSL's servers per process. Unset, it would start four of them per rank as soon as there are two nodes."""
    given = os.environ.get("MLSL_NUM_SERVERS", "0")
    if not re.fullmatch(r"\d{1,3}", given):
        raise RefusedError(f"MLSL_NUM_SERVERS is {plain(given, 40)!r}, which is no number")
    if int(given) and not intel:
        raise RefusedError(f"MLSL_NUM_SERVERS={given} works with Intel MPI only: unset it, or use Intel MPI")
    if int(given) and not os.environ.get("MLSL_SERVER_AFFINITY"):
        raise RefusedError(f"MLSL_NUM_SERVERS={given} needs MLSL_SERVER_AFFINITY, the cores of the servers: set it too")
    return int(given)


def affinity(given, pinned):
    """KMP_AFFINITY in the syntax of today; what the guide writes as compact=1 is compact,1."""
    if not given:
        # Unpinned processes of one node would all take the same first cores.
        return "granularity=fine,compact,1" if pinned else "none"
    mended = re.sub(r"\b(compact|scatter|balanced)=(\d+)", r"\1,\2", given)
    if mended != given:
        say(f"translated: KMP_AFFINITY={plain(given)} is {plain(mended)} to today's OpenMP, which ignores the rest")
    return mended


def mca(network, cidr):
    """Options of Open MPI for a network."""
    kind = {
        "tcp": ["--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp"],
        "opa": ["--mca", "pml", "cm", "--mca", "mtl", "psm2"],
        "mlx": ["--mca", "pml", "ucx"],
    }[network]
    return [*kind, *(["--mca", "btl_tcp_if_include", cidr, "--mca", "oob_tcp_if_include", cidr] if cidr else [])]


def transport(network, intel, interfaces):
    """Variables of MPICH and Intel MPI for a network; of UCX and of libfabric, as either may be inside."""
    made = {"FI_PROVIDER": {"tcp": "tcp", "opa": "psm2", "mlx": "verbs"}[network]}
    if intel:
        made |= {"I_MPI_FABRICS": "shm:ofi", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}
    elif network != "opa":
        made["UCX_TLS"] = {"tcp": "self,sm,tcp", "mlx": "self,sm,rc"}[network]
    if network == "tcp" and interfaces:
        made["UCX_NET_DEVICES"] = ",".join(interfaces)
        if len(interfaces) == 1:
            made["FI_TCP_IFACE"] = interfaces[0]
    return made


# Each rank says first on which machine it runs: Caffe's own log does not tell.
RANK = 'echo "rank of caffe.sh on $(uname -n) machine $(cat /etc/machine-id)"; exec "$0" "$@"'


@dataclass
class Plan:
    """A training that can start."""

    nodes: list
    ppn: int
    kind: str
    launcher: str
    program: list
    environment: dict
    options: list = field(default_factory=list)

    @property
    def ranks(self):
        return self.ppn * len(self.nodes)

    def command(self, hostfile):
        program = ["/bin/sh", "-c", RANK, *self.program]
        shape = {
            "openmpi": ["--tag-output", "--hostfile", hostfile, "-N", str(self.ppn), "-n", str(self.ranks)],
            "mpich": ["-l", "-n", str(self.ranks), "-ppn", str(self.ppn), "-f", hostfile],
        }[self.kind]
        handed = [("-x", name) if self.kind == "openmpi" else ("-genv", name, value)
                  for name, value in sorted(self.environment.items())]  # fmt: skip
        return [self.launcher, *shape, *self.options, *(word for one in handed for word in one), *program]

    def hosts(self):
        separator = " slots=" if self.kind == "openmpi" else ":"
        return "".join(f"{node}{separator}{self.ppn}\n" for node in self.nodes)


# The log

LINE = re.compile(r"\[(?:\d+,)?(\d+)\](?:<std\w+>:?)? ?(.*)")
TELLING = re.compile(
    r"Check failed|srun: error|error while loading|Segmentation fault|Killed|No space left|out of memory"
)
# How MPICH and Open MPI name a rank that has ended too early.
LOST = re.compile(r"PID \d+ RUNNING AT (\S+)|noticed that process rank \d+ with PID \d+ on node (\S+)")


class Log:
    """What the ranks of a training have said."""

    def __init__(self):
        self.sizes, self.started, self.done, self.machines = Counter(), Counter(), Counter(), {}
        self.accuracies, self.telling, self.lost, self.failed = {}, [], "", False

    def read(self, line):
        found = LINE.match(line)
        rank, text = (int(found[1]), found[2]) if found else (None, line)
        if place := re.search(r"rank of caffe\.sh on (\S+) machine (\S+)", text):
            self.machines[rank] = (plain(place[1], 80), plain(place[2], 40))
        elif size := re.search(r"group size: (\d+)", text):
            self.sizes[int(size[1])] += 1
        elif "Starting Multi-node Optimization in MLSL environment" in text:
            self.started[rank] += 1
        elif "Optimization Done." in text:
            self.done[rank] += 1
        elif accuracy := re.search(r"Test net output #\d+: (\S+) = (\S+)", text):
            self.accuracies[accuracy[1]] = accuracy[2]
        elif lost := LOST.search(text):
            self.lost = plain(lost[1] or lost[2], 80)
        elif TELLING.search(text):
            self.failed = self.failed or "Check failed" in text
            if len(self.telling) < 5:
                self.telling.append((rank, plain(text)))

    def where(self, rank):
        return f"rank {rank} on {self.machines[rank][0]}" if rank in self.machines else f"rank {rank}"


def cure_of(text):
    """What mends a failed check of Caffe."""
    if "SerializeToOstream" in text:
        return "the snapshot could not be written: look at the folder of snapshot_prefix and at the disk there"
    if "No space left" in text:
        return "the disk is full: free some space there"
    if "cannot open shared object" in text:
        return LIBRARY_CURE
    if re.search("Killed|out of memory", text):
        return "look at its memory: `journalctl -k` there says whether the kernel ended it"
    return "the lines above it say more"


def judge(log, plan, solver, model, ended):
    """Why a training has failed; empty if it succeeded. `ended` says why its launcher or we ended it, if so."""
    missing = [*judge_machines(log, plan), *judge_lines(log, plan, solver)]
    if not missing and not model:
        missing = [f"{plan.nodes[0]}: the model {solver.model} was not written by this training"]
    if not (ended or missing):
        # Then a line that looks bad was not.
        return []
    lost = (
        f"{log.lost}: a rank ended before the training was over. Cure: its last lines in the log say why, or "
        "`journalctl -k` there, if the kernel ended it"
    )
    said = [
        f"{log.where(rank) if rank is not None else 'the launcher'} said: {text}. Cure: {cure_of(text)}"
        for rank, text in log.telling
    ]
    return [*ended, *said, *([lost] if log.lost else []), *missing]


def judge_lines(log, plan, solver):
    """The lines that are missing; those that come later only if nothing before them is."""
    ranks = plan.ranks
    if not log.sizes:
        return [f"there is no line `group size: {ranks}`: the training did not begin"]
    found = []
    if set(log.sizes) != {ranks}:
        seen = ", ".join(map(str, sorted(log.sizes)))
        found.append(
            f"group size: {ranks} is wanted, the log has {seen}. Each rank has trained alone, or only with some "
            f"others: {plan.launcher} does not belong to the MPI of caffe, or the ranks could not find each other"
        )
    marks = {"Starting Multi-node Optimization in MLSL environment": log.started, "Optimization Done.": log.done}
    for text, count in marks.items():
        silent = [log.where(rank) for rank in range(ranks) if not count[rank]]
        if silent or sum(count.values()) != ranks:
            where = f": not from {', '.join(silent[:5])}" if silent else ""
            return [*found, f"`{text}` is there {sum(count.values())} times, wanted {ranks}{where}"]
    if solver.tests and (wanted := accuracy_missing(log, solver)):
        found.append(f"there is no line `Test net output #0: {wanted} = `, though the solver tests the net")
    return found


def judge_machines(log, plan):
    """Whether every rank has run, and on as many machines as there are nodes."""
    machines = {machine for _, machine in log.machines.values()}
    if len(log.machines) != plan.ranks:
        lost = [str(rank) for rank in range(plan.ranks) if rank not in log.machines]
        return [f"{len(log.machines)} ranks were started, wanted {plan.ranks}: not {', '.join(lost[:5])}"]
    if len(machines) != len(plan.nodes):
        seen = ", ".join(sorted({host for host, _ in log.machines.values()}))
        return [
            f"the ranks ran on {len(machines)} machines ({seen}), wanted {len(plan.nodes)}: {', '.join(plan.nodes)}"
        ]
    return []


def accuracy_missing(log, solver):
    """The accuracy that was not printed as a number; any output counts for a net without such a layer."""
    numbers = {name for name, value in log.accuracies.items() if re.fullmatch(r"[0-9.]+(e-?\d+)?", value)}
    return next((name for name in solver.accuracies if name not in numbers), "" if numbers else "accuracy")


# The job


def kill(job, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, number)


def reap(job):
    """End a job: asked first, so that its launcher ends the ranks on all nodes, then by force."""
    kill(job, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(PATIENCE)
    kill(job, signal.SIGKILL)
    job.wait()


def unread():
    """Whether the other end of our output is closed: its ssh session is lost, for example."""
    watch = select.poll()
    watch.register(1, 0)
    return bool(watch.poll(0))


def overdue(log, ranks, since):
    """Why a job has to be ended before its time; `since` holds when it failed or was done."""
    now = time.monotonic()
    if log.failed and now - since.setdefault("failed", now) > AFTER_FAILURE:
        return f"a check of Caffe failed {AFTER_FAILURE} seconds ago, and it hangs since then"
    if sum(log.done.values()) == ranks and now - since.setdefault("done", now) > AFTER_DONE:
        return DONE
    return ""


def follow(job, log, ranks, time_limit):
    """Show and read a job's lines until it ends; returns why it had to be ended, or nothing."""
    lines = queue.Queue(10000)

    def collect():
        for line in job.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=collect, daemon=True).start()
    until, since, closed = time.monotonic() + time_limit, {}, False
    while time.monotonic() < until:
        try:
            line = lines.get(timeout=0.5)
        except queue.Empty:
            # Something that it left behind may hold its output open.
            if job.poll() is not None:
                return ""
            line = b""
        closed = closed or line is None
        if closed and job.poll() is not None:
            return ""
        if line:
            text = line.decode(errors="replace").rstrip("\n")
            log.read(text)
            print(text, flush=True)
        if unread():
            raise BrokenPipeError("nobody reads its output any more")
        if why := overdue(log, ranks, since):
            return why
    return f"the time limit of {time_limit // 3600}:{time_limit // 60 % 60:02}:{time_limit % 60:02} was over"


def run(plan, time_limit):
    """Run a training in a process group of its own; returns its log, its status and why it had to be ended."""
    log, folder = Log(), tempfile.mkdtemp(prefix="caffe.")
    hostfile = Path(folder, "hosts")
    hostfile.write_text(plan.hosts())
    try:
        job = subprocess.Popen(
            plan.command(str(hostfile)),
            env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Not a session of its own: the stack's mpirun ends with the ssh session that it was started from.
            preexec_fn=os.setpgrp,
        )
        try:
            ended = follow(job, log, plan.ranks, time_limit)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            reap(job)
        return log, job.returncode, ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def catch_signals():
    """Let a signal end the job; one that was ignored from the start, as by nohup, stays ignored."""

    def end(number, _):
        raise Ended(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def settings(kind, intel, network, answers, caffe, in_slurm, servers, ppn, number):
    """The variables that all ranks get, and the launcher's options."""
    interfaces = sorted({str(one["interface"]) for one in answers.values() if one.get("interface")})
    made = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
    made["LD_LIBRARY_PATH"] = ":".join(folders_of(caffe))
    made |= {"MLSL_NUM_SERVERS": str(servers), "OMP_NUM_THREADS": str(number)}
    made["KMP_AFFINITY"] = affinity(os.environ.get("KMP_AFFINITY"), pinned=intel or ppn == 1)
    made["KMP_BLOCKTIME"] = os.environ.get("KMP_BLOCKTIME") or "1"
    made["KMP_SETTINGS"] = os.environ.get("KMP_SETTINGS") or "1"
    if kind == "openmpi":
        networks = {str(one["network"]) for one in answers.values()}
        cidr = networks.pop() if len(networks) == 1 else ""
        return made, ["--bind-to", "none", *mca(network, cidr if re.fullmatch(r"[0-9./]+", cidr) else "")]
    made |= transport(network, intel, interfaces)
    if in_slurm:
        # The launcher starts its own daemons by srun, which needs no PMIx for them.
        made["SLURM_MPI_TYPE"] = "none"
    if intel:
        # Otherwise it takes a pbsdsh that it finds on PATH.
        made["I_MPI_HYDRA_BOOTSTRAP"] = "slurm" if in_slurm else "ssh"
        return made, []
    return made, ["-launcher", "slurm" if in_slurm else "ssh"]


def prepare(chosen):
    """Check everything and return the plan, the solver and how to ask the nodes; nothing has been started."""
    allocated = allocation()
    hosts, slots, path = find_hosts(chosen.hostfile, allocated)
    nodes = list(hosts)
    ppn = per_node(hosts, slots, path, chosen.ppn, chosen.ranks)
    solver = read_solver(chosen.solver)
    caffe = chosen.caffe_bin or shutil.which("caffe") or INSTALLED
    caffe = str(Path(caffe).absolute())
    if not os.access(caffe, os.X_OK):
        raise RefusedError(
            f"{socket.gethostname()}: there is no program {caffe}. Bring it with caffe_archive (role caffe), or name "
            "it with --caffe_bin"
        )
    kind, library, kmp = which_mpi(caffe, folders_of(caffe))
    launcher, version = choose_launcher(kind, chosen.mpirun, caffe, library, ppn * len(nodes))
    intel = "Intel(R) MPI" in version
    servers = mlsl_servers(intel)
    # srun reaches nodes on which the user may not log in.
    in_slurm = bool(allocated and shutil.which("srun"))
    request = {
        "cwd": str(Path.cwd()),
        "nodes": nodes,
        "caffe": caffe,
        "folders": folders_of(caffe),
        "launcher": launcher,
        "solver": solver.path,
        "nets": solver.nets,
        "sources": solver.sources,
        "snapshots": str(Path(solver.prefix).parent),
        "model": solver.model,
    }
    answers = ask_all(nodes, request, in_slurm)
    network = "opa" if chosen.psm2 else chosen.network
    if chosen.psm2:
        without = [node for node, one in answers.items() if isinstance(one, dict) and not has_adapter(
            {"adapters": one.get("adapters", [])}, "opa")]  # fmt: skip
        if without:
            say(f"-PSM2 means Omni-Path, which {', '.join(without[:5])} does not have, so the network is tcp")
            network = "tcp"
    if problems := judge_nodes(answers, request, network):
        raise RefusedError(*problems)
    if network == "opa" and kind == "mpich" and "ch4:ucx" in version:
        raise RefusedError(f"{launcher} was built without libfabric, so it has no Omni-Path: use --network tcp")
    least = min(answers, key=lambda node: answers[node]["cores"])
    cores, where = answers[least]["cores"], least
    if allocated and (given := expand(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))):
        cores, where = min(given), f"Slurm job {os.environ.get('SLURM_JOB_ID')}"
    number = threads(chosen.num_omp_threads, cores, ppn, servers, where)
    environment, more = settings(kind, intel, network, answers, caffe, in_slurm, servers, ppn, number)
    if not kmp:
        say("caffe does not load libiomp5, so the KMP_ settings have no effect")
    program = [caffe, "train", "--solver", solver.path, *chosen.more]
    plan = Plan(nodes, ppn, kind, launcher, program, environment, more)
    say(
        f"{plan.ranks} ranks on {', '.join(nodes)}, {ppn} per node with {number} threads; network {network}; "
        f"{launcher} ({NAMES[kind]}, as caffe loads {library}); MLSL_NUM_SERVERS={servers}"
    )
    before = answers[nodes[0]]["model"]

    def written():
        """Whether the model is another file than before; asked where rank 0 has run."""
        now = ask(nodes[0], {"cwd": request["cwd"], "model": solver.model}, in_slurm)
        return isinstance(now, dict) and now.get("model") and now["model"] != before

    return plan, solver, written


def report(heading, problems):
    say(heading)
    for number, problem in enumerate(problems, 1):
        say(f"{number}. {problem}")


def main():
    catch_signals()
    try:
        chosen = read_options(sys.argv[1:])
        plan, solver, written = prepare(chosen)
    except RefusedError as error:
        report("nothing was started", error.problems)
        return 1
    except Ended as why:
        say(f"{why}: nothing was started")
        return 1
    begun = time.monotonic()
    try:
        log, status, ended = run(plan, chosen.time)
    except (Ended, BrokenPipeError) as why:
        with contextlib.suppress(OSError):
            say(f"red: the job was ended on all its nodes, because of {why}")
        return 1
    if ended == DONE:
        say(f"all ranks were done, but {plan.launcher} did not end within {AFTER_DONE} seconds, so it was ended")
        status, ended = 0, ""
    why = [f"{plan.launcher} ended with status {status}"] if status else []
    why = [f"it was ended on all its nodes, because {ended}"] if ended else why
    if problems := judge(log, plan, solver, written(), why):
        report("red: this was no successful training of all ranks together", problems)
        return 1
    tested = "".join(f", {plain(name, 40)} {value}" for name, value in log.accuracies.items())
    say(
        f"green: {plan.ranks} ranks on {len(plan.nodes)} machines trained together{tested}, "
        f"{plan.nodes[0]}:{solver.model}, {time.monotonic() - begun:.0f} s"
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-node"]:
        print(json.dumps(on_node(json.loads(sys.argv[2]))))
    else:
        sys.exit(main())
