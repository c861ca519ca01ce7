"""Jobs use, of two networks that all nodes share, the one that carries more, and leave the other one alone."""

import subprocess
from pathlib import Path

import plays
import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = 2_000_000
# An allreduce of eight megabytes.
REDUCE = f"""
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
names = ("ompi_mpi_int", "ompi_mpi_op_sum", "ompi_mpi_comm_world")
kind, total, world = (ctypes.byref(ctypes.c_char.in_dll(mpi, name)) for name in names)
mpi.MPI_Init(None, None)
ones, found = ((ctypes.c_int * {NUMBERS})(*[21] * {NUMBERS}) for _ in range(2))
mpi.MPI_Allreduce(ones, found, {NUMBERS}, kind, total, world)
mpi.MPI_Finalize()
print(sum(found))
"""


@pytest.fixture(scope="module")
def networks(worker):
    """The networks by their interfaces, according to the kernel."""
    return {
        link: worker.check_output(f"ip -4 route show dev {link} proto kernel").split()[0] for link in ("eth0", "eth1")
    }


@pytest.fixture(scope="module")
def fault(inventory_path):
    def run(verb, *options):
        command = ["farandole", "lab", "fault", verb, "node-2", *options, "--name", inventory_path.name]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    yield run
    run("heal")


@pytest.fixture(scope="module")
def play(inventory_path):
    """Configure jobs, measuring rates; returns the hosts that changed, and what was said."""

    def run():
        jobs = str(Path(__file__).parent / "jobs.yml")
        done = plays.play(inventory_path, "--extra-vars", "preflight_network=all", playbook=jobs)
        assert done.rc == 0, done.output
        return done.changed_hosts, done.flat

    return run


@pytest.fixture(scope="module")
def chosen(play, fault, head):
    """Have the second network chosen, in which the nodes' interfaces have different names."""
    rename = "ip link set {} down && ip link set {} name {} && ip link set {} up"
    head.check_output(rename.format("eth1", "eth1", "ib7", "ib7"))
    fault("throttle", "--mbit", "50")
    yield play()
    head.check_output(rename.format("ib7", "ib7", "eth1", "eth1"))


def as_job(host, *command):
    """What a command of the job user prints."""
    command = ["timeout", "60", "runuser", "-u", "trainer", "--", *command]
    return host.check_output("cd / && " + " ".join(["%s"] * len(command)), *command)


def carried(host):
    """The bytes that each interface has sent and received."""
    rows = [line.split() for line in host.check_output("cat /proc/net/dev").splitlines()[2:]]
    return {row[0].rstrip(":"): int(row[1]) + int(row[9]) for row in rows}


def reduced(nodes, *settings):
    """Run the allreduce; returns the bytes that each interface of each node carried for it."""
    before = {name: carried(host) for name, host in nodes.items()}
    job = ["mpirun", *settings, "-H", "node-1:1,node-2:1", "python", "-c", REDUCE]
    assert as_job(nodes["node-1"], *job).split() == [str(42 * NUMBERS)] * 2
    after = {name: carried(host) for name, host in nodes.items()}
    return {name: {link: now - before[name][link] for link, now in row.items()} for name, row in after.items()}


@pytest.mark.usefixtures("stack")
def test_the_network_that_carries_most_is_chosen_and_the_other_left_alone(chosen, networks, nodes):
    changed, output = chosen
    assert changed == {"node-1", "node-2"}
    assert f"note: the nodes share several networks; jobs use {networks['eth1']}" in output
    data = reduced(nodes)
    through_the_other = reduced(nodes, "--mca", "btl_tcp_if_include", networks["eth0"])
    assert "SOCKET_IFNAME" not in as_job(nodes["node-1"], "horovodrun")
    for name, link in (("node-1", "ib7"), ("node-2", "eth1")):
        written = nodes[name].check_output("cat /etc/farandole/environment /etc/farandole/openmpi/*.conf")
        assert f"GLOO_SOCKET_IFNAME:-{link}}}" in written
        assert f"oob_tcp_if_include = {networks['eth1']}\n" in written
        assert networks["eth0"] not in written
        # Its own name, and not that of the node where the job was started.
        has = as_job(nodes["node-1"], "mpirun", "-H", f"{name}:1", "env").splitlines()
        assert {f"GLOO_SOCKET_IFNAME={link}", f"NCCL_SOCKET_IFNAME=={link}"} <= {*has}
        # ssh, which starts the job, goes to the cluster addresses.
        assert data[name]["eth0"] < 1_000_000 < 4 * NUMBERS < data[name][link]
        assert through_the_other[name]["eth0"] > 4 * NUMBERS


def test_it_stays_chosen_until_another_is_clearly_faster(chosen, networks, fault, play):
    assert chosen
    fault("heal")
    fault("throttle", "--mbit", "50")
    fault("throttle", "--mbit", "40", "--link", "eth1")
    changed, output = play()
    assert (changed, f"jobs use {networks['eth1']}" in output) == (set(), True)
    fault("heal")
    fault("throttle", "--mbit", "40", "--link", "eth1")
    changed, output = play()
    assert (changed, f"jobs use {networks['eth0']}" in output) == ({"node-1", "node-2"}, True)
