"""What a solver trains, on what, and what it leaves behind."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from farandole.node.caffe.options import RefusedError, plain

# A comment, or a name and its value; a # in quotes begins no comment.
PAIR = re.compile(r"""#[^\n]*|\b(\w+)\s*:\s*("[^"\n]*"|'[^'\n]*'|[^\s"'#{}<>\[\],;]+)""")
NETS = ("net", "train_net", "test_net")
SOURCES = ("source", "mean_file")


@dataclass
class Solver:
    """A solver, the files of its nets, the data that these name, and the model that it will save."""

    path: str
    nets: list[str]
    sources: list[str]
    snapshots: str
    model: str
    # Whether it tests the net during the training.
    tests: bool


def pairs(path: str, what: str) -> list[tuple[str, str]]:
    """The names and values of a file in protobuf's text format, however deep."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        cure = "It has to be on all nodes, under this name"
        raise RefusedError(f"{socket.gethostname()}: {what} {path} cannot be read: {error.strerror}. {cure}") from None
    return [(found[1], found[2].strip("\"'")) for found in PAIR.finditer(text) if found[1]]


def read_solver(path: str) -> Solver:
    found = pairs(path, "the solver")
    last = dict(found)
    nets = list(dict.fromkeys(value for name, value in found if name in NETS))
    needed = {"net": nets, **{name: last.get(name) for name in ("max_iter", "snapshot_prefix")}}
    if lacking := [name for name, value in needed.items() if value in (None, [], "", "0")]:
        raise RefusedError(f"the solver {path} has no {' and no '.join(lacking)}: Caffe would not train, or not save")
    for name in ("max_iter", "test_interval"):
        if not re.fullmatch(r"\d{1,12}", last.get(name, "0")):
            raise RefusedError(f"the solver's {name} is not a number: {plain(last[name], 40)!r}")
    if last.get("snapshot_after_train") == "false":
        raise RefusedError(f"the solver {path} saves no model: leave snapshot_after_train: false out")
    inside = [*found, *(pair for net in nets for pair in pairs(net, "the net"))]
    first, interval = last.get("test_initialization") != "false", int(last.get("test_interval", 0))
    prefix = last["snapshot_prefix"]
    suffix = ".h5" if last.get("snapshot_format") in ("HDF5", "0") else ""
    return Solver(
        path,
        nets,
        [value for name, value in inside if name in SOURCES],
        str(Path(prefix).parent),
        f"{prefix}_iter_{int(last['max_iter'])}.caffemodel{suffix}",
        bool("test_iter" in last and interval and (first or int(last["max_iter"]) >= interval)),
    )
