"""What needs Debian's own kernel: a newer one, RDMA by Soft-RoCE, the queue's limits of cores and devices.

It computes slowly.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest
from clusters import Cluster, built_stack

from farandole.validation.nodes import program

NODES = 2
ALL = [f"node-{number}" for number in range(1, NODES + 1)]
META = "linux-image-amd64"


def older_kernel() -> str:
    """What installs the oldest kernel that apt has here: of the release, where the newest is a security update."""
    told = subprocess.run(["apt-cache", "madison", META], text=True, capture_output=True, check=True).stdout
    return "=".join([META, *(line.split("|")[1].strip() for line in told.splitlines()[-1:])])


PACKAGES = (
    f"{older_kernel()},"
    "build-essential,chrony,cmake,curl,git,ibverbs-providers,ibverbs-utils,rdma-core,rsync,vim,wget,zstd,"
    "libpmix-dev,mariadb-server,slurm-wlm,slurm-wlm-mysql-plugin,slurm-wlm-torque,slurmdbd"
)
KIND = ("--kernel", "stock", "--memory", "4096", "--packages", PACKAGES, *built_stack())
SITE = ("--extra-vars", json.dumps({"slurm_enabled": True}))
PAIR = ("-np", "2", "-H", "node-1:1,node-2:1", "--bind-to", "none")
SOFT = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"


def kernels(cluster: Cluster) -> list[str]:
    return [cluster.ssh(node, "uname", "-r").stdout.strip() for node in ALL]


@pytest.fixture
def patient(cluster: Cluster) -> Iterator[None]:
    """The inventory has what SITE says, and more time, as an emulated processor trains too slowly for two minutes."""
    folder = cluster.inventory / "group_vars"
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yml").write_text("slurm_enabled: true\nvalidation_seconds: 600\n")
    yield
    (folder / "cluster.yml").unlink()
    folder.rmdir()


@pytest.mark.usefixtures("site", "patient")
def test_a_newer_kernel_is_installed_and_started_on_one_node_after_the_other(cluster: Cluster) -> None:
    (older,) = {*kernels(cluster)}
    offered = re.findall(r"linux-image-(\d\S+-amd64) ", cluster.farandole("upgrade", "--check").stdout)
    assert offered, "apt has no kernel here that is newer than the release's"
    newer = offered[0]
    # The first one starts the kernel that it had.
    assert cluster.shell("node-2", "echo do_symlinks = no >/etc/kernel-img.conf").returncode == 0
    failed = cluster.farandole("upgrade", "--yes")
    assert failed.returncode == 1
    assert f"kernel {older} runs, and {newer} is installed: see what its boot loader starts" in failed.stdout
    assert re.search("^node-2 .*its upgrade failed", cluster.farandole("node list").stdout, re.MULTILINE)
    assert kernels(cluster) == [older] * NODES
    mend = "; ".join(f"ln -sf boot/{name}-{newer} /{name}" for name in ("vmlinuz", "initrd.img"))
    assert cluster.shell("node-2", f"rm /etc/kernel-img.conf; {mend}").returncode == 0
    done = cluster.farandole("upgrade", "--yes")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kernels(cluster) == [newer] * NODES
    assert done.stdout.index("wave 1 of 2: node-2") < done.stdout.index("wave 2 of 2: node-1")
    assert cluster.farandole("node list").stdout == "no node is left out\n"
    assert cluster.farandole("status").returncode == 0


@pytest.fixture
def ports(cluster: Cluster) -> Cluster:
    """Each node has a port for RDMA, on its first interface."""
    for node in ALL:
        assert cluster.shell(node, f"rdma link | grep -q rxe0 || {{ {SOFT}; }}").returncode == 0
    return cluster


def test_preflight_finds_ports_their_network_and_a_node_that_differs(ports: Cluster) -> None:
    assert "Debian 12, RDMA by rxe0/1 of eth0" in ports.farandole("preflight").stdout
    ports.ssh("node-2", "rdma", "link", "delete", "rxe0")
    said = ports.farandole("preflight").stdout
    assert "RDMA by" not in said
    assert "node-2: note: it has no RDMA port, unlike node-1" in said


@pytest.mark.usefixtures("site")
def test_validate_sends_data_by_rdma_between_the_nodes(ports: Cluster) -> None:
    said = ports.farandole("validate", "--quick").stdout
    assert "RDMA between 1 of 1 pairs of nodes" in said
    # The packets of RoCE.
    ports.lab("fault", "block", "node-2", "--port", "4791")
    launch = ("runuser", "-l", "trainer", "-c", shlex.join(("mpirun", *PAIR, "python", "-c", program("mpi"))))
    record = json.loads(re.findall(r"^\{.*rdma.*", ports.ssh("node-1", *launch).stdout, re.MULTILINE)[0])
    assert record["rdma"]["pairs"] == 0
    assert {tuple(one["ranks"]) for one in record["rdma"]["failed"]} <= {(0, 1), (1, 0)} != set()


@pytest.mark.usefixtures("site")
def test_a_job_has_the_cores_that_it_asked_for(cluster: Cluster) -> None:
    """These kernels have all controllers; each node has two cores."""

    def cores(count: int) -> str:
        asked = f"cd; srun -N 1 -n 1 -c {count} sh -c 'nproc; cat /proc/self/cgroup'"
        return cluster.ssh("node-1", "runuser", "-l", "trainer", "-c", asked).stdout

    assert "ConstrainCores=yes" in cluster.ssh("node-1", "cat", "/etc/slurm/cgroup.conf").stdout
    assert re.match(r"1\n.*job_\d+/step_0", cores(1))
    assert cores(2).startswith("2\n")


@pytest.mark.usefixtures("site")
def test_a_job_can_open_only_the_gpus_that_it_was_given(cluster: Cluster) -> None:
    """There is no GPU here. Disks in memory have the names of two, and the kernel lets jobs open them or not."""
    disk = "mknod -m 666 /dev/nvidia{0} b 1 {0} && echo disk {0} >/dev/nvidia{0}"
    script = " && ".join(("modprobe brd rd_nr=2 rd_size=1024", *(disk.format(number) for number in (0, 1))))
    assert cluster.shell("node-2", script).returncode == 0
    cluster.play_ok(*SITE)
    assert "ConstrainDevices=yes" in cluster.ssh("node-1", "cat", "/etc/slurm/cgroup.conf").stdout

    def opened(*asked: str) -> list[str]:
        read = "for one in 0 1; do head -qn 1 /dev/nvidia$one; done 2>&1"
        launch = shlex.join(("srun", "-N", "1", "-w", "node-2", "--mem", "100M", *asked, "sh", "-c", read))
        return cluster.ssh("node-1", "runuser", "-l", "trainer", "-c", f"cd; {launch}").stdout.splitlines()

    refused = "head: cannot open '/dev/nvidia{}' for reading: Operation not permitted"
    assert opened() == [refused.format(0), refused.format(1)]
    assert opened("--gres=gpu:1") == ["disk 0", refused.format(1)]
    assert opened("--gres=gpu:2") == ["disk 0", "disk 1"]
