#!/usr/bin/python3 -I
"""Submit PBS job scripts to Slurm.

Every option of PBS is translated, refused with a sentence, or named in a note; none is dropped in silence.
"""

from __future__ import annotations

import datetime
import json
import os
import pwd
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SBATCH, SALLOC, SRUN, SCONTROL = (f"/usr/bin/{name}" for name in ("sbatch", "salloc", "srun", "scontrol"))
# Runs a job's script in the environment that PBS would give it.
PBS_JOB = "/usr/local/libexec/farandole/pbs-job"
# On the head: whose homes all nodes mount from here.
SHARED = Path("/etc/farandole/storage/home")
# What that program has to know, as JSON.
VARIABLE = "FARANDOLE_PBS"

WITH_VALUE, FLAGS = "aAcCdDeFjJklmMNopPqrStTuvwW", "hInVxXz"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,229}")
UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMORY = re.compile(r"(\d{1,15})([kmgtp]?)([bw]?)", re.IGNORECASE)
JOB = re.compile(r"(\d{1,10})(?:(?:\[(\d{0,9})\]|_(\d{1,9})))?(?:\.[\w.-]+)?")
COMMAND_LINE = "command line"

HELP = """\
usage: qsub [OPTION ...] [SCRIPT [ARGUMENT ...]]
       qsub [OPTION ...] -- PROGRAM [ARGUMENT ...]
       qsub -I [OPTION ...]

Submit a PBS job script to Slurm, and print the job's number. Without SCRIPT, it is read from standard input.
Options are also read from lines "#PBS OPTION ..." before the script's first command; the command line wins.

  -l select=N:ncpus=C:mpiprocs=P:ompthreads=T:mem=8gb:ngpus=G:host=NODE
                   N nodes with C CPUs and P processes each
  -l nodes=N:ppn=P:gpus=G
                   the same, as Torque writes it
  -l walltime=HH:MM:SS, mem=, pmem=, ncpus=, ngpus=, procs=, file=, place=scatter|pack|free:excl|shared
  -N NAME          name of the job: NAME.oNUMBER and NAME.eNUMBER are its output
  -q QUEUE         partition
  -A ACCOUNT       account
  -o PATH, -e PATH output and errors; -j oe or eo puts both into one file
  -v NAME=VALUE,NAME
                   variables for the job; -V: all variables of this shell
  -W depend=afterok:NUMBER, -W block=true, -W umask=027, -W group_list=GROUP
  -J 0-9:2%4, -t 0-9
                   array of jobs, at most 4 at a time
  -I               interactive shell
  -S SHELL         shell of a script without #!
  -d, -w FOLDER    where the job starts, instead of your home
  -F "ARGUMENTS"   the script's arguments
  -a TIME, -h, -r y|n, -p PRIORITY, -m abe, -M ADDRESS, -n, -z, -C PREFIX
                   begin later, hold, may be restarted, priority, mail, whole nodes, print no number, other prefix
  -c, -k, -P       have no meaning here, which is said; -D, -T, -X, -x, and -u for another user are refused

  --show           print what would be submitted, and submit nothing
  --help           print this

qstat, qdel, qhold and qrls take the number that qsub prints.
"""


class RefusedError(Exception):
    """A message for the user."""


@dataclass(frozen=True)
class Given:
    """An option, and where it stands."""

    letter: str
    value: str
    where: str

    def __str__(self) -> str:
        option = f"-{self.letter} {self.value}".rstrip()
        return f"{self.where}: {option}"


@dataclass
class Chunk:
    """What PBS gives as one piece, and what becomes a node's share."""

    count: int = 1
    ncpus: int = 1
    mpiprocs: int = 1
    ompthreads: int = 0
    mem: str = ""
    ngpus: int = 0
    hosts: list[str] = field(default_factory=list)

    def shape(self) -> tuple[object, ...]:
        return self.ncpus, self.mpiprocs, self.ompthreads, self.mem, self.ngpus, bool(self.hosts)


@dataclass
class Job:
    """What is to be submitted."""

    script: bytes | None
    name: str
    folder: str
    environment: dict[str, str]
    options: dict[str, Given] = field(default_factory=dict)
    resources: dict[str, Given] = field(default_factory=dict)
    attributes: dict[str, Given] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    # The resources before they are translated.
    asked: dict[str, Given] = field(default_factory=dict)
    # Of the job's script.
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    interpreter: list[str] = field(default_factory=list)
    start: str = ""
    umask: int | None = None
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def note(self, where: object, text: str) -> None:
        self.notes.append(f"{where}: {text}")

    def has(self, letter: str) -> bool:
        return letter in self.options


# Reading


def directives(script: bytes, prefix: str) -> Iterator[tuple[int, str]]:
    """The lines with options before the first command."""
    for number, line in before_the_first_command(script):
        if prefix and line.startswith(prefix) and line[len(prefix) : len(prefix) + 1] in ("", " ", "\t", "-"):
            yield number, line[len(prefix) :].strip()


def before_the_first_command(script: bytes) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(script.split(b"\n"), start=1):
        line = raw.decode(errors="surrogateescape").strip()
        if line and not line.startswith("#") and line != ":":
            return
        yield number, line


def suspicious(script: bytes, prefix: str) -> Iterator[tuple[str, str]]:
    """Lines that look like options and are none."""
    last = max((number for number, _ in before_the_first_command(script)), default=0)
    almost = re.compile(r"#\s*" + re.escape(prefix.lstrip("#")) + r"(?=[\s-]|$)", re.IGNORECASE)
    for number, raw in enumerate(script.split(b"\n"), start=1):
        line = raw.decode(errors="surrogateescape").strip()
        if number <= last and line.startswith("#SBATCH"):
            yield f"line {number}", "Slurm reads #SBATCH too; where both say something, #PBS wins"
        if not prefix or not almost.match(line):
            continue
        if number > last:
            yield f"line {number}", f"{prefix} after the first command has no effect; move it up"
        elif not line.startswith(prefix):
            yield f"line {number}", f"this is a comment, because it does not begin with {prefix}"


def options_of(words: list[str], where: str) -> tuple[list[Given], list[str]]:
    """The options at the beginning of these words, and the words after them."""
    found: list[Given] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        cluster = rest.pop(0)[1:]
        while cluster:
            letter, cluster = cluster[0], cluster[1:]
            if letter in FLAGS:
                found.append(Given(letter, "", where))
                continue
            if letter not in WITH_VALUE:
                raise RefusedError(f"{where}: qsub does not know -{letter}; qsub --help lists the options")
            if not cluster and not rest:
                raise RefusedError(f"{where}: -{letter} needs a value")
            found.append(Given(letter, cluster or rest.pop(0), where))
            cluster = ""
    return found, rest


def options_of_line(line: str, where: str) -> list[Given]:
    try:
        words = shlex.split(line)
    except ValueError:
        raise RefusedError(f"{where}: a quote is not closed: {line}") from None
    comment = next((place for place, word in enumerate(words) if word.startswith("#")), len(words))
    found, rest = options_of(words[:comment], where)
    if rest:
        raise RefusedError(
            f"{where}: qsub cannot read {rest[0]!r}; options begin with -, values with spaces need quotes"
        )
    return found


def collect(job: Job, given: Iterable[Given]) -> None:
    """Sort options, resources and attributes, of which the last one counts."""
    for option in given:
        if option.letter == "l":
            for part in option.value.split(","):
                name, _, value = part.strip().partition("=")
                put(job, job.resources, name, Given("l", f"{name}={value}", option.where))
        elif option.letter == "W":
            for part in re.split(r",(?=[a-z_]+=)", option.value):
                name, _, value = part.strip().partition("=")
                put(job, job.attributes, name, Given("W", f"{name}={value}", option.where))
        elif option.letter == "v" and job.has("v") and job.options["v"].where == option.where:
            before = job.options["v"]
            job.options["v"] = Given("v", f"{before.value},{option.value}", option.where)
        else:
            put(job, job.options, option.letter, option)


def put(job: Job, known: dict[str, Given], name: str, given: Given) -> None:
    before = known.get(name)
    if before and before.value != given.value and given.where != COMMAND_LINE:
        job.note(given, f"replaces {before}")
    known[name] = given


def value_of(given: Given) -> str:
    """What stands after the = of a resource or attribute."""
    return given.value.partition("=")[2]


# Sizes


def number(given: Given, text: str, what: str, least: int = 1) -> int:
    if not re.fullmatch(r"\d{1,7}", text) or int(text) < least:
        raise RefusedError(f"{given}: {what}={text} is no number from {least} on")
    return int(text)


def megabytes(given: Given, text: str, share: int = 1) -> int:
    """Memory in MiB, rounded up, of one share of that size."""
    found = MEMORY.fullmatch(text)
    if not found or not int(found[1]):
        raise RefusedError(f"{given}: {text} is no size; write 512mb or 8gb")
    size: int = int(found[1]) * 1024 ** " kmgtp".index(found[2].lower() or " ") * (8 if found[3].lower() == "w" else 1)
    return max(1, -(-size // (share << 20)))


def duration(given: Given, text: str) -> str:
    """A time as Slurm writes it."""
    if not re.fullmatch(r"(\d{1,9}|(\d{1,5}:){1,3}\d{1,2})(\.\d*)?", text):
        raise RefusedError(f"{given}: {text} is no time; write HH:MM:SS")
    seconds = 0
    parts = [int(part) for part in text.partition(".")[0].split(":")]
    for part, size in zip(reversed(parts), (1, 60, 3600, 86400), strict=False):
        seconds += part * size
    if not seconds:
        raise RefusedError(f"{given}: Slurm takes a time of 0 for no limit; leave it out for the queue's own limit")
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def begin(given: Given, now: datetime.datetime) -> str:
    """When the job may begin: [[[[CC]YY]MM]DD]hhmm[.SS]."""
    found = re.fullmatch(r"(\d\d)?(\d\d)?(\d\d)?(\d\d)?(\d\d)(\d\d)(?:\.(\d\d))?", given.value)
    if not found:
        raise RefusedError(f"{given}: write the time as [[[[CC]YY]MM]DD]hhmm[.SS], for example 1830 or 12241830")
    # The optional parts are filled from the left.
    date = [int(part) for part in found.groups()[:4] if part]
    clock = [int(part or 0) for part in found.groups()[4:]]
    try:
        when = on_date(date, clock, now)
    except ValueError:
        raise RefusedError(f"{given}: there is no such time") from None
    return when.strftime("%Y-%m-%dT%H:%M:%S")


def on_date(date: list[int], clock: list[int], now: datetime.datetime) -> datetime.datetime:
    """The next time that a clock shows this on that day."""
    hour, minute, second = clock
    when = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
    if not date:
        return when if when > now else when + datetime.timedelta(days=1)
    if len(date) > 2:
        century = date[0] if len(date) == 4 else now.year // 100
        return when.replace(year=century * 100 + date[-3], month=date[-2], day=date[-1])
    month = date[-2] if len(date) == 2 else now.month
    years = [(now.year + later // 12, later % 12 + 1) for later in range(now.month - 1, now.month + 12)]
    for year, candidate in years if len(date) == 1 else ((now.year, month), (now.year + 1, month)):
        try:
            later = when.replace(year=year, month=candidate, day=date[-1])
        except ValueError:
            continue
        if later > now:
            return later
    raise ValueError


# Resources


def chunk_of(given: Given, text: str) -> Chunk:
    """One chunk of -l select."""
    first, *rest = text.split(":")
    chunk = Chunk()
    if "=" in first:
        rest.insert(0, first)
    else:
        chunk.count = number(given, first, "select")
    asked = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name in ("ncpus", "mpiprocs", "ompthreads", "ngpus"):
            asked[name] = number(given, value, name, least=0 if name == "ngpus" else 1)
        elif name == "mem":
            megabytes(given, value)
            chunk.mem = value
        elif name in ("host", "vnode"):
            chunk.hosts = [host(given, value)]
        else:
            raise RefusedError(unknown(given, name))
    chunk.ncpus = asked.get("ncpus", 1)
    chunk.mpiprocs = asked.get("mpiprocs", 1)
    chunk.ompthreads, chunk.ngpus = asked.get("ompthreads", 0), asked.get("ngpus", 0)
    if chunk.mpiprocs > chunk.ncpus:
        raise RefusedError(
            f"{given}: {chunk.mpiprocs} processes on {chunk.ncpus} CPUs; Slurm gives every process a CPU of its own: "
            f"write ncpus={chunk.mpiprocs}"
        )
    return chunk


def node_of(given: Given, text: str) -> Chunk:
    """One part of -l nodes."""
    first, *rest = text.split(":")
    chunk = Chunk()
    if first.isdigit():
        chunk.count = number(given, first, "nodes")
    else:
        chunk.hosts = [host(given, first)]
    for part in rest:
        name, _, value = part.partition("=")
        if name == "ppn":
            chunk.ncpus = chunk.mpiprocs = number(given, value, name)
        elif name == "gpus":
            chunk.ngpus = number(given, value, name, least=0)
        else:
            raise RefusedError(unknown(given, name))
    chunk.ompthreads = 1
    return chunk


def host(given: Given, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", text):
        raise RefusedError(f"{given}: {text!r} is no name of a node; sinfo -N lists them")
    return text


CURES = {
    "vmem": "virtual memory is not limited here; write mem=",
    "pvmem": "virtual memory is not limited here; write pmem=",
    "cput": "CPU time is not limited here; write walltime=",
    "pcput": "CPU time is not limited here; write walltime=",
    "qos": "add  #SBATCH --qos=NAME  to the script",
    "feature": "add  #SBATCH --constraint=NAME  to the script",
    "software": "add  #SBATCH --licenses=NAME  to the script",
    "min_walltime": "add  #SBATCH --time-min=TIME  to the script",
    "max_walltime": "write walltime=",
}


def unknown(given: Given, name: str) -> str:
    cure = CURES.get(
        name,
        "known are select, nodes, ncpus, mpiprocs, ompthreads, ppn, mem, pmem, ngpus, gpus, procs, host, file, "
        "walltime and place",
    )
    return f"{given}: {name!r} cannot be translated to Slurm: {cure}"


def joined(given: Given, chunks: list[Chunk]) -> Chunk:
    """Chunks of the same shape are one with their sum."""
    first, *others = chunks
    for other in others:
        if other.shape() != first.shape():
            raise RefusedError(
                f"{given}: the chunks differ, and Slurm gives all nodes of a job the same. "
                "Give every chunk the larger size, or submit two jobs"
            )
        first.count += other.count
        first.hosts += other.hosts
    if first.hosts and len(set(first.hosts)) != first.count:
        raise RefusedError(f"{given}: {first.count} nodes, but {len(set(first.hosts))} are named; name each one once")
    return first


def size(job: Job) -> Chunk:
    """How many nodes with how much."""
    known = job.resources
    select, nodes = known.pop("select", None), known.pop("nodes", None)
    wide = {name: known.pop(name) for name in ("ncpus", "mpiprocs", "ompthreads", "mem", "ngpus") if name in known}
    if select and nodes:
        raise RefusedError(f"{nodes}: {select} says this too; write one of them")
    if select:
        if wide:
            given = next(iter(wide.values()))
            raise RefusedError(f"{given}: with select, it stands in the chunk: -l {select.value}:{given.value}")
        return joined(select, [chunk_of(select, text) for text in value_of(select).split("+")])
    if nodes:
        chunk = joined(nodes, [node_of(nodes, text) for text in value_of(nodes).split("+")])
    else:
        parts = [wide.pop(name) for name in ("ncpus", "mpiprocs", "ompthreads", "ngpus") if name in wide]
        where = parts[0] if parts else Given("l", "", "resources")
        chunk = chunk_of(where, ":".join(["1", *(part.value for part in parts)]))
    mem = wide.pop("mem", None)
    if mem:
        chunk.mem = f"{megabytes(mem, value_of(mem), chunk.count)}mb"
        if chunk.count > 1:
            job.note(mem, f"is for the whole job, and Slurm counts by node: {chunk.mem} on each of {chunk.count}")
    for name, given in wide.items():
        raise RefusedError(f"{given}: with nodes=, write -l select=N:{name}=... instead")
    return chunk


def resources(job: Job) -> None:
    """Translate everything of -l."""
    known = job.resources
    if "procs" in known and not known.keys() & {"select", "nodes", "ncpus", "mpiprocs"}:
        procs = known.pop("procs")
        chunk, spread = size(job), f"--ntasks={number(procs, value_of(procs), 'procs')}"
        job.arguments += [spread, "--cpus-per-task=1"]
    else:
        chunk = size(job)
        place(job, chunk)
        spread = ""
    share(job, chunk, spread)
    simple: dict[str, Callable[[Given, str], str]] = {
        "walltime": lambda given, text: f"--time={duration(given, text)}",
        "pmem": lambda given, text: f"--mem-per-cpu={megabytes(given, text)}M",
        "file": lambda given, text: f"--tmp={megabytes(given, text)}M",
    }
    for name, given in known.items():
        if name not in simple:
            raise RefusedError(unknown(given, name))
        if name == "pmem" and chunk.mem:
            raise RefusedError(f"{given}: mem says this too; write one of them")
        job.arguments.append(simple[name](given, value_of(given)))


def share(job: Job, chunk: Chunk, spread: str) -> None:
    """What each node gives."""
    each = chunk.ncpus // chunk.mpiprocs
    if not spread:
        job.arguments += [
            f"--nodes={chunk.count}",
            f"--ntasks={chunk.count * chunk.mpiprocs}",
            f"--ntasks-per-node={chunk.mpiprocs}",
            f"--cpus-per-task={each}",
        ]
    if left := chunk.ncpus % chunk.mpiprocs:
        job.note(
            "resources", f"{chunk.ncpus} CPUs for {chunk.mpiprocs} processes are {each} for each; {left} are left out"
        )
    if chunk.mem:
        job.arguments.append(f"--mem={megabytes(Given('l', chunk.mem, 'resources'), chunk.mem)}M")
    if chunk.ngpus:
        job.arguments.append(f"--gpus-per-node={chunk.ngpus}")
    if chunk.hosts:
        job.arguments.append(f"--nodelist={','.join(chunk.hosts)}")
    job.variables["NCPUS"] = str(chunk.ncpus)
    if chunk.ompthreads or not (job.has("V") and "OMP_NUM_THREADS" in job.environment):
        job.variables["OMP_NUM_THREADS"] = str(chunk.ompthreads or each)


def place(job: Job, chunk: Chunk) -> None:
    given = job.resources.pop("place", None)
    if given is None:
        return
    for word in value_of(given).split(":"):
        if word == "pack":
            if chunk.hosts:
                raise RefusedError(f"{given}: pack is for one node, but nodes are named")
            if chunk.mem:
                chunk.mem = f"{megabytes(given, chunk.mem) * chunk.count}mb"
            chunk.ncpus, chunk.mpiprocs = chunk.ncpus * chunk.count, chunk.mpiprocs * chunk.count
            chunk.ngpus, chunk.count = chunk.ngpus * chunk.count, 1
        elif word in ("excl", "exclhost"):
            job.arguments.append("--exclusive")
        elif word == "free" and chunk.count > 1:
            job.note(given, "each chunk gets a node of its own; place=pack puts all on one node")
        elif word not in ("scatter", "vscatter", "free", "shared"):
            raise RefusedError(f"{given}: {word!r} cannot be translated; known are scatter, pack, free, excl, shared")


# Options


def checked(given: Given, pattern: str, what: str) -> str:
    if not re.fullmatch(pattern, given.value):
        raise RefusedError(f"{given.where}: -{given.letter} {given.value!r}: {what}")
    return given.value


def account(job: Job, given: Given) -> None:
    name = checked(given, r"[\w.@+][\w.@+-]*", "this is no name of an account")
    job.arguments.append(f"--account={name}")


def queue(job: Job, given: Given) -> None:
    name = checked(
        given, r"([\w.+][\w.+-]*)?(@[\w.-]+)?", "this is no name of a queue; sinfo -s lists them as PARTITION"
    )
    name, _, server = name.partition("@")
    if server:
        job.note(given, f"there is one server here; @{server} is left out")
    if name:
        job.arguments.append(f"--partition={name}")


def priority(job: Job, given: Given) -> None:
    value = int(checked(given, r"[+-]?\d{1,4}", "a priority is a number from -1024 to 1023"))
    if not -1024 <= value <= 1023:
        raise RefusedError(f"{given}: a priority is a number from -1024 to 1023")
    job.arguments.append(f"--nice={-value}")
    job.note(given, f"becomes --nice={-value}: in Slurm, a higher number means later")


def mail(job: Job, given: Given) -> None:
    letters = checked(given, "[abefj]+|[np]", "write n, or letters of abe: abort, begin, end")
    names = {"a": "FAIL", "f": "FAIL", "b": "BEGIN", "e": "END", "j": "ARRAY_TASKS", "n": "NONE", "p": "NONE"}
    job.arguments.append("--mail-type=" + ",".join(dict.fromkeys(names[letter] for letter in letters)))


def address(job: Job, given: Given) -> None:
    name = checked(
        given, r"[\w.+][\w.+-]*(@[\w.-]+)?", "Slurm writes to one address; name one, without spaces or commas"
    )
    job.arguments.append(f"--mail-user={name}")


def rerun(job: Job, given: Given) -> None:
    job.arguments.append("--requeue" if checked(given, "[yn]", "write y or n") == "y" else "--no-requeue")


def array(job: Job, given: Given) -> None:
    part = r"\d{1,7}(-\d{1,7}(:\d{1,7})?)?"
    job.arguments.append("--array=" + checked(given, rf"{part}(,{part})*(%\d{{1,5}})?", "write 0-9, 0-9:2 or 0-9%4"))


def shell(job: Job, given: Given) -> None:
    path = checked(given, r"/[\w./+-]+", "write one absolute path, for example /bin/bash")
    if job.interpreter:
        job.note(given, f"the script's own first line counts: #!{' '.join(job.interpreter)}")
    else:
        job.interpreter = [path]


def start_in(job: Job, given: Given) -> None:
    if "\0" in given.value or "\n" in given.value or given.value.startswith("~"):
        raise RefusedError(f"{given.where}: -{given.letter}: this is no folder; write the path in full")
    job.start = os.path.normpath(Path(job.folder) / given.value)


def words(job: Job, given: Given) -> None:
    if job.words:
        raise RefusedError(f"{given}: the script's arguments are given twice")
    try:
        job.words = shlex.split(given.value)
    except ValueError:
        raise RefusedError(f"{given}: a quote is not closed") from None


def user(_: Job, given: Given) -> None:
    if given.value.partition("@")[0] != pwd.getpwuid(os.getuid()).pw_name:
        raise RefusedError(f"{given}: a job runs as the user who submits it; log in as that user")


def variables(job: Job, given: Given) -> None:
    for text in without_quotes(given):
        name, equals, value = text.partition("=")
        if not IDENTIFIER.fullmatch(name):
            raise RefusedError(f"{given.where}: -v: {name!r} is no name of a variable")
        if name.startswith(("PBS_", "SLURM_")):
            job.note(given, f"{name} is set by the scheduler, so this value is left out")
        elif equals:
            job.variables[name] = value
        elif name in job.environment:
            job.variables[name] = job.environment[name]
        else:
            job.note(given, f"{name} is not set here, so the job does not get it")


def without_quotes(given: Given) -> Iterator[str]:
    """The parts between commas, except those in quotes or after a backslash."""
    found, quote, escaped = "", "", False
    for letter in given.value:
        if escaped or (quote and letter != quote):
            found, escaped = found + letter, False
        elif letter == "\\":
            escaped = True
        elif letter in "'\"":
            quote = "" if quote else letter
        elif letter == ",":
            yield found
            found = ""
        else:
            found += letter
    if quote or escaped:
        raise RefusedError(f"{given.where}: -v: a quote is not closed: {given.value}")
    if found:
        yield found


def flag(argument: str) -> Callable[[Job, Given], None]:
    return lambda job, _: job.arguments.append(argument)


def told(text: str) -> Callable[[Job, Given], None]:
    return lambda job, given: job.note(given, text)


def refused(text: str) -> Callable[[Job, Given], None]:
    def refuse(_: Job, given: Given) -> None:
        raise RefusedError(f"{given}: {text}")

    return refuse


def nothing(_: Job, __: Given) -> None:
    """Used elsewhere."""


OPTIONS: dict[str, Callable[[Job, Given], None]] = {
    "a": lambda job, given: job.arguments.append(f"--begin={begin(given, datetime.datetime.now())}"),
    "A": account,
    "c": told("has no meaning here: jobs have no checkpoints; let the program write its own"),
    "C": nothing,
    "d": start_in,
    "D": refused("jobs have no root folder of their own; -d says where the job starts"),
    "e": nothing,
    "F": words,
    "h": flag("--hold"),
    "I": nothing,
    "j": nothing,
    "J": array,
    "k": told("has no meaning here: output is written to its place while the job runs; -o and -e name it"),
    "m": mail,
    "M": address,
    "n": flag("--exclusive"),
    "N": nothing,
    "o": nothing,
    "p": priority,
    "P": told("has no meaning here: jobs are counted by account; -A names it"),
    "q": queue,
    "r": rerun,
    "S": shell,
    "t": array,
    "T": refused("jobs have no prologue of their own; call it in the script"),
    "u": user,
    "v": variables,
    "V": nothing,
    "w": start_in,
    "x": refused("with -I, a script's commands are not run; submit it without -I"),
    "X": refused("windows of a job cannot be shown here; write to a file instead"),
    "z": nothing,
}


# Attributes, -W


def depend(job: Job, given: Given) -> None:
    found = []
    for part in value_of(given).split(","):
        kind, *jobs = part.split(":")
        kind = kind.removesuffix("array")
        if kind in ("on", "before", "beforeok", "beforenotok", "beforeany"):
            raise RefusedError(
                f"{given}: Slurm's jobs wait for earlier ones; submit this one first, and the other with after…"
            )
        if kind not in ("after", "afterok", "afternotok", "afterany") or not jobs:
            raise RefusedError(f"{given}: write after, afterok, afternotok or afterany, and :NUMBER")
        found.append(":".join([kind, *(of_job(given, text) for text in jobs)]))
    # PBS deletes a job that can never start.
    job.arguments += [f"--dependency={','.join(found)}", "--kill-on-invalid-dep=yes"]


def of_job(given: Given, text: str) -> str:
    found = JOB.fullmatch(text)
    if not found:
        raise RefusedError(f"{given}: {text!r} is no number of a job")
    index = found[2] or found[3]
    return f"{found[1]}_{index}" if index else found[1]


def umask(job: Job, given: Given) -> None:
    text = value_of(given)
    if not re.fullmatch(r"0[0-7]{1,4}|0|[1-9]\d{0,2}", text):
        raise RefusedError(f"{given}: write it with a 0 in front, for example 027")
    job.umask = int(text, 8 if text.startswith("0") else 10)
    if job.umask > 0o777:
        raise RefusedError(f"{given}: a umask is at most 0777")
    if not text.startswith("0"):
        job.note(given, f"PBS reads this as a decimal number: umask {job.umask:04o}; write 0{text} if that is meant")


def group(_: Job, given: Given) -> None:
    import grp

    if value_of(given).partition("@")[0] != grp.getgrgid(os.getgid()).gr_name:
        raise RefusedError(
            f"{given}: a job runs in the group of who submits it; first: newgrp {shlex.quote(value_of(given))}"
        )


def block(job: Job, given: Given) -> None:
    if value_of(given).lower() not in ("", "true", "false"):
        raise RefusedError(f"{given}: write block=true")
    if value_of(given).lower() != "false":
        job.arguments.append("--wait")


STAGED = refused("files are not copied for a job; copy them in the script, or keep them in a folder that all nodes see")
ATTRIBUTES: dict[str, Callable[[Job, Given], None]] = {
    "depend": depend,
    "umask": umask,
    "group_list": group,
    "block": block,
    "stagein": STAGED,
    "stageout": STAGED,
    "sandbox": refused("jobs have no folder of their own; make one in the script"),
}


def attribute(given: Given) -> Callable[[Job, Given], None]:
    known = "known are depend, umask, group_list and block"
    return ATTRIBUTES.get(given.value.partition("=")[0], refused(f"this cannot be translated to Slurm; {known}"))


# Names


def name_of(job: Job) -> None:
    given = job.options.get("N")
    if given is None:
        safe = UNSAFE.sub("_", job.name).lstrip(".+-")[:230] or "STDIN"
        if safe != job.name:
            job.note("the script's name", f"the job is named {safe}")
        job.name = safe
        return
    if not NAME.fullmatch(given.value):
        shown = given.value if len(given.value) < 60 else f"{given.value[:60]}…"
        raise RefusedError(
            f"{given.where}: -N {shown!r}: a name has 1 to 230 letters, digits and _ . + -, and no . + - in front, "
            "because files are named after it"
        )
    job.name = given.value


def outputs(job: Job) -> None:
    """Output files, as PBS names them."""
    join = job.options.get("j")
    together = checked(join, "oe|eo|n", "write oe, eo or n") if join else "n"
    out, err = path_of(job, "o"), path_of(job, "e")
    if together == "n":
        job.arguments += [f"--output={out}", f"--error={err}"]
        return
    unused = job.options.get("e" if together == "oe" else "o")
    if unused:
        job.note(unused, f"has no effect with -j {together}")
    job.arguments.append(f"--output={out if together == 'oe' else err}")


def path_of(job: Job, letter: str) -> str:
    """The file of -o or -e, in the words of sbatch."""
    is_array = job.has("J") or job.has("t")
    default = f"{job.name}.{letter}" + ("%A.%a" if is_array else "%j")
    given = job.options.get(letter)
    if given is None:
        return f"{job.folder.replace('%', '%%')}/{default}"
    text = given.value
    if re.search(r"[\\\n\0]", text):
        raise RefusedError(f"{given.where}: -{letter} {text!r}: a path has no backslash and no new line")
    if found := re.match(r"[\w.-]+:", text):
        job.note(given, f"files are written where the job runs; {found[0]} is left out")
        text = text[found.end() :]
    if text.startswith("~"):
        raise RefusedError(f"{given}: no shell reads this, so ~ stays as it is; write the path in full")
    is_folder = text.endswith("/") or (Path(job.folder) / text).is_dir()
    path = filled(job, given, str(Path(job.folder) / text), is_array)
    if is_folder:
        return f"{path}/{default}"
    if is_array and "%a" not in path:
        job.note(given, "the jobs of the array write to files of their own, which end with .INDEX")
        path += ".%a"
    return path


def filled(job: Job, given: Given, path: str, is_array: bool) -> str:
    values = {"PBS_JOBID": "%j", "PBS_JOBNAME": job.name}
    if is_array:
        values |= {"PBS_ARRAY_INDEX": "%a", "PBS_ARRAYID": "%a"}
    path = path.replace("%", "%%")
    if is_array:
        path = path.replace("^array_index^", "%a")
    path = re.sub(r"\$(\w+|\{\w+\})", lambda found: values.get(found[1].strip("{}"), found[0]), path)
    if "$" in path:
        raise RefusedError(f"{given}: of variables, only {', '.join(values)} are known in a path")
    return path


# The job


def prepare(arguments: list[str], environment: dict[str, str], folder: str, read: Callable[[str], bytes]) -> Job:
    """Translate the command line and the script that it names."""
    given, rest = options_of(arguments, COMMAND_LINE)
    interactive = any(option.letter == "I" for option in given)
    program = rest[1:] if rest[:1] == ["--"] else []
    if rest[:1] == ["--"] and not program:
        raise RefusedError("after --, name a program")
    script = None
    if not program and (rest or not interactive):
        script = read(rest[0] if rest else "-")
    first = program[0] if program else rest[0] if rest else "STDIN"
    job = Job(script, Path(first).name, folder, environment)
    job.words = program or rest[1:]
    if script is not None:
        given = [*of_script(job, script, given), *given]
    collect(job, given)
    job.asked = dict(job.resources)
    translate(job)
    if job.refusals:
        raise RefusedError("\n".join([*job.refusals, *job.notes]))
    return job


def of_script(job: Job, script: bytes, given: list[Given]) -> list[Given]:
    """Everything that the script says."""
    if b"\0" in script:
        raise RefusedError("the script has a NUL character; this is no text file")
    if b"\r\n" in script:
        raise RefusedError("the script's lines end as on Windows; mend it with  sed -i 's/\\r$//' SCRIPT")
    if not script.strip():
        raise RefusedError("the script is empty")
    prefix = next((option.value for option in reversed(given) if option.letter == "C"), "#PBS")
    job.interpreter = interpreter(job, script)
    job.notes += [f"{where}: {text}" for where, text in suspicious(script, prefix)]
    found = []
    for line, text in directives(script, prefix):
        try:
            found += options_of_line(text, f"line {line}")
        except RefusedError as error:
            job.refusals.append(str(error))
    if any(option.letter == "I" for option in found):
        job.refusals.append("-I belongs on the command line, not in a script")
    return found


def interpreter(job: Job, script: bytes) -> list[str]:
    """What the script's first line says runs it, split as the kernel does."""
    if not script.startswith(b"#!"):
        return []
    line = script.split(b"\n", 1)[0][2:].decode(errors="surrogateescape")
    found = line.strip().split(None, 1)
    if found[:1] in (["/bin/sh"], ["/usr/bin/sh"]):
        job.note(
            "line 1",
            "#!/bin/sh is run by bash in its POSIX mode, because such scripts use source and module, which dash lacks",
        )
        found[:1] = ["/bin/bash", "--posix"]
    return found


def translate(job: Job) -> None:
    """Translate all, and collect everything that is refused."""
    todo: list[Callable[[], None]] = [lambda: name_of(job), lambda: resources(job)]
    if not job.has("I"):
        todo.append(lambda: outputs(job))
    if job.has("J") and job.has("t"):
        job.refusals.append(f"{job.options['t']}: {job.options['J']} says this too; write one of them")
    for letter, given in job.options.items():
        todo.append(lambda letter=letter, given=given: OPTIONS[letter](job, given))  # type: ignore[misc]
    for given in job.attributes.values():
        todo.append(lambda given=given: attribute(given)(job, given))  # type: ignore[misc]
    for one in todo:
        try:
            one()
        except RefusedError as error:
            job.refusals.append(str(error))
    if job.has("I") and job.script is not None:
        job.note("-I", "of the script only the #PBS lines count; its commands are not run")
    if job.has("I") and (job.has("J") or job.has("t") or "--wait" in job.arguments):
        job.refusals.append("-I: an interactive job is no array, and is waited for anyway")


def environment_of(job: Job) -> dict[str, str]:
    """What the job's program starts with."""
    me = pwd.getpwuid(os.getuid())
    mine = {"HOME": me.pw_dir, "LOGNAME": me.pw_name, "USER": me.pw_name, "SHELL": me.pw_shell}
    here = job.environment
    ours = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PBS_")
    if job.has("V"):
        found = {name: value for name, value in here.items() if not name.startswith(ours)}
    else:
        found = {"PATH": "/usr/local/bin:/usr/bin:/bin", **mine}
        found |= {name: here[name] for name in ("LANG", "TZ") if name in here}
    found |= {name: here[name] for name in ("SLURM_CONF", "SLURM_CONF_SERVER") if name in here}
    found |= job.variables
    for name in ("HOME", "LOGNAME", "PATH", "SHELL", "LANG", "TZ", "MAIL"):
        if name in here:
            found[f"PBS_O_{name}"] = here[name]
    found |= {"PBS_O_WORKDIR": job.folder, "PBS_O_HOST": socket.gethostname()}
    if "q" in job.options and (name := job.options["q"].value.partition("@")[0]):
        found["PBS_O_QUEUE"] = name
    knowledge = {
        "interpreter": runs_it(job, me.pw_shell),
        "keep": "all" if job.has("V") else sorted(job.variables),
        "start": job.start or me.pw_dir,
        "interactive": job.has("I"),
    }
    found[VARIABLE] = json.dumps(knowledge)
    return found


def runs_it(job: Job, login: str) -> list[str]:
    if job.has("I"):
        return [*(job.interpreter or [known_shell(login)]), "-i"]
    # A program of the command line runs by itself.
    return job.interpreter or ([] if job.script is None else [known_shell(login)])


def known_shell(login: str) -> str:
    return login if Path(login).name in ("bash", "ksh", "zsh", "tcsh", "csh", "fish") else "/bin/bash"


def command_of(job: Job, path: str) -> list[str]:
    """The command that submits it; the script lies at a path."""
    common = [f"--job-name={job.name}", *job.arguments]
    if job.has("I"):
        # As sbatch, salloc is told where it starts by its own working directory.
        return [SALLOC, *common, SRUN, "--interactive", "--pty", "--mpi=none", "--preserve-env", PBS_JOB]
    return [SBATCH, "--parsable", "--ignore-pbs", *common, path, *job.words]


def submitted(job: Job) -> bytes:
    """The script that Slurm gets: the same lines, with the first one changed."""
    first = f"#!{PBS_JOB}".encode()
    if job.script is None:
        return first + b"\n"
    if job.script.startswith(b"#!"):
        return first + b"\n" + job.script.partition(b"\n")[2]
    return first + b"\n" + job.script


# Submitting

SIZES = ("select", "nodes", "ncpus", "procs", "mem", "pmem", "ngpus")
# Words of sbatch, which option or resource they are about, and the cure.
HINTS: list[tuple[str, tuple[str, ...], str]] = [
    ("nvalid account", ("A",), "sacctmgr show associations user=$USER lists your accounts; leave -A out for your own"),
    ("nvalid partition", ("q",), "sinfo -s lists the queues, as PARTITION"),
    ("nvalid --nice", ("p",), "only administrators may raise a priority here; a negative one lowers it"),
    ("nvalid node name", SIZES, "sinfo -N lists the nodes"),
    ("emory specification", ("mem", "pmem", *SIZES), "no node has that much memory; sinfo -N -o '%N %m' shows MB"),
    ("PUs per task", SIZES, "no node has that many CPUs; sinfo -N -o '%N %c' shows how many they have"),
    ("ode configuration is not", SIZES, "no node has that much; sinfo -N -o '%N %c %m %G' shows what they have"),
    ("ore processors requested", SIZES, "no node has that many CPUs; sinfo -N -o '%N %c' shows how many they have"),
    ("ode count specification", SIZES, "the queue has fewer nodes; sinfo -s counts them"),
    ("partition limit", ("walltime", *SIZES), "sinfo -o '%P %l %D' shows the queue's time limit and number of nodes"),
    ("time limit", ("walltime",), "sinfo -o '%P %l' shows the queue's limit"),
    ("ependency", ("depend",), "squeue and sacct list the jobs"),
    ("ontact slurm controller", (), "on the head, systemctl status slurmctld says why it does not answer"),
]


def hints(job: Job, text: str) -> Iterator[str]:
    """The line and the cure, for what sbatch refuses."""
    known = {**job.options, **job.asked, **job.attributes}
    for words, names, cure in HINTS:
        if words in text:
            where = next((f"{known[name]}: " for name in names if name in known), "")
            yield f"{where}{cure}"
            return


def warn_of_unknown_jobs(job: Job) -> None:
    """Slurm takes a job that it does not know for one that has ended well."""
    given = job.attributes.get("depend")
    for name in dict.fromkeys(re.findall(r":(\d+)", value_of(given))) if given else ():
        asked = subprocess.run([SCONTROL, "show", "job", name], capture_output=True, text=True, check=False)
        if "Invalid job id" in asked.stderr:
            say(f"{given}: the queue does not know job {name}, so nothing waits for it; see sacct -j {name}")


def submit(job: Job) -> int:
    """Submit it, and print its number."""
    if job.umask is not None:
        os.umask(job.umask)
    environment = environment_of(job)
    warn_of_unknown_jobs(job)
    if job.has("I"):
        command = command_of(job, "")
        os.execve(command[0], command, environment)  # noqa: S606
    handle = os.memfd_create("script", 0)
    with os.fdopen(handle, "wb") as file:
        file.write(submitted(job))
        file.flush()
        command = command_of(job, f"/dev/fd/{handle}")
        os.lseek(handle, 0, os.SEEK_SET)
        done = subprocess.run(
            command, env=environment, pass_fds=[handle], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if job.has("z") else None, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    printed = done.stderr.decode(errors="replace")
    print(printed, end="", file=sys.stderr)
    if done.returncode:
        for hint in hints(job, printed):
            say(hint)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def show(job: Job) -> int:
    """Print what would be submitted."""
    for name, value in sorted(environment_of(job).items()):
        if name in job.variables or name.startswith("PBS_O_"):
            print(f"# {name}={shlex.quote(value)}")
    print(f"# run by: {shlex.join(runs_it(job, pwd.getpwuid(os.getuid()).pw_shell))}")
    print(shlex.join(command_of(job, "SCRIPT")))
    return 0


def only_here(path: str, mounts: str) -> bool:
    """Whether a path is on a disk of this machine, by the lines of mountinfo."""
    found = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        # A space is written as \040 there.
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4])
        if Path(path).is_relative_to(point):
            found[point] = after.split(" ")[0]
    kind = found[max(found, key=len)] if found else ""
    # What is mounted on first use is autofs until then.
    return not re.match("nfs|cifs|fuse|autofs|lustre|ceph|gluster|beegfs|gpfs|afs|ocfs2|gfs2|9p|virtiofs", kind)


def shared_homes() -> list[str]:
    """The homes that all nodes mount from this machine, on whose own disk they are."""
    return [f"/home/{name}" for name in SHARED.read_text().split()] if SHARED.exists() else []


def warn_of_own_disk(job: Job) -> None:
    """Slurm ends a job without a word if its first node cannot write its output."""
    mounts = Path("/proc/self/mountinfo").read_text()
    paths = [
        one.partition("=")[2].replace("%%", "%") for one in job.arguments if one.startswith(("--output", "--error"))
    ]
    folders = dict.fromkeys(os.path.realpath(os.path.dirname(path)) for path in paths)  # noqa: PTH120
    seen_by_all = ("/dev", *shared_homes())
    if here := [
        folder for folder in folders
        if not any(Path(folder).is_relative_to(one) for one in seen_by_all) and only_here(folder, mounts)
    ]:  # fmt: skip
        job.note(
            "output",
            f"{' and '.join(here)} is on this machine's own disk; a node that lacks this folder cannot start the job, "
            "and on another one its output stays there",
        )


def say(text: str) -> None:
    # Words of a script may hold sequences that change the terminal.
    safe = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    print("\n".join(f"qsub: {line}" for line in safe.splitlines()), file=sys.stderr, flush=True)


def read_script(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(f"the script {path}: {error.strerror}") from None


def working_directory() -> str:
    """The present folder, by the name that the user knows."""
    here, known = str(Path.cwd()), os.environ.get("PWD", "")
    try:
        found = known if known.startswith("/") and os.path.samefile(known, here) else here  # noqa: PTH121
    except OSError:
        found = here
    if re.search(r"[\\\n]", found):
        raise RefusedError("this folder's name has a backslash or a new line, which output files cannot have")
    return found


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["--help"], ["-?"]):
        print(HELP, end="")
        sys.exit(0)
    only_show = arguments[:1] == ["--show"]
    try:
        job = prepare(arguments[only_show:], dict(os.environ), working_directory(), read_script)
        if not job.has("I"):
            warn_of_own_disk(job)
        for note in job.notes:
            say(note)
        sys.exit(show(job) if only_show else submit(job))
    except (RefusedError, OSError) as refused:
        say(str(refused))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
