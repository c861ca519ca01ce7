"""What is trained, and how it is started: by which launcher, with which threads, variables and command."""

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line
from farandole.node.caffe.probe import ABI_CURE

# Debian has MPICH's library as libmpich.so.12 only; role caffe makes a link with the name of the ABI in this folder.
ABI = "/opt/farandole/caffe/abi"
# Each rank says first on which machine it runs: Caffe's own log does not tell. TCP needs the interface of its node.
RANK = (
    'echo "rank of caffe.sh on $(uname -n) machine $(cat /etc/machine-id)"; '
    "own=$(env -i sh -c '. /etc/farandole/environment; echo $GLOO_SOCKET_IFNAME'); "
    'case "$FI_PROVIDER $own" in "tcp "?*) export UCX_NET_DEVICES="$own" FI_TCP_IFACE="$own" ;; esac; exec "$0" "$@"'
)
# Unset, MLSL would start four servers per rank as soon as there are two nodes.
DEFAULTS = {"KMP_BLOCKTIME": "1", "KMP_SETTINGS": "1", "MLSL_NUM_SERVERS": "0"}
# For Intel MPI, and no PMIx for daemons that srun starts.
FIXED = {"I_MPI_FABRICS": "shm:ofi", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0", "SLURM_MPI_TYPE": "none"}
# For UCX and libfabric, one of which is in MPICH and Intel MPI.
NETWORKS = {"tcp": {"FI_PROVIDER": "tcp", "UCX_TLS": "self,sm,tcp"}, "opa": {"FI_PROVIDER": "psm2"}}
# A comment, or a name and its value; a # in quotes begins no comment.
PAIR = re.compile(r"""#[^\n]*|\b(\w+)\s*:\s*("[^"\n]*"|'[^'\n]*'|[^\s"'#{}<>\[\],;]+)""")


@dataclass
class Solver:
    """A solver, the files of its nets, the data that these name, and the model that it will save."""

    path: str
    nets: list[str]
    data: list[str]
    model: str
    # Whether it tests the net during the training.
    tests: bool


def pairs(path: str) -> list[tuple[str, str]]:
    """The names and values of a file in protobuf's text format, however deep."""
    text = Path(path).read_text(errors="replace")
    return [(match[1], match[2].strip("\"'")) for match in PAIR.finditer(text) if match[1]]


def read_solver(path: str) -> Solver:
    """Read a solver and its nets, and refuse one that would not train or not save."""
    own = pairs(path)
    last, nets = dict(own), [value for name, value in own if name in ("net", "train_net", "test_net")]
    needed = {"net": nets, **{name: last.get(name) for name in ("max_iter", "snapshot_prefix")}}
    if lacking := [name for name, value in needed.items() if value in (None, [], "", "0")]:
        raise FarandoleError(f"the solver {path} has no {' and no '.join(lacking)}: Caffe would not train, or not save")
    for name in ("max_iter", "test_interval"):
        if not re.fullmatch(r"\d{1,12}", last.get(name, "0")):
            raise FarandoleError(f"the solver's {name} is not a number: {one_line(last[name], 40)!r}")
    if last.get("snapshot_after_train") == "false":
        raise FarandoleError(f"the solver {path} saves no model: leave snapshot_after_train: false out")
    data = [value for file in (path, *nets) for name, value in pairs(file) if name in ("source", "mean_file")]
    iterations, interval = int(last["max_iter"]), int(last.get("test_interval", 0))
    suffix = ".h5" if last.get("snapshot_format") in ("HDF5", "0") else ""
    tested = "test_iter" in last and (last.get("test_initialization") != "false" or iterations >= interval)
    model = f"{last['snapshot_prefix']}_iter_{iterations}.caffemodel{suffix}"
    return Solver(path, nets, data, model, bool(tested and interval))


@dataclass
class Plan:
    """A training that can start."""

    nodes: list[str]
    ppn: int
    launcher: str
    program: list[str]
    environment: dict[str, str]
    solver: Solver

    @property
    def ranks(self) -> int:
        return self.ppn * len(self.nodes)

    def command(self) -> list[str]:
        shape = ["-n", str(self.ranks), "-ppn", str(self.ppn), "-hosts", ",".join(self.nodes)]
        return [self.launcher, "-l", "-genvall", *shape, "/bin/sh", "-c", RANK, *self.program]


def folders_of(caffe: str) -> str:
    """Where a program's libraries are: where the job says, beside it, the ABI's other name."""
    given = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return ":".join([*given, str(Path(caffe).resolve().parent.parent / "lib"), ABI])


def find_launcher() -> str:
    """The launcher of MPICH or Intel MPI, which alone have one of this name."""
    if launcher := shutil.which("mpiexec.hydra"):
        return launcher
    why = "there is no mpiexec.hydra on PATH, and another MPI's mpirun would start separate trainings and end with 0"
    raise FarandoleError(f"{socket.gethostname()}: {why}. {ABI_CURE}")


def threads(asked: int | None, cores: Mapping[str, int], ppn: int) -> int:
    """Threads per process: what is asked for, else all cores that a process has on the smallest node."""
    least, node = min((number, node) for node, number in cores.items())
    number = asked or max(least // ppn, 1)
    if number * ppn > least:
        cure = f"at most {least // ppn} by --num_omp_threads or OMP_NUM_THREADS, or a lower --ppn"
        raise FarandoleError(f"{node}: the job has {least} cores there, too few for {ppn} x {number} threads: {cure}")
    return number


def affinity(given: str, ppn: int) -> str:
    """KMP_AFFINITY in the syntax of today; what the guide writes as compact=1 is compact,1."""
    # Unpinned processes of one node would all take the same first cores.
    default = "granularity=fine,compact,1" if ppn == 1 else "none"
    return re.sub(r"\b(compact|scatter|balanced)=(\d+)", r"\1,\2", given) or default


def variables(caffe: str, ppn: int, number: int, network: str, in_slurm: bool) -> dict[str, str]:
    """The environment of a training. The launcher starts its daemons by ssh or srun."""
    made, start = {**DEFAULTS, **os.environ, **FIXED, **NETWORKS[network]}, "slurm" if in_slurm else "ssh"
    if made["MLSL_NUM_SERVERS"] != "0":
        raise FarandoleError("MLSL_NUM_SERVERS is set, and MLSL's servers were never tried here: unset it")
    own = {"LD_LIBRARY_PATH": folders_of(caffe), "HYDRA_LAUNCHER": start, "I_MPI_HYDRA_BOOTSTRAP": start}
    return made | own | {"OMP_NUM_THREADS": str(number), "KMP_AFFINITY": affinity(made.get("KMP_AFFINITY", ""), ppn)}
