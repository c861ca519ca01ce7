"""What patches of the series mend while ranks run, on all ranks of a job; README.md of the series says which."""

import os
import resource
import statistics
import time

import horovod.torch as hvd
import pytest
import torch

CYCLE_S, STALL_S = 0.005, 5
os.environ |= {
    "HOROVOD_CYCLE_TIME": str(1000 * CYCLE_S),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_S),
    "TF_USE_LEGACY_KERAS": "1",
}
hvd.init()
RANK = hvd.rank()


def used() -> float:
    """The processor time of this process and its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.skipif(hvd.mpi_enabled(), reason="MPI itself asks again and again")
def test_a_rank_waits_asleep() -> None:
    hvd.allreduce(torch.ones(2), name="together")
    begun = used()
    if RANK:
        time.sleep(3)
    hvd.allreduce(torch.ones(2), name="late")
    assert used() - begun < 1


def test_ranks_without_tensors_are_left_alone() -> None:
    hvd.allreduce(torch.ones(2), name="before")
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(3)
    # A cycle in which ranks exchange messages has three.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - begun < 2 * 3 / CYCLE_S


def test_what_a_program_waits_for_waits_for_no_cycle() -> None:
    took = []
    for number in range(50):
        begun = time.monotonic()
        hvd.allreduce(torch.ones(2), name=f"awaited {number}")
        took.append(time.monotonic() - begun)
    assert statistics.median(took) < CYCLE_S / 2


def test_a_large_tensor_is_summed_without_new_memory() -> None:
    # Not a multiple of a piece, and each element has a value of its own.
    own = torch.arange((64 << 20) // 4 + 3) % 1021 + 1.0
    tensor = own.clone()
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for times in range(1, 4):
        hvd.allreduce_(tensor, op=hvd.Sum, name="large")
        assert torch.equal(tensor, own * hvd.size() ** times)
        hvd.allreduce_(tensor, op=hvd.Average, name="average")
    # What it is compared with is new each time.
    compared = 3 * tensor.nbytes // resource.getpagesize()
    if hvd.mpi_enabled():
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun < compared + 10_000


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_the_warm_up_takes_optimizers_whose_momentum_is_a_number(name: str) -> None:
    import horovod.tensorflow.keras as hvd_keras
    import numpy as np
    import tensorflow as tf

    hvd_keras.init()
    keras = tf.keras
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    model.compile(hvd_keras.DistributedOptimizer(getattr(keras.optimizers, name)(0.1, momentum=0.9)), "mse")
    warm = hvd_keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    model.fit(np.ones((8, 3)), np.ones((8, 1)), epochs=3, verbose=0, callbacks=[warm])


@pytest.mark.skipif(hvd.mpi_enabled(), reason="mpirun ends the rank that comes late, with its report")
def test_a_job_ends_when_a_rank_does_not_come() -> None:
    """The last one, as Horovod has ended then."""
    begun = time.monotonic()
    if RANK:
        time.sleep(STALL_S + 10)
    with pytest.raises(Exception, match="shut down"):
        hvd.allreduce(torch.ones(2), name="stalled")
    if not RANK:
        assert time.monotonic() - begun < STALL_S + 9
