"""How a training is started: its threads, variables and command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from farandole.node.caffe.mpi import folders_of
from farandole.node.caffe.options import RefusedError, plain, say

PASSED_ON = re.compile(r"(KMP|OMP|MLSL|GLOG|I_MPI|FI|UCX|MKL)_|LD_LIBRARY_PATH$")
# Each rank says first on which machine it runs: Caffe's own log does not tell.
RANK = 'echo "rank of caffe.sh on $(uname -n) machine $(cat /etc/machine-id)"; exec "$0" "$@"'
# By network: options of Open MPI, the provider of libfabric.
OPENMPI = {
    "tcp": ["--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp"],
    "opa": ["--mca", "pml", "cm", "--mca", "mtl", "psm2"],
}
PROVIDERS = {"tcp": "tcp", "opa": "psm2"}


def threads(asked: int | None, cores: int, where: str, ppn: int) -> int:
    """Threads per process: what was asked, else what the allocation gives, within the cores of a process."""
    share = f"{where}: {cores} cores for {ppn} process{'es' * (ppn > 1)} per node"
    if cores < ppn:
        raise RefusedError(f"{share} leave none for its threads: lower --ppn")
    names = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")
    for name, value in (("--num_omp_threads", asked), *((name, os.environ.get(name)) for name in names)):
        if value and not re.fullmatch(r"[1-9]\d{0,5}", str(value)):
            raise RefusedError(f"{name} is {plain(value, 40)!r}, which is no number of threads")
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
    mended = re.sub(r"\b(compact|scatter|balanced)=(\d+)", r"\1,\2", given)
    if mended != given:
        say(f"translated: KMP_AFFINITY={plain(given)} is {plain(mended)} to today's OpenMP, which ignores the rest")
    return mended


@dataclass
class Plan:
    """A training that can start."""

    nodes: list[str]
    ppn: int
    kind: str
    launcher: str
    program: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.ppn * len(self.nodes)

    def command(self, hostfile: str) -> list[str]:
        variables = sorted(self.environment.items())
        if self.kind == "openmpi":
            shape = ["--tag-output", "--hostfile", hostfile, "-N", str(self.ppn), "-n", str(self.ranks)]
            handed = [word for name, _ in variables for word in ("-x", name)]
        else:
            shape = ["-l", "-n", str(self.ranks), "-ppn", str(self.ppn), "-f", hostfile]
            handed = [word for name, value in variables for word in ("-genv", name, value)]
        return [self.launcher, *shape, *self.options, *handed, "/bin/sh", "-c", RANK, *self.program]

    def hosts(self) -> str:
        separator = " slots=" if self.kind == "openmpi" else ":"
        return "".join(f"{node}{separator}{self.ppn}\n" for node in self.nodes)


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


def mca(network: str, fabrics: Iterable[list[str]]) -> list[str]:
    """Options of Open MPI."""
    networks = {fabric[0] for fabric in fabrics if fabric}
    chosen = networks.pop() if len(networks) == 1 else ""
    named = ["--mca", "btl_tcp_if_include", chosen, "--mca", "oob_tcp_if_include", chosen]
    return ["--bind-to", "none", *OPENMPI[network], *(named if re.fullmatch(r"[0-9./]+", chosen) else [])]


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
