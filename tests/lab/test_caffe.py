"""Intel Caffe's launcher on two nodes with a stand-in for Caffe, built for MPICH's ABI; one for Open MPI is refused."""

import hashlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import ROOT, Cluster

NODES = 2
BOTH = ("node-1", "node-2")
JOBS = "/opt/farandole/samples/jobs"
INSTALLED = "/opt/farandole/caffe/current/bin/caffe"
OPENMPI = "/home/trainer/openmpi/bin/caffe"
WORK = "/home/trainer/job"
SHARED = "/dev/shm/mine"  # noqa: S108, another user's
SOLVER = """net: "train_val.prototxt"
test_iter: 1
test_interval: 50
max_iter: 100
snapshot_prefix: "snapshots/stand_in"
"""
NET = """name: "stand-in"
layer { name: "data" type: "Data" top: "data" data_param { source: "train_lmdb" backend: LMDB } }
layer { name: "accuracy" type: "Accuracy" bottom: "data" top: "accuracy" }
"""
# The program loads libmpi.so.12, as the real one does; Debian's MPICH provides that under another name. So it is linked
# with an empty library of this name, because Debian's own would leave its own name in the program.
BUILD = """set -eu
cd /root && rm -rf build && mkdir -p build/caffe/bin build/caffe/lib build/abi build/openmpi/bin && cd build
cat >stand_in_caffe.c
gcc -x c -shared -o caffe/lib/libstandin.so.1 -Wl,-soname,libstandin.so.1 /dev/null
apt-get download -qq libmpich-dev && dpkg -x libmpich-dev*.deb dev
gcc -Idev/usr/include/x86_64-linux-gnu/mpich -c stand_in_caffe.c
nm -u stand_in_caffe.o | awk '$2 ~ /^MPI_/ { print "void " $2 "(void) {}" }' |
    gcc -x c -shared -o abi/libmpi.so.12 -Wl,-soname,libmpi.so.12 -
gcc -o caffe/bin/caffe stand_in_caffe.o -Wl,--no-as-needed abi/libmpi.so.12 caffe/lib/libstandin.so.1
/opt/farandole/current/mpi/bin/mpicc -o openmpi/bin/caffe stand_in_caffe.c
tar -czf caffe.tar.gz caffe
"""

# The guide's job script as it stands, but for the sizes of this cluster, and tcp, as it has no Omni-Path.
GUIDE = """#!/bin/sh
#PBS -N test
#PBS -V
#PBS -l select=2:ncpus=1:mpiprocs=1:ompthreads=1
#PBS -q normal
#PBS -l walltime=04:00:00
#PBS -A caffe

cd $PBS_O_WORKDIR

module purge
module load conda/intel_caffe_1.1.5
source /apps/applications/miniconda3/envs/intel_caffe/mlsl_2018.3.008/intel64/bin/mlslvars.sh

export KMP_AFFINITY=verbose,granularity=fine,compact=1
export KMP_BLOCKTIME=1
export KMP_SETTINGS=1
export OMP_NUM_THREADS=1
mpirun -PSM2 -prepend-rank caffe train \\
--solver ./models/intel_optimized_models/multinode/alexnet_4nodes/solver.prototxt

# or

./scripts/run_intelcaffe.sh --hostfile $PBS_NODEFILE \\
--caffe_bin /apps/applications/miniconda3/envs/intel_caffe/bin/caffe \\
--solver models/intel_optimized_models/multinode/alexnet_4nodes/solver.prototxt \\
--network tcp --ppn 1 --num_omp_threads 1
exit 0
"""
# What the guide takes for granted: its folder, its module, the models.
TAKEN_FOR_GRANTED = f"""set -eu
folder=/apps/applications/miniconda3/envs/intel_caffe
mkdir -p $folder/bin $folder/mlsl_2018.3.008/intel64/bin /etc/farandole/modulefiles/conda
ln -sf {INSTALLED} $folder/bin/caffe
touch $folder/mlsl_2018.3.008/intel64/bin/mlslvars.sh
cd /etc/farandole/modulefiles/conda
printf '#%%Module\\nprepend-path PATH {JOBS}/intel-caffe:%s/bin\\n' $folder >intel_caffe_1.1.5
cd {WORK}
mkdir -p scripts models/intel_optimized_models/multinode/alexnet_4nodes
cp solver.prototxt models/intel_optimized_models/multinode/alexnet_4nodes
ln -sf {JOBS}/caffe.sh scripts/run_intelcaffe.sh
chown -R trainer: .
"""


def copied(cluster: Cluster, source: str, target: str) -> None:
    subprocess.run(["scp", "-q", "-r", "-F", cluster.inventory / ".ssh/config", source, target], check=True)


def archive(folder: Path) -> tuple[str, str]:
    """The option with which site.yml gets the stand-in."""
    file = folder / "caffe.tar.gz"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    values = {"caffe_archive": str(file), "caffe_sha256": digest, "caffe_packages": ["mpich"]}
    return ("--extra-vars", json.dumps(values))


@dataclass
class Job:
    """A cluster with both stand-ins, the files of a training, and the option with which site.yml got one of them."""

    cluster: Cluster
    options: tuple[str, str]

    def shell(self, script: str, node: str = "node-1") -> subprocess.CompletedProcess[str]:
        return self.cluster.ssh(node, "su", "-", "trainer", "-c", f"cd {WORK} && {script}")

    def train(self, *options: str, caffe: str = INSTALLED, solver: str = "solver.prototxt") -> tuple[int, str, str]:
        """Run the launcher; returns its status, the log, and what it says itself."""
        command = ["sh", f"{JOBS}/caffe.sh", "--caffe_bin", caffe, "--solver", solver, *options]
        done = self.shell(shlex.join(command))
        return done.returncode, done.stdout, done.stderr

    def refused(self, *options: str, caffe: str = INSTALLED, solver: str = "solver.prototxt") -> list[str]:
        """Check that nothing is started, and return why."""
        status, log, said = self.train(*options, caffe=caffe, solver=solver)
        assert (status, log) == (1, ""), log + said
        assert "caffe.sh: nothing was started\n" in said
        return re.findall(r"^caffe\.sh: \d+\. (.*)$", said, re.MULTILINE)

    @contextmanager
    def without(self, node: str, path: str) -> Iterator[None]:
        self.cluster.ssh(node, "mv", path, f"{path}.away")
        try:
            yield
        finally:
            self.cluster.ssh(node, "mv", f"{path}.away", path)

    def left(self) -> list[str]:
        """The processes of a job on all nodes."""
        script = "ps -u trainer -o args= | grep -E 'caffe|hydra|mpirun|orted' | grep -v grep"
        return [line for node in BOTH for line in self.cluster.shell(node, script).stdout.splitlines()]


@pytest.fixture(scope="module")
def job(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Set the cluster up, build both stand-ins on the head, and install one of them as users do."""
    folder = tmp_path_factory.mktemp("caffe")
    cluster.play_ok()
    config, source = cluster.inventory / ".ssh/config", (ROOT / "tests/lab/stand_in_caffe.c").read_text()
    built = subprocess.run(
        ["ssh", "-F", config, "node-1", shlex.join(["sh", "-c", BUILD])], input=source, text=True, capture_output=True
    )
    assert built.returncode == 0, built.stderr
    copied(cluster, "node-1:/root/build/caffe.tar.gz", str(folder))
    copied(cluster, "node-1:/root/build/openmpi", str(folder))
    chosen = archive(folder)
    cluster.play_ok(*chosen)
    (folder / "job/snapshots").mkdir(parents=True)
    (folder / "job/train_lmdb").mkdir()
    (folder / "job/solver.prototxt").write_text(SOLVER)
    (folder / "job/train_val.prototxt").write_text(NET)
    for node in BOTH:
        for name in ("job", "openmpi"):
            copied(cluster, str(folder / name), f"{node}:/home/trainer")
        cluster.ssh(node, "chown", "-R", "trainer:", "/home/trainer")
    return Job(cluster, chosen)


def test_the_archive_is_installed_on_all_nodes(job: Job) -> None:
    sums = {job.cluster.ssh(node, "sha256sum", INSTALLED).stdout for node in BOTH}
    assert len(sums) == 1
    assert INSTALLED in sums.pop()
    again = job.cluster.play_ok(*job.options)
    assert set(again.count("changed").values()) == {0}, again.changes


def test_two_ranks_on_two_nodes_train_together(job: Job) -> None:
    status, log, said = job.train("--time", "2m")
    assert status == 0, log + said
    assert (
        "caffe.sh: green: 2 ranks on 2 machines trained together, accuracy 1, node-1:snapshots/stand_in_iter_100"
        in said
    )
    assert log.count("Number of groups: 1, group size: 2") == 2
    assert log.count("Optimization Done.") == 2
    assert "MLSL_NUM_SERVERS=0" in said
    assert job.left() == []


def test_the_guides_mpirun_and_script_run(job: Job) -> None:
    guide = (
        "export KMP_AFFINITY=verbose,granularity=fine,compact=1 OMP_NUM_THREADS=1 "
        f"PATH={JOBS}/intel-caffe:{INSTALLED.removesuffix('/caffe')}:$PATH && "
        "mpirun -PSM2 -prepend-rank caffe train --solver ./solver.prototxt"
    )
    done = job.shell(guide)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in (
        "network tcp; /usr/bin/mpiexec.hydra; MLSL_NUM_SERVERS=0 KMP_AFFINITY=verbose,granularity=fine,compact,1",
        "caffe.sh: green: 2 ranks on 2 machines",
    ):
        assert word in done.stderr
    # The other form of the guide, with a link where its script was, and a nodefile.
    script = (
        f"mkdir -p scripts && ln -sf {JOBS}/caffe.sh scripts/run_intelcaffe.sh && "
        "printf 'node-2\\nnode-1\\n' >nodefile && export PBS_NODEFILE=$PWD/nodefile && "
        f"./scripts/run_intelcaffe.sh --hostfile $PBS_NODEFILE --caffe_bin {INSTALLED} --solver solver.prototxt "
        "--network tcp --ppn 1 --num_omp_threads 1"
    )
    done = job.shell(script)
    assert done.returncode == 0, done.stdout + done.stderr
    # Rank 0, and so the model, is on the first node of the file.
    assert "node-2:snapshots/stand_in_iter_100.caffemodel" in done.stderr


def test_a_program_for_another_mpi_and_a_node_without_the_right_launcher_are_refused(job: Job) -> None:
    assert job.refused(caffe=OPENMPI) == [
        f"{node}: {OPENMPI} loads libmpi.so.40, but only libmpi.so.12 (MPICH, Intel MPI) is known" for node in BOTH
    ]
    # The next mpirun on PATH is the stack's.
    with job.without("node-1", "/usr/bin/mpiexec.hydra"):
        (said,) = job.refused()
    assert "another MPI's mpirun would start separate trainings and end with 0. Set caffe_packages: [mpich]" in said


def test_what_the_other_launcher_would_have_done(job: Job) -> None:
    """Why it is refused: the launcher itself ends with 0."""
    done = job.shell(f"mpiexec.hydra -l -n 2 -ppn 1 -hosts node-1,node-2 {OPENMPI} train --solver solver.prototxt")
    assert (done.returncode, (done.stdout + done.stderr).count("group size: 1")) == (0, 2), done.stderr


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["/opt/farandole/caffe/current/lib/libstandin.so.1"], ["does not find libstandin.so.1"]),
        ([f"{WORK}/snapshots"], [f"no snapshot can be written to {WORK}/snapshots"]),
        ([f"{WORK}/train_lmdb", f"{WORK}/solver.prototxt"], ["solver.prototxt cannot be", "train_lmdb cannot be read"]),
        (["/usr/bin/mpiexec.hydra"], ["/usr/bin/mpiexec.hydra cannot be read"]),
        ([WORK], ["solver.prototxt", "train_val.prototxt", "train_lmdb", f"{WORK} cannot be read", "no snapshot"]),
    ],
    ids=["library", "snapshots", "solver and data", "launcher", "folder"],
)
def test_what_a_node_lacks_is_refused(job: Job, gone: list[str], named: list[str]) -> None:
    with ExitStack() as away:
        for path in gone:
            away.enter_context(job.without("node-2", path))
        said = job.refused()
    assert all(what in line for line, what in zip(said, named, strict=True)), said
    assert {line.partition(":")[0] for line in said} == {"node-2"}
    assert job.left() == []


def test_a_solver_that_differs_is_refused(job: Job) -> None:
    job.shell("echo '# other' >>solver.prototxt", "node-2")
    (said,) = job.refused()
    assert said.startswith(f"node-2: {WORK}/solver.prototxt differs from that of node-1"), said
    job.shell("sed -i '/# other/d' solver.prototxt", "node-2")


def test_what_is_asked_wrongly_is_refused(job: Job) -> None:
    (said,) = job.refused(solver="gone.prototxt")
    assert said.startswith("node-1: gone.prototxt: No such file or directory. "), said
    assert job.refused("--network", "opa")[0].startswith("node-1: there is no Omni-Path adapter")
    (said,) = job.refused("--num_omp_threads", "60")
    assert "too few for 1 x 60 threads: at most " in said
    job.shell("printf 'node-1\\nnode-9\\n' >wrong")
    (said,) = job.refused("--hostfile", "wrong")
    assert said.startswith("node-9: it cannot be asked: "), said


def test_separate_trainings_are_red(job: Job) -> None:
    status, log, said = job.train("--time", "2m", "--", "--stand_in", "alone")
    assert status == 1, said
    assert log.count("group size: 1") == 2, log
    assert "caffe.sh: red: the ranks did not all train together successfully" in said
    assert "caffe.sh: 1. group size: 2 is wanted, the log has 1. Not all began together" in said


def test_a_job_that_hangs_or_is_ended_leaves_nothing(job: Job) -> None:
    # Somebody else's, which the guide's script would have killed.
    job.shell(f"cp /bin/sleep ./caffe && (nohup ./caffe 300 >/dev/null 2>&1 &) && touch {SHARED}", "node-2")
    begun = time.monotonic()
    status, _, said = job.train("--time", "8s", "--", "--stand_in", "hang")
    assert status == 1
    assert "caffe.sh: 1. it was ended on all its nodes, because the time limit of 8 s was over" in said
    assert time.monotonic() - begun < 60
    assert job.left() == ["./caffe 300"]
    # TERM, as a scheduler sends it.
    launcher = f"{JOBS}/caffe.sh --caffe_bin {INSTALLED} --solver solver.prototxt -- --stand_in hang"
    done = job.shell(f"timeout --foreground 8 sh {launcher}")
    assert "caffe.sh: red: everything was ended on all nodes, by a signal" in done.stderr, done.stderr
    assert job.left() == ["./caffe 300"]
    job.cluster.ssh("node-2", "pkill", "-u", "trainer", "-x", "caffe")
    assert job.cluster.ssh("node-2", "rm", SHARED).returncode == 0


def test_a_rank_that_dies_or_ends_early_is_red(job: Job) -> None:
    status, log, said = job.train("--time", "1m", "--", "--stand_in", "die")
    assert status == 1, log + said
    assert "node-2: a rank ended before the training was over" in said
    assert re.search(r"`.*` is there [01] times, wanted 2; not from: rank 0 on node-1", said), said
    status, _, said = job.train("--time", "1m", "--", "--stand_in", "mute")
    assert (status, said.count("wanted 2")) == (1, 1), said


def test_two_ranks_on_each_node_train_together(job: Job) -> None:
    status, log, said = job.train("--time", "1m", "--ppn", "2", "--num_omp_threads", "1")
    assert status == 0, log + said
    assert "green: 4 ranks on 2 machines trained together" in said


def test_a_wrong_archive_changes_nothing(job: Job, tmp_path: Path) -> None:
    before = job.cluster.ssh("node-2", "readlink", "/opt/farandole/caffe/current").stdout
    (tmp_path / "lib").mkdir()
    subprocess.run(["tar", "-czf", tmp_path / "caffe.tar.gz", "-C", tmp_path, "lib"], check=True)
    done = job.cluster.play_failing(*archive(tmp_path))
    assert "caffe_archive is refused: there is no bin/caffe in it" in done.output
    wrong = json.dumps({**json.loads(archive(tmp_path)[1]), "caffe_sha256": "0" * 64})
    done = job.cluster.play("--extra-vars", wrong)
    assert "but caffe_sha256 is 0000" in done.output
    assert job.cluster.ssh("node-2", "readlink", "/opt/farandole/caffe/current").stdout == before


def test_the_guides_job_script_is_submitted_with_qsub(job: Job) -> None:
    values = {**json.loads(job.options[1]), "slurm_enabled": True, "slurm_accounts": {"caffe": {}}}
    job.cluster.play_ok("--extra-vars", json.dumps(values))
    for node in BOTH:
        assert job.cluster.shell(node, TAKEN_FOR_GRANTED).returncode == 0
    (number,) = re.findall(r"^\d+", job.shell(f"cat >guide.pbs <<'END'\n{GUIDE}END\nqsub guide.pbs").stdout)
    until = time.monotonic() + 120
    told = f"sacct --noheader --parsable2 --allocations --jobs={number} --format=state,account,nnodes,exitcode"
    while (state := job.shell(told).stdout.strip().partition("|")[0]) in ("", "PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < until, state
        time.sleep(1)
    said = job.shell(f"cat test.o{number} test.e{number}").stdout
    assert job.shell(told).stdout == "COMPLETED|caffe|2|0:0\n", said
    # Once for each of the two ways.
    assert said.count("caffe.sh: green: 2 ranks on 2 machines trained together") == 2, said
    assert said.count("KMP_AFFINITY=verbose,granularity=fine,compact,1") == 2, said
    assert job.left() == []
