"""Programs of several frameworks, as people start them, and ranks that never meet. docs/launchers.md has each line."""

import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from clusters import LONG, PREPARED, ROOT, Cluster
from programs import lines, meet

NODES = 3
KIND = PREPARED
SITE = ()

DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), "local", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""
LATE = """
import os, time, torch.distributed as dist
time.sleep(600 * (os.environ["RANK"] == "1"))
dist.init_process_group("gloo")
"""
LOCAL = """
import os, torch.distributed as dist, torch.multiprocessing as processes

def meet(rank):
    os.environ.update(MASTER_ADDR="localhost")
    dist.init_process_group("gloo", rank=rank, world_size=3)

if __name__ == "__main__":
    processes.spawn(meet, nprocs=3)
"""
# Trains by itself; whoever starts three of these pays for three machines and gets one.
TORCH = """
import torch
layer = torch.nn.Linear(4, 1)
layer(torch.ones(2, 4)).sum().backward()
print("trained")
"""
FILES = """
import os, pathlib, time, torch
rank = int(os.environ["RANK"])
pathlib.Path(f"part-{rank}").write_text(str(torch.ones(2).sum().item()))
print("wrote", rank)
"""
# Trains as the sample does, but waits in its fourth epoch for a node to fail, the first time that it gets there.
WAITS_ONCE = """
import builtins, pathlib, runpy, time
show, waited = print, pathlib.Path("waited")

def show_and_wait(*words, **options):
    show(*words, **options)
    if words[0].startswith("Train Epoch: 4 ") and not waited.exists():
        waited.touch()
        time.sleep(100)

builtins.print = show_and_wait
runpy.run_path("pytorch_mnist.py", run_name="__main__")
"""


def run(site: Cluster, folder: Path, options: str, program: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    done = site.farandole("run", *options.split(), "--", *program.split(), folder=folder)
    print(done.stdout, done.stderr)
    return done


OTHERS = [pytest.param(*line, marks=LONG) for line in lines("keras", "tensorflow", "each")]


@pytest.mark.parametrize(("page", "line"), [*lines("horovod", "torchrun"), *OTHERS])
def test_the_line_of_a_page_works(site: Cluster, tmp_path: Path, page: str, line: str) -> None:
    meet(site, tmp_path, page, line, NODES)


@pytest.mark.parametrize(
    ("options", "program", "text", "why"),
    [
        ("", "python train.py", TORCH, "they use torch"),
        ("--gloo", "torchrun --standalone train.py", DDP, "torch.distributed knew of one rank"),
        ("", "python train.py", LOCAL, "torch.distributed at localhost"),
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
    [("", "hostname", ""), ("--each", "python train.py", TORCH), ("", "python train.py", FILES)],
)
def test_what_is_not_meant_to_meet_is_not_called_alone(
    site: Cluster, tmp_path: Path, options: str, program: str, text: str
) -> None:
    assert run(site, tmp_path, options, program, text).returncode == 0


@LONG
def test_of_independent_programs_one_may_fail(site: Cluster, tmp_path: Path) -> None:
    text = "import os, time; n = int(os.environ['FARANDOLE_SLOT']); time.sleep(n); print('end', n); exit(7 * (n == 0))"
    done = run(site, tmp_path, "--each", "python train.py", text)
    assert done.returncode == 7
    assert {*re.findall(r"end (\d)", done.stdout)} == {"0", "1", "2"}
    assert "program 0 on node-1 ended with exit status 7" in done.stdout


@LONG
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


@LONG
def test_a_rank_that_lets_the_others_wait_is_named(site: Cluster, tmp_path: Path) -> None:
    done = run(site, tmp_path, "--meet-within 25", "python train.py", LATE)
    assert done.returncode != 0
    assert "farandole: rank 1 on node-2 has not met the others through torch.distributed\n" in done.stdout
    assert "ended: rank 1 on node-2 has not met the others through torch.distributed for 25 s" in done.stderr
    assert "cause: rank 1 on node-2 has not met the others" in done.stderr


def test_options_are_those_of_the_program(site: Cluster, tmp_path: Path) -> None:
    done = run(site, tmp_path, "", "python train.py --time 5 --log here", "import sys; print(*sys.argv)")
    assert done.returncode == 0
    assert done.stdout.count("train.py --time 5 --log here") == 3


def test_bytes_that_are_no_text_lose_nothing(site: Cluster, tmp_path: Path) -> None:
    text = "import sys; sys.stdout.buffer.write(b'Gr\\xfc\\xdfe\\n' * 3); print('after them')"
    done = run(site, tmp_path, "--time 1m", "python train.py", text)
    assert (done.returncode, done.stdout.count("after them")) == (0, 3)


@LONG
def test_a_run_that_starts_again_ends_with_the_same_accuracy(site: Cluster, tmp_path: Path) -> None:
    for name in ("pytorch_mnist", "mnist", "proof"):
        shutil.copy(ROOT / f"files/samples/{name}.py", tmp_path)
    (tmp_path / "waits.py").write_text(WAITS_ONCE)
    options = ["--epochs", "5", "--images", "9000", "--checkpoints", "saved"]
    undisturbed = site.farandole("run", "--", "python", "pytorch_mnist.py", *options, folder=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    program = ["python", "waits.py", *options]
    process = site.begin("run", "--restarts", "2", "--checkpoints", "saved", "--", *program, folder=tmp_path)
    assert process.stdout
    assert any("Train Epoch: 4 " in line for line in process.stdout)
    site.lab("fault", "reboot", "node-3")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    assert "farandole: start 2" in output
    assert "going on after epoch 3" in output
    ends = [re.findall(r"accuracy \S+ loss \S+", printed) for printed in (undisturbed.stdout, output)]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
