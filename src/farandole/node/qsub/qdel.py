"""Cancel jobs by the numbers that PBS and Slurm use.

Debian's qdel takes 42[3] for 42, and so cancels the whole array.
"""

from __future__ import annotations

import re
import subprocess
import sys

SCANCEL, SCONTROL = "/usr/bin/scancel", "/usr/bin/scontrol"
JOB = re.compile(r"(\d{1,10})(?:\[(\d{1,9}(?:-\d{1,9}(?::\d{1,9})?)?)?\]|_(\d{1,9}))?(?:\.[A-Za-z][\w.-]*)?")
HELP = """\
usage: qdel NUMBER ...

Cancel jobs. NUMBER is what qsub prints; of an array 42[] is the whole, 42[3] and 42[0-5] are some of it.
"""


def job_of(text: str) -> str:
    """The number, as Slurm writes it."""
    found = JOB.fullmatch(text)
    if not found:
        cure = "qstat lists the jobs; scancel --me cancels all of yours" if text != "all" else "scancel --me does that"
        sys.exit(f"qdel: {text!r} is no number of a job: {cure}")
    index = found[2] or found[3]
    if not index:
        return found[1]
    return f"{found[1]}_{index}" if index.isdigit() else f"{found[1]}_[{index}]"


def is_known(number: str) -> bool:
    asked = subprocess.run([SCONTROL, "show", "job", number], capture_output=True, text=True, check=False)
    return "Invalid job id" not in asked.stderr


def main() -> int:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-?"]) or not arguments:
        print(HELP, end="")
        return 0 if arguments else 2
    jobs = [job_of(text) for text in arguments]
    # scancel says nothing of a job that is not there.
    missing = [job for job in jobs if not is_known(job.partition("_")[0])]
    for job in missing:
        lists = "squeue lists the jobs, sacct those that have ended"
        print(f"qdel: the queue does not know job {job}; {lists}", file=sys.stderr)
    known = [job for job in jobs if job not in missing]
    status = subprocess.run([SCANCEL, *known], check=False).returncode if known else 0
    return status or bool(missing)
