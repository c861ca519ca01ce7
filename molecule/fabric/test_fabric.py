"""Role fabric: jobs use the network between the nodes, and find the stack however they are started.

Debian's own OpenMPI takes the place of the stack's.
"""

import shutil
import time
from pathlib import Path

import plays
import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOSTS = "node-1:1,node-2:1"
DECOY = "172.17.0.1"
STACK = "/opt/farandole/current"
# An allreduce that needs only Python and OpenMPI's library: it sums 21 from each of two ranks.
REDUCE = """
import ctypes, os, socket
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
names = ("ompi_mpi_int", "ompi_mpi_op_sum", "ompi_mpi_comm_world")
kind, total, world = (ctypes.byref(ctypes.c_char.in_dll(mpi, name)) for name in names)
mpi.MPI_Init(None, None)
one, found = ctypes.c_int(21), ctypes.c_int()
mpi.MPI_Allreduce(ctypes.byref(one), ctypes.byref(found), 1, kind, total, world)
mpi.MPI_Finalize()
print(socket.gethostname(), found.value, os.environ["HOROVOD_NETWORK"], os.environ["OMPI_COMM_WORLD_SIZE"])
"""


@pytest.fixture(scope="session")
def network(head):
    """The network between the nodes, according to the kernel."""
    return head.check_output("ip -4 route show dev eth0 proto kernel").split()[0]


def as_job(host, *command):
    """Run a command as the job user, with a timeout; any failure has status 1, because 255 would mean ssh."""
    command = ["timeout", "-k", "1", "12", "runuser", "-u", "trainer", "--", *command]
    return host.run("cd / && " + " ".join(["%s"] * len(command)) + " || exit 1", *command)


def test_the_hostfile_names_every_node_in_order(host):
    assert host.file("/etc/farandole/hostfile").content_string == "node-1 slots=1\nnode-2 slots=1\n"


def test_no_setting_names_the_decoy(host, network):
    assert host.interface("docker0").addresses[0] == DECOY
    settings = host.file("/etc/farandole/openmpi/openmpi-mca-params.conf").content_string
    assert f"btl_tcp_if_include = {network}\noob_tcp_if_include = {network}\n" in settings
    written = host.check_output("cat /etc/farandole/environment /etc/farandole/openmpi/*")
    assert "172.17" not in written
    assert "docker" not in written


# cron has a shorter PATH, sudo and login shells have others.
WAYS = {
    "ssh without a login": 'runuser -u trainer -- ssh -o BatchMode=yes node-2 "{}"',
    "runuser": "runuser -u trainer -- sh -c '{}'",
    "sudo": "env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin runuser -u trainer -- sh -c '{}'",
    "cron": "env -i PATH=/usr/bin:/bin /usr/sbin/runuser -u trainer -- sh -c '/usr/local/bin/{}'",
    "login": "su - trainer -c '{}'",
}


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_stack_is_found_however_a_job_is_started(head, network, way):
    settings = dict(
        line.split("=", 1) for line in head.check_output("cd / && " + way.format("horovodrun")).splitlines()
    )
    assert settings["PATH"].startswith(f"{STACK}/venv/bin:{STACK}/mpi/bin:")
    wanted = {
        "HOROVOD_NETWORK": network,
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
        "TF_USE_LEGACY_KERAS": "1",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
    }
    assert {name: settings.get(name) for name in wanted} == wanted


OTHERS = """
set -e
mkdir -p ~/other
printf '#!/bin/sh\nexit 9\n' | tee ~/other/mpirun ~/other/python >~/other/python3
chmod +x ~/other/*
for file in .bash_profile .bashrc; do
  [ ! -e ~/$file ] || mv ~/$file ~/$file.kept
  echo 'export PATH="$HOME/other:$PATH"' >~/$file
done
"""
RESTORE = """
rm -r ~/other ~/.bash_profile ~/.bashrc
for file in .bash_profile .bashrc; do
  [ ! -e ~/$file.kept ] || mv ~/$file.kept ~/$file
done
"""


@pytest.fixture
def others(nodes):
    """Put another MPI and Python first on the job user's PATH, with its own shell files, on every node."""
    for host in nodes.values():
        host.check_output("cd / && runuser -u trainer -- env HOME=/home/trainer bash -c %s", OTHERS)
    yield
    for host in nodes.values():
        host.check_output("cd / && runuser -u trainer -- env HOME=/home/trainer bash -c %s", RESTORE)


@pytest.mark.usefixtures("stack", "others")
@pytest.mark.parametrize(
    "way",
    [WAYS["login"], WAYS["ssh without a login"], """su - trainer -c 'bash -ic "{}"'"""],
    ids=["login", "ssh", "interactive"],
)
def test_the_commands_take_precedence_over_the_job_users_shell_files(head, way):
    shown = head.check_output("cd / && " + way.format("command -v python; horovodrun which mpirun python"))
    shadow, *paths = [line for line in shown.splitlines() if line.startswith("/")]
    assert shadow == "/home/trainer/other/python", "the shell files have no effect, so this test proves nothing"
    assert paths == [f"{STACK}/mpi/bin/mpirun", f"{STACK}/venv/bin/python"]


@pytest.mark.usefixtures("stack")
def test_a_jobs_own_settings_take_precedence(head):
    own = ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=7", "HOROVOD_NETWORK=", "NCCL_SOCKET_IFNAME=ib0"]
    settings = as_job(head, "env", *own, "horovodrun").stdout.splitlines()
    assert [setting for setting in own if setting not in settings] == []


def test_no_other_users_path_is_changed(host):
    assert "farandole" not in host.check_output("su - root -c env")
    assert host.run("cat /etc/ld.so.conf /etc/ld.so.conf.d/* /etc/environment | grep farandole").rc == 1


@pytest.mark.usefixtures("stack")
def test_a_job_uses_the_network_and_not_the_decoy(head, network):
    done = as_job(head, "mpirun", "-np", "2", "-H", HOSTS, "python", "-c", REDUCE)
    assert sorted(done.stdout.splitlines()) == [f"node-{n} 42 {network} 2" for n in (1, 2)], done.stderr
    # Without the setting the ranks try docker0, which connects nothing.
    lost = as_job(head, "mpirun", "--mca", "btl_tcp_if_include", "docker0", "-H", HOSTS, "python", "-c", REDUCE)
    assert lost.rc == 1
    assert "42" not in lost.stdout


@pytest.mark.usefixtures("stack")
def test_the_launcher_listens_only_on_the_network(head, addresses):
    def output(*settings):
        done = as_job(head, "mpirun", *settings, "--mca", "plm_base_verbose", "5", "-H", "node-2:1", "hostname")
        return done.stderr + done.stdout

    assert f"tcp://{addresses['node-1']}:" in output()
    assert DECOY not in output()
    assert DECOY in output("--mca", "oob_tcp_if_include", "eth0,docker0")


# Jobs of three ssh sessions, identified by how long they sleep. The last launcher is not bound to its session.
OUTLIVE = {"3001", "3002", "3003"}
BOUND = {"3004", "3005"}
UNBOUND = "3006"
SESSIONS = (
    f"""
nohup mpirun -H {HOSTS} sleep 3001 > /dev/null 2>&1 &
mpirun -H {HOSTS} sleep 3002 > /dev/null 2>&1 &
setsid -f mpirun -H {HOSTS} sleep 3003 > /dev/null 2>&1
mpirun -H {HOSTS} sleep 3004 | cat; exit
""",
    f"bash -lc 'mpirun -H {HOSTS} sleep 3005 | cat; exit'",
    f"sh /tmp/unbound -H {HOSTS} sleep {UNBOUND} | cat; exit",
)


@pytest.mark.usefixtures("stack")
def test_only_jobs_bound_to_an_ended_ssh_session_end(nodes, head):
    def running():
        listed = [host.run("pgrep -u trainer -ax sleep").stdout for host in nodes.values()]
        return [{line.split()[-1] for line in lines.splitlines()} & every for lines in listed]

    def until(wanted, seconds):
        deadline = time.monotonic() + seconds
        while (processes := running()) != wanted and time.monotonic() < deadline:
            time.sleep(0.5)
        return processes

    every = OUTLIVE | BOUND | {UNBOUND}
    head.check_output("sed '/^case .*terminal/,/^esac/d' /usr/local/bin/mpirun > /tmp/unbound")
    try:
        for session in SESSIONS:
            client = 'setpriv --reuid=trainer --regid=trainer --init-groups ssh -o BatchMode=yes node-1 "$0"'
            script = f"cd / && echo $$ >> /run/sessions && exec {client} > /dev/null 2>&1 < /dev/null"
            head.check_output("setsid -f sh -c %s %s", script, session)
        assert until([every, every], 30) == [every, every]
        # Without a terminal, nothing else tells a job that its session has ended.
        head.check_output("kill -KILL $(cat /run/sessions)")
        assert until([every - BOUND] * 2, 15) == [every - BOUND] * 2
    finally:
        for host in nodes.values():
            host.run("kill -KILL $(pgrep -u trainer -x sleep)")


@pytest.fixture
def play(inventory_path, tmp_path):
    """Run the role on an inventory with a mistake in it."""

    def run(change):
        inventory = yaml.safe_load((inventory_path / "hosts.yml").read_text())
        change(inventory["cluster"])
        folder = tmp_path / "molecule-broken-fabric"
        folder.mkdir()
        (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        return plays.play(folder, playbook=str(Path(__file__).parent / "jobs.yml"))

    yield run
    shutil.rmtree(ROOT / ".farandole" / "molecule-broken-fabric", ignore_errors=True)


def test_nodes_without_a_common_network_are_refused_before_anything_changes(play, nodes):
    worker = nodes["node-2"]
    worker.check_output("ip address add 192.0.2.2/24 dev eth0")
    before = [host.check_output("cat /etc/farandole/hostfile /etc/farandole/environment") for host in nodes.values()]
    try:
        done = play(lambda cluster: cluster["hosts"]["node-2"].update(cluster_ip="192.0.2.2"))
    finally:
        worker.check_output("ip address del 192.0.2.2/24 dev eth0")
    assert done.rc != 0 and done.changes == set(), done.output
    assert all(
        message in done.flat for message in ("node-1 in 10.94.", "node-2 in 192.0.2.0/24", "[network-not-shared]")
    )
    after = [host.check_output("cat /etc/farandole/hostfile /etc/farandole/environment") for host in nodes.values()]
    assert after == before


def test_the_decoys_network_is_refused(play):
    done = play(lambda cluster: cluster["vars"].update(fabric_network="172.17.0.0/16"))
    assert done.rc != 0
    assert "[address-shared]" in done.flat


def test_the_role_by_itself_refuses_what_preflight_has_not_seen(play, nodes):
    before = [host.check_output("cat /etc/farandole/environment") for host in nodes.values()]
    done = play(lambda cluster: cluster["vars"].update(later_network="172.17.0.0/16"))
    assert done.rc != 0
    # By the role, and not by preflight before it.
    assert "with the network for jobs" in done.flat and "preflight found" not in done.flat
    assert "[address-shared]" in done.flat
    assert [host.check_output("cat /etc/farandole/environment") for host in nodes.values()] == before
