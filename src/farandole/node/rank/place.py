"""The place of a rank among all of them, in the variables from which each framework reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DEVICES = Path("/dev")
# Which of its options torchrun gets from the run. It takes a dash or an underscore in each.
OF_TORCHRUN = re.compile(
    r"--(nnodes|nproc[-_]per[-_]node|node[-_]rank|master[-_](addr|port)|rdzv[-_]\w+|local[-_]addr|standalone)(=.*)?"
)


class Place(NamedTuple):
    """A rank's numbers."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


def place(rank: int, slots: Mapping[str, int]) -> Place:
    """The place of a rank; the launchers fill the nodes in order."""
    first = 0
    for node, count in enumerate(slots.values()):
        if rank < first + count:
            return Place(rank, sum(slots.values()), rank - first, count, node)
        first += count
    raise ValueError(f"there is no rank {rank}")


def variables(at: Place, slots: Mapping[str, int], port: int) -> dict[str, str]:
    """How torch.distributed, JAX and TensorFlow learn their place, and Lightning in the queue."""
    master = next(iter(slots))
    workers = [f"{node}:{port + local}" for node, count in slots.items() for local in range(count)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": at.rank}}
    return {
        "RANK": str(at.rank), "WORLD_SIZE": str(at.size), "LOCAL_RANK": str(at.local_rank),
        "LOCAL_WORLD_SIZE": str(at.local_size), "NODE_RANK": str(at.node), "MASTER_ADDR": master,
        "MASTER_PORT": str(port), "JAX_COORDINATOR_ADDRESS": f"{master}:{port}",
        "TF_CONFIG": json.dumps(task), "SLURM_PROCID": str(at.rank),
        "SLURM_LOCALID": str(at.local_rank), "SLURM_NODEID": str(at.node),
    }  # fmt: skip


def alone(at: Place) -> dict[str, str]:
    """What a program gets that is one of many independent ones; a GPU of its own, if there are enough."""
    gpus = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    own = {"CUDA_VISIBLE_DEVICES": str(at.local_rank)} if len(gpus) >= at.local_size else {}
    return {"FARANDOLE_SLOT": str(at.rank), "FARANDOLE_SLOTS": str(at.size), **own}


def length_of_torchrun(program: list[str]) -> int:
    """How many words of a program start torchrun, with those of env in front; none if it is another program."""
    first = 0
    if program[0] == "env":
        first = next((place for place, word in enumerate(program) if place and "=" not in word), len(program))
    name, more = Path(program[first]).name if first < len(program) else "", program[first + 1 : first + 3]
    if name == "torchrun":
        return first + 1
    return first + 3 if re.fullmatch(r"python[\d.]*", name) and more == ["-m", "torch.distributed.run"] else 0


def refuse_options_of_torchrun(program: list[str]) -> str:
    """Why the options that a user gives torchrun cannot be, as the run sets them; empty if they can."""
    for word in program[length_of_torchrun(program) :]:
        if not word.startswith("-") and word.endswith(".py"):
            break
        if OF_TORCHRUN.fullmatch(word):
            option = word.partition("=")[0]
            return f"{option}: farandole run tells torchrun where it runs; leave this out, and use --hosts and -np"
    return ""


def torchrun(program: list[str], at: Place, slots: Mapping[str, int], port: int) -> list[str]:
    """The command that starts the ranks of a node."""
    words = length_of_torchrun(program)
    options = {
        "nnodes": len(slots), "nproc-per-node": at.local_size, "node-rank": at.node, "master-addr": next(iter(slots)),
        "master-port": port,
    }  # fmt: skip
    return [*program[:words], *(f"--{name}={value}" for name, value in options.items()), *program[words:]]
