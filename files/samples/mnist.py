"""Images and labels in MNIST's own file format, whoever made them."""

import gzip
import os
import socket
import struct
from pathlib import Path

import numpy as np

# Where Farandole puts them on every node.
STAGED = Path(os.environ.get("MNIST_DATA", "/opt/farandole/data/mnist"))
FILES = (
    ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)


class DataError(SystemExit):
    """The data is not what it should be; ends a script with these words instead of a traceback."""

    def __init__(self, path, why):
        super().__init__(
            f"{socket.gethostname()}: {path} {why}; site.yml stages it anew, MNIST_DATA names another folder"
        )


def read(path):
    """The array in an IDX file."""
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
    """Images and labels for training, so many if that is said; the same for testing.

    Like keras.datasets.mnist.load_data, it takes a path of this rank's own. If there is such a folder, its files
    count, so that every rank can have other images; else all ranks read what is staged on their node.
    """
    folder = Path(own) if Path(own).is_dir() else STAGED
    pairs = [tuple(read(folder / name) for name in names) for names in FILES]
    for (pixels, labels), names in zip(pairs, FILES):
        if pixels.ndim != 3 or len(pixels) != len(labels):
            raise DataError(folder, f"has {len(pixels)} images and {len(labels)} labels in {' and '.join(names)}")
    (pixels, labels), test = pairs
    chosen = np.arange(images or len(pixels)) % len(pixels)
    return (pixels[chosen], labels[chosen]), test


def source(own="MNIST-data"):
    """Which images these are."""
    folder = Path(own) if Path(own).is_dir() else STAGED
    note = folder / "SOURCE"
    return note.read_text().strip() if note.is_file() else str(folder)
