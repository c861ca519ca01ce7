"""Sums over two nodes compared with the network itself and with torch.distributed, and steps of training with each.

In this folder: farandole run --hosts node-1,node-2 -- python wire.py. It prints a line of JSON. All ways take turns
within one job, so that their ratios hold on a machine that is busy with other things as well.
"""

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.common.util import network_interface

SIZES = [8, 1 << 10, 1 << 16, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
# Seconds that a way has for a size, in so many turns.
SECONDS, TURNS = 0.4, 3
# What takes longer is called once in a turn.
SLOW_S = 2
IDLE_S = 4
# Layers, the width of each, and examples in a batch. The last one computes most of the time, as real training does.
MODELS = {"200 small tensors": (100, 64, 128), "4 large tensors": (4, 1400, 128), "large batches": (4, 512, 4096)}


class Wire:
    """A connection of its own between the two nodes, on which both send at once."""

    def __init__(self, rank: int) -> None:
        listener = socket.create_server(("", 0)) if rank == 0 else None
        own = (hvd_host(), listener.getsockname()[1]) if listener else None
        where = hvd.broadcast_object(own, 0, name="wire")
        self.socket = listener.accept()[0] if listener else socket.create_connection(where)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, sent: bytearray, got: bytearray) -> None:
        sender, rest = None, memoryview(got)
        if len(sent) > 1 << 16:
            sender = threading.Thread(target=self.socket.sendall, args=(sent,))
            sender.start()
        else:
            self.socket.sendall(sent)
        while rest:
            rest = rest[self.socket.recv_into(rest) :]
        if sender:
            sender.join()


def hvd_host() -> str:
    """This node's address in the cluster's network."""
    return socket.gethostbyname(socket.gethostname())


def timed(meet: Callable[[], None], action: Callable[[], object], seconds: float) -> list[float]:
    """How long each call of an action takes that both ranks do as often."""
    meet()
    begun = time.perf_counter()
    action()
    once = hvd.broadcast(torch.tensor([time.perf_counter() - begun]), 0).item()
    often = max(1 if once > SLOW_S else 3, min(2000, int(seconds / once)))
    took = []
    for _ in range(often):
        begun = time.perf_counter()
        action()
        took.append(time.perf_counter() - begun)
    return took


def sums(meet: Callable[[], None], wire: Wire, largest: int) -> dict[int, dict[str, float]]:
    """The median seconds of a sum of each size in each way."""
    result = {}
    for size in [size for size in SIZES if size <= largest]:
        tensor = torch.ones(size // 4)
        ways: dict[str, Callable[[], object]] = {
            "wire": partial(wire.exchange, bytearray(size), bytearray(size)),
            "torch": partial(dist.all_reduce, tensor),
            "horovod": partial(hvd.allreduce_, tensor, op=hvd.Sum, name=f"of {size}"),
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(TURNS):
            for way, action in ways.items():
                took[way] += timed(meet, action, SECONDS / TURNS)
        result[size] = {way: statistics.median(some) for way, some in took.items()}
    return result


def trainer(layers: int, width: int, batch: int, way: str) -> Callable[[], None]:
    """A step of training."""
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way == "torch":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if way == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    x = torch.rand(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def training(meet: Callable[[], None]) -> dict[str, dict[str, list[float]]]:
    """The median seconds of a step alone and together, and the processor seconds of one."""
    result = {}
    for name, sizes in MODELS.items():
        steps = {way: trainer(*sizes, way) for way in ("alone", "torch", "horovod")}
        took: dict[str, list[float]] = {way: [] for way in steps}
        used = dict.fromkeys(steps, 0.0)
        for _ in range(2 * TURNS):
            for way, step in steps.items():
                before = time.process_time()
                some = timed(meet, step, SECONDS)
                used[way] += time.process_time() - before
                took[way] += some
        result[name] = {way: [statistics.median(some), used[way] / len(some)] for way, some in took.items()}
    return result


def main() -> None:
    """Measure, and print what rank 0 has measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--largest", type=int, default=SIZES[-1] >> 20, help="MiB of the largest sum")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    if network := os.environ.get("HOROVOD_NETWORK"):
        os.environ["GLOO_SOCKET_IFNAME"] = network_interface(network)
    wire = Wire(rank)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    host, port = hvd.broadcast_object((hvd_host(), port), 0, name="torch")
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=hvd.size())

    def meet() -> None:
        wire.exchange(bytearray(1), bytearray(1))

    meet()
    before = time.process_time()
    time.sleep(IDLE_S)
    idle = (time.process_time() - before) / IDLE_S
    result = {
        "sums": sums(meet, wire, options.largest << 20),
        "idle": idle,
        "training": {} if options.no_training else training(meet),
    }
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
