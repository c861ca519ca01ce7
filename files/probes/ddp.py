"""LeNet-5 without Horovod: mpirun -np 2 -H node-1:1,node-2:1 --bind-to none python ddp.py --master node-1

The yardstick of the sample pytorch_mnist.py: the same training with PyTorch's own DistributedDataParallel over Gloo.
Every rank prints its speed as a line of JSON; one that finds something wrong says what, and the job's status is not 0.
"""

import argparse
import gzip
import hashlib
import json
import math
import os
import socket
import struct
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

CURRENT = Path("/opt/farandole/current")
STAGED = Path(os.environ.get("MNIST_DATA", "/opt/farandole/data/mnist"))
FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
RANDOM = 60_000
PATIENCE = 60


def arguments(environment):
    """How to train, and with whom."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", help="name or address of the node of rank 0; one rank needs none")
    parser.add_argument("--port", type=int, default=port(environment), help="free on that node; default: by the job")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step, of each rank")
    parser.add_argument("--steps", type=int, default=100, help="of each rank, of which the first 5 are not measured")
    parser.add_argument(
        "--images", type=int, default=0, help="train with so many, shown again where there are fewer; 0: all"
    )
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.5, help="of the optimizer")
    parser.add_argument("--seed", type=int, default=42, help="of the first weights and of the order of the images")
    options = parser.parse_args()
    if options.steps <= Meter.WARM_UP:
        parser.error(f"--steps has to be more than {Meter.WARM_UP}")
    if place(environment)[1] > 1 and not options.master:
        parser.error("--master is needed by more than one rank")
    return options


def place(environment):
    """This rank's number and how many there are, as mpirun says."""
    return int(environment.get("OMPI_COMM_WORLD_RANK", "0")), int(environment.get("OMPI_COMM_WORLD_SIZE", "1"))


def port(environment):
    """The same for all ranks of a job and another for the next; below those that the kernel gives away."""
    return 20_000 + zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode()) % 12_000


class Meter:
    """Images per second, without the steps in which everything starts; as the samples measure it."""

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
        """Of this rank."""
        return self.images / (self.ended - self.begun) if self.images else 0.0


def fingerprint(weights):
    """The same on all ranks when all weights are the same to the bit."""
    digest = hashlib.sha256()
    for one in weights:
        digest.update(one.tobytes())
    return digest.hexdigest()[:16]


def read(path):
    """Shape and bytes of an IDX file."""
    with gzip.open(path) as file:
        zero, kind, dimensions = struct.unpack(">HBB", file.read(4))
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        content = file.read()
    if (zero, kind) != (0, 8) or len(content) != math.prod(shape):
        raise ValueError("no IDX file of bytes, or cut short")
    return shape, content


def staged(folder):
    """Images and labels that are on this node, None when there are none."""
    if not all((folder / name).is_file() for name in FILES):
        return None
    found = []
    for name in FILES:
        try:
            found.append(read(folder / name))
        except (OSError, EOFError, struct.error, zlib.error, ValueError) as error:
            raise SystemExit(f"{socket.gethostname()}: {folder / name} is damaged ({error}); run site.yml") from None
    return found


def dataset(torch, count):
    """Images, normalised as everybody normalises MNIST, and their labels; where none are staged, random ones."""
    if found := staged(STAGED):
        (shape, pixels), (_, labels) = found
        pixels = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
        labels = torch.frombuffer(bytearray(labels), dtype=torch.uint8)
    else:
        seeded = torch.Generator().manual_seed(1)
        pixels = torch.randint(0, 256, (count or RANDOM, 28, 28), dtype=torch.uint8, generator=seeded)
        labels = torch.randint(0, 10, (count or RANDOM,), dtype=torch.uint8, generator=seeded)
    chosen = torch.arange(count or len(pixels)) % len(pixels)
    pixels, labels = pixels[chosen], labels[chosen]
    x = (pixels.float().unsqueeze(1) / 255 - 0.1307) / 0.3081
    return torch.utils.data.TensorDataset(x, labels.long())


def lenet5(torch):
    """Two convolutions, three layers."""
    nn = torch.nn
    pooled = (nn.ReLU(), nn.MaxPool2d(2))
    convolutions = (nn.Conv2d(1, 6, 5, padding=2), *pooled, nn.Conv2d(6, 16, 5), *pooled, nn.Flatten())
    return nn.Sequential(
        *convolutions, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    )


def join(dist, options, rank, size):
    """Meet the other ranks, or say within a minute why not."""
    limit = timedelta(seconds=PATIENCE)
    at, number = (options.master, options.port) if size > 1 else ("127.0.0.1", 0)
    try:
        store = dist.TCPStore(at, number, size, rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        return f"{size} ranks did not meet at {at}, port {number}, within {PATIENCE} s: {why}; see --master and --port"
    return ""


def train(torch, model, data, options, rank, size):
    """So many steps; how fast they were, and the last loss."""
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=size, rank=rank, seed=options.seed)
    batches = torch.utils.data.DataLoader(data, options.batch_size, sampler=sampler, drop_last=True)
    # The samples' rate is that of one rank times their number as well.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * size, momentum=options.momentum)
    meter, epoch = Meter(), 0
    while True:
        epoch += 1
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            meter.step(len(images))
            if meter.steps == options.steps:
                return meter.rate(), loss.item()


def judge(ranks):
    """What is wrong with the job as a whole; every rank comes to the same."""
    hosts = {}
    for one in ranks:
        hosts.setdefault(one["weights"], []).append(one["host"])
    if len(hosts) > 1:
        yield "the weights differ: " + "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
    for one in ranks:
        if not math.isfinite(one["loss"]):
            yield f"the loss of rank {one['rank']} on {one['host']} is {one['loss']}"


def short(count, options, size):
    """What is wrong with too few images: an epoch without a step would never end."""
    if count // size < options.batch_size:
        return f"{count} images are less than a batch of {options.batch_size} for each of {size} ranks; see --images"
    return ""


def tell(own, wrong, here):
    """A line of JSON, and what is wrong once more for people, said here or by another rank."""
    print(json.dumps({**own, "wrong": wrong}), flush=True)
    for words in wrong if here else ():
        print(f"{own['host']}, rank {own['rank']}: {words}", file=sys.stderr, flush=True)
    return int(bool(wrong))


def main():
    """Join the job, train, compare, say."""
    options = arguments(os.environ)
    rank, size = place(os.environ)
    import torch
    import torch.distributed as dist

    own = {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "python": sys.executable,
        "stack": CURRENT.resolve().name if CURRENT.is_symlink() else "",
        "rate": 0.0,
        "weights": "",
    }
    torch.manual_seed(options.seed)
    # One CPU thread for each rank, as the sample has it.
    torch.set_num_threads(1)
    data = dataset(torch, options.images)
    if words := short(len(data), options, size) or join(dist, options, rank, size):
        return tell(own, [words], here=True)
    model = torch.nn.parallel.DistributedDataParallel(lenet5(torch))
    rate, loss = train(torch, model, data, options, rank, size)
    weights = fingerprint(one.numpy() for one in model.module.state_dict().values())
    own |= {"rate": round(rate, 1), "weights": weights, "loss": loss}
    ranks = [None] * size
    dist.all_gather_object(ranks, own)
    code = tell(own, list(judge(ranks)), here=rank == 0)
    # Rank 0 keeps the store in which all of them meet.
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
