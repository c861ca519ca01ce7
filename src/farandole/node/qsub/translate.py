"""Translate a PBS job to the arguments of sbatch: every option is translated, refused, or named in a note."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from farandole.node.qsub.resources import OTHER, resources
from farandole.node.qsub.script import Given, Job, RefusedError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,229}")
UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
JOB = re.compile(r"(\d{1,10})(?:(?:\[(\d{0,9})\]|_(\d{1,9})))?(?:\.[\w.-]+)?")
# Slurm's program by which the head sends mail.
MAIL = Path("/bin/mail")
ARRAY = r"\d{1,7}(-\d{1,7}(:\d{1,7})?)?(,\d{1,7}(-\d{1,7}(:\d{1,7})?)?)*(%\d{1,5})?"
# What becomes one argument: the form of its value, the argument, and what to write instead.
PASSED = {
    "A": (r"[\w.@+][\w.@+-]*", "--account={}", "this is no name of an account"),
    "J": (ARRAY, "--array={}", "write 0-9, 0-9:2 or 0-9%4"),
    "t": (ARRAY, "--array={}", "write 0-9, 0-9:2 or 0-9%4"),
    "M": (r"[\w.+][\w.+-]*(@[\w.-]+)?", "--mail-user={}", "Slurm writes to one address, without spaces or commas"),
    "h": ("", "--hold", ""),
    "q": (r"[\w.+][\w.+-]*", "--partition={}", "this is no name of a queue; sinfo -s lists them, without @SERVER"),
    "block": ("block=(true|True|TRUE)", "--wait", "write block=true, or leave it out"),
}
MAILS = {"a": "FAIL", "b": "BEGIN", "e": "END", "n": "NONE"}
NOTED = {
    "k": "has no meaning here: output is written to its place while the job runs; -o and -e name it",
    "P": "has no meaning here: jobs are counted by account; -A names it",
}
IN_SCRIPT = "write  cd FOLDER  in the script"
STAGED = "files are not copied for a job; copy them in the script, or keep them in a folder that all nodes see"
REFUSED = {
    "a": "add  #SBATCH --begin=TIME  to the script",
    "c": "jobs have no checkpoints; let the program write its own",
    "C": "options are read from lines with #PBS only",
    "d": IN_SCRIPT,
    "D": IN_SCRIPT,
    "F": "write the arguments after the script: qsub SCRIPT ARGUMENT ...",
    "I": "for a shell on a node, write  srun --nodes=1 --cpus-per-task=C --time=HH:MM:SS --pty bash",
    "n": "write -l place=excl",
    "p": "add  #SBATCH --nice=NUMBER  to the script, where a higher one means later",
    "T": "call it in the script",
    "u": "log in as that user",
    "w": IN_SCRIPT,
    "x": "write  srun PROGRAM",
    "X": "windows of a job cannot be shown here; write to a file instead",
    "z": "write  qsub SCRIPT >/dev/null",
    "umask": "write  umask MODE  in the script",
    "group_list": "a job runs in the group of who submits it; leave it out, and first: newgrp GROUP",
    "stagein": STAGED,
    "stageout": STAGED,
    "sandbox": "make a folder in the script",
}


def checked(given: Given, pattern: str, cure: str) -> str:
    if not re.fullmatch(pattern, given.value):
        raise RefusedError(f"{given.where}: -{given.letter} {given.value!r}: {cure}")
    return given.value


def mail(job: Job, given: Given) -> None:
    letters = checked(given, "[abe]+|n", "write n, or letters of abe: abort, begin, end")
    job.arguments.append("--mail-type=" + ",".join(dict.fromkeys(MAILS[letter] for letter in letters)))
    if letters != "n" and not MAIL.exists():
        job.note(given, "this machine has no program mail, so none may be sent; ask who manages the cluster")


def rerun(job: Job, given: Given) -> None:
    job.arguments.append("--requeue" if checked(given, "[yn]", "write y or n") == "y" else "--no-requeue")


def shell(job: Job, given: Given) -> None:
    path = checked(given, r"/[\w./+-]+", "write one absolute path, for example /bin/bash")
    if job.interpreter:
        job.note(given, f"the script's own first line counts: #!{' '.join(job.interpreter)}")
    else:
        job.interpreter = [path]


def variables(job: Job, given: Given) -> None:
    commas = shlex.shlex(given.value, posix=True)
    commas.whitespace, commas.whitespace_split, commas.commenters = ",", True, ""
    try:
        parts = list(commas)
    except ValueError:
        raise RefusedError(f"{given.where}: -v: a quote is not closed: {given.value}") from None
    for name, equals, value in (part.partition("=") for part in parts):
        if not IDENTIFIER.fullmatch(name):
            raise RefusedError(f"{given.where}: -v: {name!r} is no name of a variable")
        if name.startswith(("PBS_", "SLURM_")):
            job.note(given, f"{name} is set by the scheduler, so this value is left out")
        elif not equals and name not in job.environment:
            job.note(given, f"{name} is not set here, so the job does not get it")
        else:
            job.variables[name] = value if equals else job.environment[name]


def depend(job: Job, given: Given) -> None:
    found = []
    for part in given.assigned.split(","):
        kind, *jobs = part.split(":")
        if kind not in ("after", "afterok", "afternotok", "afterany") or not jobs:
            raise RefusedError(
                f"{given}: write after, afterok, afternotok or afterany, and :NUMBER; Slurm's jobs wait for earlier "
                "ones only"
            )
        found.append(":".join([kind, *(of_job(given, text) for text in jobs)]))
    # PBS deletes a job that can never start.
    job.arguments += [f"--dependency={','.join(found)}", "--kill-on-invalid-dep=yes"]


def of_job(given: Given, text: str) -> str:
    found = JOB.fullmatch(text)
    if not found:
        raise RefusedError(f"{given}: {text!r} is no number of a job")
    index = found[2] or found[3]
    return f"{found[1]}_{index}" if index else found[1]


def name_of(job: Job) -> None:
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


def outputs(job: Job) -> None:
    """Output files, as PBS names them."""
    joined = job.given.get("j")
    how = checked(joined, "oe|eo|n", "write oe, eo or n") if joined else "n"
    if how == "n":
        job.arguments += [f"--output={path_of(job, 'o')}", f"--error={path_of(job, 'e')}"]
        return
    if unused := job.given.get(how[1]):
        job.note(unused, f"has no effect with -j {how}")
    job.arguments.append(f"--output={path_of(job, how[0])}")


def path_of(job: Job, letter: str) -> str:
    """The file of -o or -e, in the words of sbatch."""
    is_array = "J" in job.given or "t" in job.given
    default = f"{job.name}.{letter}" + ("%A.%a" if is_array else "%j")
    given = job.given.get(letter)
    if given is None:
        return f"{job.folder.replace('%', '%%')}/{default}"
    checked(given, r"[^\\\n\0]*", "a path has no backslash and no new line")
    checked(given, r"(?![\w.-]+:|~)[^$]*", "write the path in full, without ~, variables and HOST:")
    path = str(Path(job.folder) / given.value).replace("%", "%%")
    if given.value.endswith("/") or (Path(job.folder) / given.value).is_dir():
        return f"{path}/{default}"
    if not is_array or "^array_index^" in path:
        return path.replace("^array_index^", "%a") if is_array else path
    job.note(given, "the jobs of the array write to files of their own, which end with .INDEX")
    return f"{path}.%a"


OPTIONS: dict[str, Callable[[Job, Given], None]] = {
    "m": mail, "r": rerun, "S": shell, "v": variables, "depend": depend
}  # fmt: skip
# What is read by name.
READ = ("e", "j", "N", "o", "V")


def option(job: Job, name: str, given: Given) -> None:
    """Translate an option or an attribute."""
    if given.letter == "l" or name in READ:
        return
    if name in OPTIONS:
        OPTIONS[name](job, given)
    elif name in PASSED:
        pattern, argument, cure = PASSED[name]
        job.arguments.append(argument.format(checked(given, pattern, cure)))
    elif name in NOTED:
        job.note(given, NOTED[name])
    else:
        raise RefusedError(f"{given}: cannot be translated to Slurm: {REFUSED.get(name, OTHER)}")


def translate(job: Job) -> None:
    """Translate all, and collect everything that is refused."""
    steps: list[Callable[[], None]] = [partial(name_of, job), partial(resources, job), partial(outputs, job)]
    steps += [partial(option, job, name, given) for name, given in job.given.items()]
    for step in steps:
        try:
            step()
        except RefusedError as error:
            job.refusals.append(str(error))
    if "J" in job.given and "t" in job.given:
        job.refusals.append(f"{job.given['t']}: {job.given['J']} says this too; write one of them")
