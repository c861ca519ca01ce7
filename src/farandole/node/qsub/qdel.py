"""Cancel jobs by the numbers that PBS and Slurm use.

Debian's qdel takes 42[3] for 42, and so cancels the whole array.
"""

from __future__ import annotations

import re
import subprocess
import sys

from farandole.node.allocation import SCONTROL

SCANCEL = "/usr/bin/scancel"
JOB = re.compile(r"(\d{1,10})(?:\[(\d{1,9}(?:-\d{1,9}(?::\d{1,9})?)?)?\]|_(\d{1,9}))?(?:\.[A-Za-z][\w.-]*)?")
HELP = """\
usage: qdel NUMBER ...

Cancel jobs. NUMBER is what qsub prints; of an array 42[] is the whole, 42[3] and 42[0-5] are some of it.
"""


def job_of(text: str) -> str:
    """The number, as Slurm writes it."""
    job = JOB.fullmatch(text)
    if not job:
        sys.exit(f"qdel: {text!r} is not a job number: qstat lists the jobs; scancel --me cancels all of yours")
    index = job[2] or job[3] or ""
    return f"{job[1]}_{index}" if index.isdigit() else f"{job[1]}_[{index}]" if index else job[1]


def is_known(job: str) -> bool:
    """Whether the queue knows a job, which is said if not."""
    asked = subprocess.run(
        [SCONTROL, "show", "job", job.partition("_")[0]], capture_output=True, text=True, check=False
    )
    if "Invalid job id" in asked.stderr:
        print(f"qdel: the queue does not know job {job}; squeue and sacct list the jobs", file=sys.stderr)
        return False
    return True


def main() -> int:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-?"]) or not arguments:
        print(HELP, end="")
        return 0 if arguments else 2
    # scancel says nothing of a job that is not there.
    known = [job for job in map(job_of, arguments) if is_known(job)]
    status = subprocess.run([SCANCEL, *known], check=False).returncode if known else 0
    return status or int(len(known) < len(arguments))
