"""Frameworks that are not in the stack, as packages of the user's own: their ranks meet, by ssh and in the queue."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import PREPARED, Cluster
from programs import lines, meet, program

NODES = 2
KIND = PREPARED
PACKAGES = "stack_packages: [accelerate, jax, lightning, mpi4py, ray]\n"
QUEUE = "slurm_enabled: true\n"
# Of each page, in the queue.
FIRST = dict(reversed(lines("accelerate", "lightning", "jax", "mpi")))

STEPS = """
import pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
folder = pathlib.Path("saved")
folder.mkdir(exist_ok=True)
last = torch.tensor([max([0, *(int(path.name) for path in folder.iterdir())])])
dist.broadcast(last, 0)
print("after step", last.item(), "of", dist.get_world_size(), flush=True)
# However long the fault takes to come; after the loss there is little left to do.
for step in range(last.item() + 1, 600 if dist.get_world_size() > 1 else last.item() + 9):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.25)
    if dist.get_rank() == 0:
        (folder / str(step)).touch()
"""


@pytest.fixture(scope="module", autouse=True)
def packages(cluster: Cluster) -> Iterator[None]:
    """The packages on every node."""
    settings(cluster, PACKAGES)
    yield
    # What a user wrote is kept when a lab is removed.
    shutil.rmtree(cluster.inventory / "group_vars")


def settings(cluster: Cluster, text: str) -> None:
    path = cluster.inventory / "group_vars/all.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    locked = cluster.farandole("lock")
    assert locked.returncode == 0, locked.stdout + locked.stderr
    cluster.play_ok()


@pytest.mark.parametrize(("page", "line"), lines("accelerate", "lightning", "jax", "mpi", "ray"))
def test_ranks_meet(cluster: Cluster, tmp_path: Path, page: str, line: str) -> None:
    meet(cluster, tmp_path, page, line, NODES)


def test_trainers_of_lightning_on_one_node_each_are_alone(cluster: Cluster, tmp_path: Path) -> None:
    for_one_node = program("lightning").replace('num_nodes=2, devices=1, strategy="ddp"', "devices=1")
    (tmp_path / "train.py").write_text(for_one_node)
    done = cluster.farandole("run", "--", "python", "train.py", folder=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "num_nodes=N" in done.stdout


def test_ranks_of_accelerate_that_are_not_told_to_use_processors_are_alone(cluster: Cluster, tmp_path: Path) -> None:
    """They do meet, and nothing is averaged."""
    (tmp_path / "train.py").write_text(program("accelerate"))
    done = cluster.farandole("run", "--", "env", "ACCELERATE_USE_CPU=no", "python", "train.py", folder=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "accelerate launch --cpu" in done.stdout


@pytest.fixture(scope="module")
def queue(cluster: Cluster) -> None:
    settings(cluster, PACKAGES + QUEUE)


@pytest.mark.usefixtures("queue")
def test_ranks_meet_in_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    for page, line in FIRST.items():
        meet(cluster, tmp_path, page, line, NODES)


@pytest.mark.usefixtures("queue")
def test_a_run_of_the_queue_goes_on_after_the_loss_of_a_node(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    options = ("--restarts", "1", "--min-nodes", "1", "--checkpoints", "saved")
    process = cluster.begin("run", *options, "--", "python", "train.py", folder=tmp_path)
    assert process.stdout
    assert any("after step 0 of 2" in line for line in process.stdout)
    time.sleep(3)
    cluster.lab("fault", "kill", "node-2")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, output + errors
    assert "farandole: start 2, without node-2" in output
    assert re.search(r"after step [1-9]\d* of 1\n", output)
