"""What nodes that share a kernel cannot show: their clocks, disks, networks and limits, and NFS."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from clusters import EVERY, LONG, Cluster, until

from farandole.lab import lab, machine

# What takes minutes to install there.
PACKAGES = (
    *("curl", "git", "nfs-kernel-server", "rsync", "vim", "wget", "zstd"),
    *("galera-4", "mariadb-client", "mariadb-server-core"),
)
NODES, KIND = 3 if EVERY else 2, ("--kernel", "own", "--packages", ",".join(PACKAGES))
ALL = [f"node-{number}" for number in range(1, NODES + 1)]
PEOPLE = [{"name": "alice", "uid": 2001}, {"name": "bob", "uid": 2002}]
MOUNTS = [{"what": "node-1:/srv/data", "where": "/data", "type": "nfs4", "options": "soft,timeo=50"}]
# Without a stack, there are no jobs that could prove a node.
QUEUE = {"slurm_enabled": True, "slurm_proof": False}
SETTINGS = {"storage_home": "nfs", "storage_mounts": MOUNTS, "cluster_users": PEOPLE, **QUEUE}
SITE = ("--skip-tags", "stack,build_tools", "--extra-vars", json.dumps(SETTINGS))
WRITER = "while sleep 0.2; do date +%s >>/home/alice/log && echo $(date +%s) || echo failed; done >/run/alice.log 2>&1"
# As a client of NTP does.
ASK_TIME = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
    asker.settimeout(5)
    asker.sendto(b"\\x23" + bytes(47), (sys.argv[1], 123))
    try:
        print(len(asker.recv(64)), "bytes")
    except OSError:
        print("no answer")
"""
# More than a switched-off server needs to boot, and less than a client of NFS that has given up.
BACK_S = 150
# How often a run is cut short, and within how many seconds, at most.
CUTS, SITE_S = int(os.environ.get("FARANDOLE_POWER_CUTS", "1")), 90


def alice(cluster: Cluster, node: str, script: str) -> str:
    done = cluster.ssh(node, "runuser", "-u", "alice", "--", "sh", "-c", script)
    return done.stdout + done.stderr


def ahead_s(cluster: Cluster, node: str) -> float:
    """By how much a node's clock is ahead of this machine's."""
    return int(cluster.ssh(node, "date", "+%s").stdout) - time.time()


def connect_ms(cluster: Cluster) -> float:
    """How long a connection from one node to the other takes; the first one of a program takes longer."""
    script = """
import socket, sys, time
for _ in range(5):
    begun = time.monotonic()
    socket.create_connection((sys.argv[1], 22)).close()
    print((time.monotonic() - begun) * 1000)
"""
    address = cluster.ssh("node-2", "hostname", "-I").stdout.split()[0]
    return min(map(float, cluster.ssh("node-1", "python3", "-c", script, address).stdout.split()))


def test_each_node_has_a_kernel_of_its_own(cluster: Cluster) -> None:
    ids = {cluster.ssh(node, "cat", "/proc/sys/kernel/random/boot_id").stdout for node in ("node-1", "node-2")}
    assert len(ids) == 2
    assert cluster.ssh("node-1", "systemctl", "is-system-running", "--wait").stdout == "running\n"


def test_a_kernel_has_no_part_in_what_root_does_in_its_case(cluster: Cluster) -> None:
    case = lab.node(cluster.name, "node-2")
    cluster.lab("fault", "kill", "node-2")
    console = machine.MACHINES / case.container / "case/console"
    console.rename(console.with_name("printed"))
    console.symlink_to("/root/written")
    cluster.lab("fault", "start", "node-2")
    proc = Path(f"/proc/{lab.node(cluster.name, 'node-2').pid}")
    assert not (proc / "root/root/written").exists()
    mounts = (proc / "mounts").read_text()
    assert all(re.search(rf" {place} \S+ ro[, ]", mounts) for place in ("/sys", "/proc/sys"))


@LONG
def test_faults_that_need_one_are_felt_and_healed(cluster: Cluster) -> None:
    cluster.lab("fault", "netem", "node-2", "--delay", "40", "--loss", "0.1")
    assert 40 <= connect_ms(cluster) < 80
    cluster.lab("fault", "heal", "node-2")
    assert connect_ms(cluster) < 40
    cluster.lab("fault", "skew", "node-2", "--seconds", "3600")
    assert 3500 < ahead_s(cluster, "node-2") < 3700
    assert abs(ahead_s(cluster, "node-1")) < 60
    cluster.lab("fault", "heal", "node-2")
    assert abs(ahead_s(cluster, "node-2")) < 60
    cluster.lab("fault", "fill", "node-2", "/srv")
    assert "No space left" in cluster.shell("node-2", "cp /etc/hostname /srv/x").stderr
    cluster.lab("fault", "heal", "node-2")


# What node-2 sends or gets, and what preflight finds. What hardly disturbs may be called slow or not.
LATE_OR_LOST = (
    *("--delay 0.1", "--delay 1", "--loss 0.1", "--loss 1", "--duplicate 5"),
    *("--delay 5", "--delay 20", "--delay 50", "--loss 5", "--delay 5 --jitter 4", "--delay 5 --reorder 25"),
)
HARMLESS = LATE_OR_LOST[:5]
# Large packets of other nodes vanish on their way to it without a word; or it sends at a hundredth of their rate.
VANISH = (
    """
tc qdisc add dev eth0 ingress
tc filter add dev eth0 parent ffff: protocol ip prio 1 \\
    u32 match ip src $(ip route show default | cut -d ' ' -f 3) action pass
for length in 0x0400 0x0800 0x1000 0x2000 0x4000 0x8000; do
    tc filter add dev eth0 parent ffff: protocol ip prio 2 u32 match u16 $length $length at 2 action drop || exit
done
""",
    "tc qdisc delete dev eth0 ingress",
)
ONE_WAY = ("tc qdisc replace dev eth0 root tbf rate 20mbit burst 100kb latency 50ms", "tc qdisc delete dev eth0 root")


def pairs_found(cluster: Cluster) -> tuple[set[tuple[str, str]], float]:
    """What preflight finds about connections, with the host that it names, and after how many seconds."""
    begun = time.monotonic()
    cluster.farandole("preflight")
    took = time.monotonic() - begun
    found = json.loads((cluster.state / "preflight.json").read_text())["findings"]
    return {(one["code"], one["host"]) for one in found if one["code"].startswith("pair-")}, took


@LONG
@pytest.mark.parametrize("options", LATE_OR_LOST)
def test_preflight_names_a_node_whose_packets_are_late_or_lost(cluster: Cluster, options: str) -> None:
    cluster.lab("fault", "netem", "node-2", *options.split())
    try:
        found, took = pairs_found(cluster)
    finally:
        cluster.lab("fault", "heal", "node-2")
    print(f"{options}: {found} after {took:.0f} s")
    assert options in HARMLESS or ("pair-slow-node", "node-2") in found
    # It is slow, and nothing else; with two cores for all, others may seem to be so as well.
    assert {code for code, _ in found} <= {"pair-slow-node", "pair-slow-link", "pair-slow-groups", "pair-slow-all"}
    assert took < 90


@LONG
@pytest.mark.parametrize(("spoil", "mend"), [VANISH, ONE_WAY])
def test_preflight_names_a_node_with_a_bad_way_in_one_direction(cluster: Cluster, spoil: str, mend: str) -> None:
    assert cluster.shell("node-2", spoil).returncode == 0
    try:
        found, took = pairs_found(cluster)
    finally:
        assert cluster.shell("node-2", mend).returncode == 0
    print(f"{spoil}: {found} after {took:.0f} s")
    named = "pair-path-narrow" if spoil == VANISH[0] else "pair-slow-node"
    assert any(code == named and "node-2" in host for code, host in found)
    assert took < 90


@LONG
def test_a_power_cut_keeps_what_was_synced(cluster: Cluster) -> None:
    cluster.shell("node-2", "echo kept >/root/kept && sync")
    cluster.lab("fault", "kill", "node-2")
    cluster.lab("fault", "start", "node-2")
    assert cluster.ssh("node-2", "cat", "/root/kept").stdout == "kept\n"


@LONG
def test_what_such_a_node_cannot_do_is_said(cluster: Cluster) -> None:
    for fault, words in (("memory", "lab up --memory"), ("block", "has no firewall")):
        with pytest.raises(AssertionError, match=words):
            cluster.lab("fault", fault, "node-2")


def state_of(cluster: Cluster, node: str) -> tuple[str, str]:
    """What systemd and dpkg say of a node that has booted."""
    booted = cluster.ssh(node, "systemctl", "is-system-running", "--wait").stdout.strip()
    return booted, " ".join(cluster.shell(node, "dpkg --audit").stdout.split())


@LONG
def test_site_yml_mends_what_power_cuts_leave(bare: Cluster) -> None:
    """Again and again, a node loses its power at some moment of a run."""
    for turn in range(CUTS):
        chance = random.Random(turn)  # noqa: S311
        node, moment = chance.choice(ALL), chance.uniform(2, SITE_S)
        begun = time.monotonic()
        play = bare.start(*SITE)
        while play.process.poll() is None and time.monotonic() - begun < moment:
            time.sleep(0.2)
        cut = play.process.poll() is None
        bare.lab("fault", "kill", node)
        run = play.end()
        assert cut or run.rc == 0, run.output
        bare.lab("fault", "start", node)
        where = run.tasks[-1:] if cut else "no run any more"
        print(
            f"{turn + 1}: {node} after {min(moment, time.monotonic() - begun):.0f} s, in {where}:", state_of(bare, node)
        )
    bare.play_ok(*SITE)
    assert not bare.play_ok(*SITE).changes
    assert [state_of(bare, node) for node in ALL] == [("running", "")] * NODES
    assert alice(bare, "node-1", f"cd; srun -N {NODES} hostname | sort") == "".join(f"{node}\n" for node in ALL)


@pytest.mark.usefixtures("site")
def test_a_second_run_changes_nothing(cluster: Cluster) -> None:
    assert not cluster.play_ok(*SITE).changes


@pytest.mark.usefixtures("site")
def test_the_head_tells_its_time_to_its_nodes_only(cluster: Cluster) -> None:
    head = cluster.ssh("node-1", "hostname", "-I").stdout.split()[0]
    assert cluster.ssh("node-2", "python3", "-c", ASK_TIME, head).stdout == "48 bytes\n"
    stranger = subprocess.run([sys.executable, "-c", ASK_TIME, head], capture_output=True, text=True, check=False)
    assert stranger.stdout == "no answer\n", stranger.stderr


@pytest.mark.usefixtures("site")
def test_homes_over_nfs_belong_to_their_owners(cluster: Cluster) -> None:
    assert "vers=4.2" in alice(cluster, "node-2", "echo hello >~/hello; mount | grep /home/alice")
    assert alice(cluster, ALL[-1] if EVERY else "node-1", "cat ~/hello") == "hello\n"
    options = alice(cluster, "node-2", "mount | grep /home/alice")
    assert "nosuid" in options
    assert "nodev" in options
    assert "Permission denied" in cluster.shell("node-2", "touch /home/alice/of-root").stderr


@pytest.fixture
def share(site: Cluster) -> Iterator[Cluster]:
    """Another file system of the head's, of 16 MiB, that all nodes mount."""
    script = """
mkdir -p /srv/data && mount -t tmpfs -o size=16m,mode=1777 share /srv/data &&
echo '/srv/data *(rw,fsid=77,no_subtree_check)' >/etc/exports.d/share.exports && exportfs -ra
"""
    assert site.shell("node-1", script).returncode == 0
    yield site
    site.shell("node-1", "rm /etc/exports.d/share.exports; exportfs -ra; umount --lazy /srv/data")


@LONG
def test_a_mount_that_is_full_or_withdrawn_ends_with_an_error(share: Cluster) -> None:
    assert alice(share, "node-2", "echo hello >/data/hello; cat /data/hello") == "hello\n"
    share.shell("node-1", "dd if=/dev/zero of=/srv/data/filler bs=64k")
    assert "No space left" in alice(share, "node-2", "cp /bin/bash /data/bash")
    share.shell("node-1", "rm /srv/data/filler")
    assert alice(share, "node-2", "cp /bin/sh /data/sh") == ""
    share.shell("node-1", "exportfs -u '*:/srv/data'")
    for node in ("node-2", "node-3"):
        begun = time.monotonic()
        assert re.search("cannot (access|open)", alice(share, node, "ls /data")), node
        assert time.monotonic() - begun < 60
    assert not share.play_ok(*SITE).changes
    share.shell("node-1", "exportfs -ra")
    until(lambda: all("hello" in alice(share, node, "ls /data") for node in ("node-2", "node-3")))


@LONG
@pytest.mark.usefixtures("site")
def test_a_clock_that_is_set_wrongly_is_right_again_and_jobs_go_on(cluster: Cluster) -> None:
    begun = alice(cluster, "node-1", f"cd; sbatch --parsable -N {NODES} --wrap 'srun sleep 90'").strip()
    # No step of a job starts or ends while the clocks disagree.
    until(lambda: cluster.shell("node-2", "pgrep -u alice -x sleep").stdout)
    for seconds in ("3600", "-3600"):
        cluster.lab("fault", "skew", "node-2", "--seconds", seconds)
        until(lambda: abs(ahead_s(cluster, "node-2")) < 5)
    told = f"sacct -nXj {begun} --format=state"
    until(lambda: cluster.shell("node-1", told).stdout.strip() == "COMPLETED", 180)
    assert alice(cluster, "node-1", "cd; srun -w node-2 hostname") == "node-2\n"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"


@LONG
@pytest.mark.usefixtures("site")
def test_the_nodes_follow_a_head_whose_clock_is_set(cluster: Cluster) -> None:
    """A cluster without a time server, whose head's clock a person has corrected."""
    # No other server is asked.
    cluster.ssh("node-1", "chronyc", "offline")
    cluster.lab("fault", "skew", "node-1", "--seconds", "600")
    until(lambda: all(ahead_s(cluster, node) > 590 for node in ALL), 200)
    assert "clock-wrong-here" in cluster.farandole("preflight").stdout
    cluster.lab("fault", "heal", "node-1")
    for node in ("node-2", "node-3"):
        cluster.ssh(node, "systemctl", "restart", "systemd-timesyncd")
    until(lambda: all(abs(ahead_s(cluster, node)) < 5 for node in ("node-2", "node-3")))


@LONG
@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("faults", [("kill", "start"), ("reboot",)])
def test_a_job_waits_for_a_server_of_nfs_that_comes_back(cluster: Cluster, faults: tuple[str, ...]) -> None:
    cluster.ssh("node-2", "install", "-o", "alice", "/dev/null", "/run/alice.log")
    cluster.ssh("node-2", "systemd-run", "--quiet", "--unit=writer", "--uid=alice", "sh", "-c", WRITER)
    try:
        time.sleep(2)
        for fault in faults:
            cluster.lab("fault", fault, "node-1")
        again = "tail -n 0 -f /run/alice.log | grep -qm 1 ."
        assert cluster.ssh("node-2", "timeout", str(BACK_S), "sh", "-c", again).returncode == 0
        assert "failed" not in cluster.ssh("node-2", "cat", "/run/alice.log").stdout
    finally:
        cluster.ssh("node-2", "systemctl", "stop", "writer")
    written, kept = (
        cluster.ssh("node-2", "wc", "-l", "/run/alice.log"),
        cluster.ssh("node-1", "wc", "-l", "/home/alice/log"),
    )
    assert int(kept.stdout.split()[0]) >= int(written.stdout.split()[0])
    cluster.ssh("node-1", "rm", "/home/alice/log")


@LONG
@pytest.mark.usefixtures("site")
def test_a_dead_server_of_nfs_blocks_no_boot(cluster: Cluster) -> None:
    cluster.lab("fault", "kill", "node-1")
    try:
        cluster.lab("fault", "reboot", "node-2")
        assert cluster.ssh("node-2", "systemctl", "is-system-running", "--wait").stdout == "running\n"
        begun = time.monotonic()
        assert "No such device" in alice(cluster, "node-2", "ls /home/alice")
        assert time.monotonic() - begun < 60
    finally:
        cluster.lab("fault", "start", "node-1")
    assert ".bashrc" in alice(cluster, "node-2", "ls -a /home/alice")


STEPS = 60 * CUTS
COUNT = f"""
n=$(cat state 2>/dev/null || echo 0)
while [ "$n" -lt {STEPS} ]; do
  n=$((n + 1))
  echo "$n" >state.new && sync state.new && mv state.new state || exit
  sleep 0.3
done
"""


@LONG
@pytest.mark.usefixtures("site")
def test_a_job_in_the_queue_goes_on_after_power_cuts(cluster: Cluster) -> None:
    """It starts again from what it has saved, whichever node loses its power, the head included."""
    asked = f"cd; rm -f state; sbatch --parsable --requeue -N {NODES} --time 20 --wrap {shlex.quote(COUNT)}"
    job = alice(cluster, "node-1", asked).strip()
    assert job.isdecimal(), job
    ended = f"sacct -nXj {job} --format=state%20"

    def saved() -> int:
        return int(alice(cluster, "node-1", "cat ~/state 2>/dev/null || echo 0"))

    for turn in range(CUTS):
        chance = random.Random(turn)  # noqa: S311
        node = chance.choice(ALL)
        # It has gone on since the last cut.
        until(partial(lambda before: saved() > before, saved()), 400)
        time.sleep(chance.uniform(0, 5))
        cluster.lab("fault", "kill", node)
        cluster.lab("fault", "start", node)
        print(f"{node} was switched off, {saved()} is saved, {cluster.shell('node-1', ended).stdout.strip()}")
    until(lambda: cluster.shell("node-1", ended).stdout.split()[-1:] == ["COMPLETED"], 600)
    assert saved() == STEPS


@pytest.mark.usefixtures("site")
def test_the_kernel_ends_a_job_that_takes_more_memory_than_it_asked_for(cluster: Cluster) -> None:
    """These kernels have no cpuset, so cores are not limited, but memory is."""
    settings = cluster.ssh("node-1", "cat", "/etc/slurm/cgroup.conf").stdout
    assert re.search(r"v2\nConstrainCores=no\nConstrainRAMSpace=yes", settings)
    takes = "srun -N 1 --mem={} python3 -c 'x = bytearray(400 << 20); print(len(x) >> 20)'"
    assert "Out Of Memory" in alice(cluster, "node-1", f"cd; {takes.format('200M')}")
    assert "400" in alice(cluster, "node-1", f"cd; {takes.format('600M')}")
    for _ in range(30):
        states = cluster.ssh("node-1", "sacct", "-anX", "--format=state%20").stdout.split()
        if states[-2:] == ["OUT_OF_MEMORY", "COMPLETED"]:
            return
        time.sleep(1)
    pytest.fail(f"the accounting has {states}")


@pytest.mark.usefixtures("site")
def test_all_of_it_is_back_after_a_reboot(cluster: Cluster) -> None:
    rebooted = ALL if EVERY else ["node-2"]
    limits = "ulimit -n; ulimit -l"
    assert cluster.job_ssh("node-1", "node-2", limits).stdout == "1048576\nunlimited\n"
    for node in rebooted:
        cluster.lab("fault", "reboot", node)
    assert [state_of(cluster, node) for node in rebooted] == [("running", "")] * len(rebooted)
    until(lambda: alice(cluster, "node-1", f"cd; srun -N {NODES} hostname").count("node-") == NODES, BACK_S)
    assert "vers=4.2" in alice(cluster, "node-2", "ls ~ >/dev/null; mount | grep /home/alice")
    assert cluster.job_ssh("node-1", "node-2", limits).stdout == "1048576\nunlimited\n"
    head = cluster.ssh("node-1", "hostname", "-I").stdout.split()[0]
    asked = "timedatectl show-timesync; chronyc -n sources"
    until(lambda: re.search(rf"ServerName={head}|\^\* {head}", cluster.shell("node-2", asked).stdout), BACK_S)
    until(lambda: "NTPSynchronized=yes" in cluster.ssh("node-2", "timedatectl", "show").stdout, BACK_S)


@pytest.mark.usefixtures("site")
def test_a_cluster_is_taken_away_again(cluster: Cluster) -> None:
    done = cluster.farandole("remove", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.applied = None
    ours = "/opt/farandole /etc/slurm/slurm.conf /etc/chrony/conf.d/farandole.conf /etc/systemd/timesyncd.conf.d"
    for node in ("node-1", "node-2"):
        assert cluster.shell(node, f"ls -d {ours}; mount | grep nfs4; echo looked").stdout == "looked\n"
