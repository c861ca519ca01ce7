"""The launcher's options and those of the guide's mpirun, and what it says itself."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

INSTALLED = "/opt/farandole/caffe/current/bin/caffe"
HOSTFILE = "/etc/farandole/hostfile"
TRANSLATED = {
    "-psm2": "--network opa on nodes that have Omni-Path",
    "-prepend-rank": "each line bears its rank anyway",
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
    return "".join(one if one.isprintable() else "?" for one in str(text))[:length]


def limit(text: str) -> int:
    """Parse a time limit. A bare number is refused, as it means minutes to Slurm and seconds to PBS."""
    found = re.fullmatch(r"(\d{1,4}):(\d\d):(\d\d)|(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", text)
    hours, minutes, seconds, *units = (int(one or 0) for one in found.groups()) if found else [0] * 6
    total = 3600 * (hours + units[0]) + 60 * (minutes + units[1]) + seconds + units[2]
    if not total:
        raise argparse.ArgumentTypeError(f"{text!r} is no time limit: write 4:00:00, 90m or 4h")
    return total


def positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


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
    add("--time", type=limit, default=4 * 3600, help="end the job after that time; default: 4:00:00")
    add("--mpirun", help="the launcher; default: the one on PATH of the MPI that caffe was built for")
    made.set_defaults(more=[], psm2=False)
    return made


def of_mpirun(words: list[str]) -> argparse.Namespace | None:
    """Translate the guide's mpirun line; None if it starts anything but caffe train."""
    places = (place for place, word in enumerate(words) if Path(word).name == "caffe")
    start = next((place for place in places if words[place + 1 : place + 2] == ["train"]), None)
    if start is None:
        return None
    options = words[:start]
    if unknown := next((word for word in options if word.lower() not in TRANSLATED), ""):
        cure = "leave it out, or use caffe.sh with --hostfile, --ppn, --network; see caffe.sh --help"
        raise RefusedError(f"mpirun's option {plain(unknown)} cannot be translated: {cure}")
    chosen, more = parser().parse_known_args(words[start + 2 :])
    chosen.more = more
    chosen.psm2 = "-psm2" in (word.lower() for word in options)
    if "/" in words[start]:
        chosen.caffe_bin = words[start]
    if options:
        say(f"translated: {'; '.join(f'{word} ({TRANSLATED[word.lower()]})' for word in options)}")
    return chosen


def programs(*names: str) -> list[str]:
    """The programs of these names on PATH, and where the stack and Debian have them, except our own translator."""
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/local/bin", "/usr/bin"]
    found = [str(Path(folder, name)) for folder in folders if folder.startswith("/") for name in names]
    ours = "intel-caffe"
    return [one for one in dict.fromkeys(found) if os.access(one, os.X_OK) and Path(one).resolve().parent.name != ours]


def read_options(words: list[str]) -> argparse.Namespace:
    """Read our options, or those of the guide's mpirun; anything else goes to the next mpirun on PATH."""
    if words[:1] == ["--as-mpirun"]:
        if chosen := of_mpirun(words[1:]):
            return chosen
        beyond = next(iter(programs("mpirun")), None)
        if not beyond:
            raise RefusedError("there is no mpirun on PATH, only the one that hands Intel Caffe to its launcher")
        os.execv(beyond, [beyond, *words[1:]])  # noqa: S606
    end = words.index("--") if "--" in words else len(words)
    chosen = parser().parse_args(words[:end])
    chosen.more = words[end + 1 :]
    return chosen
