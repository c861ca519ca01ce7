"""qsub: submit PBS job scripts to Slurm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from farandole.node.qsub.script import COMMAND_LINE, Job, RefusedError, collect, options_in, options_of
from farandole.node.qsub.submit import say, show, submit, warn_of_own_disk
from farandole.node.qsub.translate import translate

HELP = """\
usage: qsub [OPTION ...] [SCRIPT [ARGUMENT ...]]

Submit a PBS job script to Slurm, and print the job's number. Without SCRIPT, it is read from standard input.
Options are also read from lines "#PBS OPTION ..." before the script's first command; the command line wins.

  -l select=N:ncpus=C:mpiprocs=P:ompthreads=T:mem=8gb:ngpus=G, -l nodes=N:ppn=P:gpus=G
  -l walltime=HH:MM:SS, mem=, ncpus=, ngpus=, place=scatter|free|excl|shared
  -N NAME, -q QUEUE, -A ACCOUNT, -h, -r y|n, -m abe, -M ADDRESS
  -o PATH, -e PATH, -j oe|eo    output and errors, both in one file; by default NAME.oNUMBER and NAME.eNUMBER
  -v NAME=VALUE,NAME, -V        variables for the job, all of this shell
  -W depend=afterok:NUMBER, -W block=true
  -J 0-9:2%4, -t 0-9            array of jobs, at most 4 at a time
  -S SHELL                      of a script without #!
  -k, -P                        have no meaning here, which is said
  --show                        print what would be submitted, and submit nothing

Any other option is refused with what to use instead. qstat, qdel, qhold and qrls take the number that qsub prints.
"""


def prepare(arguments: list[str], environment: dict[str, str], folder: str, read: Callable[[str], bytes]) -> Job:
    """Translate the command line and the script that it names."""
    given, rest = options_of(arguments, COMMAND_LINE)
    path = rest[0] if rest else "-"
    job = Job(read(path), Path(path).name if rest else "STDIN", folder, environment, rest[1:])
    if not job.script.strip():
        raise RefusedError("the script is empty")
    job.interpreter = interpreter(job)
    given = [*options_in(job), *given]
    collect(job, given)
    translate(job)
    if job.refusals:
        raise RefusedError("\n".join([*job.refusals, *job.notes]))
    return job


def interpreter(job: Job) -> list[str]:
    """What the script's first line says runs it, split as the kernel does."""
    if not job.script.startswith(b"#!"):
        return []
    found = job.script.split(b"\n", 1)[0][2:].decode(errors="surrogateescape").strip().split(None, 1)
    if found[:1] in (["/bin/sh"], ["/usr/bin/sh"]):
        # Such scripts use source and module, which dash lacks.
        job.note("line 1", "#!/bin/sh is run by bash in its POSIX mode")
        found[:1] = ["/bin/bash", "--posix"]
    return found


def read_script(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(f"the script {path}: {error.strerror}") from None


def working_directory() -> str:
    """The present folder, by the name that the user knows."""
    here, known = str(Path.cwd()), os.environ.get("PWD", "")
    found = known if known.startswith("/") and os.path.realpath(known) == here else here
    if re.search(r"[\\\n]", found):
        raise RefusedError("this folder's name has a backslash or a new line, which output files cannot have")
    return found


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
