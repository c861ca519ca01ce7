"""The launcher of Intel Caffe: its options, hosts and solver, and what it refuses."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.node import allocation
from farandole.node.caffe import nodes, options, plan, solver
from farandole.node.caffe.options import RefusedError

from .loading import ROOT, install
from .prefix import program

JOBS = ROOT / "files/samples/jobs"
COMMAND = "/usr/local/libexec/farandole/caffe"
HERE = socket.gethostname()
SOLVER = """
net: "train_val.prototxt"  # the net
test_iter: 10
test_interval: 50
base_lr: 0.01
max_iter: 100
snapshot: 40
snapshot_prefix: "snapshots/lenet"
"""
NET = """
name: "LeNet"
layer {
  name: "data" type: "Data" top: "data" top: "label"
  include { phase: TRAIN }
  transform_param { scale: 0.00390625 mean_file: 'mean.binaryproto' }
  data_param { source: "train_lmdb" batch_size: 64 backend: LMDB }
}
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" }
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working folder of its own, and none of the variables that the launcher reads."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "KMP_", "OMP_", "MLSL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(RefusedError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The launcher and the samples that start it, as a node has them."""
    install(tmp_path / "node", "farandole.node.caffe", caffe="main")
    for name in ("caffe.sh", "intel-caffe/mpirun"):
        program(tmp_path / "jobs" / name, (JOBS / name).read_text().replace(COMMAND, str(tmp_path / "node/caffe")))
    return tmp_path / "jobs"


# Options


def test_the_guides_options_have_their_names() -> None:
    line = "--hostfile h --caffe_bin c --solver s --network opa --ppn 2 --num_omp_threads 60 --time 1h -- --weights w"
    assert vars(options.read_options(line.split())) == {
        "hostfile": "h", "caffe_bin": "c", "solver": "s", "network": "opa", "ppn": 2, "num_omp_threads": 60,
        "time": 3600, "more": ["--weights", "w"], "psm2": False,
    }  # fmt: skip
    assert options.read_options(["--solver", "s"]).network == "tcp"


def test_the_guides_mpirun_is_translated(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--as-mpirun -PSM2 -prepend-rank caffe train --solver ./solver.prototxt"
    chosen = options.read_options(line.split())
    assert (chosen.solver, chosen.psm2, chosen.more) == ("./solver.prototxt", True, [])
    said = capsys.readouterr().err
    assert all(word in said for word in ("translated", "-PSM2", "-prepend-rank"))
    chosen = options.of_mpirun(shlex.split("-psm2 /x/caffe train -solver=s -weights w --snapshot=z")) or chosen
    assert (chosen.caffe_bin, chosen.solver, chosen.more) == ("/x/caffe", "s", ["-weights", "w", "--snapshot=z"])


@pytest.mark.parametrize("line", ["-np 2 python train.py", "-x A python caffe", "--version", "-n 2 caffe time", ""])
def test_mpirun_without_caffe_is_handed_on(line: str) -> None:
    assert options.of_mpirun(line.split()) is None


def test_mpirun_of_something_else_runs_as_it_is(installed: Path, tmp_path: Path) -> None:
    program(tmp_path / "mpirun", 'echo "the other: $*"')
    path = f"{installed / 'intel-caffe'}:{tmp_path}:{os.environ['PATH']}"
    command = ["mpirun", "-np", "2", "python", "a b"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.stdout == "the other: -np 2 python a b\n", done.stderr


@pytest.mark.parametrize("line", ["-n 2", "-ppn 2", "-genv A b", "-hostfile h", "-env I_MPI_DEBUG 5", "-l"])
def test_an_option_of_mpirun_that_the_guide_does_not_use_is_refused(line: str) -> None:
    said = refusal(lambda: options.of_mpirun(f"-PSM2 {line} caffe train --solver s".split()))
    assert f"option {line.split()[0]} cannot be translated" in said


def test_kmp_affinity(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.affinity(None, 1) == "granularity=fine,compact,1"
    assert plan.affinity(None, 2) == "none"
    assert plan.affinity("granularity=fine,compact,1", 1) == "granularity=fine,compact,1"
    assert capsys.readouterr().err == ""
    guide = "verbose,granularity=fine,compact=1"
    assert plan.affinity(guide, 1) == "verbose,granularity=fine,compact,1"
    assert f"translated: KMP_AFFINITY={guide}" in capsys.readouterr().err


# Hosts


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\nb\n", {"a": 1, "b": 1}),
        ("a\na\nb\nb\n", {"a": 2, "b": 2}),
        # Slots are places, not wishes: Caffe uses the cores by threads.
        ("a slots=4\n\n# none\nb slots=2 max_slots=3 # why\n", {"a": 1, "b": 1}),
        ("", {}),
    ],
)
def test_hostfiles(text: str, wanted: Any) -> None:
    assert nodes.read_hosts(text) == wanted


@pytest.mark.parametrize("line", ["-oProxyCommand=id", "a;id", "$(id)", "a slots=x", "a:2", "a b"])
def test_a_line_that_is_no_host_is_refused(line: str) -> None:
    assert f"line 2 of the hostfile is not a host: {line!r}" in refusal(lambda: nodes.read_hosts(f"ok\n{line}\n"))


def test_where_the_hosts_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine").write_text("c\n")
    Path("nodefile").write_text("a\na\n")
    Path("empty").touch()
    allocated = {"a": 1, "b": 1}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # Before the cluster's hostfile: that one names nodes of other jobs.
    assert nodes.find_hosts(None, allocated) == (allocated, "Slurm job 7")
    monkeypatch.setenv("PBS_NODEFILE", "nodefile")
    assert nodes.find_hosts(None, allocated) == ({"a": 2}, "nodefile")
    assert nodes.find_hosts("mine", {})[0] == {"c": 1}
    assert "mine names c, which this job does not have" in refusal(lambda: nodes.find_hosts("mine", allocated))
    assert "gone cannot be read: No such file" in refusal(lambda: nodes.find_hosts("gone", {}))
    assert "empty names no host" in refusal(lambda: nodes.find_hosts("empty", {}))
    assert nodes.per_node({"a": 2, "b": 2}, "f") == 2
    assert "(a 2, b 1)" in refusal(lambda: nodes.per_node({"a": 2, "b": 1}, "f"))


def test_the_nodes_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes.allocation() == {}
    program(tmp_path / "bin/scontrol", 'test "$*" = "show hostnames node-[1-2]" && echo node-1 && echo node-2')
    monkeypatch.setattr(allocation, "SCONTROL", str(tmp_path / "bin/scontrol"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert nodes.allocation() == {"node-1": 2, "node-2": 2}


# Solver


def read(text: str = SOLVER, net: str = NET) -> solver.Solver:
    Path("solver.prototxt").write_text(text)
    Path("train_val.prototxt").write_text(net)
    return solver.read_solver("solver.prototxt")


def test_a_solver_is_read() -> None:
    about = read()
    assert (about.nets, about.snapshots, about.tests) == (["train_val.prototxt"], "snapshots", True)
    assert about.model == "snapshots/lenet_iter_100.caffemodel"
    assert about.sources == ["mean.binaryproto", "train_lmdb"]
    assert read(f"{SOLVER}snapshot_format: HDF5\n").model.endswith(".caffemodel.h5")
    assert not read(SOLVER.replace("test_interval: 50", "test_interval: 500\ntest_initialization: false")).tests
    assert not read(SOLVER.replace("test_iter: 10", "")).tests


def test_a_net_of_an_odd_form_is_read() -> None:
    net = "layer: 1 layer < source : 'shard_%#_lmdb' > # source: \"x\"\nlayer { source { a: 1 } mean_file:m;param [1] }"
    assert read(net=net).sources == ["shard_%#_lmdb", "m"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("net: ", "#", "solver.prototxt has no net"),
        ("max_iter:", "#", "solver.prototxt has no max_iter"),
        ("snapshot_prefix:", "#", "solver.prototxt has no snapshot_prefix"),
        ("snapshot: 40", "snapshot_after_train: false", "saves no model"),
        ("100", "many", "max_iter is not a number: 'many'"),
    ],
)
def test_a_solver_that_would_not_train_or_not_save_is_refused(old: str, new: str, said: str) -> None:
    assert said in refusal(lambda: read(SOLVER.replace(old, new)))


# Libraries and launchers

LDD = """
	linux-vdso.so.1 (0x00007fff)
	libmlsl.so => /opt/lib/libmlsl.so (0x00007f00)
	{} (0x00007f01)
	libiomp5.so => not found
	/lib64/ld-linux-x86-64.so.2 (0x00007f02)
"""


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        ("libmpi.so.12 => /opt/lib/libmpi.so.12", ""),
        ("libmpich.so.12 => not found", ""),
        ("libmpi.so.40 => /opt/lib/libmpi.so.40", "loads libmpi.so.40, but only libmpi.so.12"),
        ("libmpi.so.12 => /x (0x1)\nlibmpi.so.40 => /y", "loads libmpi.so.12, libmpi.so.40, but only"),
        ("libc.so.6 => /x", "does not find libiomp5.so"),
    ],
)
def test_the_mpi_of_a_program_is_read_from_ldd(
    library: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ldd.txt").write_text(LDD.format(library))
    program(tmp_path / "bin/ldd", f"cat {tmp_path}/ldd.txt")
    caffe = program(tmp_path / "bin/caffe", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    if refused:
        assert refused in refusal(lambda: plan.caffe_of(caffe))
    else:
        assert plan.caffe_of(None) == caffe


def test_a_launcher_of_another_mpi_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = program(tmp_path / "o/mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    intel = program(tmp_path / "i/mpirun", "echo 'Intel(R) MPI Library'")
    debian = program(tmp_path / "d/mpiexec.hydra", "echo HYDRA build details:")
    monkeypatch.setenv("PATH", f"{JOBS}/intel-caffe:relative:{tmp_path}/o:{tmp_path}/i")
    # Never the translator itself.
    assert options.programs("mpirun")[:2] == [other, intel]

    def choose(*there: str) -> str:
        monkeypatch.setattr(plan, "programs", lambda *_: [*there])
        return plan.choose_launcher("/c", 2)

    assert choose(debian) == debian
    assert capsys.readouterr().err == ""
    assert choose(other, intel) == intel
    assert f"{other} is not of MPICH or Intel MPI" in capsys.readouterr().err
    assert f"{other} would start 2 separate trainings" in refusal(lambda: choose(other))
    assert "on PATH: there is none" in refusal(choose)


# Threads and settings


def test_threads_come_from_the_option_or_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan.threads(None, 68, "node-1", 1) == 68
    assert plan.threads(60, 68, "node-1", 1) == 60
    assert "asks for 60 threads: at most 34" in refusal(lambda: plan.threads(60, 68, "node-1", 2))
    assert "lower --ppn" in refusal(lambda: plan.threads(None, 2, "node-1", 4))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "34")
    assert plan.threads(None, 68, "node-1", 1) == 34
    monkeypatch.setenv("OMP_NUM_THREADS", "20")
    assert plan.threads(None, 68, "node-1", 1) == 20
    assert "OMP_NUM_THREADS asks for 20" in refusal(lambda: plan.threads(None, 16, "node-1", 1))
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert "'4,2', which is not a number" in refusal(lambda: plan.threads(None, 68, "n", 1))


def test_variables_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSL_ROOT", "/m")
    monkeypatch.setenv("SECRET", "s")
    made = plan.variables("/c/bin/caffe", 1, 2)
    assert (made["MLSL_NUM_SERVERS"], made["OMP_NUM_THREADS"], made["MLSL_ROOT"]) == ("0", "2", "/m")
    assert "/c/lib" in made["LD_LIBRARY_PATH"] and "SECRET" not in made
    monkeypatch.setenv("MLSL_NUM_SERVERS", "4")
    assert "MLSL_NUM_SERVERS is set" in refusal(lambda: plan.variables("/c/bin/caffe", 1, 2))


def test_networks() -> None:
    fabrics = [["10.0.0.0/24", "eth0"], ["10.0.0.0/24", "ens3"], []]
    tcp, opa = plan.hydra("tcp", fabrics, in_slurm=True), plan.hydra("opa", [], in_slurm=False)
    assert (tcp["UCX_NET_DEVICES"], tcp["HYDRA_LAUNCHER"], tcp["FI_PROVIDER"]) == ("ens3,eth0", "slurm", "tcp")
    assert (opa["I_MPI_HYDRA_BOOTSTRAP"], opa["FI_PROVIDER"]) == ("ssh", "psm2")


def test_commands() -> None:
    made = plan.Plan(["node-1", "node-2"], 1, "/m/mpirun", ["/c/bin/caffe", "train"], {"OMP_NUM_THREADS": "2"})
    words = ["/m/mpirun", "-l", "-n", "2", "-ppn", "1", "-f", "f", "-genv", "OMP_NUM_THREADS", "2", "/bin/sh", "-c"]
    assert made.command("f") == [*words, plan.RANK, "/c/bin/caffe", "train"]
    assert made.hosts() == "node-1:1\nnode-2:1\n"


def test_a_refusal_ends_with_one_and_says_that_nothing_was_started(installed: Path) -> None:
    Path("hosts").write_text("node-1\n")
    command = ["sh", str(installed / "caffe.sh"), "--hostfile", "hosts", "--solver", "gone"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == "caffe.sh: nothing was started"
    assert second.startswith(f"caffe.sh: 1. {HERE}: the solver gone cannot be read: No such file or directory")
