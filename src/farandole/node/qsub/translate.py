"""Translate a PBS job to the arguments of sbatch: every option is translated, or refused with what to use instead."""

import re
from pathlib import Path

from farandole.node.qsub.options import Option, Submission

PATH = r"(?![\w.-]+:|~)[^$\\\n\0]*", "write the path in full, without ~, variables, HOST:, backslash and new line"
# What is translated: the option of sbatch that it becomes as it is, the form of its value, and a cure for another one.
FORMS = {
    "A": ("account", r"[\w.@+][\w.@+-]*", "this is not an account name"),
    "e": ("", *PATH),
    "j": ("", "oe|eo", "write oe or eo"),
    # Files are named after it.
    "N": ("job-name", r"(?a)\w[\w.+-]{0,229}", "write 1 to 230 letters, digits and _ . + -, with no . + - in front"),
    "o": ("", *PATH),
    "q": ("partition", r"[\w.+][\w.+-]*", "this is not a queue name; sinfo -s lists them, without @SERVER"),
    "V": ("", "", ""),
    "l select": (
        "",
        r"[1-9]\d{0,6}(:(ncpus|mpiprocs|ompthreads)=[1-9]\d{0,6})*",
        "Slurm gives all nodes of a job the same: write select=N:ncpus=C:mpiprocs=P:ompthreads=T, "
        "and  #SBATCH --mem=8G, --gpus-per-node=G, --nodelist=NODE  for the rest",
    ),
    # To Slurm, a bare number would mean minutes, and 0 no limit.
    "l walltime": (
        "time",
        r"(?=.*[1-9])(\d{1,6}:)?\d{1,6}:\d\d",
        "write HH:MM:SS, or leave it out for the queue's limit",
    ),
}
ARRAY = "add  #SBATCH --array=0-9%4  to the script, which finds $SLURM_ARRAY_TASK_ID"
SHELL = "for a shell on a node, write  srun --nodes=1 --cpus-per-task=C --time=HH:MM:SS --pty bash"
OTHER = "do it in the script, or add  #SBATCH OPTION  to it; man sbatch lists them"
INSTEAD = {
    "a": "add  #SBATCH --begin=TIME  to the script",
    "h": "add  #SBATCH --hold  to the script",
    "I": SHELL,
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
    "v": "write  export NAME=VALUE  in the script, or arguments after it: qsub SCRIPT ARGUMENT ...",
    "W": "add  #SBATCH --dependency=afterok:NUMBER --kill-on-invalid-dep=yes  to the script, or --wait for block=true",
    "x": SHELL,
    "l mem": "add  #SBATCH --mem=8G  to the script, which is for each node",
    "l ncpus": "write -l select=1:ncpus=C",
    "l ngpus": "add  #SBATCH --gpus-per-node=G  to the script",
    "l nodes": "write -l select=N:ncpus=P:mpiprocs=P",
    "l place": "leave it out: each chunk gets a node of its own; for excl, add  #SBATCH --exclusive  to the script",
}


def checked(option: Option) -> Option:
    if option.name not in FORMS:
        raise option.refused(f"cannot be translated to Slurm: {INSTEAD.get(option.name, OTHER)}")
    _, pattern, cure = FORMS[option.name]
    if not re.fullmatch(pattern, option.value):
        raise option.refused(cure)
    return option


def resources(job: Submission) -> None:
    """Translate -l select=."""
    select = job.given.get("l select", Option("l select", "1", "resources"))
    count, *parts = select.value.split(":")
    chunk = {"ncpus": "1", "mpiprocs": "1", **dict(part.split("=") for part in parts)}
    nodes, cpus, processes = int(count), int(chunk["ncpus"]), int(chunk["mpiprocs"])
    threads, uneven = divmod(cpus, processes)
    if uneven or not threads:
        cure = f"write ncpus={-(-cpus // processes) * processes}"
        raise select.refused(f"{cpus} CPUs cannot be shared evenly by {processes} processes; {cure}")
    job.options |= {"nodes": nodes, "ntasks": nodes * processes, "ntasks-per-node": processes, "cpus-per-task": threads}
    job.variables["NCPUS"] = chunk["ncpus"]
    if "ompthreads" in chunk or not ("V" in job.given and "OMP_NUM_THREADS" in job.environment):
        job.variables["OMP_NUM_THREADS"] = chunk.get("ompthreads", str(threads))


def outputs(job: Submission) -> None:
    """Output files, as PBS names them."""
    joined = job.given.get("j")
    letters = joined.value[0] if joined else "oe"
    if joined and (unused := job.given.get(joined.value[1])):
        job.note(unused, f"has no effect with {joined}")
    for option, letter in zip(("output", "error"), letters, strict=False):
        given = job.given[letter].value if letter in job.given else ""
        path, file = Path(job.folder, given), f"{job.name}.{letter}%j"
        if given and not given.endswith("/") and not path.is_dir():
            path, file = path.parent, path.name.replace("%", "%%")
        job.folders.append(path)
        job.options[option] = f"{str(path).replace('%', '%%')}/{file}"


def translate(job: Submission) -> None:
    """Translate all, and collect everything that is refused."""
    given, job.given = job.given, {}
    for name, option in given.items():
        with job.refusing():
            job.given[name] = checked(option)
    safe = re.sub(r"[^A-Za-z0-9_.+-]", "_", job.name).lstrip(".+-")[:230] or "STDIN"
    job.name = job.given["N"].value if "N" in job.given else safe
    job.options["job-name"] = job.name
    job.options |= {FORMS[name][0]: option.value for name, option in job.given.items() if FORMS[name][0]}
    with job.refusing():
        resources(job)
    outputs(job)
