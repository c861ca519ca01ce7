"""The parts shared by all samples: options, speed, and the proof that all ranks trained together."""

import argparse
import hashlib
import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import mnist

CURRENT = Path("/opt/farandole/current")


def arguments(description, **defaults):
    """Parse the options common to all samples, with each sample's own defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    batch_size = defaults.pop("batch_size", 128)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="images per step and worker")
    parser.add_argument("--lr", type=float, default=defaults.pop("lr"), help="learning rate per worker")
    parser.add_argument("--seed", type=int, default=42, help="seed for the initial weights and the order of the images")
    parser.add_argument(
        "--images", type=int, default=0, help="number of images to train with, repeated if there are fewer; 0: all"
    )
    if "checkpoints" not in defaults:
        parser.add_argument("--checkpoints", type=Path, help="folder to save checkpoints in and to resume from")
    parser.add_argument("--json", action="store_true", help="print the result as a line of JSON at the end")
    for name, (kind, value, help_text) in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=help_text)
    return parser.parse_args()


def threads():
    """The number of CPU threads per rank: OMP_NUM_THREADS, or 1."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


class Meter:
    """Measures images per second, without the first steps."""

    WARM_UP = 5
    # So many values of the loss are kept at most: of every step, of every second, of every fourth …
    KEPT = 200

    def __init__(self):
        self.steps = self.images = 0
        self.begun = self.ended = 0.0
        self.losses, self.every = [], 1

    def step(self, images, loss=None):
        """Count a finished step, and keep its loss if it is one of those to keep."""
        self.steps += 1
        if loss is not None and self.steps % self.every == 0:
            self.losses.append([self.steps, float(loss)])
            if len(self.losses) > self.KEPT:
                self.every *= 2
                self.losses = [loss for loss in self.losses if loss[0] % self.every == 0]
        self.ended = time.perf_counter()
        if self.steps <= self.WARM_UP:
            self.begun = self.ended
        else:
            self.images += images

    def rate(self):
        """Images per second of this worker."""
        return self.images / (self.ended - self.begun) if self.images else 0.0


def count(number, noun):
    """A number with its noun in the singular or plural."""
    return f"{number} {noun}{'s' * (number != 1)}"


def fingerprint(weights):
    """A digest of the weights, to compare them bit by bit between ranks."""
    digest = hashlib.sha256()
    for array in weights:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def describe(rank, size):
    """A description of this rank."""
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": CURRENT.resolve().name if CURRENT.is_symlink() else "",
    }


def mean_losses(ranks):
    """The loss of some steps, each the mean over all ranks, in lines that no launcher splits."""
    steps = {tuple(step for step, _ in losses) for losses in ranks}
    if len(steps) != 1:
        return
    means = [[step[0][0], round(sum(loss for _, loss in step) / len(step), 6)] for step in zip(*ranks)]
    means = [mean for mean in means if math.isfinite(mean[1])]
    for start in range(0, len(means), 25):
        yield {"losses": means[start : start + 25]}


def finish(options, gather, rank, size, weights, meter, accuracy, loss):
    """Compare the ranks and print the result on rank 0. Returns 1 if they did not train together.

    `gather` collects one object from every rank on all ranks.
    """
    expected = int(os.environ.get("FARANDOLE_RANKS") or size)
    if size != expected:
        problem = f"error: this rank trains with {size} of {expected} ranks, so each trains alone"
        print(f"{problem}: start them with horovodrun, mpirun or  srun --mpi=pmix", file=sys.stderr, flush=True)
        return 1
    own = {
        **describe(rank, size),
        "weights": fingerprint(weights),
        "rate": round(meter.rate(), 1),
        "losses": meter.losses if options.json else [],
        "data": mnist.source(),
    }
    ranks = gather(own)
    # A rank may have images of its own.
    data = " and ".join(dict.fromkeys(answer.pop("data") for answer in ranks))
    losses = list(mean_losses([answer.pop("losses") for answer in ranks]))
    hosts = {answer["weights"]: answer["host"] for answer in ranks}
    together = len(hosts) == 1
    if rank == 0:
        total = sum(answer["rate"] for answer in ranks)
        machines = len({answer["machine"] for answer in ranks})
        print(
            f"{count(size, 'worker')} on {count(machines, 'machine')}: accuracy {accuracy:.4f}, loss {loss:.4f}, "
            f"{total:.0f} images/s, data: {data}",
            flush=True,
        )
        if not together:
            print(f"the weights differ between {' and '.join(hosts.values())}", file=sys.stderr, flush=True)
        if options.json:
            for line in losses:
                print(json.dumps(line), flush=True)
            result = {"accuracy": accuracy, "loss": loss, "rate": round(total, 1), "data": data}
            print(json.dumps({"sample": Path(sys.argv[0]).name, **result, "ranks": ranks}), flush=True)
    return 0 if together else 1
