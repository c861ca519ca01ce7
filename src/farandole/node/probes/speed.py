"""Measure the cost of training together: horovodrun --mpi -np 2 -H node-1:1,node-2:1 python speed.py --master node-1

One model is trained in three ways: on every node by itself, on all nodes with Horovod, and on all nodes with PyTorch's
own DistributedDataParallel over Gloo. The ways take turns of half a second, so that a machine that slows down slows all
three. Rounds in which other programs kept a rank waiting are marked; rounds are repeated until enough of them were
quiet and agree or are clearly fast enough, or time is up.
"""

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NoReturn, cast

sys.path.insert(0, "/opt/farandole/samples")

import horovod.torch as hvd
import proof
import torch
import torch.distributed as dist
from horovod.common.util import network_interface
from pytorch_mnist import LeNet5, datasets

from farandole.node.probes import ranks
from farandole.node.probes.ranks import waiting

WAYS = ("alone", "horovod", "ddp")
BATCH, IMAGES = 512, 8192
WARM_UP = 5
TURN_S = 0.5
# This many quiet rounds are enough once they agree to a tenth, or all but a sixth of them reach the bar.
ENOUGH, AGREE, MISSES = 7, 0.1, 6
# A rank was disturbed if it waited for a processor this share of the time while other programs used this many cores.
WAITED, OTHERS = 0.03, 0.15
PATIENCE = timedelta(seconds=60)
PR_SET_PDEATHSIG = 1
Options = argparse.Namespace


class Worker:
    """A process that trains in one way. It is stopped between its turns, so that it takes no time from the others."""

    def __init__(self, way: str, options: Options, data: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.way = way
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=learn, args=(way, options, data, far_end), daemon=True)
        self.process.start()
        self.pid = cast(int, self.process.pid)
        far_end.close()

    def answer(self) -> Any:
        """Wait for the worker's next message."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            end_like(self.process.exitcode)

    def stop(self) -> None:
        """Stop the worker until its next turn."""
        os.kill(self.pid, signal.SIGSTOP)

    def turn(self, steps: int) -> dict[str, Any]:
        """Let the worker train for some steps and return the result."""
        os.kill(self.pid, signal.SIGCONT)
        self.pipe.send(steps)
        result: dict[str, Any] = self.answer()
        self.stop()
        return result

    def end(self) -> Any:
        """Let the worker exit and return its final message."""
        os.kill(self.pid, signal.SIGCONT)
        self.pipe.send(None)
        last = self.answer()
        self.process.join()
        return last


def end_like(status: int | None) -> NoReturn:
    """Exit as a worker did, which has printed the reason; after a signal, the launcher prints it."""
    if status and status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status or 1)


def learn(way: str, options: Options, data: Any, pipe: Any) -> None:
    """Train in a worker process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.manual_seed(options.seed)
    # As in the sample.
    torch.set_num_threads(1)
    model = LeNet5()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    if way == "horovod":
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), num_groups=1)
    elif way == "ddp":
        if network := os.environ.get("HOROVOD_NETWORK"):
            # horovodrun passes on the name that the interface has on the head.
            os.environ["GLOO_SOCKET_IFNAME"] = network_interface(network)
        store = dist.PrefixStore("ddp", meet(options, is_master=False))
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.size, timeout=PATIENCE)
        model = torch.nn.parallel.DistributedDataParallel(model)
    batches = chain.from_iterable(repeat(torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)))

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    pipe.send(None)
    while steps := pipe.recv():
        begun, waited = time.perf_counter(), waiting()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - begun
        pipe.send({"seconds": seconds, "waited": (waiting() - waited) / seconds})
    if way == "horovod":
        hvd.shutdown()
    pipe.send(proof.fingerprint([tensor.numpy() for tensor in model.state_dict().values()]))


def used(process: int) -> float:
    """The processor seconds that a process has used, with all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def meet(options: Options, *, is_master: bool) -> Any:
    """Open the store through which the ranks coordinate their turns."""
    # The same port for all ranks of a job and another for the next job, below the kernel's ephemeral ports.
    port = 20_000 + zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode()) % 12_000
    try:
        return dist.TCPStore(options.master, port, None, is_master, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        ranks.fail("ddp-not-met", f"{options.size} ranks, port {port}: {reason}", options.master)


class Conductor:
    """Coordinates the turns; every rank has one, and that of rank 0 gives the orders and collects the results."""

    def __init__(self, options: Options, store: Any, workers: Mapping[str, Worker]) -> None:
        self.rank, self.size, self.store, self.workers = options.rank, options.size, store, workers
        self.number = 0
        self.machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def lead(self, way: str, steps: int) -> list[dict[str, Any]]:
        """Rank 0: let all ranks take a turn, and collect their results."""
        self.store.set(f"order {self.number}", json.dumps([way, steps]))
        mine, number = self.follow(), self.number - 1
        return [mine, *(json.loads(self.store.get(f"answer {number} {rank}")) for rank in range(1, self.size))]

    def dismiss(self) -> None:
        """Rank 0: there are no more turns."""
        self.store.set(f"order {self.number}", "null")

    def follow(self) -> dict[str, Any] | None:
        """Take the next turn; None if there are no more."""
        if not (order := json.loads(self.store.get(f"order {self.number}"))):
            return None
        way, steps = order
        before, own = ranks.processors()[0], self.used()
        answer = self.workers[way].turn(steps)
        answer.update(
            busy=ranks.processors()[0] - before, own=self.used() - own, machine=self.machine, host=socket.gethostname()
        )
        if self.rank:
            self.store.set(f"answer {self.number} {self.rank}", json.dumps(answer))
        self.number += 1
        return answer

    def used(self) -> float:
        """The processor seconds that the workers have used."""
        return sum(used(worker.pid) for worker in self.workers.values())


def disturbance(answers: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """How many cores other programs used while a rank waited for one, and on which host; 0 if none was disturbed."""
    worst, where = 0.0, ""
    for machine in {answer["machine"] for answer in answers}:
        # Nodes that share a machine share its processors.
        here = [answer for answer in answers if answer["machine"] == machine]
        seconds = max(answer["seconds"] for answer in here)
        others = (max(answer["busy"] for answer in here) - sum(answer["own"] for answer in here)) / seconds
        if max(answer["waited"] for answer in here) > WAITED and others > max(worst, OTHERS):
            worst, where = others, here[0]["host"]
    return worst, where


def settled(rounds: Sequence[dict[str, Any]], way: str, bar: float) -> bool:
    """Whether the ratios of Horovod to another way agree, or nearly all of them reach the bar."""
    ratios = sorted(turn["horovod"] / turn[way] for turn in rounds)
    # Without the smallest and the largest.
    agree = ratios[-2] - ratios[1] < AGREE * statistics.median(ratios)
    # That something is slow is never decided early.
    return bool(agree or ratios[len(ratios) // MISSES] >= bar)


def measure(conductor: Conductor, seconds: float, bars: Mapping[str, float]) -> None:
    """Do rounds until enough quiet ones settle it, or time is up; every other round reverses the order of the ways."""
    until = time.monotonic() + seconds
    tried = max(answer["seconds"] for answer in conductor.lead("alone", WARM_UP))
    steps = max(2, round(TURN_S * WARM_UP / tried))
    rounds: list[dict[str, Any]] = []
    while time.monotonic() < until:
        rates, worst, where = {}, 0.0, ""
        for way in WAYS if len(rounds) % 2 else reversed(WAYS):
            answers = conductor.lead(way, steps)
            rates[way] = round(sum(steps * BATCH / answer["seconds"] for answer in answers), 1)
            worst, where = max((worst, where), disturbance(answers))
        rounds.append({**rates, "quiet": not worst, "others": round(worst, 2), "where": where})
        # One line per round, as launchers split long lines.
        ranks.show({"round": rounds[-1]})
        quiet = [turn for turn in rounds if turn["quiet"]]
        if len(quiet) >= ENOUGH and all(settled(quiet, way, bar) for way, bar in bars.items()):
            return


def main() -> int:
    """Measure, and print the results as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", required=True, help="name of the node of rank 0")
    parser.add_argument("--seconds", type=float, default=45, help="time limit for all rounds")
    for bar in ("efficiency", "yardstick"):
        parser.add_argument(f"--{bar}", type=float, default=math.nan, help="bar of this check")
    options = parser.parse_args()
    options.rank, options.size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    options.seed, options.lr = 42, 0.02
    data, _ = datasets(f"MNIST-data-{options.rank}", IMAGES)

    # The workers come first, as a process with threads is not safe to fork.
    workers = {way: Worker(way, options, data) for way in WAYS}
    store = meet(options, is_master=options.rank == 0)
    for worker in workers.values():
        worker.answer()
    for worker in workers.values():
        worker.stop()
    conductor = Conductor(options, store, workers)
    if options.rank == 0:
        measure(conductor, options.seconds, {"alone": options.efficiency, "ddp": options.yardstick})
        conductor.dismiss()
    while conductor.follow():
        pass
    weights = {way: worker.end() for way, worker in workers.items()}
    sizes = {"batch": BATCH, "gradients_mb": sum(4 * parameter.numel() for parameter in LeNet5().parameters()) / 1e6}
    ranks.show({**ranks.describe(options.rank, options.size), "weights": weights["horovod"], **sizes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
