"""Keras 3 with Horovod, on all ranks of a job; run.py starts it with each backend."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.keras as hvd
import keras
import numpy as np
import pytest
from numpy.typing import NDArray

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init()
RANK, SIZE, ON_TORCH = hvd.rank(), hvd.size(), keras.backend.backend() == "torch"
# The same on all ranks; each trains with its share.
X = np.random.default_rng(7).random((32 * SIZE, 4), np.float32)
Y = X @ np.array([[1.0], [2.0], [-3.0], [0.5]], np.float32)
MINE = slice(RANK, None, SIZE)
MSE = keras.losses.MeanSquaredError
Optimizer = Callable[[], Any]


def net(seed: int = 1) -> Any:
    """A model whose weights depend on the seed alone."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])


def weights(model: Any) -> NDArray[Any]:
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def everywhere(values: NDArray[Any]) -> NDArray[Any]:
    """A row of each rank."""
    return np.asarray(hvd.allgather(values[None].copy()))


def are_equal(model: Any) -> None:
    rows = everywhere(weights(model))
    assert rows.shape[0] == SIZE
    assert (rows == rows[0]).all()


def fitted(optimizer: Any, model: Any = None, batches: int = 4, **options: Any) -> Any:
    """A model after some steps with this rank's share of the data."""
    model = model or net()
    model.compile(optimizer, MSE())
    each = len(X[MINE]) // batches
    model.fit(X[MINE], Y[MINE], batch_size=each, shuffle=False, verbose=0, **options)
    return model


def alone(optimizer: Any, batches: int = 4) -> Any:
    """A model trained without Horovod in steps with the same images as all ranks have together."""
    model = net()
    model.compile(optimizer, MSE())
    each = len(X) // batches
    model.fit(X, Y, batch_size=each, shuffle=False, verbose=0)
    return model


SGD: Optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
ADAM: Optimizer = lambda: keras.optimizers.Adam(0.05, clipnorm=0.5)  # noqa: E731


@pytest.mark.parametrize("make", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"sparse_as_dense": True}])
def test_together_they_train_as_one_with_all_data(make: Optimizer, options: dict[str, Any]) -> None:
    model = fitted(hvd.DistributedOptimizer(make(), **options))
    are_equal(model)
    np.testing.assert_allclose(weights(model), weights(alone(make())), rtol=1e-4, atol=1e-5)


def test_without_it_they_do_not() -> None:
    rows = everywhere(weights(fitted(SGD())))
    assert not (rows == rows[0]).all()


def test_half_precision_on_the_wire_is_close() -> None:
    model = fitted(hvd.DistributedOptimizer(SGD(), compression=hvd.Compression.fp16))
    are_equal(model)
    np.testing.assert_allclose(weights(model), weights(alone(SGD())), rtol=0.02, atol=0.01)


def test_a_sum_is_a_mean_times_the_ranks() -> None:
    model = fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 / SIZE), op=hvd.Sum))
    np.testing.assert_allclose(weights(model), weights(alone(keras.optimizers.SGD(0.1))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("average", "rate"), [(True, 0.1), (False, 0.05)])
def test_two_backward_passes_make_one_step(average: bool, rate: float) -> None:
    distributed = hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    model = fitted(distributed, batches=4)
    are_equal(model)
    np.testing.assert_allclose(weights(model), weights(alone(keras.optimizers.SGD(0.1), batches=2)), rtol=1e-4)
    assert distributed.get_config().get("gradient_accumulation_steps") is None


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(SGD()), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(SGD()))
    with pytest.raises(ValueError, match="needs an optimizer of Keras 3"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


@pytest.mark.skipif(ON_TORCH, reason="tf_keras has no other backend")
@pytest.mark.parametrize("passes", [1, 2])
def test_optimizers_of_tf_keras_take_the_old_way(passes: int) -> None:
    import tf_keras

    tf_keras.utils.set_random_seed(1)
    layers = [tf_keras.Input((4,)), tf_keras.layers.Dense(3), tf_keras.layers.Dense(1)]
    distributed = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
    are_equal(fitted(distributed, tf_keras.Sequential(layers)))
    local = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(1)])
    distributed = hvd.PartialDistributedOptimizer(tf_keras.optimizers.SGD(0.1), local_layers=local.layers[0])
    rows = everywhere(weights(fitted(distributed, local)))
    assert not (rows == rows[0]).all()


def test_a_process_set_trains_for_itself() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    try:
        rows = everywhere(weights(fitted(hvd.DistributedOptimizer(SGD(), process_set=sets[RANK]))))
        assert not (rows == rows[0]).all()
    finally:
        for one in sets:
            hvd.remove_process_set(one)


def test_local_layers_keep_their_own_gradients() -> None:
    model = net()
    first = model.layers[0]
    distributed = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=first)
    model = fitted(distributed, model, batches=1)
    local, shared = everywhere(np.ravel(first.kernel)), everywhere(np.ravel(model.layers[1].kernel))
    assert not (local == local[0]).all()
    assert (shared == shared[0]).all()


def test_a_loop_of_ones_own() -> None:
    model, loss, distributed = net(), MSE(), hvd.DistributedOptimizer(SGD())
    x, y = X[MINE], Y[MINE]
    for start in range(0, len(x), len(x) // 4):
        part = slice(start, start + len(x) // 4)
        variables = model.trainable_variables
        if ON_TORCH:
            model.zero_grad()
            loss(y[part], model(x[part])).backward()
            distributed.apply([variable.value.grad for variable in variables], variables)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                value = loss(y[part], model(x[part]))
            distributed.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
    are_equal(model)
    np.testing.assert_allclose(weights(model), weights(alone(SGD())), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(ON_TORCH, reason="it is TensorFlow's")
def test_the_tape_takes_variables_of_keras() -> None:
    import horovod.tensorflow as hvd_tensorflow
    import tensorflow as tf

    model, loss, optimizer = net(RANK), MSE(), SGD()
    hvd_tensorflow.broadcast_variables(model.variables, root_rank=0)
    with tf.GradientTape() as tape:
        value = loss(Y[MINE], model(X[MINE]))
    variables = model.trainable_variables
    tape = hvd_tensorflow.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
    are_equal(model)


@pytest.mark.parametrize("built", [True, False])
def test_all_start_with_the_weights_of_one(built: bool) -> None:
    keras.utils.set_random_seed(RANK)
    layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(([keras.Input((4,))] if built else []) + layers)
    first = weights(model) if built else None
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1)
    fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), model, callbacks=[callback])
    are_equal(model)
    if first is not None:
        assert (weights(model) == everywhere(first)[SIZE - 1]).all()
    # Each rank drops other units.
    seeds = everywhere(np.ravel(layers[1].seed_generator.state))
    assert not (seeds == seeds[0]).all()


def test_local_variables_stay_as_they_are() -> None:
    model = net(RANK)
    bias = model.layers[0].bias
    bias.assign(np.full(3, RANK))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[bias])
    fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), model, callbacks=[callback])
    assert (everywhere(np.ravel(bias)) == np.arange(SIZE)[:, None]).all()
    kernels = everywhere(np.ravel(model.layers[0].kernel))
    assert (kernels == kernels[0]).all()


def test_metrics_are_those_of_all() -> None:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            logs["epoch"] = logs["mine"] = float(RANK + epoch)

    model = net()
    model.compile(hvd.DistributedOptimizer(SGD()), MSE())
    callbacks = [Own(), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(X[MINE], Y[MINE], epochs=2, verbose=0, callbacks=callbacks).history
    mean = (SIZE - 1) / 2
    assert history["mine"] == [mean, mean + 1]
    losses = everywhere(np.array(history["loss"]))
    assert (losses == losses[0]).all()


def test_the_learning_rate_warms_up_and_follows_a_schedule() -> None:
    class Rates(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: object, **__: object) -> None:
            seen.append(float(self.model.optimizer.learning_rate))

    seen: list[float] = []
    model = net()
    model.compile(hvd.DistributedOptimizer(SGD()), MSE())
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch, start_epoch=2)
    callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2), schedule, Rates()]
    history = model.fit(X[MINE], Y[MINE], batch_size=16, epochs=4, verbose=0, callbacks=callbacks).history
    # Two steps an epoch; the first of them already a step up from a rate for one rank.
    ramp = [0.4 / SIZE * (1 + (step / 2) * (SIZE - 1) / 2) for step in range(1, 5)]
    np.testing.assert_allclose(seen, [*ramp, 0.1, 0.1, 0.05, 0.05], rtol=1e-5)
    np.testing.assert_allclose(history["lr"], [ramp[1], 0.4, 0.1, 0.05], rtol=1e-5)


class Slower(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer of somebody's own."""


@pytest.mark.parametrize("suffix", ["keras", "h5"])
@pytest.mark.parametrize("own", [False, True])
def test_a_loaded_model_goes_on(tmp_path: Path, suffix: str, own: bool) -> None:
    make = (lambda: Slower(0.1, momentum=0.9)) if own else SGD
    model = fitted(hvd.DistributedOptimizer(make()))
    path = tmp_path / f"model.{suffix}"
    model.save(path)
    known = {"custom_optimizers": [Slower]} if own else {}
    loaded = hvd.load_model(path, **known)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 4
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for one in (model, loaded):
        one.fit(X[MINE], Y[MINE], batch_size=8, shuffle=False, verbose=0)
    are_equal(loaded)
    np.testing.assert_allclose(weights(loaded), weights(model), rtol=1e-5)


def test_a_model_is_loaded_without_horovod(tmp_path: Path) -> None:
    fitted(hvd.DistributedOptimizer(ADAM())).save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(plain.optimizer, keras.optimizers.Adam)
    assert type(plain.optimizer) is type(ADAM())
    assert int(plain.optimizer.iterations) == 4


def test_one_rank_may_load_for_all(tmp_path: Path) -> None:
    trained = fitted(hvd.DistributedOptimizer(ADAM()))
    trained.save(tmp_path / "model.keras")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if RANK == 0:
        model = hvd.load_model(tmp_path / "model.keras")
        model.fit(X[MINE], Y[MINE], batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    else:
        model = fitted(hvd.DistributedOptimizer(ADAM()), net(2), callbacks=callbacks)
    are_equal(model)
    assert int(model.optimizer.iterations) == 8


def test_ranks_skip_the_same_steps_in_half_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = net()
        model.compile(hvd.DistributedOptimizer(SGD()), MSE())
        x = X[MINE].copy()
        if RANK == SIZE - 1:
            x[0] = 1e30
        model.fit(x, Y[MINE], batch_size=8, shuffle=False, verbose=0)
        are_equal(model)
        assert np.isfinite(weights(model)).all()
        assert float(model.optimizer.dynamic_scale) <= 2**14
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_loss_scale_optimizer_around_it_is_refused() -> None:
    model = net()
    model.compile(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(SGD())), MSE())
    with pytest.raises(ValueError, match="each rank would decide alone"):
        model.fit(X, Y, verbose=0)


def test_elastic_state_is_kept_and_shared() -> None:
    model = fitted(hvd.DistributedOptimizer(SGD()), net(RANK))
    state = hvd.elastic.KerasState(model, batch=RANK, epoch=0)
    state.sync()
    are_equal(model)
    assert state.batch == 0
    before = weights(model)
    state.batch = 5
    model.fit(X[MINE], Y[MINE], verbose=0)
    state.restore()
    assert (weights(model) == before).all()
    assert state.batch == 0
    assert int(model.optimizer.iterations) == 4
    callbacks = [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state)]
    model.fit(X[MINE], Y[MINE], epochs=2, verbose=0, callbacks=callbacks)
    assert (state.epoch, state.batch) == (2, 0)


def test_the_ranks_are_on_different_machines() -> None:
    digits = np.frombuffer(socket.gethostname().encode().ljust(64), np.uint8).astype(np.int32)
    assert len({bytes(row.astype(np.uint8)) for row in everywhere(digits)}) == SIZE
