"""The launcher of Intel Caffe: its options, hosts and solver, and what it refuses."""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.node.caffe import main, nodes, plan

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
    with pytest.raises(FarandoleError) as caught:
        call()
    return str(caught.value)


# Options


def test_the_guides_options_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--hostfile h --caffe_bin c --solver s --network opa --ppn 2 --num_omp_threads 60 --time 1h -- --weights w"
    assert vars(main.read_options(line.split())) == {
        "hostfile": "h", "caffe_bin": "c", "solver": "s", "network": "opa", "ppn": 2, "num_omp_threads": 60,
        "time": 3600, "more": ["--weights", "w"],
    }  # fmt: skip
    monkeypatch.setenv("PBS_NODEFILE", "nodefile")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "34")
    chosen = main.read_options(["--solver", "s"])
    assert (chosen.hostfile, chosen.caffe_bin, chosen.network) == ("nodefile", main.INSTALLED, "tcp")
    assert (chosen.ppn, chosen.num_omp_threads, chosen.time, chosen.more) == (None, 34, 4 * 3600, [])
    monkeypatch.setenv("OMP_NUM_THREADS", "20")
    assert main.read_options(["--solver", "s"]).num_omp_threads == 20


@pytest.mark.parametrize("line", ["--mpirun m", "--network mlx", "--ppn 0", "--weights w", "--num_omp_threads 4,2"])
def test_an_option_that_no_guide_uses_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.read_options(["--solver", "s", *line.split()])
    assert line.split()[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("-PSM2 -prepend-rank caffe train --solver ./s", "launcher: --network psm2 --solver ./s\n"),
        ("-np 2 python train.py", "mpirun: -np 2 python train.py\n"),
        ("-x A python caffe", "mpirun: -x A python caffe\n"),
        ("-n 2 caffe time", "mpirun: -n 2 caffe time\n"),
        ("--version", "mpirun: --version\n"),
        ("", "mpirun: \n"),
        ("-PSM2 -n 2 caffe train --solver s", ""),
        ("-PSM2 -genv A b /x/caffe train --solver s", ""),
        ("-l caffe train --solver s", ""),
    ],
)
def test_the_guides_mpirun(line: str, output: str, tmp_path: Path) -> None:
    """It starts the launcher, refuses other options of caffe train, and hands everything else to the next mpirun."""
    launcher = program(tmp_path / "launcher", 'echo "launcher: $*"')
    own = (JOBS / "intel-caffe/mpirun").read_text().replace(COMMAND, launcher)
    program(tmp_path / "intel-caffe/mpirun", own)
    program(tmp_path / "bin/mpirun", 'echo "mpirun: $*"')
    (tmp_path / "link").symlink_to("intel-caffe")
    path = f"{tmp_path}/link:{tmp_path}/intel-caffe:{tmp_path}/bin:{os.environ['PATH']}"
    done = subprocess.run(["mpirun", *line.split()], env={"PATH": path}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (output, 0 if output else 1), done.stderr
    assert output or "only -PSM2 -prepend-rank can be translated" in done.stderr


# Hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", {"a": 1, "b": 1}),
        ("a\na\nb\nb\n", {"a": 2, "b": 2}),
        # Slots are places, not wishes: Caffe uses the cores by threads.
        ("a slots=4\n\n# none\nb slots=2 max_slots=3 # why\n", {"a": 1, "b": 1}),
    ],
)
def test_hostfiles(text: str, hosts: dict[str, int]) -> None:
    Path("hosts").write_text(text)
    assert nodes.read_hosts("hosts") == hosts


@pytest.mark.parametrize("line", ["-oProxyCommand=id", "a;id", "$(id)", "a slots=x", "a:2", "a b"])
def test_a_line_that_is_no_host_is_refused(line: str) -> None:
    Path("hosts").write_text(f"ok\n{line}\n")
    assert f"line 2 of hosts is not NAME or NAME slots=N: {line!r}" in refusal(lambda: nodes.read_hosts("hosts"))


def test_where_the_hosts_come_from() -> None:
    Path("mine").write_text("c\n")
    Path("nodefile").write_text("a\na\n")
    Path("empty").touch()
    allocated = {"a": 1, "b": 1}
    # Before the cluster's hostfile: that one names nodes of other jobs.
    assert nodes.find_hosts(None, None, allocated) == (["a", "b"], 1)
    assert nodes.find_hosts("nodefile", None, allocated) == (["a"], 2)
    assert nodes.find_hosts("nodefile", 3, {}) == (["a"], 3)
    assert "mine names c, which this job does not have" in refusal(lambda: nodes.find_hosts("mine", None, allocated))
    assert "empty names no host" in refusal(lambda: nodes.find_hosts("empty", None, {}))
    assert "(a 2, b 1)" in refusal(lambda: nodes.find_hosts(None, None, {"a": 2, "b": 1}))


# Solver


def read(text: str = SOLVER, net: str = NET) -> plan.Solver:
    Path("solver.prototxt").write_text(text)
    Path("train_val.prototxt").write_text(net)
    return plan.read_solver("solver.prototxt")


def test_a_solver_is_read() -> None:
    about = read()
    assert about == plan.Solver(
        "solver.prototxt", ["train_val.prototxt"], ["mean.binaryproto", "train_lmdb"],
        "snapshots/lenet_iter_100.caffemodel", True,
    )  # fmt: skip
    assert read(f"{SOLVER}snapshot_format: HDF5\n").model.endswith(".caffemodel.h5")
    assert not read(SOLVER.replace("test_interval: 50", "test_interval: 500\ntest_initialization: false")).tests
    assert not read(SOLVER.replace("test_iter: 10", "")).tests


def test_a_net_of_an_odd_form_is_read() -> None:
    net = "layer: 1 layer < source : 'shard_%#_lmdb' > # source: \"x\"\nlayer { source { a: 1 } mean_file:m;param [1] }"
    assert read(net=net).data == ["shard_%#_lmdb", "m"]


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


# How it is started


def test_a_launcher_of_another_mpi_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "openmpi/mpirun", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/openmpi:{tmp_path}/mpich")
    assert "another MPI's mpirun would start separate trainings" in refusal(plan.find_launcher)
    launcher = program(tmp_path / "mpich/mpiexec.hydra", "")
    assert plan.find_launcher() == launcher


def test_threads() -> None:
    cores = {"node-1": 80, "node-2": 68}
    assert (plan.threads(None, cores, 1), plan.threads(60, cores, 1), plan.threads(None, cores, 3)) == (68, 60, 22)
    assert "node-2: the job has 68 cores there" in refusal(lambda: plan.threads(60, cores, 2))
    assert "a lower --ppn" in refusal(lambda: plan.threads(None, cores, 100))


def test_variables_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSL_ROOT", "/m")
    made = plan.variables("/c/bin/caffe", 1, 2, "tcp", True)
    assert (made["MLSL_NUM_SERVERS"], made["OMP_NUM_THREADS"], made["MLSL_ROOT"]) == ("0", "2", "/m")
    assert (made["KMP_AFFINITY"], made["KMP_BLOCKTIME"]) == ("granularity=fine,compact,1", "1")
    assert (made["FI_PROVIDER"], made["HYDRA_LAUNCHER"]) == ("tcp", "slurm")
    assert "/c/lib" in made["LD_LIBRARY_PATH"].split(":")
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.setenv("KMP_AFFINITY", "verbose,granularity=fine,compact=1")
    made = plan.variables("/c/bin/caffe", 2, 2, "opa", False)
    assert (made["KMP_AFFINITY"], made["KMP_BLOCKTIME"]) == ("verbose,granularity=fine,compact,1", "7")
    assert (made["FI_PROVIDER"], made["I_MPI_HYDRA_BOOTSTRAP"]) == ("psm2", "ssh")
    monkeypatch.setenv("MLSL_NUM_SERVERS", "4")
    assert "MLSL_NUM_SERVERS is set" in refusal(lambda: plan.variables("/c/bin/caffe", 1, 2, "tcp", True))


@pytest.mark.parametrize(("provider", "interface"), [("tcp", "eth1 eth1"), ("psm2", " ")])
def test_a_rank_names_its_machine_and_uses_its_nodes_interface(provider: str, interface: str, tmp_path: Path) -> None:
    """Whatever interface the head has, whose environment all ranks get."""
    (tmp_path / "environment").write_text('export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-eth1}"\n')
    script = plan.RANK.replace("/etc/farandole/environment", str(tmp_path / "environment"))
    command = ["/bin/sh", "-c", script, "/bin/sh", "-c", 'echo "$UCX_NET_DEVICES $FI_TCP_IFACE" "$@"', "caffe", "a b"]
    environment = {**os.environ, "FI_PROVIDER": provider, "GLOO_SOCKET_IFNAME": "eth0"}
    place, rest = subprocess.run(command, env=environment, capture_output=True, text=True).stdout.splitlines()
    assert place.startswith(f"rank of caffe.sh on {HERE} machine ")
    assert rest == f"{interface} a b"


def test_commands() -> None:
    about = plan.Solver("s", [], [], "m", False)
    made = plan.Plan(["node-1", "node-2"], 1, "/m/mpiexec.hydra", ["/c/bin/caffe", "train"], {}, about)
    line = "/m/mpiexec.hydra -l -genvall -n 2 -ppn 1 -hosts node-1,node-2 /bin/sh -c"
    assert made.command() == [*line.split(), plan.RANK, "/c/bin/caffe", "train"]


def test_a_refusal_ends_with_one_and_says_that_nothing_was_started(tmp_path: Path) -> None:
    install(tmp_path / "node", "farandole.node.caffe", caffe="main")
    Path("hosts").write_text("node-1\n")
    command = [str(tmp_path / "node/caffe"), "--hostfile", "hosts", "--solver", "gone"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == "caffe.sh: nothing was started"
    assert second.startswith(f"caffe.sh: 1. {HERE}: gone: No such file or directory. ")
