"""A cluster that the version before 1.0.0 has made becomes one of this version, while a job of that version runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import ROOT, Cluster

NODES = 2
BEFORE = "944c0ec"
# It ends when it may, or after ten minutes.
PROGRAM = """\
import os, time
for _ in range(1200):
    if os.path.exists("/run/finish"):
        break
    time.sleep(0.5)
print("whole" if os.path.exists("/run/finish") else "late", flush=True)
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the version before, with the same state folders, as if `git pull` came next."""
    folder = tmp_path_factory.mktemp("before") / "farandole"
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"{BEFORE} is not in this clone: git fetch --unshallow")
    folder.mkdir()
    # Debian 12's own tarfile has no filter.
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    (ROOT / ".farandole").mkdir(exist_ok=True)
    (folder / ".farandole").symlink_to(ROOT / ".farandole")
    return folder


def farandole(folder: Path, cluster: Cluster, verb: str, *arguments: str, cwd: Path) -> str:
    """Run the command of a checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "ANSIBLE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "farandole", verb, "-i", str(cluster.inventory), *arguments],
        cwd=cwd, env={**environment, "PYTHONPATH": str(folder / "src")}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_cluster_of_the_version_before_is_taken_over_under_a_running_job(
    cluster: Cluster, old: Path, tmp_path: Path
) -> None:
    lock, settings = cluster.inventory / "stack.lock.yml", cluster.inventory / "group_vars/all.yml"
    settings.parent.mkdir(exist_ok=True)
    # The Horovod of that version has to be compiled, which takes half as long for one framework.
    settings.write_text("stack_frameworks: [pytorch]\n")
    farandole(old, cluster, "apply", cwd=old)
    before = lock.read_bytes()
    (tmp_path / "wait.py").write_text(PROGRAM)
    farandole(old, cluster, "run", "--detach", "--", "python", "wait.py", cwd=tmp_path)
    cluster.bare = False
    for changes in (True, False):
        done = cluster.play_ok()
        assert bool(done.changed_hosts) == changes, done.changes
    # The same versions, and so nothing is built or installed again.
    assert lock.read_bytes() == before
    assert "run 1 of trainer" in farandole(ROOT, cluster, "status", cwd=ROOT)
    for node in ("node-1", "node-2"):
        assert cluster.ssh(node, "touch", "/run/finish").returncode == 0
    assert farandole(ROOT, cluster, "attach", cwd=ROOT).count("whole") == 2
    farandole(ROOT, cluster, "run", "--", "python", "-c", "print('new')", cwd=tmp_path)
    farandole(ROOT, cluster, "validate", "--quick", cwd=ROOT)
    shutil.rmtree(settings.parent)
