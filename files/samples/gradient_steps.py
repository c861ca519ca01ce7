"""What the network costs a job with large gradients: horovodrun -np 2 -H node-1:1,node-2:1 python gradient_steps.py

A step takes a given time, a third of it for the forward pass, but computes nothing, so that it takes no longer on nodes
that share their processors. What it takes longer with Horovod is what the network costs, which `farandole predict`
predicts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import proof
import torch
from torch import nn, optim

LAYERS = 20
FLOATS_PER_MB = 1_000_000 // 4
WARM_UP = 3
# The steps whose times are in the result.
MOST = 50


class Wait(torch.autograd.Function):
    """Waits instead of computing, twice as long for the backward pass, and returns a known gradient."""

    @staticmethod
    def forward(ctx, x, _weights, gradient, seconds):
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, x):
        time.sleep(2 * ctx.seconds)
        return x, ctx.gradient, None, None


class Model(nn.Module):
    """Layers with equally many weights."""

    def __init__(self, megabytes, seconds):
        super().__init__()
        size = max(1, round(megabytes * FLOATS_PER_MB / LAYERS))
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(LAYERS)])
        self.gradient, self.seconds = torch.ones(size), seconds / 3 / LAYERS

    def forward(self, x):
        for weights in self.layers:
            x = Wait.apply(x, weights, self.gradient, self.seconds)
        return x


def step(model, optimizer):
    """Do a step and return how many seconds it took."""
    begun = time.monotonic()
    optimizer.zero_grad()
    model(torch.ones(1, requires_grad=True)).backward()
    optimizer.step()
    return time.monotonic() - begun


def median(took):
    """The milliseconds of a step; the first ones are slower."""
    return round(1000 * statistics.median(took[WARM_UP:] or took[-1:]), 2)


def main():
    """Do steps alone, then with Horovod, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-mb", type=float, default=100, help="size of the gradients")
    parser.add_argument("--step-ms", type=float, default=250, help="time of a step on one worker")
    parser.add_argument("--steps", type=int, default=10, help="number of steps to measure")
    parser.add_argument("--seconds", type=float, default=60, help="measure fewer if they take longer")
    parser.add_argument("--grouped", action="store_true", help="send the gradients when all are there: num_groups=1")
    parser.add_argument("--json", action="store_true", help="print the result as a line of JSON at the end")
    options = parser.parse_args()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.set_num_threads(1)

    model = Model(options.model_mb, options.step_ms / 1000)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    # Not before all workers have started.
    hvd.allreduce(torch.zeros(1))
    alone = [step(model, optimizer) for _ in range(WARM_UP + options.steps)]

    model.gradient.fill_(rank + 1)
    before = model.layers[0].data.clone()
    groups = {"num_groups": 1} if options.grouped else {}
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **groups)
    until, together, on = time.monotonic() + options.seconds, [], True
    while on:
        together.append(step(model, optimizer))
        late = len(together) == WARM_UP + options.steps or time.monotonic() > until
        on = hvd.broadcast_object(not late, root_rank=0)

    # Every step subtracts the mean of 1, 2, 3 …
    wanted = before - len(together) * (size + 1) / 2
    own = {
        **proof.describe(rank, size),
        "right": all(torch.allclose(layer.data, wanted) for layer in model.layers),
        **{way: median(took) for way, took in (("alone", alone), ("together", together))},
    }
    ranks = hvd.allgather_object(own)
    if rank == 0:
        # The others wait for the slowest.
        result = {f"{way}_ms": max(answer[way] for answer in ranks) for way in ("alone", "together")}
        machines = proof.count(len({answer["machine"] for answer in ranks}), "machine")
        print(
            f"{proof.count(size, 'worker')} on {machines}, {options.model_mb:g} MB of gradients: a step takes "
            f"{result['alone_ms']:.0f} ms alone, {result['together_ms']:.0f} ms with Horovod, efficiency "
            f"{100 * result['alone_ms'] / result['together_ms']:.0f} %",
            flush=True,
        )
        if options.json:
            took = {
                way: [round(1000 * seconds, 2) for seconds in some[:MOST]]
                for way, some in (("alone", alone), ("together", together))
            }
            result |= {"gradients_mb": options.model_mb, "steps_ms": took, "ranks": ranks}
            print(json.dumps({"sample": Path(sys.argv[0]).name, **result}), flush=True)
    if wrong := [answer["host"] for answer in ranks if not answer["right"]]:
        print(f"the mean of the gradients was wrong on {' and '.join(wrong)}", file=sys.stderr, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
