"""Translate a PBS job to the arguments of sbatch: every option is translated, or refused with what to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from farandole.node.qsub.options import Option, RefusedError, Submission

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,229}")
UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]")
MEMORY = re.compile(r"(\d{1,15})([kmgt]?)b?", re.IGNORECASE)
# What becomes one argument: the form of its value, the argument, and what to write instead.
PASSED = {
    "A": (r"[\w.@+][\w.@+-]*", "--account={}", "this is not an account name"),
    "q": (r"[\w.+][\w.+-]*", "--partition={}", "this is not a queue name; sinfo -s lists them, without @SERVER"),
}
# What is read by name.
READ = {"e", "j", "N", "o", "V", "l select", "l nodes", "l walltime"}
# What the pieces of a job may say of themselves.
PARTS = {"select": ("ncpus", "mpiprocs", "ompthreads", "ngpus", "mem"), "nodes": ("ppn",)}
IN_SCRIPT = "write  cd FOLDER  in the script"
IN_CHUNK = "write it as part of select=N:ncpus=C:mpiprocs=P:mem=M:ngpus=G"
ARRAY = "add  #SBATCH --array=0-9%4  to the script, which finds $SLURM_ARRAY_TASK_ID"
OTHER = "add  #SBATCH OPTION  to the script; man sbatch lists them"
INSTEAD = {
    "a": "add  #SBATCH --begin=TIME  to the script",
    "c": "jobs have no checkpoints; let the program write its own",
    "C": "options are read from lines with #PBS only",
    "d": IN_SCRIPT,
    "D": IN_SCRIPT,
    "F": "write the arguments after the script: qsub SCRIPT ARGUMENT ...",
    "h": "add  #SBATCH --hold  to the script",
    "I": "for a shell on a node, write  srun --nodes=1 --cpus-per-task=C --time=HH:MM:SS --pty bash",
    "J": ARRAY,
    "k": "leave it out: output is written to its place while the job runs; -o and -e name it",
    "m": "add  #SBATCH --mail-type=BEGIN,END,FAIL  to the script",
    "M": "add  #SBATCH --mail-user=ADDRESS  to the script",
    "n": "add  #SBATCH --exclusive  to the script",
    "p": "add  #SBATCH --nice=NUMBER  to the script, where a higher one means later",
    "P": "jobs are counted by account; -A names it",
    "r": "add  #SBATCH --requeue  or  --no-requeue  to the script",
    "S": "write #!SHELL as the first line of the script",
    "t": ARRAY,
    "T": "call it in the script",
    "u": "log in as that user",
    "v": "write  export NAME=VALUE  in the script, or arguments after it: qsub SCRIPT ARGUMENT ...",
    "w": IN_SCRIPT,
    "W": "add  #SBATCH --dependency=afterok:NUMBER --kill-on-invalid-dep=yes  to the script, or --wait for block=true",
    "x": "write  srun PROGRAM",
    "X": "windows of a job cannot be shown here; write to a file instead",
    "z": "write  qsub SCRIPT >/dev/null",
    **dict.fromkeys(("l mem", "l ncpus", "l ngpus"), IN_CHUNK),
    "l place": "leave it out: each chunk gets a node of its own; for excl, add  #SBATCH --exclusive  to the script",
    "l host": "add  #SBATCH --nodelist=NODE  to the script",
}


def checked(option: Option, pattern: str, cure: str) -> str:
    if not re.fullmatch(pattern, option.value):
        raise RefusedError(f"{option.where}: -{option.letter} {option.value!r}: {cure}")
    return option.value


def name_of(job: Submission) -> None:
    given = job.given.get("N")
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


def number(option: Option, name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise RefusedError(f"{option}: {name}={text} is not a positive integer")
    return int(text)


def mebibytes(option: Option, text: str) -> int:
    """A size, rounded up."""
    size = MEMORY.fullmatch(text)
    if not size or not int(size[1]):
        raise RefusedError(f"{option}: {text} is not a size; write 512mb or 8gb")
    number_of_bytes: int = int(size[1]) * 1024 ** " kmgt".index(size[2].lower() or " ")
    return -(-number_of_bytes // (1 << 20))


def chunk_of(option: Option) -> dict[str, int]:
    """What each node gets by select= or nodes=, and how many there are of them; memory in MiB."""
    what, _, text = option.value.partition("=")
    if "+" in text:
        cure = "write one chunk of the larger size, or submit two jobs"
        raise RefusedError(f"{option}: Slurm gives all nodes of a job the same; {cure}")
    count, *parts = text.split(":")
    chunk = {what: number(option, what, count)}
    for name, _, value in (part.partition("=") for part in parts):
        if name not in PARTS[what]:
            cure = INSTEAD.get(f"l {name}", OTHER)
            raise RefusedError(f"{option}: {name!r} cannot be translated to Slurm: {cure}")
        chunk[name] = mebibytes(option, value) if name == "mem" else number(option, name, value)
    return chunk


def resources(job: Submission) -> None:
    """Translate everything of -l."""
    select, nodes = job.given.get("l select"), job.given.get("l nodes")
    if select and nodes:
        raise RefusedError(f"{nodes}: {select} says this too; write one of them")
    given = select or nodes or Option("l", "select=1", "resources")
    chunk = chunk_of(given)
    count = chunk.get("select") or chunk["nodes"]
    processes = chunk.get("ppn") or chunk.get("mpiprocs", 1)
    cpus = chunk.get("ppn") or chunk.get("ncpus", 1)
    threads, uneven = divmod(cpus, processes)
    if uneven or not threads:
        cure = f"write ncpus={-(-cpus // processes) * processes}"
        raise RefusedError(f"{given}: {cpus} CPUs cannot be shared evenly by {processes} processes; {cure}")
    shape = {"nodes": count, "ntasks": count * processes, "ntasks-per-node": processes, "cpus-per-task": threads}
    job.options += [f"--{name}={value}" for name, value in shape.items()]
    more = {"mem": "--mem={}M", "ngpus": "--gpus-per-node={}"}
    job.options += [argument.format(chunk[name]) for name, argument in more.items() if name in chunk]
    job.variables["NCPUS"] = str(cpus)
    if "ompthreads" in chunk or not ("V" in job.given and "OMP_NUM_THREADS" in job.environment):
        job.variables["OMP_NUM_THREADS"] = str(chunk.get("ompthreads", threads))


def walltime(job: Submission) -> None:
    """A time as Slurm writes it, to which a bare number would mean minutes."""
    if not (given := job.given.get("l walltime")):
        return
    text = given.value.partition("=")[2]
    if re.fullmatch(r"\d{1,9}", text):
        text = f"{int(text) // 3600}:{int(text) // 60 % 60:02}:{int(text) % 60:02}"
    if not re.fullmatch(r"(\d{1,6}:)?\d{1,6}:\d\d", text) or not re.search("[1-9]", text):
        # Slurm takes 0 for no limit.
        raise RefusedError(f"{given}: this is not a time; write HH:MM:SS, or leave it out for the queue's own limit")
    job.options.append(f"--time={text}")


def outputs(job: Submission) -> None:
    """Output files, as PBS names them."""
    joined = job.given.get("j")
    letters = checked(joined, "oe|eo", "write oe or eo")[0] if joined else "oe"
    if unused := job.given.get({"o": "e", "e": "o"}.get(letters, "")):
        job.note(unused, f"has no effect with {joined}")
    for option, letter in zip(("--output", "--error"), letters, strict=False):
        job.options.append(f"{option}={path_of(job, letter)}")


def path_of(job: Submission, letter: str) -> str:
    """The file of -o or -e, as sbatch writes it."""
    default, given = f"{job.name}.{letter}%j", job.given.get(letter)
    if given is None:
        return f"{job.folder.replace('%', '%%')}/{default}"
    checked(given, r"[^\\\n\0]*", "a path has no backslash and no new line")
    checked(given, r"(?![\w.-]+:|~)[^$]*", "write the path in full, without ~, variables and HOST:")
    path = str(Path(job.folder) / given.value).replace("%", "%%")
    is_folder = given.value.endswith("/") or (Path(job.folder) / given.value).is_dir()
    return f"{path}/{default}" if is_folder else path


def option(job: Submission, name: str, given: Option) -> None:
    """Translate what stands for itself, and refuse what is not known."""
    if name in PASSED:
        pattern, argument, cure = PASSED[name]
        job.options.append(argument.format(checked(given, pattern, cure)))
    elif name not in READ:
        raise RefusedError(f"{given}: cannot be translated to Slurm: {INSTEAD.get(name, OTHER)}")


def translate(job: Submission) -> None:
    """Translate all, and collect everything that is refused."""
    steps: list[Callable[[], None]] = [partial(step, job) for step in (name_of, resources, walltime, outputs)]
    steps += [partial(option, job, name, given) for name, given in job.given.items()]
    for step in steps:
        try:
            step()
        except RefusedError as error:
            job.refusals.append(str(error))
