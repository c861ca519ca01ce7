"""Frameworks that are not in the stack, as packages of the user's own: their ranks meet, by ssh and in the queue."""

import re
from pathlib import Path

import pytest
from clusters import Cluster

NODES = 2
PACKAGES = "stack_packages: [accelerate, jax, lightning, mpi4py]\n"
QUEUE = "slurm_enabled: true\n"

ACCELERATE = """
import accelerate, torch
accelerator = accelerate.Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 1))
accelerator.backward(model(torch.ones(2, 4)).sum())
print("rank", accelerator.process_index, "of", accelerator.num_processes)
"""
LIGHTNING = """
import lightning, torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), 2))
print("rank", trainer.global_rank, "of", trainer.world_size)
"""
JAX = """
import os, jax, jax.numpy as jnp
jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
print("rank", jax.process_index(), "of", jax.process_count(), "devices", jax.device_count())
"""
MPI = """
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.allreduce(world.rank) - 1 + world.rank, "of", world.size)
"""
# Each is a training of its own.
ALONE = LIGHTNING.replace("num_nodes=2", "num_nodes=1")
LINES = {
    "accelerate launch": ("accelerate launch --cpu train.py", ACCELERATE),
    "accelerate": ("python train.py", ACCELERATE),
    "lightning": ("python train.py", LIGHTNING),
    "jax": ("python train.py", JAX),
    "mpi4py": ("mpirun", MPI),
}


@pytest.fixture(scope="module", autouse=True)
def packages(cluster: Cluster) -> None:
    """The packages on every node."""
    settings(cluster, PACKAGES)


def settings(cluster: Cluster, text: str) -> None:
    path = cluster.inventory / "group_vars/all.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    locked = cluster.farandole("lock")
    assert locked.returncode == 0, locked.stdout + locked.stderr
    cluster.play_ok()


def meet(cluster: Cluster, folder: Path, name: str) -> None:
    """Run a program with two ranks, which have to meet."""
    line, text = LINES[name]
    (folder / "train.py").write_text(text)
    program = ["--mpi", "--", "python", "train.py"] if line == "mpirun" else ["--", *line.split()]
    done = cluster.farandole("run", *program, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("farandole: 2 ranks on 2 nodes, ")
    assert {*re.findall(r"rank (\d) of 2", done.stdout)} == {"0", "1"}, done.stdout


@pytest.mark.parametrize("name", LINES)
def test_ranks_meet(cluster: Cluster, tmp_path: Path, name: str) -> None:
    meet(cluster, tmp_path, name)


def test_two_trainers_of_lightning_are_alone(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    done = cluster.farandole("run", "--", "python", "train.py", folder=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Trainer(num_nodes=N)" in done.stdout


def test_ranks_meet_in_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    settings(cluster, PACKAGES + QUEUE)
    for name in ("accelerate launch", "lightning", "jax", "mpi4py"):
        meet(cluster, tmp_path, name)
