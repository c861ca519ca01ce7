"""What every sample does around the training: its options, its speed, the proof that they trained together."""

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import mnist

CURRENT = Path("/opt/farandole/current")


def arguments(description, **defaults):
    """The options that all samples have, each with the sample's own default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    batch_size = defaults.pop("batch_size", 128)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="images per step, of each worker")
    parser.add_argument("--lr", type=float, default=defaults.pop("lr"), help="learning rate of one worker")
    parser.add_argument("--seed", type=int, default=42, help="of the first weights and of the order of the images")
    parser.add_argument(
        "--images", type=int, default=0, help="train with so many, shown again where there are fewer; 0: all"
    )
    parser.add_argument("--checkpoints", type=Path, help="folder to keep them in and to go on from; else none is kept")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    for name, (kind, value, words) in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=words)
    return parser.parse_args()


def threads():
    """How many a rank computes with: what the job says, else one."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


class Meter:
    """Images per second, without the steps in which everything starts."""

    WARM_UP = 5

    def __init__(self):
        self.steps = self.images = 0
        self.begun = self.ended = 0.0

    def step(self, images):
        """One step is done."""
        self.steps += 1
        self.ended = time.perf_counter()
        if self.steps <= self.WARM_UP:
            self.begun = self.ended
        else:
            self.images += images

    def rate(self):
        """Of this worker."""
        return self.images / (self.ended - self.begun) if self.images else 0.0


def count(number, thing):
    """As one says it."""
    return f"{number} {thing}{'s' * (number != 1)}"


def fingerprint(weights):
    """The same on all ranks when all weights are the same to the bit."""
    digest = hashlib.sha256()
    for one in weights:
        digest.update(one.tobytes())
    return digest.hexdigest()[:16]


def finish(options, gather, rank, size, weights, meter, accuracy, loss):
    """Compare the ranks; rank 0 says what came of the job. Status 1 when they did not train together.

    `gather` brings what every rank hands in to all of them.
    """
    own = {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": CURRENT.resolve().name if CURRENT.is_symlink() else "",
        "weights": fingerprint(weights),
        "rate": round(meter.rate(), 1),
    }
    ranks = gather(own)
    kinds = {one["weights"]: one["host"] for one in ranks}
    together = len(kinds) == 1
    if rank == 0:
        total = sum(one["rate"] for one in ranks)
        machines = len({one["machine"] for one in ranks})
        print(
            f"{count(size, 'worker')} on {count(machines, 'machine')}: accuracy {accuracy:.4f}, loss {loss:.4f}, "
            f"{total:.0f} images/s, data: {mnist.source()}",
            flush=True,
        )
        if not together:
            print(f"the weights differ between {' and '.join(kinds.values())}", file=sys.stderr, flush=True)
        if options.json:
            told = {"accuracy": accuracy, "loss": loss, "rate": round(total, 1), "data": mnist.source()}
            print(json.dumps({"sample": Path(sys.argv[0]).name, **told, "ranks": ranks}), flush=True)
    return 0 if together else 1
