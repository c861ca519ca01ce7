"""The MPI that caffe was built for, and a launcher of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from farandole.node.caffe.options import RefusedError, programs, say
from farandole.node.caffe.probe import LIBRARY_CURE, ldd

# Debian has MPICH's library as libmpich.so.12 only; role caffe makes a link with the name of the ABI in this folder.
ABI = "/opt/farandole/caffe/abi"
STACK = "/opt/farandole/current/mpi/lib"
# The libraries by which a program shows which MPI it was built for.
KINDS = {"libmpi.so.12": "mpich", "libmpich.so.12": "mpich", "libmpi.so.40": "openmpi"}
NAMES = {"mpich": "MPICH or Intel MPI", "openmpi": "Open MPI", "": "no MPI that is known here"}
LAUNCHERS = {"mpich": ("mpiexec.hydra", "mpirun"), "openmpi": ("mpirun", "mpirun.openmpi")}
CURES = {
    "mpich": "Install Debian's mpich on all nodes (caffe_packages: [mpich]), or load Intel MPI",
    "openmpi": "Run site.yml, which installs it",
}


def folders_of(caffe: str) -> list[str]:
    """Where a program's libraries are: where the job says, beside it, the stack's MPI, the ABI's other name."""
    given = [one for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    return [*given, str(Path(caffe).resolve().parent.parent / "lib"), STACK, ABI]


def which_mpi(caffe: str, folders: list[str]) -> str:
    """The library of MPI that a program loads, a key of KINDS."""
    here = f"{socket.gethostname()}: {caffe}"
    try:
        libraries = ldd(caffe, folders)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{here}: ldd failed: {error}") from None
    found = [name for name in libraries if re.match(r"libmpi(ch)?\.so", name)]
    if len({KINDS.get(name, name) for name in found}) == 1 and found[0] in KINDS:
        return found[0]
    if found:
        known = "only libmpi.so.12 (MPICH, Intel MPI) or libmpi.so.40 (Open MPI) is known, and only one of them"
        raise RefusedError(f"{here} loads {', '.join(found)}: {known}")
    if missing := [name for name, where in libraries.items() if where == "not found"]:
        raise RefusedError(f"{here} does not find {', '.join(missing)}. {LIBRARY_CURE}")
    raise RefusedError(
        f"{here} loads no MPI, so it trains on one node only: bring one that was built with USE_MLSL := 1"
    )


def kind_of(launcher: str) -> tuple[str, str]:
    """Which MPI a launcher belongs to, and the version that it prints."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=20, check=False,
        )  # fmt: skip
        version = asked.stdout + asked.stderr
        if "Open MPI" in version:
            return "openmpi", version
        if "Intel(R) MPI" in version or "HYDRA" in version:
            return "mpich", version
    return "", ""


def choose_launcher(forced: str | None, caffe: str, library: str, ranks: int) -> tuple[str, str]:
    """The launcher of the MPI that caffe was built for, and its version."""
    wanted, here = KINDS[library], socket.gethostname()
    built = f"{caffe} was built for {NAMES[wanted]} ({library})"
    path = shutil.which(forced) if forced else None
    if forced and not path:
        raise RefusedError(f"{here}: there is no program {forced}: mend or leave out --mpirun")
    seen = [(one, *kind_of(one)) for one in ([path] if path else programs(*LAUNCHERS[wanted]))]
    for launcher, kind, version in seen:
        if kind == wanted:
            if launcher != seen[0][0]:
                say(f"{seen[0][0]} is not of {NAMES[wanted]}, for which caffe was built, so {launcher} starts it")
            return launcher, version
    cure = "Leave --mpirun out" if forced else CURES[wanted]
    if not seen:
        raise RefusedError(f"{here}: {built}, and there is no launcher of it: {cure}")
    raise RefusedError(
        f"{here}: {seen[0][0]} is a launcher of {NAMES[seen[0][1]]}, and {built}: it would start {ranks} separate "
        f"trainings and end with 0. {cure}"
    )
