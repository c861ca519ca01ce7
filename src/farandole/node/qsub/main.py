"""usage: qsub [--show] [OPTION ...] [SCRIPT [ARGUMENT ...]]

Submit a PBS job script to Slurm, and print the job's number. Without SCRIPT, it is read from standard input.
Options are also read from lines "#PBS OPTION ..." before the script's first command; the command line wins.

  -l select=N:ncpus=C:mpiprocs=P:ompthreads=T, -l walltime=HH:MM:SS
  -N NAME, -q QUEUE, -A ACCOUNT
  -o PATH, -e PATH, -j oe|eo    output and errors, both in one file; by default NAME.oNUMBER and NAME.eNUMBER
  -V                            all variables of this shell for the job
  --show                        print what would be submitted, and submit nothing

Any other option is refused with what to use instead. qstat, qdel, qhold and qrls take the number that qsub prints.
"""

import os
import pwd
import re
import sys
from pathlib import Path

from farandole.core.text import visible
from farandole.node.qsub.options import COMMAND_LINE, Option, RefusedError, Submission, options_of, read_options
from farandole.node.qsub.submit import show, submit, warn_of_own_disk
from farandole.node.qsub.translate import translate


def prepare(job: Submission, given: list[Option]) -> Submission:
    """Translate the options of a script and of the command line."""
    if not job.script.strip():
        raise RefusedError("the script is empty")
    job.interpreter = interpreter(job)
    read_options(job)
    job.give(given)
    translate(job)
    if job.refusals:
        raise RefusedError("\n".join([*job.refusals, *job.notes]))
    return job


def interpreter(job: Submission) -> list[str]:
    """What the script's first line says runs it, split as the kernel does, or else a login shell."""
    line = job.script.partition(b"\n")[0].decode(errors="surrogateescape")
    program = line[2:].strip().split(None, 1) if line.startswith("#!") else []
    if program[:1] in (["/bin/sh"], ["/usr/bin/sh"]):
        # Such scripts use source and module, which dash lacks.
        job.note("line 1", "#!/bin/sh is run by bash in its POSIX mode")
        program[:1] = ["/bin/bash", "--posix"]
    login = pwd.getpwuid(os.getuid()).pw_shell
    known = Path(login).name in ("bash", "ksh", "zsh", "tcsh", "csh", "fish")
    return program or [login if known else "/bin/bash"]


def working_directory() -> str:
    """The present folder, by the name that the user knows."""
    here, known = str(Path.cwd()), os.environ.get("PWD", "")
    folder = known if known.startswith("/") and os.path.realpath(known) == here else here
    if re.search(r"[\\\n]", folder):
        raise RefusedError("this folder's name has a backslash or a new line, which output files cannot have")
    return folder


def say(text: str) -> None:
    # What a script says may hold sequences that change the terminal.
    for line in visible(text, keep="\n").splitlines():
        print(f"qsub: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["--help"], ["-?"]):
        print(__doc__, end="")
        return 0
    only_show = arguments[:1] == ["--show"]
    try:
        given, rest = options_of(arguments[only_show:], COMMAND_LINE)
        path = rest[0] if rest else "STDIN"
        script = Path(path).read_bytes() if rest else sys.stdin.buffer.read()
        job = prepare(Submission(script, Path(path).name, working_directory(), dict(os.environ), rest[1:]), given)
        warn_of_own_disk(job)
        say("\n".join(job.notes))
        return show(job) if only_show else submit(job)
    except (RefusedError, OSError) as refused:
        say(str(refused))
        return 1
    except KeyboardInterrupt:
        return 130
