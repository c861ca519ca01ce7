"""The place of a rank among all of them, in the variables from which each framework reads it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DEVICES = Path("/dev")
# There, what computes in place of processors: of NVIDIA (also in WSL), AMD, Intel, Habana and Google, and Huawei.
ACCELERATORS = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*", "accel*", "vfio/[0-9]*", "davinci[0-9]*")
# Seconds that a rank waits to meet the others before the head learns of it.
PATIENCE = 8
# Programs that start the ranks of a node themselves, and which of their options the run gives them. Both take a dash or
# an underscore in each.
OF_RUN = {
    "torchrun": r"nnodes|nproc.per.node|node.rank|master.(addr|port)|rdzv.\w+|local.addr|standalone",
    "accelerate": r"num.(machines|processes)|machine.rank|main.process.(ip|port)|same.network|rdzv.\w+",
}

# Options of accelerate that choose how it trains, if not with several processes; and the one for processors, which
# cannot be together with that for several.
ANOTHER_WAY = re.compile(r"--(tpu|multi.gpu|use.\w+)$")
ON_CPUS, CPUS = "--cpu", ("ACCELERATE_USE_CPU", "true")


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


def on_processors() -> dict[str, str]:
    """What Accelerate has to be told on a node that has nothing else: by itself, each rank would train alone there."""
    return {} if any(any(DEVICES.glob(pattern)) for pattern in ACCELERATORS) else dict([CPUS])


def alone(at: Place, given: str = "") -> dict[str, str]:
    """What a program gets that is one of many independent ones; a GPU of its own, if there are enough."""
    gpus = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # The queue, or the user, may have chosen some.
    visible = given.split(",") if given else [str(number) for number in range(len(gpus))]
    own = {"CUDA_VISIBLE_DEVICES": visible[at.local_rank]} if len(visible) >= at.local_size else {}
    return {"FARANDOLE_SLOT": str(at.rank), "FARANDOLE_SLOTS": str(at.size), **own}


def words_of_env(program: list[str]) -> int:
    """How many words of a command are env and the variables that it sets."""
    if program[0] != "env":
        return 0
    return next((place for place, word in enumerate(program) if place and "=" not in word), len(program))


def starter(program: list[str]) -> tuple[str, int]:
    """The program that starts the ranks of a node, and how many words start it, with those of env in front; or none."""
    first = words_of_env(program)
    name, more = Path(program[first]).name if first < len(program) else "", program[first + 1 : first + 3]
    if name == "torchrun":
        return name, first + 1
    if name == "accelerate" and more[:1] == ["launch"]:
        return name, first + 2
    is_module = re.fullmatch(r"python[\d.]*", name) and more == ["-m", "torch.distributed.run"]
    return ("torchrun", first + 3) if is_module else ("", 0)


def refused_option(program: list[str]) -> str:
    """Why the options that a user gives to what starts the ranks cannot be; empty if they can."""
    name, words = starter(program)
    for word in options_of(program, words):
        option = word.partition("=")[0]
        if option.startswith("--") and re.fullmatch(OF_RUN[name], option[2:]):
            return f"{option}: farandole run tells {name} where it runs; leave this out, and use --hosts and -np"
    return ""


def options_of(program: list[str], words: int) -> list[str]:
    """The options of what starts the ranks, with their values, and not those of the program that it starts."""
    rest, is_module = program[words:], False
    for place, word in enumerate(rest):
        if word.endswith(".py") or (is_module and not word.startswith("-")):
            return rest[:place]
        is_module = is_module or word in ("-m", "--module")
    return rest


def on_node(program: list[str], at: Place, slots: Mapping[str, int], port: int) -> list[str]:
    """The command that starts the ranks of a node."""
    name, words = starter(program)
    master = next(iter(slots))
    of_run: dict[str, object] = {
        "nnodes": len(slots), "nproc-per-node": at.local_size, "node-rank": at.node,
        "master-addr": master, "master-port": port,
    }  # fmt: skip
    if name == "accelerate":
        of_run = {
            "num_machines": len(slots), "num_processes": at.size, "machine_rank": at.node,
            "main_process_ip": master, "main_process_port": port,
        }  # fmt: skip
    options = [f"--{option}={value}" for option, value in of_run.items()]
    own, rest = program[:words], program[words:]
    if name == "accelerate":
        given = options_of(program, words)
        options.append("--same_network")
        if at.size > 1 and ON_CPUS in given:
            own = ["env", "=".join(CPUS), *own]
            rest = [*(word for word in given if word != ON_CPUS), *rest[len(given) :]]
        # Without GPUs, this only means that it starts several processes.
        options += ["--multi_gpu"] if at.size > 1 and not any(map(ANOTHER_WAY.match, given)) else []
    return [*own, *options, *rest]
