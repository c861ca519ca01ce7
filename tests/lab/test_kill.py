"""A run that is killed at any task, and started again, ends in the same state as an undisturbed one; also a removal."""

import itertools
import re
import signal

import pytest
from clusters import LONG, QUICK, Cluster, Run

NODES = 2
PICKED = (
    "base : Install the base packages",
    "ssh_trust : Write certificates and settings",
    "depot : Upload missing files to the depot",
)
# Up to the depot, without those that have nothing to do here. Later ones have tasks in several plays, which hides when
# a run has finished them.
ROLES = ("base", "build_tools", "ssh_trust", "depot")


def finished_roles(run: Run) -> set[str]:
    """Those of the first roles that were followed by another one of them."""
    begun = {role(task) for task in run.tasks}
    return {before for before, after in itertools.pairwise(ROLES) if {before, after} <= begun}


def changed_again(run: Run, finished: set[str]) -> set[tuple[str, str]]:
    """What a run changed in the roles that the run before it had finished."""
    return {(task, host) for task, host in run.changes if role(task) in finished}


def role(task: str) -> str:
    return task.partition(" : ")[0]


def assert_recovers(cluster: Cluster, where: str, finished: set[str]) -> None:
    recovered = cluster.play()
    assert recovered.rc == 0, f"after a kill at {where}\n{recovered.output}"
    assert changed_again(recovered, finished) == set()
    again = cluster.play_ok()
    assert again.changed_hosts == set(), f"after a kill at {where}\n{again.output}"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    stacks = [cluster.ssh(node, "readlink", "/opt/farandole/current").stdout for node in ("node-1", "node-2")]
    assert stacks[0] == stacks[1] != ""


def test_killed_runs_recover(bare: Cluster) -> None:
    """Each run repairs what the one before it left, so the next has nothing to change in the roles that it finished."""
    finished: set[str] = set()
    for task in PICKED:
        run = bare.play_until(task)
        assert (run.rc, task in " ".join(run.tasks)) == (-signal.SIGKILL, True), run.output
        assert changed_again(run, finished) == set()
        finished = finished_roles(run)
    assert finished == {*ROLES[:-1]}
    bare.play_while("node-2", "test -e /opt/farandole/incoming/tree")
    assert bare.ssh("node-2", "test", "-e", "/opt/farandole/current").returncode == 1
    assert_recovers(bare, run.tasks[-1], finished)


@LONG
def test_a_run_can_be_killed_at_every_task(bare: Cluster) -> None:
    """The first run is killed at its first task, the next one at its second: each finds what a bare node has become by
    the tasks before, and one more that was killed on it."""
    finished: set[str] = set()
    task = 0
    while True:
        run = bare.play_until(task + 1)
        if run.rc == 0:
            break
        assert run.rc == -signal.SIGKILL, run.output
        task = len(run.tasks)
        assert changed_again(run, finished) == set(), run.output
        finished = finished_roles(run)
        print(f"killed at task {task}: {run.tasks[-1]}", flush=True)
    assert_recovers(bare, f"each of {len(run.tasks)} tasks", finished)


REMOVE = "playbooks/remove.yml"
WITH_ACCOUNTS = ("--extra-vars", "base_remove_accounts=true")
# What there is: files with their sums, mounts, open ports, what sshd and logind have read; without the name of a node.
STATE = r"""
cd / && export LC_ALL=C
find opt srv home root usr/local var/cache var/lib/systemd var/mail var/spool var/tmp run/farandole* \
  /var/lib/farandole* -maxdepth 3 -path var/cache/apt -prune -o -printf '/%p\n' 2>/dev/null
find etc -printf '/%p %m %u:%g %l\n'
find etc usr/local -type f -exec sha256sum {} + | awk '{print "/" $2, $1}' | grep -v -e ^/etc/host
sed "s/$(hostname)/NODE/" etc/hosts
findmnt --raw --noheadings --output TARGET | sed 's/^/mount /'
ss --no-header -ltn | awk '{print "port", $4}'
sshd -T | grep -v listenaddress
read=$(systemctl show --property=StateChangeTimestamp --value ssh)
[ "$(date -d "$read" +%s)" -ge "$(stat -c %Y /etc/ssh/sshd_config.d)" ] || echo "sshd still has its former settings"
busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager RemoveIPC
"""
# What differs between two nodes of the same kind, and what installing packages changes or makes without recording it.
OTHERWISE = re.compile(
    r"/etc/(machine-id|ssh/ssh_host_\w+(\.pub)?|ld\.so\.cache|(passwd|group|shadow|gshadow|subuid|subgid)-?) |"
    r"/etc/alternatives/|/etc/rc\w\.d/|/etc/systemd/system/(\w+\.target\.wants/systemd-timesyncd|dbus-org\.freedesktop\.t)|"
    r"/etc/nginx/sites-enabled/default |/etc/dpkg/shlibs\.|/etc/systemd/system/nginx\.service |"
    r"/var/cache/(man|ldconfig|debconf)|/var/lib/systemd/(deb-systemd-helper|random-seed|timesync)|/var/tmp/systemd-private-"
)


def state(cluster: Cluster, node: str) -> set[str]:
    """What is on a node, without what its packages have brought."""
    lines = cluster.shell(node, STATE).stdout.splitlines()
    brought = set(cluster.shell(node, "cat /var/lib/dpkg/info/*.list").stdout.splitlines())
    return {line for line in lines if line.split(" ")[0] not in brought and not OTHERWISE.match(line)}


def accounts(cluster: Cluster, node: str) -> set[str]:
    return set(cluster.shell(node, "getent passwd; getent group").stdout.splitlines())


@pytest.fixture
def third(cluster: Cluster) -> Cluster:
    """A cluster, and a bare node with which its own are compared when they were cleared."""
    if cluster.applied not in ((), QUICK):
        cluster.ensure()
    cluster.lab("up", "--nodes", "3")
    hosts = cluster.inventory / "hosts.yml"
    hosts.write_text(re.sub(r"    node-3:\n.*\n", "", hosts.read_text()))
    return cluster


@LONG
def test_a_removal_leaves_packages_and_accounts_and_site_yml_brings_everything_back(third: Cluster) -> None:
    third.ensure()
    bare = state(third, "node-3")
    theirs = "touch ~/result && mkdir -p ~/.ssh && echo a key >~/.ssh/authorized_keys"
    assert third.ssh("node-1", "runuser", "-l", "trainer", "-c", theirs).returncode == 0
    assert state(third, "node-1") - bare > {"port 0.0.0.0:8480", "/opt/farandole/current", "b false"}
    predicted = third.play_ok("--check", "--diff", playbook=REMOVE)
    done = third.play(playbook=REMOVE)
    third.applied = None
    assert done.rc == 0, done.output
    assert predicted.changes == done.changes != set()
    again = third.play_ok(playbook=REMOVE)
    assert again.count("changed") == {"node-1": 0, "node-2": 0}, again.output
    assert "account trainer with its home /home/trainer, because it was not asked for" in again.output
    assert "/home/trainer/.ssh/authorized_keys, which lets people log in again" in again.flat
    for node in ("node-1", "node-2"):
        kept = {line for line in state(third, node) if not line.startswith("/home/trainer")}
        assert (kept - bare, bare - kept) == (set(), set()), node
        assert third.ssh(node, "getent", "hosts", node).returncode == 0
    third.play_ok(*QUICK)
    assert third.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    assert third.ssh("node-1", "test", "-e", "/home/trainer/result").returncode == 0


@LONG
def test_a_removal_that_is_killed_or_refused_can_be_run_again(third: Cluster) -> None:
    # As if it were started by a job.
    busy = "FARANDOLE_JOB=x setsid --fork runuser -u trainer sleep 600 >/dev/null 2>&1 </dev/null"
    assert third.shell("node-2", busy).returncode == 0
    refused = third.play_failing(playbook=REMOVE)
    assert refused.changed_hosts == set()
    assert "node-2: runuser of root, sleep of trainer" in refused.flat
    assert third.ssh("node-2", "pkill", "-u", "trainer", "sleep").returncode == 0
    disk = "mkdir /home/trainer/disk && mount -t tmpfs disk /home/trainer/disk && touch /home/trainer/disk/result"
    assert third.shell("node-2", disk).returncode == 0
    killed = third.play_until("ssh_trust : Remove certificate", playbook=REMOVE)
    assert killed.rc == -signal.SIGKILL, killed.output
    done = third.play(*WITH_ACCOUNTS, playbook=REMOVE)
    third.applied = None
    assert done.rc == 0, done.output
    assert "/home/trainer, because /home/trainer/disk is mounted" in done.flat
    theirs = "rm /home/trainer/disk/result && umount /home/trainer/disk && rm -r /home/trainer"
    assert third.shell("node-2", theirs).returncode == 0
    bare = accounts(third, "node-3")
    for node in ("node-1", "node-2"):
        assert {name.split(":")[0] for name in accounts(third, node) ^ bare} <= {"systemd-timesync"}
        assert third.ssh(node, "ls", "/home").stdout == ""
        assert third.ssh(node, "sshd", "-t").returncode == 0
