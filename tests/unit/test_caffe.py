"""The launcher of Intel Caffe: what it refuses, and how it judges a log."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .loading import ROOT

JOBS = ROOT / "files/samples/jobs"
sys.path.append(str(JOBS))
caffe: Any = importlib.import_module("caffe")
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
    with pytest.raises(caffe.RefusedError) as caught:
        call()
    return str(caught.value)


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# Options


@pytest.mark.parametrize(
    ("text", "wanted"), [("4:00:00", 14400), ("04:00:30", 14430), ("90m", 5400), ("4h", 14400), ("5s", 5)]
)
def test_time_limits(text: str, wanted: int) -> None:
    assert caffe.limit(text) == wanted


@pytest.mark.parametrize("text", ["240", "0s", "0:00:00", "4:00", "-1h", "x", ""])
def test_a_time_limit_that_could_mean_anything_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no time limit: write 4:00:00, 90m or 4h"):
        caffe.limit(text)


def test_the_guides_options_have_their_names() -> None:
    words = "--hostfile h --caffe_bin c --solver s --network opa --ppn 2 --num_omp_threads 60 --time 1h -- --weights w"
    chosen = caffe.read_options(words.split())
    assert vars(chosen) == {
        "hostfile": "h", "caffe_bin": "c", "solver": "s", "network": "opa", "ppn": 2, "num_omp_threads": 60,
        "time": 3600, "mpirun": None, "more": ["--weights", "w"], "ranks": None, "psm2": False,
    }  # fmt: skip
    assert caffe.read_options(["--solver", "s"]).network == "tcp"


def test_the_guides_mpirun_is_translated_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--as-mpirun", "-PSM2", "-prepend-rank", "caffe", "train", "--solver", "./solver.prototxt"]
    chosen = caffe.read_options(words)
    assert (chosen.solver, chosen.psm2, chosen.ranks, chosen.more) == ("./solver.prototxt", True, None, [])
    assert capsys.readouterr().err == (
        "caffe.sh: translated: -PSM2 (--network opa on nodes that have Omni-Path); -prepend-rank (each line bears its "
        "rank anyway)\n"
    )


def test_other_options_of_mpirun_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "")
    words = shlex.split("-n 4 -ppn 2 -hostfile h -genv A b /x/caffe train -solver=s -weights w --snapshot=z")
    chosen, _ = caffe.translate(words)
    assert (chosen.ranks, chosen.ppn, chosen.hostfile, chosen.caffe_bin) == (4, 2, "h", "/x/caffe")
    assert (chosen.solver, chosen.more, os.environ["A"]) == ("s", ["-weights", "w", "--snapshot=z"], "b")


@pytest.mark.parametrize("line", ["-np 2 python train.py", "-x A python caffe", "--version", "-n 2 caffe time", ""])
def test_mpirun_without_caffe_is_handed_on(line: str) -> None:
    assert caffe.translate(line.split()) is None


def test_mpirun_of_something_else_runs_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "mpirun"
    other.write_text('#!/bin/sh\necho "the other: $*"\n')
    other.chmod(0o755)
    path = f"{JOBS / 'intel-caffe'}:{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["mpirun", "-np", "2", "python", "a b"], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "the other: -np 2 python a b\n", done.stderr


def test_an_option_of_mpirun_that_is_not_known_is_refused() -> None:
    words = ["-PSM2", "-env", "I_MPI_DEBUG", "5", "caffe", "train", "--solver", "s"]
    assert refusal(lambda: caffe.translate(words)) == (
        "mpirun's option -env cannot be translated: leave it out, see caffe.sh --help"
    )


def test_kmp_affinity(capsys: pytest.CaptureFixture[str]) -> None:
    assert caffe.affinity(None, pinned=True) == "granularity=fine,compact,1"
    assert caffe.affinity(None, pinned=False) == "none"
    assert caffe.affinity("granularity=fine,compact,1", pinned=True) == "granularity=fine,compact,1"
    assert capsys.readouterr().err == ""
    guide = "verbose,granularity=fine,compact=1"
    assert caffe.affinity(guide, pinned=True) == "verbose,granularity=fine,compact,1"
    assert "translated: KMP_AFFINITY=verbose,granularity=fine,compact=1 is verbose,granul" in capsys.readouterr().err


# Hosts


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\nb\n", ({"a": 1, "b": 1}, False)),
        ("a\na\nb\nb\n", ({"a": 2, "b": 2}, False)),
        ("a slots=4\n\n# none\nb slots=2 max_slots=3 # why\n", ({"a": 4, "b": 2}, True)),
        ("a:3\nb:3\n", ({"a": 3, "b": 3}, True)),
        ("", ({}, False)),
    ],
)
def test_hostfiles(text: str, wanted: Any) -> None:
    assert caffe.read_hosts(text) == wanted


@pytest.mark.parametrize("line", ["-oProxyCommand=id", "a;id", "$(id)", "a slots=0", "a slots=x", "a:b"])
def test_a_line_that_is_no_host_is_refused(line: str) -> None:
    assert refusal(lambda: caffe.read_hosts(f"ok\n{line}\n")).startswith(f"line 2 of the hostfile is no host: {line!r}")


def test_where_the_hosts_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine").write_text("c\n")
    Path("nodefile").write_text("a\na\n")
    allocated = {"a": 1, "b": 1}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # Before the cluster's hostfile: that one names nodes of other jobs.
    assert caffe.find_hosts(None, allocated) == (allocated, False, "Slurm job 7")
    monkeypatch.setenv("PBS_NODEFILE", "nodefile")
    assert caffe.find_hosts(None, allocated) == ({"a": 2}, False, "nodefile")
    assert caffe.find_hosts("mine", {})[0] == {"c": 1}
    assert refusal(lambda: caffe.find_hosts("mine", allocated)) == (
        "mine names c, which this job does not have: Slurm gave it a, b. Leave --hostfile out"
    )
    assert "the hostfile gone cannot be read: No such file" in refusal(lambda: caffe.find_hosts("gone", {}))
    Path("empty").touch()
    assert refusal(lambda: caffe.find_hosts("empty", {})) == "the hostfile empty names no host"
    assert caffe.expand("4(x2),2") == [4, 4, 2]


def test_the_nodes_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caffe.allocation() == {}
    program(tmp_path / "bin/scontrol", 'test "$*" = "show hostnames node-[1-2]" && echo node-1 && echo node-2')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert caffe.allocation() == {"node-1": 2, "node-2": 2}


def test_processes_per_node() -> None:
    per = caffe.per_node
    assert per({"a": 1, "b": 1}, False, "f", None, None) == 1
    assert per({"a": 2, "b": 2}, False, "f", None, None) == 2
    # Slots are places, not wishes: Caffe uses the cores by threads.
    assert per({"a": 4, "b": 4}, True, "f", None, None) == 1
    assert per({"a": 1, "b": 1}, False, "f", 2, None) == 2
    assert per({"a": 1, "b": 1}, False, "f", None, 4) == 2
    assert refusal(lambda: per({"a": 2, "b": 1}, False, "f", None, None)) == (
        "f has lines in different numbers (a 2, b 1), but every node gets as many: say --ppn 1"
    )
    # Slots of the cluster's own hostfile count GPUs.
    assert per({"a": 4, "b": 2}, False, caffe.HOSTFILE, 3, None) == 3
    assert per({"a": 4, "b": 2}, False, caffe.HOSTFILE, None, None) == 1
    assert refusal(lambda: per({"a": 2, "b": 1}, True, "f", 2, None)) == "b has place for 1 in f, but --ppn is 2"
    assert "3 ranks cannot be shared evenly by the 2 nodes of f" in refusal(
        lambda: per({"a": 1, "b": 1}, False, "f", None, 3)
    )


# Solver


def solver(text: str = SOLVER, net: str = NET) -> Any:
    Path("solver.prototxt").write_text(text)
    Path("train_val.prototxt").write_text(net)
    return caffe.read_solver("solver.prototxt")


def test_a_solver_is_read() -> None:
    read = solver()
    assert (read.nets, read.prefix, read.tests) == (["train_val.prototxt"], "snapshots/lenet", True)
    assert read.model == "snapshots/lenet_iter_100.caffemodel"
    assert (read.sources, read.accuracies) == (["mean.binaryproto", "train_lmdb"], ["accuracy"])


def test_a_net_of_an_odd_form_is_read() -> None:
    read = solver(net='layer: 1 layer { source { a: 1 } } layer < type: "Data"; param [1, 2] >')
    assert (read.sources, read.accuracies) == ([], [])
    assert "cannot be parsed" in refusal(lambda: solver(net="a {" * 5000))


def test_what_a_solver_leaves_behind_follows_its_settings() -> None:
    assert solver(f"{SOLVER}snapshot_after_train: false\n").model == "snapshots/lenet_iter_80.caffemodel"
    assert solver(f"{SOLVER}snapshot_format: HDF5\n").model.endswith(".caffemodel.h5")
    assert not solver(SOLVER.replace("test_interval: 50", "test_interval: 500\ntest_initialization: false")).tests
    assert not solver(SOLVER.replace("test_iter: 10", "")).tests
    never = SOLVER.replace("snapshot: 40", "snapshot_after_train: false")
    assert "saves no model: leave snapshot_after_train: false out" in refusal(lambda: solver(never))


@pytest.mark.parametrize("lacking", ["net", "max_iter", "snapshot_prefix"])
def test_a_solver_without_a_key_is_refused(lacking: str) -> None:
    text = "\n".join(line for line in SOLVER.splitlines() if not line.startswith(f"{lacking}:"))
    assert refusal(lambda: solver(text)) == (
        f"the solver solver.prototxt has no {lacking}: Caffe would not train, or not save"
    )


def test_a_solver_that_is_missing_or_broken_is_refused() -> None:
    assert refusal(lambda: caffe.read_solver("gone.prototxt")) == (
        f"{HERE}: the solver gone.prototxt cannot be read: No such file or directory. It has to be on all nodes, under "
        "this name"
    )
    assert "cannot be parsed: a } is missing at the end" in refusal(lambda: solver(f"{SOLVER}net_param {{"))
    assert "line 2 has a quote that does not end" in refusal(lambda: solver('a: 1\nnet: "x\n'))
    assert "there is no value at" in refusal(lambda: solver("net: }"))
    assert "max_iter is no number: 'many'" in refusal(lambda: solver(SOLVER.replace("100", "many")))
    assert "the net train_val.prototxt cannot be parsed" in refusal(lambda: solver(net="layer {"))


# Libraries and launchers

LDD = """
	linux-vdso.so.1 (0x00007fff)
	libmlsl.so => /opt/lib/libmlsl.so (0x00007f00)
	{} (0x00007f01)
	libiomp5.so => not found
	/lib64/ld-linux-x86-64.so.2 (0x00007f02)
"""


@pytest.fixture
def ldd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Let ldd print a line for the MPI, and ask for its kind."""

    def which(line: str) -> Any:
        (tmp_path / "ldd.txt").write_text(LDD.format(line))
        program(tmp_path / "bin/ldd", f"cat {tmp_path}/ldd.txt")
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        return caffe.which_mpi("/opt/bin/caffe", [])

    return which


def test_the_mpi_of_a_program_is_read_from_ldd(ldd: Callable[[str], Any]) -> None:
    assert ldd("libmpi.so.12 => /opt/lib/libmpi.so.12") == ("mpich", "libmpi.so.12", True)
    assert ldd("libmpich.so.12 => not found") == ("mpich", "libmpich.so.12", True)
    assert ldd("libmpi.so.40 => /opt/lib/libmpi.so.40") == ("openmpi", "libmpi.so.40", True)
    assert "loads libmpi.so.20: only libmpi.so.12 (MPICH" in refusal(lambda: ldd("libmpi.so.20 => /x"))
    assert "and only one of them" in refusal(lambda: ldd("libmpi.so.12 => /x (0x1)\nlibmpi.so.40 => /y"))
    assert "does not find libiomp5.so. Put it into the folder lib" in refusal(lambda: ldd("libc.so.6 => /x"))


HYDRA = "echo HYDRA build details:; echo Version: 4.0.2"
OMPI = "echo 'mpirun (Open MPI) 4.1.4'"


def test_a_launcher_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    openmpi, hydra = program(tmp_path / "o/mpirun", OMPI), program(tmp_path / "h/mpiexec.hydra", HYDRA)
    choose = caffe.choose_launcher
    assert choose("openmpi", str(openmpi), "/c", "libmpi.so.40", 2)[0] == str(openmpi)
    assert refusal(lambda: choose("mpich", str(openmpi), "/c", "libmpi.so.12", 2)) == (
        f"{HERE}: {openmpi} is a launcher of Open MPI, and /c was built for MPICH or Intel MPI (libmpi.so.12): it "
        "would start 2 separate trainings and end with 0. Leave --mpirun out"
    )
    assert refusal(lambda: choose("openmpi", str(hydra), "/c", "libmpi.so.40", 2)) == (
        f"{HERE}: {hydra} is a launcher of MPICH or Intel MPI, and /c was built for Open MPI (libmpi.so.40): it would "
        "start 2 separate trainings and end with 0. Leave --mpirun out"
    )
    assert "is a launcher of no MPI that is known here" in refusal(
        lambda: choose("openmpi", "/bin/true", "/c", "libmpi.so.40", 2)
    )
    assert "there is no program /gone" in refusal(lambda: choose("openmpi", "/gone", "/c", "libmpi.so.40", 2))


def test_the_launcher_of_the_right_kind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose, programs = caffe.choose_launcher, caffe.programs
    first, second = program(tmp_path / "o/mpirun", OMPI), program(tmp_path / "i/mpirun", "echo 'Intel(R) MPI Library'")
    monkeypatch.setenv("PATH", f"{JOBS}/intel-caffe:relative:{first.parent}:{second.parent}")
    # Never the translator itself.
    assert programs("mpirun")[:2] == [str(first), str(second)]
    monkeypatch.setattr(caffe, "programs", lambda *_: [str(first), str(second)])
    assert choose("mpich", None, "/c", "libmpi.so.12", 2)[0] == str(second)
    assert f"{first} is not of MPICH or Intel MPI, for which caffe was built, so {second} starts it" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(caffe, "programs", lambda *_: [str(first)])
    assert refusal(lambda: choose("mpich", None, "/c", "libmpi.so.12", 2)) == (
        f"{HERE}: {first} is a launcher of Open MPI, and /c was built for MPICH or Intel MPI (libmpi.so.12): it "
        "would start 2 separate trainings and end with 0. Install Debian's mpich on all nodes (caffe_packages: "
        "[mpich]), or load Intel MPI"
    )
    monkeypatch.setattr(caffe, "programs", lambda *_: [])
    assert "and there is no launcher of it: Run site.yml" in refusal(
        lambda: choose("openmpi", None, "/c", "libmpi.so.40", 2)
    )


# Nodes

REQUEST = {
    "cwd": "/w", "nodes": ["node-1", "node-2"], "caffe": "/c/bin/caffe", "launcher": "/usr/bin/mpiexec.hydra",
    "solver": "s", "nets": ["n"], "sources": ["train_lmdb"], "snapshots": "snap shots", "model": "m",
}  # fmt: skip
GOOD: dict[str, Any] = {
    "caffe": {"sha256": "a" * 64}, "missing": [], "launcher": True, "sources": {}, "snapshots": "", "model": [],
    "files": {"s": {"sha256": "b" * 64}, "n": {"sha256": "c" * 64}}, "cores": 2, "adapters": [], "network": "",
    "interface": "eth0",
}  # fmt: skip


def judged(network: str = "tcp", **second: Any) -> list[str]:
    """What is said about a second node that differs from the first."""
    answers = {"node-1": {**GOOD, "machine": "1"}, "node-2": {**GOOD, "machine": "2", **second}}
    found: list[str] = caffe.judge_nodes(answers, REQUEST, network)
    return found


def test_sound_nodes_have_no_problem() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"missing": ["libmlsl.so.1"]},
         "node-2: /c/bin/caffe does not find libmlsl.so.1. Put it into the folder lib beside its bin, on all nodes, or "
         "its folder on LD_LIBRARY_PATH"),
        ({"missing": ["libmpi.so.12"]},
         "node-2: /c/bin/caffe does not find libmpi.so.12. Set caffe_packages: [mpich] and run site.yml, or load Intel "
         "MPI"),
        ({"caffe": {"error": "No such file or directory"}},
         "node-2: /c/bin/caffe cannot be run: No such file or directory. It has to be on all nodes"),
        ({"caffe": {"sha256": "d" * 64}},
         f"node-2: /c/bin/caffe is not the one of the other nodes (sha256 {'d' * 12}, elsewhere {'a' * 12}). Run "
         "site.yml, or copy it again"),
        ({"launcher": False},
         "node-2: there is no /usr/bin/mpiexec.hydra, which starts the ranks. Install the same MPI as elsewhere"),
        ({"files": {**GOOD["files"], "s": {"error": "No such file or directory"}}},
         "node-2: the solver s cannot be read: No such file or directory. Put it there"),
        ({"files": {**GOOD["files"], "n": {"sha256": "d" * 64}}},
         "node-2: the net n differs from that of node-1. Copy it again"),
        ({"sources": {"train_lmdb": "Permission denied"}},
         "node-2: the data train_lmdb cannot be read: Permission denied. Put it there, or mend its path"),
        ({"snapshots": "No such file or directory"},
         "node-2: no snapshot can be written to snap shots: No such file or directory. Caffe would hang for ever after "
         "the training. Make the folder there: mkdir -p 'snap shots'"),
        ({"machine": "1"}, "node-2: it is the same machine as node-1 (/etc/machine-id): name each machine once"),
    ],
)  # fmt: skip
def test_each_fault_of_a_node_is_named(second: dict[str, Any], said: str) -> None:
    assert judged(**second) == [said]


def test_a_node_without_answer_folder_or_adapter_is_named() -> None:
    first = {**GOOD, "machine": "1"}
    answers = {"node-1": first, "node-2": "Permission denied (publickey)."}
    assert caffe.judge_nodes(answers, REQUEST, "tcp") == [
        "node-2 cannot be asked: Permission denied (publickey).. Mend `ssh node-2`, or take it out of the hostfile"
    ]
    assert caffe.judge_nodes({"node-1": first, "node-2": {"cwd": "gone"}}, REQUEST, "tcp") == [
        "node-2: /w, where the job starts, cannot be entered: gone. Make that folder there"
    ]
    assert judged("opa")[1] == "node-2: there is no Omni-Path adapter (/sys/class/infiniband/hfi1*): use --network tcp"
    assert len(judged("mlx", adapters=["mlx5_0"])) == 1


def test_a_node_describes_itself(tmp_path: Path) -> None:
    for name in ("solver", "train_lmdb", "shard_0_lmdb"):
        Path(name).write_text(name)
    Path("closed").mkdir()
    request = {
        **REQUEST, "cwd": str(tmp_path), "caffe": "/bin/true", "folders": [], "launcher": "/bin/true",
        "solver": "solver", "nets": ["gone"], "snapshots": "gone", "model": "solver",
        "sources": ["train_lmdb", "shard_%#_lmdb", "test_%#_lmdb", "gone"],
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-", "--on-node", json.dumps(request)], input=(JOBS / "caffe.py").read_text(), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["files"] == {
        "solver": {"sha256": hashlib.sha256(b"solver").hexdigest()}, "gone": {"error": "No such file or directory"}
    }  # fmt: skip
    assert set(answer["sources"]) == {"test_%#_lmdb", "gone"}
    assert (answer["snapshots"], answer["missing"], answer["launcher"]) == ("No such file or directory", [], True)
    assert answer["cores"] >= 1
    assert answer["model"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["closed", "shard_0_lmdb", "solver", "train_lmdb"]
    assert caffe.on_node({**request, "cwd": "/gone"}) == {"cwd": "No such file or directory"}


# Threads and settings


def test_threads_come_from_the_option_or_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = caffe.threads
    assert threads(None, 68, 1, 0, "node-1") == 68
    assert threads(60, 68, 1, 4, "node-1") == 60
    assert threads(None, 68, 2, 4, "node-1") == 30
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "34")
    assert threads(None, 68, 1, 4, "node-1") == 30
    monkeypatch.setenv("OMP_NUM_THREADS", "20")
    assert threads(None, 68, 1, 0, "node-1") == 20


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = caffe.threads
    assert refusal(lambda: threads(60, 68, 2, 0, "node-1")) == (
        "node-1: 68 cores for 2 processes per node, but --num_omp_threads asks for 60 threads: at most 34"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "68")
    assert refusal(lambda: threads(None, 68, 1, 4, "node-1")) == (
        "node-1: 68 cores for 1 process per node less 4 for MLSL's servers, but OMP_NUM_THREADS asks for 68 threads: "
        "at most 64"
    )
    assert "leave none for its threads: lower --ppn" in refusal(lambda: threads(None, 2, 4, 0, "node-1"))
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert refusal(lambda: threads(None, 68, 1, 0, "n")) == "OMP_NUM_THREADS is '4,2', which is no number of threads"


def test_mlsl_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert caffe.mlsl_servers(intel=False) == 0
    monkeypatch.setenv("MLSL_NUM_SERVERS", "4")
    assert "works with Intel MPI only" in refusal(lambda: caffe.mlsl_servers(intel=False))
    assert "needs MLSL_SERVER_AFFINITY" in refusal(lambda: caffe.mlsl_servers(intel=True))
    monkeypatch.setenv("MLSL_SERVER_AFFINITY", "6,7,8,9")
    assert caffe.mlsl_servers(intel=True) == 4


def test_networks() -> None:
    assert caffe.transport("tcp", True, ["eth0"])["I_MPI_FABRICS"] == "shm:ofi"
    assert [caffe.transport(name, True, [])["FI_PROVIDER"] for name in ("tcp", "opa", "mlx")] == [
        "tcp",
        "psm2",
        "verbs",
    ]
    assert caffe.transport("tcp", False, ["eth0", "ens3"])["UCX_NET_DEVICES"] == "eth0,ens3"
    assert "psm2" in caffe.mca("opa", "")
    assert caffe.mca("tcp", "10.0.0.0/24")[-1] == "10.0.0.0/24"


def plan(kind: str = "openmpi", **more: Any) -> Any:
    program = ["/c/bin/caffe", "train", "--solver", "s"]
    return caffe.Plan(["node-1", "node-2"], 1, kind, "/m/mpirun", program, {"OMP_NUM_THREADS": "2"}, **more)


def test_commands() -> None:
    assert plan().command("f")[:9] == ["/m/mpirun", "--tag-output", "--hostfile", "f", "-N", "1", "-n", "2", "-x"]
    assert plan().hosts() == "node-1 slots=1\nnode-2 slots=1\n"
    made = plan("mpich", options=["-launcher", "ssh"]).command("f")
    assert made[:13] == [
        "/m/mpirun", "-l", "-n", "2", "-ppn", "1", "-f", "f", "-launcher", "ssh", "-genv", "OMP_NUM_THREADS", "2"
    ]  # fmt: skip
    assert made[13:15] == ["/bin/sh", "-c"]
    assert plan("mpich").hosts() == "node-1:1\nnode-2:1\n"


# The log


def lines(**changed: str | None) -> list[str]:
    """The log of a good training on two nodes, with each kind of line replaced, or left out."""
    made = {
        "where": "rank of caffe.sh on node-{host} machine {rank}aa",
        "group": "I1124 13:00:00.0  1 x.cpp:1] Number of groups: 1, group size: 2",
        "start": "I1124 13:00:00.0  1 x.cpp:1] Starting Multi-node Optimization in MLSL environment",
        "accuracy": "I1124 13:00:00.0  1 x.cpp:1]     Test net output #0: accuracy = 0.98",
        "done": "I1124 13:00:00.0  1 x.cpp:1] Optimization Done.",
        **changed,
    }
    return [
        f"[1,{rank}]<stderr>:{text.format(rank=rank, host=rank + 1)}"
        for text in made.values() if text is not None
        for rank in (0, 1)
    ]  # fmt: skip


def verdict(said: list[str], *why: str, model: bool = True, tests: bool = True) -> list[str]:
    log = caffe.Log()
    for line in said:
        log.read(line)
    solver = caffe.Solver("s", ["n"], "p", "p_iter_100.caffemodel", tests, [], ["accuracy"])
    found: list[str] = caffe.judge(log, plan(), solver, model, why)
    return found


def test_a_good_training_is_green_with_either_launchers_prefix() -> None:
    assert verdict(lines()) == []
    assert verdict([line.replace("[1,", "[").replace("]<stderr>:", "] ") for line in lines()]) == []
    assert verdict(lines(accuracy=None), tests=False) == []
    # A net may have such words in it.
    assert verdict([*lines(), '[0] layer { name: "Killed" }']) == []
    assert verdict(lines(), "mpirun ended with status 1") == ["mpirun ended with status 1"]


def test_separate_trainings_are_red() -> None:
    assert verdict(lines(group="Number of groups: 1, group size: 1")) == [
        "group size: 2 is wanted, the log has 1. Each rank has trained alone, or only with some others: /m/mpirun does "
        "not belong to the MPI of caffe, or the ranks could not find each other"
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group": None}, "there is no line `group size: 2`: the training did not begin"),
        ({"start": None}, "`Starting Multi-node Optimization in MLSL environment` is there 0 times, wanted 2: not from "
         "rank 0 on node-1, rank 1 on node-2"),
        ({"accuracy": None}, "there is no line `Test net output #0: accuracy = `, though the solver tests the net"),
        ({"accuracy": "Test net output #0: accuracy = nan"},
         "there is no line `Test net output #0: accuracy = `, though the solver tests the net"),
        ({"where": "rank of caffe.sh on node-1 machine 0aa"},
         "the ranks ran on 1 machines (node-1), wanted 2: node-1, node-2"),
        ({"where": None}, "0 ranks were started, wanted 2: not 0, 1"),
    ],
)  # fmt: skip
def test_each_missing_line_is_red(changed: dict[str, str | None], said: str) -> None:
    assert verdict(lines(**changed)) == [said]


def test_a_rank_that_does_not_end_and_a_missing_model_are_red() -> None:
    assert verdict(lines()[:-1]) == ["`Optimization Done.` is there 1 times, wanted 2: not from rank 1 on node-2"]
    assert verdict([*lines(), lines()[-1]]) == ["`Optimization Done.` is there 3 times, wanted 2"]
    assert verdict([*lines()[:-1], lines()[-2]]) == [
        "`Optimization Done.` is there 2 times, wanted 2: not from rank 1 on node-2"
    ]
    assert verdict(lines(), model=False) == ["node-1: the model p_iter_100.caffemodel was not written by this training"]


@pytest.mark.parametrize(
    "line",
    [
        "=   PID 2156 RUNNING AT node-2",
        "mpirun noticed that process rank 1 with PID 0 on node node-2 exited on signal 6 (Aborted).",
    ],
)
def test_a_rank_that_ends_too_early_is_named(line: str) -> None:
    assert verdict([*lines()[:-1], line]) == [
        "node-2: a rank ended before the training was over. Cure: its last lines in the log say why, or `journalctl "
        "-k` there, if the kernel ended it",
        "`Optimization Done.` is there 1 times, wanted 2: not from rank 1 on node-2",
    ]


def test_a_failed_check_is_named_with_its_host_and_cure() -> None:
    failed = "[1,1]<stderr>:F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) \x1b[2J"
    assert verdict([*lines()[:-2], lines()[-1], failed]) == [
        "rank 1 on node-2 said: F1124 io.cpp:69] Check failed: proto.SerializeToOstream(&output) ?[2J. Cure: the "
        "snapshot could not be written: look at the folder of snapshot_prefix and at the disk there",
        "`Optimization Done.` is there 1 times, wanted 2: not from rank 0 on node-1",
    ]


# The job


def job(script: str, seconds: int) -> tuple[Any, int, str]:
    made = plan(options=[])
    made.command = lambda _: ["/bin/sh", "-c", script]
    found: tuple[Any, int, str] = caffe.run(made, seconds)
    return found


@pytest.fixture
def signals() -> Iterator[None]:
    """A job that ends leaves signals ignored, so that its end cannot be disturbed."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_job_is_shown_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    log, status, ended = job("echo '[0] group size: 2'; exit 3", 20)
    assert (dict(log.sizes), status, ended) == ({2: 1}, 3, "")
    assert capsys.readouterr().out == "[0] group size: 2\n"


@pytest.mark.usefixtures("signals")
def test_a_job_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    _, _, ended = job(f"sleep 1000 & echo $! >{tmp_path}/child; wait", 2)
    assert ended == "the time limit of 0:00:02 was over"
    about = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    # On a busy machine, a process dies some time after its signal.
    until = time.monotonic() + 10
    while (alive := about.exists() and "zombie" not in about.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive


@pytest.mark.usefixtures("signals")
def test_a_failed_check_that_hangs_is_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caffe, "AFTER_FAILURE", 1)
    _, _, ended = job("echo 'F1124 io.cpp:69] Check failed: proto.SerializeToOstream'; sleep 1000", 100)
    assert ended == "a check of Caffe failed 1 seconds ago, and it hangs since then"


@pytest.mark.usefixtures("signals")
def test_a_job_that_is_done_but_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caffe, "AFTER_DONE", 1)
    log, _, ended = job("echo '[0] Optimization Done.'; echo '[1] Optimization Done.'; sleep 1000", 100)
    assert (ended, sum(log.done.values())) == (caffe.DONE, 2)


@pytest.mark.usefixtures("signals")
def test_a_job_that_closes_its_output_is_waited_for() -> None:
    _, _, ended = job("echo '[0] Optimization Done.'; exec >&- 2>&-; sleep 1000", 3)
    assert ended == "the time limit of 0:00:03 was over"


def test_a_refusal_ends_with_one_and_says_that_nothing_was_started() -> None:
    Path("hosts").write_text("node-1\n")
    done = subprocess.run(
        ["sh", str(JOBS / "caffe.sh"), "--hostfile", "hosts", "--solver", "gone"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        "caffe.sh: nothing was started\n"
        f"caffe.sh: 1. {HERE}: the solver gone cannot be read: No such file or directory. It has to be on all nodes, "
        "under this name\n"
    )
