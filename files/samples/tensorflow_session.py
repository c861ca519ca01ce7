"""LeNet-5 on MNIST in TensorFlow 1 style: horovodrun -np 2 -H node-1:1,node-2:1 python tensorflow_session.py"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import mnist
import numpy as np
import proof
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()


def layer(name, x, shape, activation=tf.nn.relu):
    """A convolution if the shape has four dimensions, otherwise a dense layer."""
    weights = tf.get_variable(f"{name}/weights", shape, initializer=tf.glorot_uniform_initializer())
    bias = tf.get_variable(f"{name}/bias", shape[-1:], initializer=tf.zeros_initializer())
    padding = "SAME" if name == "conv1" else "VALID"
    product = tf.nn.conv2d(x, weights, 1, padding) if len(shape) == 4 else tf.matmul(x, weights)
    return activation(product + bias)


def lenet5(x):
    """Two convolutions and three dense layers."""
    x = tf.nn.max_pool2d(layer("conv1", x, [5, 5, 1, 6]), 2, 2, "VALID")
    x = tf.nn.max_pool2d(layer("conv2", x, [5, 5, 6, 16]), 2, 2, "VALID")
    x = layer("fc1", tf.reshape(x, [-1, 400]), [400, 120])
    return layer("fc3", layer("fc2", x, [120, 84]), [84, 10], activation=tf.identity)


def batches(x, y, size, generator):
    """An endless stream of batches, in this rank's own order."""
    while True:
        order = generator.permutation(len(x))
        for start in range(0, len(x) - size + 1, size):
            part = order[start : start + size]
            yield x[part], y[part]


def session_config():
    """Use one GPU per process, or the CPU with the job's number of threads."""
    config = tf.ConfigProto()
    if tf.config.list_physical_devices("GPU"):
        config.gpu_options.allow_growth = True
        config.gpu_options.visible_device_list = str(hvd.local_rank())
    else:
        config.intra_op_parallelism_threads = proof.threads()
        config.inter_op_parallelism_threads = 2
    return config


class Timing(tf.train.SessionRunHook):
    """Measures the training speed, and reads the loss."""

    def __init__(self, meter, images, loss):
        self.meter, self.images, self.loss = meter, images, loss

    def before_run(self, run_context):
        """Ask for the loss of the step."""
        return tf.train.SessionRunArgs(self.loss)

    def after_run(self, run_context, run_values):
        """Count a finished step."""
        self.meter.step(self.images, run_values.results)


class LastWeights(tf.train.SessionRunHook):
    """Keeps the weights from the end of the session, because no other session can read them."""

    def end(self, session):
        """Read the weights before the session closes."""
        self.weights = session.run(tf.trainable_variables())


def main():
    """Train, test and compare the ranks."""
    options = proof.arguments(
        __doc__.splitlines()[0], lr=0.001, steps=(int, 2000, "steps in total, divided among the workers")
    )
    hvd.init()
    tf.set_random_seed(options.seed)
    (x_train, y_train), (x_test, y_test) = mnist.load_data("MNIST-data-%d" % hvd.rank(), options.images)
    x_train, x_test = (x[..., None].astype(np.float32) / 255 for x in (x_train, x_test))

    image = tf.placeholder(tf.float32, [None, 28, 28, 1])
    label = tf.placeholder(tf.int64, [None])
    logits = lenet5(image)
    loss = tf.losses.sparse_softmax_cross_entropy(label, logits)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), label), tf.float32))

    opt = tf.train.AdamOptimizer(options.lr * hvd.size())
    opt = hvd.DistributedOptimizer(opt)
    global_step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)

    meter, last = proof.Meter(), LastWeights()
    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),
        tf.train.StopAtStepHook(last_step=options.steps // hvd.size()),
        Timing(meter, options.batch_size, loss),
        last,
    ]
    if hvd.rank() == 0:
        hooks.append(tf.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=100))
    checkpoint_dir = str(options.checkpoints) if options.checkpoints and hvd.rank() == 0 else None
    feed = batches(x_train, y_train, options.batch_size, np.random.default_rng(options.seed + hvd.rank()))
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=checkpoint_dir, hooks=hooks, config=session_config(), log_step_count_steps=None
    ) as mon_sess:
        while not mon_sess.should_stop():
            x, y = next(feed)
            mon_sess.run(train_op, {image: x, label: y})

    with tf.Session(config=session_config()) as session:
        for variable, value in zip(tf.trainable_variables(), last.weights):
            variable.load(value, session)
        result = map(float, session.run([accuracy, loss], {image: x_test, label: y_test}))
    # The training graph is finalized, so the comparison needs its own.
    with tf.Graph().as_default(), tf.Session(config=session_config()) as session:
        gather = lambda own: hvd.allgather_object(own, session=session)
        return proof.finish(options, gather, hvd.rank(), hvd.size(), last.weights, meter, *result)


if __name__ == "__main__":
    tf.logging.set_verbosity(tf.logging.INFO)
    sys.exit(main())
