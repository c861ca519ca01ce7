"""The samples on real nodes, and failing jobs: they end, report the cause and leave nothing behind."""

import json
import re
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from clusters import PREPARED, Cluster

from farandole.validation.judge import explain, failure
from farandole.validation.nodes import program, task
from farandole.validation.plan import SAMPLES, horovodrun

NODES = 2
KIND = PREPARED
SITE = ()
pytestmark = pytest.mark.usefixtures("site")
BOTH = ("node-1", "node-2")
TRAIN = f"{SAMPLES}/pytorch_mnist.py"
HOME = "/home/trainer"
# Trains until it is killed.
LONG = (TRAIN, "--epochs", "100000", "--log-interval", "1000000")


def job(cluster: Cluster, argv: tuple[str, ...], nodes: tuple[str, ...] = BOTH, seconds: int = 60) -> dict[str, Any]:
    """Run a job as the validation play does, as the job user on the head."""
    planned = {"argv": argv, "probe": "", "nodes": nodes, "seconds": seconds, "group": "samples"}
    argument = json.dumps(task(planned))
    done = cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "python3", "-c", program("job"), argument)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "job": planned}


def logged(cluster: Cluster, argv: tuple[str, ...], seconds: int = 60) -> tuple[dict[str, Any], str]:
    """Run a job and return its whole output as well."""
    log = f"{HOME}/job.log"
    done = job(cluster, ("bash", "-o", "pipefail", "-c", f"{shlex.join(argv)} 2>&1 | tee {log}"), seconds=seconds)
    return done, cluster.ssh("node-1", "cat", log).stdout


def workers(cluster: Cluster) -> list[str]:
    """Remaining processes of jobs on all nodes."""
    processes = []
    for node in BOTH:
        listed = cluster.ssh(node, "ps", "-u", "trainer", "-o", "args=").stdout.splitlines()
        processes += [f"{node}: {line}" for line in listed if "python" in line or "orted" in line or "horovod" in line]
    return processes


def left(cluster: Cluster, seconds: int) -> list[str]:
    """What remains of jobs after some time. What ends a worker gives it five seconds."""
    deadline = time.monotonic() + seconds
    while (remaining := workers(cluster)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return remaining


@contextmanager
def injected(cluster: Cluster, *faults: tuple[str, str]) -> Iterator[None]:
    """Inject faults into node-2 in order, each as soon as a condition holds on the head."""

    def inject() -> None:
        for condition, fault in faults:
            cluster.shell("node-1", f"for i in $(seq 600); do {condition} && break; sleep 0.1; done")
            cluster.lab("fault", fault, "node-2")

    thread = threading.Thread(target=inject)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_second_run_changes_nothing(cluster: Cluster) -> None:
    again = cluster.play_ok()
    assert set(again.count("changed").values()) == {0}, again.changes


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize(
    "sample", ["pytorch_mnist", "tensorflow_tape", "tensorflow_session", "Keras_TF_MultiNode_GPU", "keras_3"]
)
def test_each_sample_trains_on_two_nodes_to_equal_weights(cluster: Cluster, sample: str, controller: str) -> None:
    done = job(cluster, (*horovodrun(controller, BOTH), f"{SAMPLES}/{sample}.py", "--json", "--batch-size", "64"))
    assert failure(done) == "", done
    assert done["accuracy"] >= 0.95
    assert len({rank["weights"] for rank in done["ranks"]}) == 1


@pytest.mark.parametrize("script", ["horovodrun", "mpirun", "shell"])
def test_the_job_scripts_run(cluster: Cluster, script: str) -> None:
    command = f"cd / && sh {SAMPLES}/jobs/{script}.sh {TRAIN} --epochs 1 --json"
    output = cluster.ssh("node-1", "su", "-", "trainer", "-c", command)
    assert output.returncode == 0, output.stdout + output.stderr
    assert ("1 worker on 1 machine" if script == "shell" else "2 workers on 2 machines") in output.stdout


@pytest.mark.parametrize("sample", ["pytorch_mnist", "tensorflow_tape", "Keras_TF_MultiNode_GPU", "keras_3"])
def test_a_job_resumes_from_its_checkpoint(cluster: Cluster, sample: str) -> None:
    options = (f"{SAMPLES}/{sample}.py", "--json", "--checkpoints", f"{HOME}/{sample}")
    first = job(cluster, (*horovodrun("gloo", BOTH), *options, "--epochs", "4"))
    assert failure(first) == "", first
    assert cluster.ssh("node-2", "ls", f"{HOME}/{sample}").returncode != 0
    more, log = logged(cluster, (*horovodrun("gloo", BOTH), *options, "--epochs", "8"))
    assert failure(more) == "", more
    assert "going on" in log, log
    assert more["loss"] < first["loss"]


def test_a_damaged_checkpoint_costs_one_epoch(cluster: Cluster) -> None:
    cluster.shell("node-1", f"for f in {HOME}/pytorch_mnist/*; do last=$f; done; truncate -s 1000 $last")
    argv = (*horovodrun("gloo", BOTH), TRAIN, "--json", "--checkpoints", f"{HOME}/pytorch_mnist")
    done, log = logged(cluster, argv)
    assert failure(done) == "", done
    assert "is damaged, trying the one before" in log, log
    assert "going on after epoch 7" in log, log


CRASH = "import os, horovod.torch as hvd; hvd.init(); hvd.rank() == 1 and exit('out of luck'); hvd.barrier()"
HANG = "import time, horovod.torch as hvd; hvd.init(); hvd.rank() == 1 and time.sleep(1000); hvd.barrier()"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize(
    ("nodes", "script", "seconds", "code", "named"),
    [
        (("node-1", "nod-2"), "1", 60, "job-name-unknown", "nod-2"),
        (BOTH, CRASH, 60, "worker-failed", "node-2"),
        (BOTH, HANG, 15, "job-hangs", ""),
    ],
    ids=["wrong name", "crash", "hang"],
)
def test_a_failing_job_ends_and_leaves_nothing_behind(
    cluster: Cluster, controller: str, nodes: tuple[str, ...], script: str, seconds: int, code: str, named: str
) -> None:
    done = job(cluster, (*horovodrun(controller, nodes), "-c", script), nodes, seconds)
    assert failure(done), done
    assert done["seconds"] < seconds + 25
    explained, cause, _ = explain(done)
    assert explained == code, done["said"]
    assert named in cause, done["said"]
    assert left(cluster, 10) == []


# Shuts Horovod down and starts it again in the same processes; MPI starts only once, so the script itself starts it.
AGAIN = """
import ctypes, os, sys, torch, horovod.torch as hvd
mpi = ctypes.CDLL("/opt/farandole/current/mpi/lib/libmpi.so", mode=ctypes.RTLD_GLOBAL) if "mpi" in sys.argv else None
mpi and mpi.MPI_Init_thread(None, None, 3, ctypes.byref(ctypes.c_int()))
for turn in range(20):
    hvd.init()
    found = hvd.allreduce(torch.tensor([turn + hvd.rank()]), op=hvd.Sum).item()
    assert found == 2 * turn + 1, found
    hvd.shutdown()
    "alone" in sys.argv and turn == 3 and os.environ["HOROVOD_RANK"] == "1" and sys.exit()
mpi and mpi.MPI_Finalize()
print("twenty times")
"""


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovod_restarts_in_the_same_processes(cluster: Cluster, controller: str) -> None:
    done = job(cluster, (*horovodrun(controller, BOTH), "-c", AGAIN, controller))
    assert done["code"] == 0, done["said"]
    assert sum("twenty times" in line for line in done["said"]) == 2


@pytest.mark.parametrize(
    ("controller", "argument", "message"),
    [("gloo", "alone", "rank 1 on host node-2 cannot be reached"), ("mpi", "", "MPI cannot be started again")],
)
def test_a_failed_restart_of_horovod_is_explained(
    cluster: Cluster, controller: str, argument: str, message: str
) -> None:
    argv = ("env", "HOROVOD_GLOO_TIMEOUT_SECONDS=5", *horovodrun(controller, BOTH), "-c", AGAIN, argument)
    done = job(cluster, argv)
    assert done["code"]
    assert any(f"ValueError: Horovod initialization failed: {message}" in line for line in done["said"]), done["said"]
    assert not any("terminate called" in line or "Aborted" in line for line in done["said"]), done["said"]


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_job_ends_with_its_ssh_session(cluster: Cluster, controller: str) -> None:
    def until(nodes: set[str], seconds: int) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if {line[:6] for line in workers(cluster) if "hvd" in line or not nodes} == nodes:
                return True
        return False

    ssh = shlex.join(("ssh", "node-1", shlex.join((*horovodrun(controller, BOTH), "-c", HANG))))
    cluster.shell("node-1", f"setsid -f runuser -u trainer -- {ssh} < /dev/null > /dev/null 2>&1")
    # By then the worker is sleeping, where only a signal reaches it.
    assert until(set(BOTH), 30)
    time.sleep(5)
    cluster.ssh("node-1", "pkill", "-KILL", "-u", "trainer", "-f", "^ssh node-1 ")
    assert until(set(), 15), workers(cluster)


def test_too_many_workers_are_refused(cluster: Cluster) -> None:
    argv = ("/usr/local/bin/horovodrun", "--gloo", "-np", "3", "-H", "node-1:1,node-2:1", "python", "-c", "1")
    done = job(cluster, argv)
    assert done["code"]
    assert done["seconds"] < 10
    assert explain(done)[0] == "slots-too-few", done["said"]
    assert not any("Traceback" in line for line in done["said"])


def test_a_node_that_is_off_is_reported(cluster: Cluster) -> None:
    cluster.lab("fault", "kill", "node-2")
    try:
        done = job(cluster, (*horovodrun("gloo", BOTH), TRAIN))
    finally:
        cluster.lab("fault", "start", "node-2")
    assert done["code"]
    assert done["seconds"] < 30
    code, cause, cure = explain(done)
    assert code == "job-node-unreachable"
    assert "node-2" in cause and "node-2" in cure
    assert not any("Traceback" in line for line in done["said"])


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_job_ends_if_a_node_is_cut_off(cluster: Cluster, controller: str) -> None:
    kept = f"{HOME}/cut-{controller}"
    argv = (*horovodrun(controller, BOTH), *LONG, "--checkpoints", kept)
    try:
        with injected(cluster, (f"[ -e {kept}/pytorch-0003.pt ]", "cut")):
            done = job(cluster, argv, seconds=80)
    finally:
        cluster.lab("fault", "heal", "node-2")
    assert failure(done)
    assert explain(done)[0] == "node-silent", done
    assert "node-2" in explain(done)[1]
    assert done["seconds"] < 75
    names = cluster.ssh("node-1", "ls", kept).stdout.split()
    assert len(names) > 1
    load = f"import torch; print(torch.load('{kept}/{names[-1]}', weights_only=True)['epoch'])"
    assert cluster.ssh("node-1", "/opt/farandole/current/venv/bin/python", "-c", load).stdout.strip().isdigit()
    # The worker on the cut-off node ends when its sshd notices; nothing else can reach it.
    assert left(cluster, 60) == []


def test_a_full_disk_keeps_earlier_checkpoints(cluster: Cluster) -> None:
    mount = f"mkdir -p {HOME}/small && mount -t tmpfs -o size=3m,uid=2000 none {HOME}/small"
    assert cluster.shell("node-1", mount).returncode == 0
    try:
        done = job(cluster, (*horovodrun("gloo", BOTH), *LONG, "--checkpoints", f"{HOME}/small/kept"))
        assert done["code"]
        code, cause, _ = explain(done)
        assert code == "checkpoint-unwritable", done["said"]
        assert "node-1" in cause and f"{HOME}/small/kept/pytorch-" in cause
        assert any("node-1: " in line and "the checkpoints before it are whole" in line for line in done["said"])
        kept = cluster.shell("node-1", f"ls {HOME}/small/kept/*.pt").stdout.split()
        load = "import sys, torch; [torch.load(path, weights_only=True) for path in sys.argv[1:]]"
        python = "/opt/farandole/current/venv/bin/python"
        assert kept
        assert cluster.ssh("node-1", python, "-c", load, *kept).returncode == 0
    finally:
        cluster.ssh("node-1", "umount", f"{HOME}/small")
    assert workers(cluster) == []


@pytest.mark.parametrize("damage", ["truncate -s 5000", "rm"])
def test_damaged_data_is_reported_and_repaired(cluster: Cluster, damage: str) -> None:
    path = "/opt/farandole/data/mnist/train-images-idx3-ubyte.gz"
    cluster.shell("node-2", f"{damage} {path}")
    done = job(cluster, (*horovodrun("gloo", BOTH), TRAIN))
    assert done["code"]
    code, cause, _ = explain(done)
    assert code == "data-damaged", done["said"]
    assert path in cause and "node-2" in cause
    repaired = cluster.play()
    assert {host for host, number in repaired.count("changed").items() if number} == {"node-2"}, repaired.output
    assert failure(job(cluster, (*horovodrun("gloo", BOTH), TRAIN, "--json", "--epochs", "1"))) == ""


# With Keras 3; a second for each epoch, as it would be over before a node has come back.
ELASTIC = f"""
import sys, time
sys.path.insert(0, "{SAMPLES}")
import horovod.keras as hvd, keras, mnist, numpy as np, proof
from keras_3 import gather, lenet5
hvd.init()
(x, y), _ = mnist.load_data("MNIST-data")
model = lenet5()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001)), loss, metrics=["accuracy"], jit_compile=False)
meter = proof.Meter()
sys.argv = ["elastic_keras_3.py", "--json"]
options = proof.arguments("", lr=0.001)

@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        print(proof.count(hvd.size(), "worker"), "from epoch", state.epoch + 1, flush=True)
    mine = slice(hvd.rank(), len(x) // hvd.size() * hvd.size(), hvd.size())
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(1)),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, 5),
    ]
    model.fit(x[mine, ..., None] / 255, y[mine], epochs=40 - state.epoch, callbacks=callbacks, verbose=0)

train(hvd.elastic.KerasState(model, epoch=0))
lost, accuracy = model.evaluate(x[..., None] / 255, y, verbose=0)
sys.exit(proof.finish(options, gather, hvd.rank(), hvd.size(), model.get_weights(), meter, accuracy, lost))
"""
TORCH = (f"{SAMPLES}/pytorch_elastic.py", "--json", "--images", "60000", "--epochs", "8", "--log-interval", "1000000")


@pytest.mark.parametrize(
    "program",
    [TORCH, ("-c", f"import os; os.environ['KERAS_BACKEND'] = 'tensorflow'{ELASTIC}"),
     ("-c", f"import os; os.environ['KERAS_BACKEND'] = 'torch'{ELASTIC}")],
    ids=["pytorch", "keras on tensorflow", "keras on pytorch"],
)  # fmt: skip
@pytest.mark.parametrize("count", [2, 3])
def test_an_elastic_job_survives_the_loss_and_return_of_a_node(
    cluster: Cluster, count: int, program: tuple[str, ...]
) -> None:
    nodes = tuple(f"node-{number}" for number in range(1, count + 1))
    if cluster.running() < count:
        cluster.lab("up", "--nodes", str(count), *KIND)
        cluster.play_ok()
    argv = (
        "/usr/local/bin/horovodrun", "-np", str(count), "--min-np", str(count - 1),
        "--blacklist-cooldown-range", "2", "60", "--host-discovery-script", f"{SAMPLES}/discover_hosts.sh",
        "python", *program,
    )  # fmt: skip
    log = f"{HOME}/elastic.log"
    cluster.ssh("node-1", "rm", "-f", log)
    command = ("bash", "-o", "pipefail", "-c", f"{shlex.join(argv)} 2>&1 | tee {log}")
    with injected(
        cluster,
        (f"grep -q '{count} workers from epoch' {log} && sleep 2", "kill"),
        (f"grep -Eq '{count - 1} workers? from epoch' {log}", "start"),
    ):
        done = job(cluster, command, nodes, seconds=240)
    assert done["code"] == 0, done["said"]
    assert done["accuracy"] >= 0.95
    turns = re.findall(r"(\d) workers? from epoch", cluster.ssh("node-1", "cat", log).stdout)
    assert turns == [str(count), str(count - 1), str(count)], done["said"]
    # Who stays comes first.
    assert sorted(rank["host"] for rank in done["ranks"]) == list(nodes)
    assert len({rank["weights"] for rank in done["ranks"]}) == 1
