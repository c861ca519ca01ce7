"""Translate a PBS job to the arguments of sbatch: every option is translated, or refused with what to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from farandole.node.qsub.options import Option, RefusedError, Submission

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,229}")
UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]")
# What becomes one argument: the form of its value, the argument, and what to write instead.
PASSED = {
    "A": (r"[\w.@+][\w.@+-]*", "--account={}", "this is not an account name"),
    "q": (r"[\w.+][\w.+-]*", "--partition={}", "this is not a queue name; sinfo -s lists them, without @SERVER"),
}
# What is read by name.
READ = {"e", "j", "N", "o", "V", "l select", "l walltime"}
CHUNK = ("ncpus", "mpiprocs", "ompthreads")
IN_SCRIPT = "write  cd FOLDER  in the script"
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
    "l mem": "add  #SBATCH --mem=8G  to the script, which is for each node",
    "l ncpus": "write -l select=1:ncpus=C",
    "l ngpus": "add  #SBATCH --gpus-per-node=G  to the script",
    "l nodes": "write -l select=N:ncpus=P:mpiprocs=P",
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


def chunk_of(option: Option) -> tuple[int, dict[str, int]]:
    """How many nodes there are by select=, and what each gets."""
    text = option.value.partition("=")[2]
    if "+" in text:
        cure = "write one chunk of the larger size, or submit two jobs"
        raise RefusedError(f"{option}: Slurm gives all nodes of a job the same; {cure}")
    count, *parts = text.split(":")
    chunk = {"ncpus": 1, "mpiprocs": 1}
    for name, _, value in (part.partition("=") for part in parts):
        if name not in CHUNK:
            cure = INSTEAD.get(f"l {name}", OTHER)
            raise RefusedError(f"{option}: {name!r} cannot be translated to Slurm: {cure}")
        chunk[name] = number(option, name, value)
    return number(option, "select", count), chunk


def resources(job: Submission) -> None:
    """Translate -l select=."""
    given = job.given.get("l select", Option("l", "select=1", "resources"))
    count, chunk = chunk_of(given)
    cpus, processes = chunk["ncpus"], chunk["mpiprocs"]
    threads, uneven = divmod(cpus, processes)
    if uneven or not threads:
        cure = f"write ncpus={-(-cpus // processes) * processes}"
        raise RefusedError(f"{given}: {cpus} CPUs cannot be shared evenly by {processes} processes; {cure}")
    shape = {"nodes": count, "ntasks": count * processes, "ntasks-per-node": processes, "cpus-per-task": threads}
    job.options += [f"--{name}={value}" for name, value in shape.items()]
    job.variables["NCPUS"] = str(cpus)
    if "ompthreads" in chunk or not ("V" in job.given and "OMP_NUM_THREADS" in job.environment):
        job.variables["OMP_NUM_THREADS"] = str(chunk.get("ompthreads", threads))


def walltime(job: Submission) -> None:
    """A time that means the same to Slurm, to which a bare number would mean minutes, and 0 no limit."""
    if given := job.given.get("l walltime"):
        time = given.value.partition("=")[2]
        if not re.fullmatch(r"(\d{1,6}:)?\d{1,6}:\d\d", time) or not re.search("[1-9]", time):
            cure = "write HH:MM:SS, or leave it out for the queue's own limit"
            raise RefusedError(f"{given}: this is not a time; {cure}")
        job.options.append(f"--time={time}")


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
