"""The jobs that validate a cluster, in the order in which they run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farandole.validation.judge import Bars

SAMPLES = "/opt/farandole/samples"
MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
# Not where Keras is older than its name says.
KERAS_3 = "keras_3.py"
# By sample: its framework, Horovod's controller, the learning rate of one worker, and how long it trains.
TRAINING: Mapping[str, tuple[str, str, float, str, int]] = {
    "tensorflow_session.py": ("tensorflow", "mpi", 0.001, "--steps", 300),
    "tensorflow_tape.py": ("tensorflow", "gloo", 0.001, "--epochs", 12),
    "Keras_TF_MultiNode_GPU.py": ("tensorflow", "mpi", 1.0, "--epochs", 12),
    KERAS_3: ("tensorflow", "gloo", 0.001, "--epochs", 12),
    "pytorch_mnist.py": ("pytorch", "gloo", 0.05, "--epochs", 12),
}
# Trained by one worker and by all of them on the same images in the same order, to compare the loss.
PARITY: Mapping[str, tuple[str, float]] = {
    "pytorch_mnist.py": ("pytorch", 0.05),
    "tensorflow_tape.py": ("tensorflow", 0.001),
}
# Images per step over all workers, in training and for parity.
GLOBAL_BATCH = 128
# How long Gloo waits for the other ranks, unless told otherwise.
GLOO_SECONDS = 30
# Upper limit for measuring the training speed; on idle nodes a quarter of it is enough.
SPEED_SECONDS = 45
# Of the job that finds out whether the queue's limits hold.
LIMIT_SECONDS = 240
# A job through the queue that must also be in its accounting, with the person, the number of nodes and the exit status.
QUEUE = """
name=farandole-validate-$$ nodes=$1
shift
salloc --quiet --job-name="$name" "$@" || exit
for _ in $(seq 20); do
  seen=$(sacct --noheader --parsable2 --allocations --name="$name" --format=user,nnodes,state,exitcode)
  [ "$seen" != "$(id -un)|$nodes|COMPLETED|0:0" ] || exit 0
  sleep 0.5
done
echo "the accounting says '$seen' of this job, not $(id -un)|$nodes|COMPLETED|0:0" >&2
exit 1
"""


@dataclass(frozen=True)
class PlannedJob:
    """A job to run on the head."""

    id: str
    group: str
    title: str
    nodes: tuple[str, ...]
    argv: tuple[str, ...]
    seconds: int
    # The probe whose text replaces {probe} among the arguments.
    probe: str = ""


def horovodrun(controller: str, nodes: Sequence[str], seconds: int = 0) -> tuple[str, ...]:
    """The horovodrun command for a worker on each of these nodes, or as the allocation of the queue says.

    Where jobs may take longer, Gloo waits longer for ranks."""
    longer = controller == "gloo" and seconds // 4 > GLOO_SECONDS
    patience = ("--gloo-timeout-seconds", str(seconds // 4)) if longer else ()
    return "/usr/local/bin/horovodrun", f"--{controller}", *patience, *_workers(nodes), "python"


def _workers(nodes: Sequence[str]) -> tuple[str, ...]:
    return ("-np", str(len(nodes)), "-H", ",".join(f"{node}:1" for node in nodes)) if nodes else ()


def jobs(
    nodes: Sequence[str], frameworks: Sequence[str], seconds: int, bars: Bars, *, quick: bool, gpu: bool = False,
    queue: Sequence[str] = (), keras_3: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """All jobs, or only those that take half a minute; one through the queue, on those nodes that have one."""
    exported = ("-x", "FARANDOLE_JOB", "-x", "OMP_NUM_THREADS")
    argv = ("/usr/local/bin/mpirun", *_workers(nodes), "--bind-to", "none", *exported, "python")
    argv += ("-c", "{probe}", "--expect", str(len(nodes)))
    title = "ring, sums, latency and bandwidth over MPI"
    planned = [PlannedJob("mpi", "mpi", title, tuple(nodes), argv, seconds, "mpi")]
    planned += _horovod(nodes, frameworks, seconds, quick=quick, gpu=gpu)
    members = [node for node in nodes if node in queue]
    planned += _queued(members, frameworks, seconds)
    if not quick:
        planned += _limits(members, seconds)
        samples = [sample for sample in TRAINING if keras_3 or sample != KERAS_3]
        planned += [*_training(nodes, frameworks, seconds, samples), *_parity(nodes, frameworks, seconds)]
        if "pytorch" in frameworks and len(nodes) > 1:
            planned += [_network(nodes, seconds), _speed(nodes, seconds, bars)]
    return [asdict(job) for job in planned]


def _horovod(
    nodes: Sequence[str], frameworks: Sequence[str], seconds: int, *, quick: bool, gpu: bool
) -> Iterator[PlannedJob]:
    # NCCL moves data between GPUs; Gloo then only coordinates.
    ways = {"gloo": "gloo"} | ({} if quick else {"mpi": "mpi"}) | ({"nccl": "gloo"} if gpu else {})
    for place, framework in enumerate(sorted(frameworks)):
        module = MODULES[framework]
        for way, controller in ways.items():
            probe = ["-c", "{probe}", module, "--expect", str(len(nodes)), *["--gpu"] * (way == "nccl")]
            # Of the processor once, and of each GPU.
            probe += ["--pace"] * (way == "nccl" or (way == "gloo" and place == 0))
            argv = (*horovodrun(controller, nodes, seconds), *probe)
            title = f"{module} over {way}"
            yield PlannedJob(f"horovod.{module}.{way}", "horovod", title, tuple(nodes), argv, seconds, "allreduce")


def _queued(nodes: Sequence[str], frameworks: Sequence[str], seconds: int) -> Iterator[PlannedJob]:
    """Sum over ranks on nodes that Slurm has allocated."""
    if not nodes or not frameworks:
        return
    module, count = MODULES[min(frameworks)], str(len(nodes))
    where = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}")
    # In an allocation it needs no hosts.
    launch = (*horovodrun("gloo", (), seconds), "-c", "{probe}", module, "--expect", count)
    argv = ("sh", "-c", QUEUE, "queue", count, *where, "--time=10", *launch)
    title = f"{module} through the queue"
    yield PlannedJob("queue", "queue", title, tuple(nodes), argv, seconds, "allreduce")


def _limits(nodes: Sequence[str], seconds: int) -> Iterator[PlannedJob]:
    """Take more memory and more time than asked for."""
    if nodes:
        argv = ("python3", "-c", "{probe}", ",".join(nodes))
        # Slurm counts a limit in minutes, and looks at it every half minute.
        most = max(seconds, LIMIT_SECONDS)
        yield PlannedJob(
            "queue.limits", "limits", "the queue's limits of memory and time", tuple(nodes), argv, most, "limits"
        )


def _training(
    nodes: Sequence[str], frameworks: Sequence[str], seconds: int, samples: Sequence[str]
) -> Iterator[PlannedJob]:
    """Train with the same number of images per step, and of steps, whatever the number of workers."""
    count = len(nodes)
    for sample in samples:
        framework, controller, rate, option, amount = TRAINING[sample]
        if framework not in frameworks:
            continue
        size = ("--batch-size", str(max(1, GLOBAL_BATCH // count)), "--lr", str(rate / count))
        # With more workers than images per step, each worker gets one image and an epoch has fewer steps.
        epochs = amount * math.ceil(count / GLOBAL_BATCH)
        learn = (option, str(amount * count if option == "--steps" else epochs))
        argv = (*horovodrun(controller, nodes, seconds), f"{SAMPLES}/{sample}", "--json", *size, *learn)
        name = sample.removesuffix(".py")
        yield PlannedJob(f"training.{name}", "training", f"{sample} over {controller}", tuple(nodes), argv, seconds)


def _parity(nodes: Sequence[str], frameworks: Sequence[str], seconds: int) -> Iterator[PlannedJob]:
    share = max(1, GLOBAL_BATCH // len(nodes))
    images = str(share * len(nodes) * 4)
    for sample, (framework, rate) in PARITY.items():
        if framework not in frameworks or len(nodes) == 1:
            continue
        name = sample.removesuffix(".py")
        for which, some, batch in (("one", nodes[:1], share * len(nodes)), ("all", nodes, share)):
            # Samples multiply the rate by the number of workers; here both jobs have to make the same steps.
            size = ("--images", images, "--batch-size", str(batch))
            options = ("--json", "--epochs", "3", *size, "--lr", str(rate / len(some)))
            argv = (*horovodrun("gloo", some, seconds), f"{SAMPLES}/{sample}", *options)
            title = f"{sample}, {len(some)} worker{'s' * (len(some) > 1)}, the same images in each step"
            yield PlannedJob(f"parity.{name}.{which}", "parity", title, tuple(some), argv, seconds)


def _network(nodes: Sequence[str], seconds: int) -> PlannedJob:
    """Exchange larger gradients than those of the samples, which every network carries."""
    options = ("--model-mb", "25", "--step-ms", "100", "--steps", "8", "--seconds", str(min(15, seconds // 4)))
    argv = (*horovodrun("gloo", nodes, seconds), f"{SAMPLES}/gradient_steps.py", "--json", *options)
    return PlannedJob("network", "network", "steps with 25 MB of gradients", tuple(nodes), argv, seconds)


def _speed(nodes: Sequence[str], seconds: int, bars: Bars) -> PlannedJob:
    """Measure training speed; workers also train alone at the same time, as nodes may share a machine."""
    measuring = str(max(10, min(SPEED_SECONDS, seconds // 2)))
    argv = (*horovodrun("mpi", nodes), "-c", "{probe}", "--master", nodes[0], "--seconds", measuring)
    argv += ("--efficiency", str(bars.efficiency), "--yardstick", str(bars.yardstick))
    title = "training alone, with Horovod, with torch.distributed"
    return PlannedJob("speed", "speed", title, tuple(nodes), argv, seconds, "speed")
