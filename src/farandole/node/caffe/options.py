"""The launcher's options and those of the guide's mpirun, and what it says itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from farandole.core.text import visible
from farandole.node.arguments import duration, positive

INSTALLED = "/opt/farandole/caffe/current/bin/caffe"
HOSTFILE = "/etc/farandole/hostfile"
TRANSLATED = {
    "-psm2": "--network opa on nodes that have Omni-Path",
    "-prepend-rank": "each line starts with its rank anyway",
}


class RefusedError(Exception):
    """Why nothing was started: problems, each with host, cause and cure."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def say(text: str, problems: Iterable[str] = ()) -> None:
    for line in (text, *(f"{number}. {problem}" for number, problem in enumerate(problems, 1))):
        print(f"caffe.sh: {line}", file=sys.stderr, flush=True)


def plain(text: object, length: int = 300) -> str:
    """What a node or a log says, without characters that a terminal would obey."""
    return visible(str(text))[:length]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="caffe.sh",
        allow_abbrev=False,
        description="Train with Intel Caffe on several nodes. Further options for `caffe train` follow after --.",
    )
    add = made.add_argument
    add("--hostfile", help=f"host names, one a line; default: $PBS_NODEFILE, Slurm's nodes, {HOSTFILE}")
    add("--caffe_bin", help=f"the program caffe, on all nodes; default: caffe on PATH, {INSTALLED}")
    add("--solver", "-solver", required=True, help="solver.prototxt, on all nodes")
    add("--network", choices=["tcp", "opa"], default="tcp", help="tcp (default) or Omni-Path")
    add("--ppn", type=positive, help="processes per node; default: what the nodefile gives, else 1")
    add("--num_omp_threads", type=positive, help="threads per process; default: what the allocation gives")
    add("--time", type=duration, default=4 * 3600, help="end the job after that time; default: 4h")
    made.set_defaults(more=[], psm2=False)
    return made


def of_mpirun(arguments: list[str]) -> argparse.Namespace | None:
    """Translate the guide's mpirun line; None if it starts anything but caffe train."""
    pairs = enumerate(pairwise(arguments))
    start = next((at for at, (program, verb) in pairs if Path(program).name == "caffe" and verb == "train"), None)
    if start is None:
        return None
    options = arguments[:start]
    if unknown := next((option for option in options if option.lower() not in TRANSLATED), ""):
        cure = "leave it out, or use caffe.sh with --hostfile, --ppn, --network; see caffe.sh --help"
        raise RefusedError(f"mpirun's option {plain(unknown)} cannot be translated: {cure}")
    chosen, more = parser().parse_known_args(arguments[start + 2 :])
    chosen.more = more
    chosen.psm2 = "-psm2" in map(str.lower, options)
    if "/" in arguments[start]:
        chosen.caffe_bin = arguments[start]
    if options:
        say(f"translated: {'; '.join(f'{option} ({TRANSLATED[option.lower()]})' for option in options)}")
    return chosen


def programs(*names: str) -> list[str]:
    """The programs of these names on PATH, and where the stack and Debian have them, except our own translator."""
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/local/bin", "/usr/bin"]
    paths = dict.fromkeys(Path(folder, name) for folder in folders if folder.startswith("/") for name in names)
    return [str(path) for path in paths if os.access(path, os.X_OK) and path.resolve().parent.name != "intel-caffe"]


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read our options, or those of the guide's mpirun; anything else goes to the next mpirun on PATH."""
    if arguments[:1] == ["--as-mpirun"]:
        if chosen := of_mpirun(arguments[1:]):
            return chosen
        beyond = next(iter(programs("mpirun")), None)
        if not beyond:
            raise RefusedError("there is no mpirun on PATH, only the one that hands Intel Caffe to its launcher")
        os.execv(beyond, [beyond, *arguments[1:]])  # noqa: S606
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen = parser().parse_args(arguments[:end])
    chosen.more = arguments[end + 1 :]
    return chosen
