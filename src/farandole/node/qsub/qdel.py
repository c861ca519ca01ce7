"""usage: qdel NUMBER ...

Cancel jobs. NUMBER is what qsub prints; of an array 42[] is the whole, 42[3] and 42[0-5] are some of it.
Debian's qdel takes 42[3] for 42, and so cancels the whole array.
"""

import re
import subprocess
import sys

from farandole.node.allocation import SCONTROL

SCANCEL = "/usr/bin/scancel"
JOB = re.compile(r"(\d{1,10})(?:\[(\d{1,9}(?:-\d{1,9}(?::\d{1,9})?)?)?\]|_(\d{1,9}))?(?:\.[A-Za-z][\w.-]*)?")


def job_of(text: str) -> str:
    """The number, as Slurm writes it."""
    job = JOB.fullmatch(text)
    if not job:
        sys.exit(f"qdel: {text!r} is not a job number: qstat lists the jobs; scancel --me cancels all of yours")
    index = job[2] or job[3] or ""
    return f"{job[1]}_{index}" if index.isdigit() else f"{job[1]}_[{index}]" if index else job[1]


def cancelled(job: str) -> bool:
    """Whether this job was there, and is cancelled."""
    # scancel says nothing of a job that is not there.
    command = [SCONTROL, "show", "job", job.partition("_")[0]]
    asked = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if asked.returncode:
        print(f"qdel: {job}: {asked.stderr.strip()}", file=sys.stderr)
    return not (asked.returncode or subprocess.run([SCANCEL, job], check=False).returncode)


def main() -> int:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-?"], []):
        print(__doc__, end="")
        return 0 if arguments else 2
    jobs = [job_of(text) for text in arguments]
    return int(False in [cancelled(job) for job in jobs])
