"""qsub: submit PBS job scripts to Slurm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from farandole.node.qsub.options import COMMAND_LINE, RefusedError, Submission, collect, options_in, options_of
from farandole.node.qsub.submit import say, show, submit, warn_of_own_disk
from farandole.node.qsub.translate import translate

HELP = """\
usage: qsub [--show] [OPTION ...] [SCRIPT [ARGUMENT ...]]

Submit a PBS job script to Slurm, and print the job's number. Without SCRIPT, it is read from standard input.
Options are also read from lines "#PBS OPTION ..." before the script's first command; the command line wins.

  -l select=N:ncpus=C:mpiprocs=P:ompthreads=T, -l walltime=HH:MM:SS
  -N NAME, -q QUEUE, -A ACCOUNT
  -o PATH, -e PATH, -j oe|eo    output and errors, both in one file; by default NAME.oNUMBER and NAME.eNUMBER
  -V                            all variables of this shell for the job
  --show                        print what would be submitted, and submit nothing

Any other option is refused with what to use instead. qstat, qdel, qhold and qrls take the number that qsub prints.
"""


def prepare(arguments: list[str], environment: dict[str, str], folder: str, read: Callable[[str], bytes]) -> Submission:
    """Translate the command line and the script that it names."""
    given, rest = options_of(arguments, COMMAND_LINE)
    path = rest[0] if rest else "-"
    job = Submission(read(path), Path(path).name if rest else "STDIN", folder, environment, rest[1:])
    if not job.script.strip():
        raise RefusedError("the script is empty")
    job.interpreter = interpreter(job)
    collect(job, [*options_in(job), *given])
    translate(job)
    if job.refusals:
        raise RefusedError("\n".join([*job.refusals, *job.notes]))
    return job


def interpreter(job: Submission) -> list[str]:
    """What the script's first line says runs it, split as the kernel does."""
    if not job.script.startswith(b"#!"):
        return []
    program = job.script.split(b"\n", 1)[0][2:].decode(errors="surrogateescape").strip().split(None, 1)
    if program[:1] in (["/bin/sh"], ["/usr/bin/sh"]):
        # Such scripts use source and module, which dash lacks.
        job.note("line 1", "#!/bin/sh is run by bash in its POSIX mode")
        program[:1] = ["/bin/bash", "--posix"]
    return program


def read_script(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(f"the script {path}: {error.strerror}") from None


def working_directory() -> str:
    """The present folder, by the name that the user knows."""
    here, known = str(Path.cwd()), os.environ.get("PWD", "")
    folder = known if known.startswith("/") and os.path.realpath(known) == here else here
    if re.search(r"[\\\n]", folder):
        raise RefusedError("this folder's name has a backslash or a new line, which output files cannot have")
    return folder


def main() -> int:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["--help"], ["-?"]):
        print(HELP, end="")
        return 0
    only_show = arguments[:1] == ["--show"]
    try:
        job = prepare(arguments[only_show:], dict(os.environ), working_directory(), read_script)
        warn_of_own_disk(job)
        for note in job.notes:
            say(note)
        return show(job) if only_show else submit(job)
    except (RefusedError, OSError) as refused:
        say(str(refused))
        return 1
    except KeyboardInterrupt:
        return 130
