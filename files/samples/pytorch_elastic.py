"""LeNet-5 on MNIST with PyTorch and elastic Horovod: continues when a node is lost, and uses it again when it is back.

horovodrun -np 2 --min-np 1 --host-discovery-script ./discover_hosts.sh python pytorch_elastic.py; to use a returning
node again, add --blacklist-cooldown-range 2 60.
"""

import argparse
import sys

import horovod.torch as hvd
import proof
import torch
import torch.nn.functional as F
from pytorch_mnist import LeNet5, datasets, metric_average
from torch import optim


@hvd.elastic.run
def train(state, data, options, meter):
    """Train from the last commit; called again whenever the set of workers changes."""
    if hvd.rank() == 0:
        print(f"{proof.count(hvd.size(), 'worker')} from epoch {state.epoch + 1} on", flush=True)
    batches = torch.utils.data.DataLoader(data, options.batch_size, sampler=state.sampler)
    while state.epoch < options.epochs:
        state.model.train()
        for index, (x, y) in enumerate(batches):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(x), y)
            loss.backward()
            state.optimizer.step()
            meter.step(len(x))
            # The remaining workers do not repeat images that have been used in this epoch.
            state.sampler.record_batch(index, options.batch_size)
            if index % options.commit_interval == 0:
                state.commit()
            if index % options.log_interval == 0 and hvd.rank() == 0:
                print(f"epoch {state.epoch + 1}, {hvd.size()} workers, batch {index}: {loss.item():.4f}", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


@torch.no_grad()
def test(model, data):
    """Loss and accuracy over all images; every worker evaluates all of them."""
    model.eval()
    x, y = data.tensors
    output = model(x)
    loss, right = F.cross_entropy(output, y).item(), (output.argmax(1) == y).float().mean().item()
    return metric_average(loss, "avg_loss"), metric_average(right, "avg_acc")


def refused(_):
    """Refuse an option that the other samples have."""
    raise argparse.ArgumentTypeError("this sample keeps its state in memory; pytorch_mnist.py writes checkpoints")


def main():
    """Train, test and compare the ranks."""
    options = proof.arguments(
        __doc__.splitlines()[0],
        lr=0.05,
        momentum=(float, 0.9, "momentum of the optimizer"),
        epochs=(int, 12, "passes over all images"),
        commit_interval=(int, 10, "steps between commits; at most this many are lost with a worker"),
        log_interval=(int, 10, "steps between two lines of output"),
        checkpoints=(refused, None, "refused, as the state is kept in memory"),
    )
    hvd.init()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    train_data, test_data = datasets("MNIST-data-%d" % hvd.rank(), options.images)
    model = LeNet5()
    # Not scaled with the number of workers, which changes.
    optimizer = optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_data, shuffle=True, seed=options.seed)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    meter = proof.Meter()
    train(state, train_data, options, meter)
    loss, accuracy = test(model, test_data)
    weights = [tensor.numpy() for tensor in model.state_dict().values()]
    return proof.finish(options, hvd.allgather_object, hvd.rank(), hvd.size(), weights, meter, accuracy, loss)


if __name__ == "__main__":
    sys.exit(main())
