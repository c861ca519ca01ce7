"""What a node says about a training that is to start there; the launcher sends this file to the node's Python."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from glob import escape, iglob
from pathlib import Path
from typing import Any

# The libraries of MPICH and Intel MPI, which launch each other's programs; Intel Caffe was released for the latter.
KNOWN = {"libmpi.so.12", "libmpich.so.12"}
LIBRARY_CURE = "Put it into the folder lib beside its bin, on all nodes, or its folder on LD_LIBRARY_PATH"
ABI_CURE = "Set caffe_packages: [mpich] and run site.yml, or load Intel MPI"


def wrong_libraries(caffe: str, folders: str) -> Iterator[str]:
    """Say what keeps a program from training with others, of what ldd shows."""
    environment = {**os.environ, "LC_ALL": "C", "LD_LIBRARY_PATH": folders}
    asked = subprocess.run(["ldd", caffe], capture_output=True, env=environment, timeout=30, check=False)
    pairs = re.findall(r"^\s*(\S+) => (.*?)(?: \(0x[0-9a-f]+\))?$", asked.stdout.decode(errors="replace"), re.MULTILINE)
    missing = {name for name, where in pairs if where == "not found"}
    mpi = {name for name, _ in pairs if re.match(r"libmpi(ch)?\.so", name)}
    if mpi - KNOWN:
        yield f"{caffe} loads {', '.join(sorted(mpi))}, but only libmpi.so.12 (MPICH, Intel MPI) is known"
    elif missing:
        yield f"{caffe} does not find {', '.join(sorted(missing))}. {ABI_CURE if missing & KNOWN else LIBRARY_CURE}"
    elif not mpi:
        yield f"{caffe} loads no MPI, so it trains on one node only: bring one that was built with USE_MLSL := 1"


def problems(request: dict[str, Any]) -> Iterator[str]:
    for path, wanted in request["files"].items():
        try:
            # In the name of data, a rank's number may stand for %#.
            os.close(os.open(next(iglob(escape(path).replace("%#", "[0-9]*")), path), os.O_RDONLY))  # noqa: PTH207
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}. Put it there, or correct its path"
            continue
        if wanted and hashlib.sha256(Path(path).read_bytes()).hexdigest() != wanted:
            yield f"{path} differs from that of {request['host']}. Copy it again, or run site.yml"
        if path == request["caffe"]:
            yield from wrong_libraries(path, request["folders"])
    folder = str(Path(request["model"]).parent)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = f"{error.strerror}. Caffe would hang forever after the training"
        yield f"no snapshot can be written to {folder}: {why}. Make it there: mkdir -p {shlex.quote(folder)}"


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    model = Path(asked["model"])
    answer = {
        "problems": list(problems(asked)),
        # What changes when it is written again.
        "model": model.stat().st_mtime_ns if model.exists() else 0,
        "cores": len(os.sched_getaffinity(0)),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "omni_path": any(Path("/sys/class/infiniband").glob("hfi1*")),
    }
    print(json.dumps(answer))
