"""The sample pytorch_mnist.py without Horovod: mpirun -np 2 -H node-1:1,node-2:1 python ddp.py --master node-1

A yardstick: the same model learns the same images by PyTorch's own DistributedDataParallel over Gloo.
"""

import os
import sys
import zlib
from datetime import timedelta

sys.path.insert(0, "/opt/farandole/samples")

import proof
import torch
import torch.distributed as dist
from pytorch_mnist import LeNet5, datasets

PATIENCE = timedelta(seconds=60)


def join(options, rank, size):
    """Meet the other ranks, or say within a minute why not."""
    # The same for all ranks of a job and another for the next; below those that the kernel gives away.
    port = 20_000 + zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode()) % 12_000
    try:
        store = dist.TCPStore(options.master, port, size, rank == 0, timeout=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"{size} ranks did not meet at {options.master}, port {port}: {str(error).splitlines()[0]}")


def gather(own):
    """What every rank hands in, for all of them."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def main():
    """Train, compare, say how fast it was."""
    options = proof.arguments(
        __doc__.splitlines()[0],
        lr=0.02,
        momentum=(float, 0.9, "of the optimizer"),
        epochs=(int, 1, "times through all images"),
        master=(str, None, "name of the node of rank 0"),
    )
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
    torch.manual_seed(options.seed)
    # As in the sample.
    torch.set_num_threads(1)
    join(options, rank, size)

    data, test = datasets(f"MNIST-data-{rank}", options.images)
    sampler = torch.utils.data.distributed.DistributedSampler(data, seed=options.seed)
    batches = torch.utils.data.DataLoader(data, options.batch_size, sampler=sampler, drop_last=True)
    model = torch.nn.parallel.DistributedDataParallel(LeNet5())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * size, momentum=options.momentum)
    meter = proof.Meter()
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            meter.step(len(images))
    images, labels = test.tensors
    with torch.no_grad():
        output = model.module(images)
    loss, accuracy = (
        torch.nn.functional.cross_entropy(output, labels).item(),
        (output.argmax(1) == labels).float().mean().item(),
    )
    weights = [one.numpy() for one in model.module.state_dict().values()]
    code = proof.finish(options, gather, rank, size, weights, meter, accuracy, loss)
    # Rank 0 keeps the store in which all of them meet.
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
