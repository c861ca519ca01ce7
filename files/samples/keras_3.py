"""LeNet-5 on MNIST with Keras 3, on TensorFlow or PyTorch: horovodrun -np 2 -H node-1:1,node-2:1 python keras_3.py"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Or torch; Keras itself takes TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import horovod.keras as hvd
import keras
import mnist
import numpy as np
import proof


class Timing(keras.callbacks.Callback):
    """Measures the training speed."""

    def __init__(self, meter, images):
        super().__init__()
        self.meter, self.images = meter, images

    def on_train_batch_end(self, batch, logs=None):
        """Count a finished step."""
        self.meter.step(self.images)

    def on_epoch_end(self, epoch, logs=None):
        """Keep the mean loss of the epoch, as Keras reports no other."""
        self.meter.losses.append([self.meter.steps, float((logs or {})["loss"])])


def lenet5():
    """Two convolutions and three dense layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(6, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )


def one_device():
    """Use one GPU per process, or the CPU with the job's number of threads."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(proof.threads())
        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank())
        return
    import tensorflow as tf

    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    else:
        tf.config.threading.set_intra_op_parallelism_threads(proof.threads())
        tf.config.threading.set_inter_op_parallelism_threads(2)


def resume(folder):
    """The newest complete checkpoint, with its optimizer, and its epoch; None and 0 if there is none."""
    for path in sorted(folder.glob("keras_3-*.keras"), reverse=True) if folder else ():
        try:
            model = hvd.load_model(path)
        except (OSError, ValueError, KeyError) as error:
            print(f"{path} is damaged, trying the one before: {error}", file=sys.stderr, flush=True)
            continue
        print(f"going on from {path}", flush=True)
        return model, int(path.stem.split("-")[1])
    return None, 0


def main():
    """Train, test and compare the ranks."""
    options = proof.arguments(__doc__.splitlines()[0], lr=0.001, epochs=(int, 12, "passes over all images"))
    hvd.init()
    one_device()
    keras.utils.set_random_seed(options.seed + hvd.rank())
    (x_train, y_train), (x_test, y_test) = mnist.load_data("MNIST-data-%d" % hvd.rank(), options.images)
    x_train, x_test = (x[..., None].astype(np.float32) / 255 for x in (x_train, x_test))
    # Each rank trains with every size-th image, and all ranks with equally many.
    share = slice(hvd.rank(), len(x_train) // hvd.size() * hvd.size(), hvd.size())

    keep = options.checkpoints if hvd.rank() == 0 else None
    model, done = resume(keep)
    if model is None:
        model = lenet5()
        opt = hvd.DistributedOptimizer(keras.optimizers.Adam(options.lr * hvd.size()))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(opt, loss, metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")], jit_compile=False)
    else:
        # The checkpoint may be of another number of ranks.
        model.optimizer.learning_rate = options.lr * hvd.size()
    [done] = np.asarray(hvd.broadcast(np.array([done]), 0, name="epoch"))

    meter = proof.Meter()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        Timing(meter, options.batch_size),
    ]
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(keep / "keras_3-{epoch:04}.keras"))
    model.fit(
        x_train[share],
        y_train[share],
        batch_size=options.batch_size,
        callbacks=callbacks,
        epochs=options.epochs,
        initial_epoch=min(int(done), options.epochs),
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if done >= options.epochs:
        # No training was left, and only rank 0 has read the checkpoint.
        hvd.broadcast_variables(model.weights, 0)
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return proof.finish(
        options, gather, hvd.rank(), hvd.size(), model.get_weights(), meter, float(accuracy), float(loss)
    )


def gather(answer):
    """One object of every rank, on all ranks."""
    if keras.backend.backend() == "torch":
        import horovod.torch as native
    else:
        import horovod.tensorflow as native
    return native.allgather_object(answer)


if __name__ == "__main__":
    sys.exit(main())
