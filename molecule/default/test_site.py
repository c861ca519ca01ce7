"""A cluster after site.yml; the scenarios of the roles cover the details."""

import hashlib
import json
import re
from pathlib import Path

import plays
import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "files/samples"
TRAINED = {
    "tensorflow": ("tensorflow_session", "tensorflow_tape", "Keras_TF_MultiNode_GPU", "keras_3"),
    "pytorch": ("pytorch_mnist",),
}


@pytest.fixture(scope="module")
def result(inventory_path):
    """The full result of the validation play, with time enough for a busy machine, and without limits on speed, which
    benchmarks measure."""
    fast = dict.fromkeys(("mpi_bandwidth", "mpi_latency", "efficiency", "yardstick"), 0)
    patient = json.dumps({"validation_bars": fast, "validation_seconds": 600})
    done = plays.play(inventory_path, "--extra-vars", patient, playbook="playbooks/validate.yml")
    assert done.rc == 0, done.output
    folder = re.search(r"report: ([\w/.-]+)", done.output)
    return json.loads((Path(folder[1]) / "result.json").read_text())


def test_the_validation_play_is_green_and_complete(result, head):
    checks = {check["id"]: check for check in result["checks"]}
    wanted = json.loads(head.check_output("cat /opt/farandole/current/manifest.json"))["wanted"]["frameworks"]
    measured = {name for name, check in checks.items() if check["status"] == "green"}
    speed, missing = {"mpi.bandwidth", "mpi.latency"}, {"nccl", "rdma", "speed"}
    speed |= {f"horovod.{'torch' if 'pytorch' in wanted else 'tensorflow'}.gloo.pace"}
    if "pytorch" in wanted:
        speed |= {"speed.efficiency", "speed.yardstick", "speed.predicted", "network.predicted"}
        missing -= {"speed"}
        assert "network.efficiency" in measured
    # On shared cores, speed may be not measured.
    assert missing <= set(checks) - measured <= missing | speed
    assert {"trust.node-1", "mpi"} < measured and speed < set(checks)
    for framework, module in (("tensorflow", "tensorflow"), ("pytorch", "torch")):
        names = {f"horovod.{module}.gloo", f"horovod.{module}.mpi"}
        names |= {f"training.{sample}.accuracy" for sample in TRAINED[framework]}
        assert names <= measured or framework not in wanted
    assert "machines: 2 of 2, clean connections: 4" in checks["trust.node-1"]["words"]
    assert len(result["data"]) == 1


def test_both_commands_of_the_manual_train(head, addresses):
    script = "python /opt/farandole/samples/Keras_TF_MultiNode_GPU.py --epochs 2"
    for options, count in (("-np 1 -H localhost:1", 1), (f"-np 2 -H localhost:1,{addresses['node-2']}:1", 2)):
        output = head.check_output(f"runuser -u trainer -- horovodrun {options} {script}")
        each = "1 worker on 1 machine" if count == 1 else "2 workers on 2 machines"
        assert f"{each}: accuracy" in output


# An allreduce of eight megabytes, of which each rank says its interface.
REDUCE = """
import os, torch, horovod.torch as hvd
hvd.init()
found = hvd.allreduce(torch.full((2_000_000,), 21, dtype=torch.int32), op=hvd.Sum)
print("sum", int(found.sum()), os.environ["HOROVOD_GLOO_IFACE"], flush=True)
"""


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_job_uses_the_faster_network_whatever_its_interfaces_are_called(nodes, head, controller):
    def carried():
        rows = [line.split() for host in nodes.values() for line in host.check_output("cat /proc/net/dev").splitlines()]
        return {
            link: sum(int(row[1]) + int(row[9]) for row in rows if row[0] == f"{link}:") for link in ("eth0", "eth1")
        }

    before = carried()
    job = f"cd / && runuser -u trainer -- horovodrun --{controller} -np 2 -H node-1:1,node-2:1 python -c %s"
    shown = head.check_output(job, REDUCE)
    assert {*re.findall(r"sum (\d+) (\w+)", shown)} == {("84000000", "ens7"), ("84000000", "eth1")}
    after = carried()
    assert after["eth0"] - before["eth0"] < 1_000_000 < 8_000_000 < after["eth1"] - before["eth1"]


def test_all_nodes_run_the_same_stack_without_build_leftovers(host, head):
    assert host.check_output("readlink /opt/farandole/current") == head.check_output("readlink /opt/farandole/current")
    assert host.file("/opt/farandole/current/manifest.json").exists
    assert not host.file("/opt/farandole/incoming").exists
    assert not host.file("/opt/farandole/build").exists


def test_names_do_not_resolve_to_the_decoy(host, addresses):
    assert host.interface("docker0").addresses[0] == "172.17.0.1"
    for name, address in addresses.items():
        assert host.check_output("getent ahostsv4 %s", name).split()[0] == address


def test_only_the_head_has_a_compiler(nodes):
    assert nodes["node-1"].exists("g++")
    assert not nodes["node-2"].exists("g++")


def test_no_unit_has_failed(host):
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""


def test_the_job_user_can_read_the_data_and_its_source(host):
    folder = "/opt/farandole/data/mnist"
    source = host.file(f"{folder}/SOURCE").content_string
    assert source == "MNIST\n" or re.fullmatch(r"digits of scikit-learn [\d.]+, scaled to 28x28\n", source)
    read = (
        "import gzip, pathlib, sys\n"
        "for kind in ('train', 't10k'):\n"
        "    labels, images = (gzip.open(pathlib.Path(sys.argv[1]) / f'{kind}-{what}-ubyte.gz').read()"
        " for what in ('labels-idx1', 'images-idx3'))\n"
        "    count = int.from_bytes(labels[4:8], 'big')\n"
        "    assert images[:16] == b''.join(n.to_bytes(4, 'big') for n in (2051, count, 28, 28))\n"
        "    assert (len(images), len(labels)) == (16 + count * 784, 8 + count)\n"
        "    print(kind, count, sorted(set(labels[8:])) == list(range(10)))\n"
    )
    labels = host.check_output("runuser -u trainer -- python3 -c %s %s", read, folder).splitlines()
    counts = ("60000", "10000") if source == "MNIST\n" else ("1497", "300")
    assert labels == [f"train {counts[0]} True", f"t10k {counts[1]} True"]


def test_the_samples_are_installed_for_the_job_user(host):
    wanted = [path for path in sorted(SAMPLES.rglob("*")) if path.suffix in (".py", ".sh")]
    assert wanted
    # One login, because each takes time.
    look = 'cd /opt/farandole/samples && for it; do sha256sum "$it" && stat --format "%U %G %a" "$it"; done'
    names = [str(path.relative_to(SAMPLES)) for path in wanted]
    shown = host.check_output(f"sh -c %s sh {' '.join(names)}", look).splitlines()
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in wanted]
    assert shown == [
        line for name, sum_ in zip(names, sums, strict=True) for line in (f"{sum_}  {name}", "root trainer 755")
    ]
    assert host.run("runuser -u trainer -- touch /opt/farandole/samples/mine").failed


def test_installing_the_data_leaves_nothing_behind(host, head):
    assert host.check_output("ls -A /opt/farandole/data").split() == [".lock", "mnist"]
    # An account that could open it could block every later run.
    assert host.run("runuser -u trainer -- flock --nonblock /opt/farandole/data/.lock true").failed
    assert len(head.check_output("ls -A /srv/farandole/data").split()) == 1
