"""LeNet-5 on MNIST with Keras and Horovod: horovodrun -np 2 -H node-1:1,node-2:1 python Keras_TF_MultiNode_GPU.py

It uses GPUs if there are any, otherwise CPUs.
"""

import math
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# This is written for Keras 2; keras_3.py is for Keras 3.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import horovod.tensorflow as hvd_tensorflow
import horovod.tensorflow.keras as hvd
import mnist
import numpy as np
import proof
from tensorflow import keras
from tensorflow_tape import lenet5, one_device


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


def resume(folder, model):
    """Load the weights of the newest complete checkpoint and return its epoch, or 0; Adadelta starts afresh."""
    for path in sorted(folder.glob("keras-*.h5"), reverse=True):
        try:
            model.load_weights(path)
        except OSError as error:
            print(f"{path} is damaged, trying the one before: {error}", file=sys.stderr, flush=True)
            continue
        print(f"going on from {path}", flush=True)
        return int(path.stem.split("-")[1])
    return 0


def main():
    """Train, test and compare the ranks."""
    options = proof.arguments(
        __doc__.splitlines()[0], lr=1.0, epochs=(int, 12, "passes over all images, divided among the workers")
    )
    hvd.init()
    one_device()
    keras.utils.set_random_seed(options.seed + hvd.rank())
    epochs = math.ceil(options.epochs / hvd.size())
    (x_train, y_train), (x_test, y_test) = mnist.load_data("MNIST-data-%d" % hvd.rank(), options.images)
    x_train, x_test = (x[..., None].astype(np.float32) / 255 for x in (x_train, x_test))

    model = lenet5()
    opt = keras.optimizers.Adadelta(options.lr * hvd.size())
    opt = hvd.DistributedOptimizer(opt)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=opt, metrics=["accuracy"])

    keep = options.checkpoints if hvd.rank() == 0 else None
    done = hvd_tensorflow.broadcast_object(resume(keep, model) if keep else 0, root_rank=0)

    meter = proof.Meter()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        Timing(meter, options.batch_size),
    ]
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(str(keep / "keras-{epoch:04}.h5")))
    model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        callbacks=callbacks,
        epochs=epochs,
        initial_epoch=min(done, epochs),
        verbose=2 if hvd.rank() == 0 else 0,
        validation_data=(x_test, y_test),
    )
    if done >= epochs:
        # No training was left, and only rank 0 has read the checkpoint.
        hvd_tensorflow.broadcast_variables(model.variables, root_rank=0)
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    weights = model.get_weights()
    gather = hvd_tensorflow.allgather_object
    return proof.finish(options, gather, hvd.rank(), hvd.size(), weights, meter, accuracy, loss)


if __name__ == "__main__":
    sys.exit(main())
