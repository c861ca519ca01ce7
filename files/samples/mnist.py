"""Read images and labels in MNIST's file format."""

import gzip
import os
import socket
import struct
from pathlib import Path

import numpy as np

# Where Farandole installs them on every node.
STAGED = Path(os.environ.get("MNIST_DATA", "/opt/farandole/data/mnist"))
# Where load_data has found them: an elastic job may give this rank another number later.
used = STAGED
FILES = (
    ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)


class DataError(SystemExit):
    """The data is missing or damaged; ends a script with this message instead of a traceback."""

    def __init__(self, path, why):
        super().__init__(
            f"{socket.gethostname()}: {path} {why}; site.yml stages it anew, MNIST_DATA names another folder"
        )


def read(path):
    """Read the array in an IDX file."""
    try:
        with gzip.open(path) as file:
            zero, kind, dimensions = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            content = np.frombuffer(file.read(), np.uint8)
    except FileNotFoundError:
        raise DataError(path, "is not there") from None
    except (OSError, EOFError, struct.error, ValueError) as error:
        raise DataError(path, f"is damaged ({error})") from None
    if (zero, kind) != (0, 8) or content.size != np.prod(shape, dtype=int):
        raise DataError(path, "is no IDX file of bytes, or is cut short")
    return content.reshape(shape).copy()


def load_data(own="MNIST-data", images=0):
    """Return images and labels for training (`images` of them, 0 for all) and for testing.

    Like keras.datasets.mnist.load_data, it takes a path, different for every rank. If that folder exists, its files
    are used, so that every rank can have different images; otherwise all ranks read the data installed on their node.
    """
    global used
    folder = used = Path(own) if Path(own).is_dir() else STAGED
    pairs = [tuple(read(folder / name) for name in names) for names in FILES]
    for (pixels, labels), names in zip(pairs, FILES):
        if pixels.ndim != 3 or len(pixels) != len(labels):
            raise DataError(folder, f"has {len(pixels)} images and {len(labels)} labels in {' and '.join(names)}")
    (pixels, labels), test = pairs
    chosen = np.arange(images or len(pixels)) % len(pixels)
    return (pixels[chosen], labels[chosen]), test


def source():
    """The origin of the images that were loaded."""
    note = used / "SOURCE"
    return note.read_text().strip() if note.is_file() else str(used)
