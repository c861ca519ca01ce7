"""LeNet-5 on MNIST with PyTorch and Horovod: horovodrun -np 2 -H node-1:1,node-2:1 python pytorch_mnist.py"""

import os
import pickle
import shutil
import sys

import horovod.torch as hvd
import mnist
import proof
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from torch import nn, optim


class LeNet5(nn.Module):
    """Two convolutions and three dense layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc3(F.relu(self.fc2(x)))


def datasets(own, images):
    """The training and test data, normalised with MNIST's usual mean and deviation."""
    for pixels, labels in mnist.load_data(own, images):
        x = (torch.from_numpy(pixels).float().unsqueeze(1) / 255 - 0.1307) / 0.3081
        yield torch.utils.data.TensorDataset(x, torch.from_numpy(labels).long())


def loader(dataset, options, shuffle):
    """The batches of this rank's share, and their sampler."""
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle, seed=options.seed
    )
    return torch.utils.data.DataLoader(dataset, options.batch_size, sampler=sampler, drop_last=shuffle), sampler


def metric_average(value, name):
    """The mean over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model, device, batches, sampler, optimizer, epoch, meter, interval):
    """Train for one epoch."""
    model.train()
    # Otherwise every epoch has the same order.
    sampler.set_epoch(epoch)
    for index, (data, target) in enumerate(batches):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        meter.step(len(data), loss.detach())
        if hvd.rank() == 0 and index % interval == 0:
            done = f"{index * len(data)}/{len(sampler)} ({100 * index / len(batches):.0f}%)"
            print(f"Train Epoch: {epoch} [{done}]\tLoss: {loss.item():.6f}", flush=True)


@torch.no_grad()
def test(model, device, batches, sampler):
    """Loss and accuracy over the shares of all ranks."""
    model.eval()
    loss = right = 0.0
    for data, target in batches:
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        right += (output.argmax(1) == target).sum().item()
    loss, accuracy = (metric_average(x / len(sampler), name) for x, name in ((loss, "avg_loss"), (right, "avg_acc")))
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%\n", flush=True)
    return loss, accuracy


def save(folder, epoch, model, optimizer):
    """Write a checkpoint atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    draft, path = folder / "pytorch.part", folder / f"pytorch-{epoch:04}.pt"
    try:
        torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
        draft.replace(path)
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(folder).free >> 20
        draft.unlink(missing_ok=True)
        where = f"{os.uname().nodename}: {path} cannot be written, {free} MiB are free"
        sys.exit(f"{where}: {error}; the checkpoints before it are whole")


def resume(folder, model, optimizer):
    """Load the newest complete checkpoint and return its epoch, or 0."""
    for path in sorted(folder.glob("pytorch-*.pt"), reverse=True):
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            print(f"{path} is damaged, trying the one before: {error}", file=sys.stderr, flush=True)
            continue
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        print(f"going on after epoch {state['epoch']}, from {path}", flush=True)
        return state["epoch"]
    return 0


def main():
    """Train, test and compare the ranks."""
    options = proof.arguments(
        __doc__.splitlines()[0],
        batch_size=64,
        lr=0.02,
        momentum=(float, 0.9, "momentum of the optimizer"),
        epochs=(int, 12, "passes over all images"),
        log_interval=(int, 10, "steps between two lines of output"),
    )
    hvd.init()
    torch.manual_seed(options.seed)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # One CPU thread per rank.
    torch.set_num_threads(1)

    train_data, test_data = datasets("MNIST-data-%d" % hvd.rank(), options.images)
    batches, sampler = loader(train_data, options, shuffle=True)
    test_batches, test_sampler = loader(test_data, options, shuffle=False)

    model = LeNet5().to(device)
    optimizer = optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=options.momentum)
    # Average this small model at once; for a large one, overlap averaging with computing the remaining gradients.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), num_groups=1)
    keep = options.checkpoints if hvd.rank() == 0 else None
    # Only now, as DistributedOptimizer makes another optimizer, without what the first one has gathered.
    done = resume(keep, model, optimizer) if keep else 0
    done = hvd.broadcast_object(done, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for group in optimizer.param_groups:
        # The checkpoint may be of another number of ranks.
        group["lr"] = options.lr * hvd.size()

    meter = proof.Meter()
    for epoch in range(done + 1, options.epochs + 1):
        train(model, device, batches, sampler, optimizer, epoch, meter, options.log_interval)
        if keep:
            save(keep, epoch, model, optimizer)
    loss, accuracy = test(model, device, test_batches, test_sampler)
    weights = [tensor.cpu().numpy() for tensor in model.state_dict().values()]
    return proof.finish(options, hvd.allgather_object, hvd.rank(), hvd.size(), weights, meter, accuracy, loss)


if __name__ == "__main__":
    sys.exit(main())
