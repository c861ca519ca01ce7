"""Translate the resources of -l."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from farandole.node.qsub.script import Given, Job, RefusedError

OF_CHUNK = ("ncpus", "mpiprocs", "ompthreads", "ngpus", "mem")
KNOWN = ("select", "nodes", *OF_CHUNK, "walltime", "place")
MEMORY = re.compile(r"(\d{1,15})([kmgt]?)b?", re.IGNORECASE)
CURES = {
    "host": "add  #SBATCH --nodelist=NODE  to the script",
    "procs": "write nodes=N:ppn=P",
    "pmem": "write mem=",
    "vmem": "virtual memory is not limited here; write mem=",
    "cput": "CPU time is not limited here; write walltime=",
}
OTHER = "add  #SBATCH OPTION  to the script; man sbatch lists them"


@dataclass
class Chunk:
    """What PBS gives as one piece, and what becomes a node's share; memory in MiB."""

    count: int
    ncpus: int = 1
    mpiprocs: int = 1
    ompthreads: int = 0
    ngpus: int = 0
    mem: int = 0


def unknown(given: Given, name: str) -> RefusedError:
    return RefusedError(f"{given}: {name!r} cannot be translated to Slurm: {CURES.get(name, OTHER)}")


def number(given: Given, text: str, what: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text) or (int(text) < 1 and what not in ("ngpus", "gpus")):
        raise RefusedError(f"{given}: {what}={text} is no number from 1 on")
    return int(text)


def mebibytes(given: Given, text: str, shares: int = 1) -> int:
    """One of so many shares of a size, rounded up."""
    found = MEMORY.fullmatch(text)
    if not found or not int(found[1]):
        raise RefusedError(f"{given}: {text} is no size; write 512mb or 8gb")
    size: int = int(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " ")
    return max(1, -(-size // (shares << 20)))


def duration(given: Given) -> str:
    """A time as Slurm writes it, to which a bare number would mean minutes."""
    text = given.assigned
    if re.fullmatch(r"\d{1,9}", text):
        text = f"{int(text) // 3600}:{int(text) // 60 % 60:02}:{int(text) % 60:02}"
    if not re.fullmatch(r"(\d{1,6}:)?\d{1,6}:\d\d", text) or not re.search("[1-9]", text):
        # Slurm takes 0 for no limit.
        raise RefusedError(f"{given}: this is no time; write HH:MM:SS, or leave it out for the queue's own limit")
    return text


def chunk_of(given: Given) -> Chunk:
    """The chunk of select= or nodes=."""
    what, _, text = given.value.partition("=")
    if "+" in text:
        cure = "write one chunk of the larger size, or submit two jobs"
        raise RefusedError(f"{given}: Slurm gives all nodes of a job the same; {cure}")
    count, *parts = text.split(":")
    chunk = Chunk(number(given, count, what))
    for name, _, value in (part.partition("=") for part in parts):
        if (what, name) == ("nodes", "ppn"):
            chunk.ncpus = chunk.mpiprocs = number(given, value, name)
            chunk.ompthreads = 1
        elif (what, name) == ("nodes", "gpus"):
            chunk.ngpus = number(given, value, name)
        elif what == "nodes" or name not in OF_CHUNK:
            raise unknown(given, name)
        else:
            setattr(chunk, name, mebibytes(given, value) if name == "mem" else number(given, value, name))
    if chunk.ncpus % chunk.mpiprocs:
        cure = f"write ncpus={-(-chunk.ncpus // chunk.mpiprocs) * chunk.mpiprocs}"
        raise RefusedError(f"{given}: {chunk.ncpus} CPUs cannot be shared evenly by {chunk.mpiprocs} processes; {cure}")
    return chunk


def shape(job: Job) -> Chunk:
    """How many nodes with how much."""
    select, nodes = job.given.get("select"), job.given.get("nodes")
    wide = {name: job.given[name] for name in OF_CHUNK if name in job.given}
    mem = wide.pop("mem", None) if nodes else None
    if select and (beside := nodes or next(iter(wide.values()), None)):
        raise RefusedError(f"{beside}: {select} stands beside it; write both as one, -l select=N:ncpus=C:mem=M")
    if nodes and wide:
        raise RefusedError(f"{next(iter(wide.values()))}: {nodes} stands beside it; write -l select=N:ncpus=C")
    if not nodes:
        first = next(iter(wide.values()), Given("l", "", "resources"))
        return chunk_of(select or replace(first, value=":".join(["select=1", *(one.value for one in wide.values())])))
    chunk = chunk_of(nodes)
    if mem:
        chunk.mem = mebibytes(mem, mem.assigned, chunk.count)
        if chunk.count > 1:
            job.note(mem, f"is for the whole job, and Slurm counts by node: {chunk.mem}mb on each of {chunk.count}")
    return chunk


def place(job: Job, given: Given) -> None:
    for word in given.assigned.split(":"):
        if word in ("excl", "exclhost"):
            job.arguments.append("--exclusive")
        elif word not in ("scatter", "free", "shared"):
            raise RefusedError(f"{given}: {word!r} cannot be translated; each chunk gets a node of its own, or excl")


def resources(job: Job) -> None:
    """Translate everything of -l."""
    for name, given in job.given.items():
        if given.letter == "l" and name not in KNOWN:
            raise unknown(given, given.value.partition("=")[0])
    chunk = shape(job)
    each = chunk.ncpus // chunk.mpiprocs
    job.arguments += [
        f"--nodes={chunk.count}",
        f"--ntasks={chunk.count * chunk.mpiprocs}",
        f"--ntasks-per-node={chunk.mpiprocs}",
        f"--cpus-per-task={each}",
        *([f"--mem={chunk.mem}M"] if chunk.mem else []),
        *([f"--gpus-per-node={chunk.ngpus}"] if chunk.ngpus else []),
    ]
    job.variables["NCPUS"] = str(chunk.ncpus)
    if chunk.ompthreads or not ("V" in job.given and "OMP_NUM_THREADS" in job.environment):
        job.variables["OMP_NUM_THREADS"] = str(chunk.ompthreads or each)
    if where := job.given.get("place"):
        place(job, where)
    if time := job.given.get("walltime"):
        job.arguments.append(f"--time={duration(time)}")
