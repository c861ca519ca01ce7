"""What a node says about a training that is to start there; the launcher sends this file to the node's Python."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY_CURE = "Put it into the folder lib beside its bin, on all nodes, or its folder on LD_LIBRARY_PATH"
ABI_CURE = "Set caffe_packages: [mpich] and run site.yml, or load Intel MPI"


def ldd(program: str, folders: list[str]) -> dict[str, str]:
    """The libraries that a program loads, and where they are."""
    environment = {**os.environ, "LC_ALL": "C", "LD_LIBRARY_PATH": ":".join(folders)}
    asked = subprocess.run(["ldd", program], capture_output=True, env=environment, timeout=30, check=False)
    pairs = re.findall(r"^\s*(\S+) => (.*?)(?: \(0x[0-9a-f]+\))?$", asked.stdout.decode(errors="replace"), re.MULTILINE)
    return dict(pairs)


def why_not(path: str) -> str:
    """Why a file or folder cannot be read."""
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        return str(error.strerror)
    return "" if os.access(path, os.R_OK) else "Permission denied"


def problems(request: dict[str, Any]) -> Iterator[str]:
    for path, what in request["files"].items():
        if why := why_not(path):
            yield f"{what} {path} cannot be read: {why}. Put it there"
    libraries = ldd(request["caffe"], request["folders"])
    if missing := [name for name, where in libraries.items() if where == "not found"]:
        cure = ABI_CURE if "libmpi.so.12" in missing else LIBRARY_CURE
        yield f"{request['caffe']} does not find {', '.join(missing)}. {cure}"
    if not os.access(request["launcher"], os.X_OK):
        yield f"there is no {request['launcher']}, which starts the ranks. Install the same MPI as elsewhere"
    for source in request["sources"]:
        # A rank's number may stand for %#.
        folder, name = os.path.split(source)
        found = next(Path(folder or ".").glob(name.replace("%#", "[0-9]*")), source) if "%#" in name else source
        if why := why_not(str(found)):
            yield f"the data {source} cannot be read: {why}. Put it there, or correct its path"
    try:
        tempfile.TemporaryFile(dir=request["snapshots"]).close()
    except OSError as error:
        why = f"{error.strerror}. Caffe would hang forever after the training"
        cure = f"Make the folder there: mkdir -p {shlex.quote(request['snapshots'])}"
        yield f"no snapshot can be written to {request['snapshots']}: {why}. {cure}"


def signature(path: Path) -> list[int]:
    """What changes when a file is written again; empty if it does not exist."""
    about = path.stat() if path.exists() else None
    return [about.st_mtime_ns, about.st_ino, about.st_size] if about else []


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request."""
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        why = f"{request['cwd']}, where the job starts, cannot be entered: {error.strerror}. Make that folder there"
        return {"problems": [why]}
    adapters = Path("/sys/class/infiniband")
    settings = '. /etc/farandole/environment && echo "$HOROVOD_NETWORK $GLOO_SOCKET_IFNAME"'
    chosen = subprocess.run(["sh", "-c", settings], capture_output=True, text=True, env={"PATH": "/bin"}, check=False)
    readable = [path for path in request["files"] if not why_not(path)]
    return {
        "problems": list(problems(request)),
        "digests": {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in readable},
        "model": signature(Path(request["model"])),
        "cores": len(os.sched_getaffinity(0)),
        "machine": Path("/etc/machine-id").read_text().strip(),
        "adapters": [one.name for one in adapters.iterdir()] if adapters.is_dir() else [],
        # The network that Farandole has chosen for jobs, and this node's interface in it.
        "fabric": chosen.stdout.split(),
    }


if __name__ == "__main__":
    print(json.dumps(describe(json.loads(sys.argv[1]))))
