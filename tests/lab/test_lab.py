"""The lab itself: nodes behave like machines, and the machine is restored afterwards."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import ROOT, Cluster

from farandole.lab import host, lab, podman

NODES = 2
# Values that change by themselves on any machine.
VOLATILE = re.compile(
    r"random|file-nr|dentry|inode-(nr|state)|ns_last_pid|quota\.syncs|conntrack_count|packets|pty\.nr"
)


def farandole(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["farandole", "lab", *arguments], cwd=ROOT, text=True, capture_output=True, check=False)


def machine() -> list[str]:
    """Settings, links, firewall, mounts and run-time folders of this machine."""
    script = "sysctl --all 2>/dev/null; nft list ruleset; ip -brief link; cat /proc/mounts; ls /run /dev/shm /run/netns"
    shown = subprocess.run(["sh", "-c", script], text=True, capture_output=True, check=False).stdout
    return [line for line in shown.splitlines() if not VOLATILE.search(line)]


@pytest.fixture
def alone() -> None:
    if Path("/run/farandole").exists():
        pytest.skip("other labs are up: `farandole lab status`")


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit that the nodes raise; a lab that was up before may have left it as high as it goes."""
    limit = Path("/proc/sys/fs/file-max")
    before = limit.read_text()
    limit.write_text("1000000")
    yield
    limit.write_text(before)


@pytest.mark.usefixtures("alone", "few_files")
def test_a_lab_killed_at_many_points_recovers_and_restores_the_machine() -> None:
    before = machine()
    for tenths in range(3, 14):
        for command in (["up", "--nodes", "20", "--second-network"], ["down"]):
            process = subprocess.Popen(
                ["farandole", "lab", *command, "--name", "test-killed"],
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            time.sleep(tenths / 10 if command[0] == "up" else tenths / 40)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    up = farandole("up", "--nodes", "20", "--second-network", "--name", "test-killed")
    assert up.returncode == 0, up.stderr
    assert farandole("ssh", "--name", "test-killed", "node-20", "hostname").stdout == "node-20\n"
    down = farandole("down", "--name", "test-killed")
    assert "restored: net.ipv4.ip_forward" in down.stdout or "net.ipv4.ip_forward = 1" in before
    assert machine() == before


@pytest.mark.usefixtures("alone")
def test_the_lab_runs_with_a_unified_cgroup_tree_and_shared_mounts() -> None:
    """As systemd makes both. What is unmounted meanwhile is not kept mounted by the lab."""
    script = """
      mount --make-rshared / && mount -t tmpfs none /mnt
      umount --recursive /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup
      farandole lab up --nodes 1 --name test-unified && umount /mnt &&
        ! nsenter --mount=/run/farandole/namespace/mnt grep ' /mnt ' /proc/self/mounts &&
        farandole lab ssh --name test-unified node-1 systemctl is-system-running
      result=$?
      farandole lab down --name test-unified && exit $result
    """
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert "running" in done.stdout, done.stderr
    assert done.returncode == 0


def test_each_node_is_a_separate_machine(cluster: Cluster) -> None:
    for command in ("cat /etc/machine-id", "cat /etc/ssh/ssh_host_ed25519_key.pub", "hostname", "hostname -I"):
        answers = {cluster.shell(node, command).stdout for node in ("node-1", "node-2")}
        assert len(answers) == 2, command
        assert "" not in answers
    assert cluster.ssh("node-1", "cat", "/proc/1/comm").stdout == "systemd\n"
    assert cluster.ssh("node-1", "systemctl", "is-system-running", "--wait").stdout == "running\n"


# None of these changes the machine even if it succeeds.
CHANGES_TO_THIS_MACHINE = {
    "a setting": "tee /proc/sys/vm/swappiness </proc/sys/vm/swappiness",
    "the program that the kernel starts as root": "cd /proc/sys/kernel && cat core_pattern | tee core_pattern",
    "the clock": "date --set=@$(date +%s)",
    "the kernel's log": "dd if=/dev/kmsg bs=8k count=1 iflag=nonblock status=none",
    "a disk": "head --bytes=1 /dev/{name}",
    "a disk, through a new device node": "mknod /root/disk b {numbers}",
    "a power setting": "tee /sys/power/pm_freeze_timeout </sys/power/pm_freeze_timeout",
}


def test_root_on_a_node_cannot_change_this_machine_by_mistake(cluster: Cluster) -> None:
    disk = next(path for path in sorted(Path("/sys/class/block").glob("*/dev")))
    values = {"name": disk.parent.name, "numbers": disk.read_text().strip().replace(":", " ")}
    attacks = {name: attack.format(**values) for name, attack in CHANGES_TO_THIS_MACHINE.items()}
    statuses = {name: cluster.shell("node-1", attack).returncode for name, attack in attacks.items()}
    assert [name for name, status in statuses.items() if not status] == []
    assert 255 not in statuses.values(), "ssh itself failed"


def test_root_on_a_node_can_mount_and_use_private_tmp(cluster: Cluster) -> None:
    own = "mount -t tmpfs -o size=1m none /mnt && touch /mnt/here && ls /mnt"
    assert cluster.ssh("node-1", "unshare", "--mount", "sh", "-c", own).stdout == "here\n"
    private = "systemd-run --wait --pipe --quiet -p PrivateTmp=yes -p PrivateDevices=yes ls -A /tmp"
    assert cluster.shell("node-1", private).returncode == 0


def test_ssh_runs_exactly_these_arguments(cluster: Cluster) -> None:
    ssh = ("ssh", "--name", cluster.name, "node-1", "--")
    arguments = ["two words", "*", "$HOME", "--", "-n", 'quote"', "it's", "", "a;b"]
    shown = farandole(*ssh, "python3", "-c", "import sys; print(sys.argv[1:])", *arguments)
    assert shown.stdout == f"{arguments}\n"
    assert farandole(*ssh, "sh", "-c", "exit 7").returncode == 7


def test_ssh_passes_standard_input(cluster: Cluster) -> None:
    command = ["farandole", "lab", "ssh", "--name", cluster.name, "node-1", "--", "cat"]
    sent = os.urandom(100_000)
    assert subprocess.run(command, cwd=ROOT, input=sent, capture_output=True, check=True).stdout == sent


def test_a_second_up_changes_nothing(cluster: Cluster) -> None:
    started = cluster.ssh("node-1", "stat", "-c", "%Y", "/proc/1").stdout
    # A node that reboots at this moment makes podman ask conmon for its version.
    asking = [*host.enter(), "bash", "-c", "exec -a conmon sleep 600"]
    with subprocess.Popen(asking) as asked:
        try:
            cluster.lab("up", "--nodes", "2")
            assert asked.poll() is None
        finally:
            asked.kill()
    assert cluster.ssh("node-1", "stat", "-c", "%Y", "/proc/1").stdout == started


def state(cluster: Cluster, node: str) -> list[str]:
    row = next(line for line in farandole("status").stdout.splitlines() if cluster.name in line and node in line)
    return [cell.strip() for cell in row.strip("│").split("│")[-2:]]


def test_faults_are_injected_and_repaired(cluster: Cluster) -> None:
    for fault, expected, repair in (
        ("cut", ["running", "silent"], "heal"),
        ("pause", ["paused", "silent"], "resume"),
        ("kill", ["exited", "silent"], "start"),
    ):
        cluster.lab("fault", fault, "node-2")
        time.sleep(0.5)
        assert state(cluster, "node-2") == expected
        cluster.lab("fault", repair, "node-2")
        assert state(cluster, "node-2") == ["running", "answers"]
    assert cluster.shell("node-2", "ip route | grep --count ^default").stdout == "1\n"


SERVE = """
import socket
server = socket.create_server(("", 9000))
while True:
    one, _ = server.accept()
    while one.recv(65536):
        pass
    one.send(b"done")
"""
# Whether six megabytes take longer than a second.
SEND = """
import socket, time
begun, one = time.monotonic(), socket.create_connection(("{address}", 9000), timeout=2)
one.settimeout(20)
one.sendall(bytes(6_000_000))
one.shutdown(socket.SHUT_WR)
one.recv(4)
print(time.monotonic() - begun > 1)
"""
# A packet of 1500 bytes that may not be taken apart.
PING = """
import socket
one = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
one.setsockopt(socket.IPPROTO_IP, 10, 2)
one.settimeout(1)
one.sendto(bytes.fromhex("0800f7ff00000000") + bytes(1472), ("{address}", 0))
one.recv(9000)
print(False)
"""
# Whether a computation never has a third of a processor for half a second. On a busy machine it sometimes has.
COMPUTE = """
import time
def share():
    begun, used = time.monotonic(), time.process_time()
    while time.monotonic() - begun < 0.5:
        pass
    return (time.process_time() - used) / (time.monotonic() - begun)
print(all(share() < 0.33 for _ in range(12)))
"""

# Whether the clock is close to that of the kernel.
CLOCK = "btime=$(sed -n 's/^btime //p' /proc/stat); [ $(($(date +%s) - btime - $(cut -d . -f 1 /proc/uptime))) -lt 60 ]"


def test_each_fault_is_felt_and_healed(cluster: Cluster) -> None:
    address = {node: cluster.ssh(node, "hostname", "-I").stdout.strip() for node in ("node-1", "node-2")}
    for node in address:
        server = 'setsid -f python3 -c "$1" >/dev/null 2>&1 </dev/null'
        cluster.ssh(node, "sh", "-c", server, "sh", SERVE)

    def python(script: str) -> Callable[[str], str]:
        def ask(node: str) -> str:
            other = address["node-1" if node == "node-2" else "node-2"]
            done = cluster.ssh(node, "python3", "-c", script.format(address=other))
            return done.stdout.strip() or done.stderr.splitlines()[-1].split(":")[0]

        return ask

    def shell(script: str) -> Callable[[str], str]:
        return lambda node: str(cluster.shell(node, script).returncode)

    for fault, ask, answers in (
        (("throttle", "--mbit", "20"), python(SEND), ("True", "True")),
        (("block", "--all-but-ssh"), python(SEND), ("TimeoutError", "False")),
        (
            ("block", "--from", "node-1", "--port", "9000", "--reject"),
            python(SEND),
            ("ConnectionRefusedError", "False"),
        ),
        (("mtu", "--bytes", "1400"), python(PING), ("TimeoutError", "OSError")),
        (("slow", "--percent", "20"), python(COMPUTE), ("False", "True")),
        (("memory", "--mib", "64"), shell("python3 -c 'bytearray(1 << 28)' || exit 1"), ("0", "1")),
        (("skew", "--seconds", "3600"), shell(CLOCK), ("0", "1")),
        (("fill", "/srv"), shell("echo x >/srv/x"), ("0", "1")),
        (("fill", "--inodes", "/srv"), shell("touch /srv/y"), ("0", "1")),
    ):
        cluster.lab("fault", fault[0], "node-2", *fault[1:])
        assert (ask("node-1"), ask("node-2")) == answers, fault
        cluster.lab("fault", "heal", "node-2")
        healed = ("0", "0") if answers[0].isdigit() else ("False", "False")
        assert (ask("node-1"), ask("node-2")) == healed, fault


def test_a_reboot_keeps_the_disk_the_keys_and_the_address(cluster: Cluster) -> None:
    look = "cat /etc/machine-id /etc/ssh/*.pub /root/kept; ip -4 -o address show eth0"
    cluster.shell("node-2", "echo kept >/root/kept")
    before = cluster.shell("node-2", look).stdout
    cluster.lab("fault", "reboot", "node-2")
    strip = re.compile(r"eth0.*inet (\S+).*", re.DOTALL)
    after = cluster.shell("node-2", look).stdout
    assert strip.sub(r"\1", after) == strip.sub(r"\1", before)
    assert "kept" in after


def test_a_lab_can_grow_and_mix_releases(cluster: Cluster) -> None:
    cluster.lab("up", "--nodes", "3", "--suite", "trixie", "--decoy", "--second-network")
    assert cluster.ssh("node-1", "cat", "/etc/debian_version").stdout.startswith("12.")
    assert cluster.ssh("node-3", "cat", "/etc/debian_version").stdout.startswith("13.")
    assert "172.17.0.1/16" in cluster.ssh("node-3", "ip", "address", "show", "docker0").stdout
    assert "inet 10.94." in cluster.ssh("node-3", "ip", "address", "show", "eth1").stdout
    assert cluster.shell("node-3", "ip route | grep --count ^default").stdout == "1\n"


def test_two_labs_run_side_by_side(cluster: Cluster) -> None:
    assert farandole("up", "--nodes", "1", "--name", "test-second").returncode == 0
    try:
        addresses = {
            farandole("ssh", "--name", name, "node-1", "hostname", "-I").stdout
            for name in (cluster.name, "test-second")
        }
        assert len(addresses) == 2
        assert len([*Path("/sys/class/net").glob("farandole*")]) >= 2
    finally:
        farandole("down", "--name", "test-second")
    assert cluster.ssh("node-1", "true").returncode == 0


def test_the_lab_of_another_checkout_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "site.yml").touch()
    (tmp_path / "roles").mkdir()
    for command in ("up", "down"):
        done = subprocess.run(
            ["farandole", "lab", command, "--name", cluster.name],
            cwd=tmp_path, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert f"belongs to {ROOT}" in " ".join(done.stderr.split())
    assert cluster.ssh("node-1", "true").returncode == 0


def test_when_podman_is_restarted_for_one_lab_the_nodes_of_others_start_again(cluster: Cluster) -> None:
    cluster.shell("node-1", "echo kept >/root/kept && sync")
    podman.power_cycle(RuntimeError("for a test"), [lab.node(cluster.name, "node-2").container])
    assert state(cluster, "node-2")[0] == "exited"
    cluster.lab("up", "--nodes", str(cluster.running() + 1))
    assert cluster.ssh("node-1", "cat", "/root/kept").stdout == "kept\n"
    assert state(cluster, "node-2") == ["running", "answers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fault", "cut", "node-9", "--name", "test-lab"], "it has: node-1, node-2"),
        (["fault", "explode", "node-1"], "No such command 'explode'"),
        (["up", "--suite", "buster"], "'buster' is not one of"),
        (["up", "--name", "Not A Name"], "lower-case letters"),
        (["up", "--name", "example"], "was not written by the lab"),
        (["up", "--name", "test-lab", "--nodes", "1"], "farandole lab down --name test-lab"),
        (["ssh", "--name", "nowhere", "node-1"], "farandole lab up --name nowhere"),
        (["ssh", "--name", "test-lab", "node-9"], "has no node node-9"),
        (["ssh", "node-1", "--name", "test-lab"], "this checkout knows no lab"),
        (["ssh", "--name", "test-lab", "node-1", "--", "-V"], "options of this command go before node-1"),
        (["fault", "block", "node-1", "--port", "5", "--all-but-ssh", "--name", "test-lab"], "exclude each other"),
        (["fault", "fill", "node-1", "/nowhere", "--name", "test-lab"], "node-1: /nowhere is not a folder"),
        (["fault", "resume", "node-1", "--name", "test-lab"], "is for a node that is paused"),
        (["fault", "start", "node-1", "--name", "test-lab"], "is for a node that is exited"),
    ],
)
def test_wrong_arguments_are_refused_with_a_helpful_message(
    cluster: Cluster, arguments: list[str], message: str
) -> None:
    assert cluster.name == "test-lab"
    done = farandole(*arguments)
    output = " ".join(re.sub("[│╭╮╰╯─]", "", done.stderr).split())
    assert done.returncode != 0
    assert message in output
    assert "Traceback" not in output
