"""LeNet-5 on MNIST in TensorFlow 2 style: horovodrun -np 2 -H node-1:1,node-2:1 python tensorflow_tape.py"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# This is written for Keras 2; keras_3.py is for Keras 3.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import horovod.tensorflow as hvd
import mnist
import proof
import tensorflow as tf


def lenet5():
    """Two convolutions and three dense layers."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(6, 5, padding="same", activation="relu", input_shape=(28, 28, 1)),
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
    if gpus := tf.config.list_physical_devices("GPU"):
        gpu = gpus[hvd.local_rank()]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    else:
        tf.config.threading.set_intra_op_parallelism_threads(proof.threads())
        tf.config.threading.set_inter_op_parallelism_threads(2)


def main():
    """Train, test and compare the ranks."""
    options = proof.arguments(__doc__.splitlines()[0], lr=0.001, epochs=(int, 12, "passes over all images"))
    hvd.init()
    one_device()
    # Keras draws the initial weights from Python's random generator.
    tf.keras.utils.set_random_seed(options.seed)
    (x_train, y_train), (x_test, y_test) = mnist.load_data("MNIST-data-%d" % hvd.rank(), options.images)
    scale = lambda x, y: (tf.cast(x[..., None], tf.float32) / 255, tf.cast(y, tf.int64))
    # All ranks shuffle in the same order and take every size-th image: together they use each one once per epoch.
    data = tf.data.Dataset.from_tensor_slices(scale(x_train, y_train))
    data = data.shuffle(len(x_train), seed=options.seed, reshuffle_each_iteration=True)
    data = data.shard(hvd.size(), hvd.rank()).batch(options.batch_size, drop_remainder=True)

    model, criterion = lenet5(), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    opt = tf.keras.optimizers.Adam(options.lr * hvd.size())

    # There is nothing in it that AutoGraph would have to convert, and converting Horovod's functions takes seconds.
    @tf.function(autograph=False)
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    epoch = tf.Variable(0)
    keep = tf.train.Checkpoint(model=model, optimizer=opt, epoch=epoch)
    manager = None
    if options.checkpoints and hvd.rank() == 0:
        manager = tf.train.CheckpointManager(keep, options.checkpoints, max_to_keep=3, checkpoint_name="tensorflow")
        if path := manager.restore_or_initialize():
            print(f"going on after epoch {epoch.numpy()}, from {path}", flush=True)
    hvd.broadcast_variables([epoch], root_rank=0)
    # The checkpoint may be of another number of ranks, and the rate is not among the optimizer's variables.
    opt.learning_rate = options.lr * hvd.size()

    meter, first = proof.Meter(), True
    while epoch < options.epochs:
        for x, y in data:
            loss = train(x, y)
            # After the first step, because the optimizer creates its variables there.
            if first:
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(opt.variables(), root_rank=0)
            first = False
            meter.step(len(x), loss)
        epoch.assign_add(1)
        if hvd.rank() == 0:
            print(f"epoch {epoch.numpy()}: loss {loss:.4f}", flush=True)
        if manager:
            manager.save()
    if first:
        # No training was left, and only rank 0 has read the checkpoint.
        hvd.broadcast_variables(model.variables, root_rank=0)

    x, y = scale(x_test, y_test)
    logits = model(x)
    loss = float(criterion(y, logits))
    accuracy = float(tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == y, tf.float32)))
    weights = [variable.numpy() for variable in model.weights]
    return proof.finish(options, hvd.allgather_object, hvd.rank(), hvd.size(), weights, meter, accuracy, loss)


if __name__ == "__main__":
    sys.exit(main())
