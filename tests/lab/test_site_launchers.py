"""Programs of several frameworks, as people start them, and ranks that never meet. docs/launchers.md has each line."""

import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from clusters import Cluster

NODES = 3
SITE = ()

DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), "local", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""
HOROVOD = """
import horovod.torch as hvd, torch
hvd.init()
print("rank", hvd.rank(), "of", hvd.size(), "sum", hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item())
"""
TENSORFLOW = """
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
replicas = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
print("replicas", strategy.num_replicas_in_sync, "sum", float(replicas))
"""
STEPS = """
import pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
folder = pathlib.Path("saved")
folder.mkdir(exist_ok=True)
last = torch.tensor([max([0, *(int(path.name) for path in folder.glob("[0-9]*"))])])
dist.broadcast(last, 0)
print("after step", last.item(), flush=True)
for step in range(last.item() + 1, 41):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.25)
    if dist.get_rank() == 0:
        (folder / ".draft").write_text("")
        (folder / ".draft").rename(folder / str(step))
print("done")
"""
# Trains by itself; whoever starts three of these pays for three machines and gets one.
TORCH = """
import torch
layer = torch.nn.Linear(4, 1)
layer(torch.ones(2, 4)).sum().backward()
print("trained")
"""
KERAS = """
import horovod.keras as hvd, keras, numpy
hvd.init()
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(numpy.ones((8, 4)), numpy.ones((8, 1)), verbose=0)
print("trained")
"""
FILES = """
import os, pathlib, time, torch
rank = int(os.environ["RANK"])
pathlib.Path(f"part-{rank}").write_text(str(torch.ones(2).sum().item()))
print("wrote", rank)
"""


def run(site: Cluster, folder: Path, options: str, program: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    done = site.farandole("run", *options.split(), "--", *program.split(), folder=folder)
    print(done.stdout, done.stderr)
    return done


@pytest.mark.parametrize(
    ("options", "program", "text", "shape"),
    [
        ("", "python train.py", DDP, "3 ranks on 3 nodes, Horovod"),
        ("", "torchrun train.py", DDP, "3 ranks on 3 nodes, torchrun"),
        ("", "python train.py", HOROVOD, "3 ranks on 3 nodes, Horovod"),
    ],
)
def test_ranks_meet(site: Cluster, tmp_path: Path, options: str, program: str, text: str, shape: str) -> None:
    done = run(site, tmp_path, options, program, text)
    assert done.returncode == 0
    assert done.stdout.startswith(f"farandole: {shape}\n")
    assert {*re.findall(r"rank (\d) of 3 sum 3\.0", done.stdout)} == {"0", "1", "2"}
    assert "\x02" not in done.stdout


def test_workers_of_tensorflow_meet(site: Cluster, tmp_path: Path) -> None:
    done = run(site, tmp_path, "", "python train.py", TENSORFLOW)
    assert done.returncode == 0
    assert done.stdout.count("replicas 3 sum 3.0") == 3


@pytest.mark.parametrize(
    ("options", "program", "text", "why"),
    [
        ("", "python train.py", TORCH, "they use torch"),
        ("--gloo", "torchrun --standalone train.py", DDP, "torch.distributed knew of one rank"),
        ("", "python train.py", KERAS, "Keras 3 does not call Horovod"),
    ],
)
def test_ranks_that_never_meet_are_no_success(
    site: Cluster, tmp_path: Path, options: str, program: str, text: str, why: str
) -> None:
    done = run(site, tmp_path, options, program, text)
    assert done.returncode == 3
    assert re.search(
        rf"^farandole: 3 ranks were started, and each worked by itself: .*{why}", done.stdout, re.MULTILINE
    )
    assert "alone: the ranks never met after" in done.stderr
    assert "alone: " in site.farandole("runs").stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "program", "text"),
    [
        ("", "hostname", ""),
        ("--each", "python train.py", TORCH),
        ("", "python train.py", FILES),
    ],
)
def test_what_is_not_meant_to_meet_is_not_called_alone(
    site: Cluster, tmp_path: Path, options: str, program: str, text: str
) -> None:
    assert run(site, tmp_path, options, program, text).returncode == 0


def test_of_independent_programs_one_may_fail(site: Cluster, tmp_path: Path) -> None:
    text = "import os, time; n = int(os.environ['FARANDOLE_SLOT']); time.sleep(n); print('end', n); exit(7 * (n == 0))"
    done = run(site, tmp_path, "--each", "python train.py", text)
    assert done.returncode == 7
    assert {*re.findall(r"end (\d)", done.stdout)} == {"0", "1", "2"}
    assert "program 0 on node-1 ended with exit status 7" in done.stdout


def test_a_port_of_the_first_node_can_be_reached_from_here(site: Cluster, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("hello from the node")
    serve = "python -m http.server 8791 --bind 127.0.0.1"
    process = site.begin("run", "--hosts", "node-2", "--forward", "8792:8791", "--", *serve.split(), folder=tmp_path)
    try:
        assert process.stdout
        assert any("Serving HTTP" in line for line in process.stdout)
        with urllib.request.urlopen("http://127.0.0.1:8792/page", timeout=60) as page:
            assert page.read() == b"hello from the node"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_run_starts_again_when_a_node_is_back(site: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    options = ("--restarts", "2", "--checkpoints", "saved", "--fetch", "saved")
    process = site.begin("run", *options, "--", "python", "train.py", folder=tmp_path)
    assert process.stdout
    assert any("after step 0" in line for line in process.stdout)
    time.sleep(4)
    site.lab("fault", "reboot", "node-3")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    assert "farandole: start 2" in output
    resumed = {int(step) for step in re.findall(r"after step (\d+)", output)} - {0}
    assert len(resumed) == 1
    assert output.count("] done") == 3
    assert len(list((tmp_path / "saved").glob("[0-9]*"))) == 40
