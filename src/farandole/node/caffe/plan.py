"""How a training is started: by which launcher, with which threads, variables and command."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from farandole.node.caffe.options import INSTALLED, RefusedError, plain, programs, say
from farandole.node.caffe.probe import ABI_CURE, LIBRARY_CURE, ldd

# Debian has MPICH's library as libmpich.so.12 only; role caffe makes a link with the name of the ABI in this folder.
ABI = "/opt/farandole/caffe/abi"
# The libraries of MPICH and Intel MPI, which launch each other's programs; Intel Caffe was released for the latter.
LIBRARIES = {"libmpi.so.12", "libmpich.so.12"}
LAUNCHERS = ("mpiexec.hydra", "mpirun")
PASSED_ON = re.compile(r"(KMP|OMP|MLSL|GLOG|I_MPI|FI|UCX|MKL)_|LD_LIBRARY_PATH$")
# Each rank says first on which machine it runs: Caffe's own log does not tell.
RANK = 'echo "rank of caffe.sh on $(uname -n) machine $(cat /etc/machine-id)"; exec "$0" "$@"'
# The provider of libfabric.
PROVIDERS = {"tcp": "tcp", "opa": "psm2"}


def caffe_of(chosen: str | None) -> str:
    """The program, of which it is certain that it was built for MPICH or Intel MPI."""
    caffe = str(Path(chosen or shutil.which("caffe") or INSTALLED).absolute())
    if not os.access(caffe, os.X_OK):
        cure = "Bring it with caffe_archive (role caffe), or name it with --caffe_bin"
        raise RefusedError(f"{socket.gethostname()}: there is no program {caffe}. {cure}")
    here = f"{socket.gethostname()}: {caffe}"
    try:
        libraries = ldd(caffe, folders_of(caffe))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{here}: ldd failed: {error}") from None
    seen = {name for name in libraries if re.match(r"libmpi(ch)?\.so", name)}
    if seen - LIBRARIES:
        raise RefusedError(f"{here} loads {', '.join(sorted(seen))}, but only libmpi.so.12 (MPICH, Intel MPI) is known")
    if seen:
        return caffe
    if missing := [name for name, where in libraries.items() if where == "not found"]:
        raise RefusedError(f"{here} does not find {', '.join(missing)}. {LIBRARY_CURE}")
    cure = "bring one that was built with USE_MLSL := 1"
    raise RefusedError(f"{here} loads no MPI, so it trains on one node only: {cure}")


def folders_of(caffe: str) -> list[str]:
    """Where a program's libraries are: where the job says, beside it, the ABI's other name."""
    given = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return [*given, str(Path(caffe).resolve().parent.parent / "lib"), ABI]


def is_hydra(launcher: str) -> bool:
    """Whether a launcher is MPICH's or Intel MPI's. Any other would start a separate training for each rank."""
    with suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [launcher, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=20, check=False,
        )  # fmt: skip
        return "Intel(R) MPI" in asked.stdout or "HYDRA" in asked.stdout
    return False


def choose_launcher(caffe: str, ranks: int) -> str:
    """The first launcher on PATH that belongs to the MPI of caffe."""
    seen = programs(*LAUNCHERS)
    launcher = next(filter(is_hydra, seen), None)
    if not launcher:
        others = f"{seen[0]} would start {ranks} separate trainings and end with 0" if seen else "there is none"
        built = f"{caffe} was built for MPICH or Intel MPI, and no launcher of it is on PATH"
        raise RefusedError(f"{socket.gethostname()}: {built}: {others}. {ABI_CURE}")
    if launcher != seen[0]:
        say(f"{seen[0]} is not of MPICH or Intel MPI, for which caffe was built, so {launcher} starts it")
    return launcher


def threads(asked: int | None, cores: int, where: str, ppn: int) -> int:
    """Threads per process: what was asked, else what the allocation gives, within the cores of a process."""
    share = f"{where}: {cores} cores for {ppn} process{'es' * (ppn > 1)} per node"
    if cores < ppn:
        raise RefusedError(f"{share} leave none for its threads: lower --ppn")
    names = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")
    for name, value in (("--num_omp_threads", asked), *((name, os.environ.get(name)) for name in names)):
        if value and not re.fullmatch(r"[1-9]\d{0,5}", str(value)):
            raise RefusedError(f"{name} is {plain(value, 40)!r}, which is not a number of threads")
        if value and int(value) > cores // ppn:
            raise RefusedError(f"{share}, but {name} asks for {value} threads: at most {cores // ppn}")
        if value:
            return int(value)
    return cores // ppn


def affinity(given: str | None, ppn: int) -> str:
    """KMP_AFFINITY in the syntax of today; what the guide writes as compact=1 is compact,1."""
    if not given:
        # Unpinned processes of one node would all take the same first cores.
        return "granularity=fine,compact,1" if ppn == 1 else "none"
    corrected = re.sub(r"\b(compact|scatter|balanced)=(\d+)", r"\1,\2", given)
    if corrected != given:
        say(f"translated: KMP_AFFINITY={plain(given)} is {plain(corrected)} to today's OpenMP, which ignores the rest")
    return corrected


@dataclass
class Plan:
    """A training that can start."""

    nodes: list[str]
    ppn: int
    launcher: str
    program: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.ppn * len(self.nodes)

    def command(self, hostfile: str) -> list[str]:
        shape = ["-l", "-n", str(self.ranks), "-ppn", str(self.ppn), "-f", hostfile]
        handed = [text for name, value in sorted(self.environment.items()) for text in ("-genv", name, value)]
        return [self.launcher, *shape, *handed, "/bin/sh", "-c", RANK, *self.program]

    def hosts(self) -> str:
        return "".join(f"{node}:{self.ppn}\n" for node in self.nodes)


def variables(caffe: str, ppn: int, number: int) -> dict[str, str]:
    """The variables that all ranks get, whatever starts them."""
    here = os.environ
    if here.get("MLSL_NUM_SERVERS", "0") != "0":
        raise RefusedError("MLSL_NUM_SERVERS is set, and MLSL's servers were never tried here: unset it")
    return {
        **{name: value for name, value in here.items() if PASSED_ON.match(name)},
        "LD_LIBRARY_PATH": ":".join(folders_of(caffe)),
        # Unset, it would start four servers per rank as soon as there are two nodes.
        "MLSL_NUM_SERVERS": "0",
        "OMP_NUM_THREADS": str(number),
        "KMP_AFFINITY": affinity(here.get("KMP_AFFINITY"), ppn),
        "KMP_BLOCKTIME": here.get("KMP_BLOCKTIME") or "1",
        "KMP_SETTINGS": here.get("KMP_SETTINGS") or "1",
    }


def hydra(network: str, fabrics: Iterable[list[str]], in_slurm: bool) -> dict[str, str]:
    """Variables of MPICH and Intel MPI, which start their daemons by ssh or srun; UCX or libfabric may be inside."""
    start, interfaces = "slurm" if in_slurm else "ssh", sorted({fabric[-1] for fabric in fabrics if fabric})
    made = {"HYDRA_LAUNCHER": start, "I_MPI_HYDRA_BOOTSTRAP": start, "FI_PROVIDER": PROVIDERS[network]}
    made |= {"I_MPI_FABRICS": "shm:ofi", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}
    if network == "tcp":
        made |= {"UCX_TLS": "self,sm,tcp"} | ({"UCX_NET_DEVICES": ",".join(interfaces)} if interfaces else {})
        made |= {"FI_TCP_IFACE": interfaces[0]} if len(interfaces) == 1 else {}
    # The daemons need no PMIx.
    return made | ({"SLURM_MPI_TYPE": "none"} if in_slurm else {})
