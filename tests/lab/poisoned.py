"""A packed stack as a malicious root on a builder could make it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from clusters import ROOT

from farandole.core.files import sha256


def poison(builds: Path, honest: Path, stack: str) -> None:
    """Make one from an honest build: consistent, but with a different mpirun."""
    record = next((honest / "stacks").glob(f"{stack}.*.zst.json"))
    about = json.loads(record.read_text())
    trees, packed = builds / "trees", builds / "stacks" / record.name.removesuffix(".json")
    trees.mkdir()
    packed.parent.mkdir()
    subprocess.run(["tar", "-C", trees, "--zstd", "-xf", record.with_suffix("")], check=True)
    (mpi,) = (trees / "mpi").iterdir()
    mpirun = mpi / "bin/mpirun"
    mpirun.unlink()
    mpirun.write_text(
        '#!/bin/sh\nid -un >>/tmp/poisoned; id -un 2>/dev/null >>/root/poisoned\nexec "${0%mpirun}orterun" "$@"\n'
    )
    mpirun.chmod(0o755)
    (mpi / "contents").unlink()
    listed = [sys.executable, "-I", str(ROOT / "plugins/module_utils/contents.py"), str(mpi)]
    about["contents"][f"mpi/{mpi.name}"] = subprocess.check_output(listed, text=True).strip()
    subprocess.run(["tar", "-C", trees, "-I", "zstd -1 -T0", "-cf", packed, "stacks", "mpi"], check=True)
    about["sha256"] = sha256(packed)
    (packed.parent / record.name).write_text(json.dumps(about))
    shutil.rmtree(trees)
