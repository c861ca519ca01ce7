"""Files that all nodes see: a server of data that dies, homes of the head, and what a key for them opens."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from clusters import QUICK, Cluster, Run

NODES = 3
# The third node is the server of the data, and does not take part.
PART = (*QUICK, "--limit", "node-1,node-2")
# What a person waits for; a server that hangs would keep them for minutes, or for ever.
SECONDS = 60
MOUNT = {
    "what": "trainer@node-3:/srv/results",
    "where": "/data/re-sults",
    "type": "fuse.sshfs",
    "options": "allow_other,default_permissions,IdentityFile=/root/data,BatchMode=yes,reconnect,dcache_timeout=1,"
    "ConnectTimeout=3,ServerAliveInterval=2,ServerAliveCountMax=2",
}
PEOPLE = [
    {"name": "alice", "uid": 2001},
    {"name": "bob", "uid": 2002},
    {"name": "carol", "uid": 2003, "admin": True},
    # Not whom certificates for the files of bob name.
    {"name": "files-bob", "uid": 2004},
]
HOMES = ("--extra-vars", json.dumps({"storage_home": "sshfs", "cluster_users": PEOPLE}))
WRITER = "while sleep 0.2; do date +%s >>{0}/log && echo written || echo failed; done >/run/{1} 2>&1"


def mounts(*changes: dict[str, str]) -> tuple[str, str]:
    return "--extra-vars", json.dumps({"storage_mounts": [{**MOUNT, **change} for change in changes or ({},)]})


def timed(cluster: Cluster, *arguments: str) -> Run:
    begun = time.monotonic()
    done = cluster.play(*arguments)
    assert time.monotonic() - begun < SECONDS
    return done


def validated(cluster: Cluster, *arguments: str, nodes: str = "node-1,node-2") -> str:
    """The line about the shared folders of the report, and the cause if they are red."""
    limits = ("--tags", "quick", "--extra-vars", f"validation_hosts={nodes}")
    begun = time.monotonic()
    output = cluster.play(*limits, *arguments, playbook="playbooks/validate.yml").output
    assert time.monotonic() - begun < SECONDS
    return "\n".join(re.findall(r"^ +files\..*|^ +cause: .*\[files-.*", output, re.MULTILINE))


def as_user(cluster: Cluster, node: str, user: str, script: str) -> subprocess.CompletedProcess[str]:
    return cluster.ssh(node, "runuser", "-u", user, "--", "sh", "-c", script)


def write_on(cluster: Cluster, node: str, folder: str, user: str = "trainer") -> None:
    """Start a job that writes again and again."""
    cluster.ssh(node, "install", "-o", user, "/dev/null", f"/run/{user}.log")
    script = WRITER.format(folder, f"{user}.log")
    cluster.ssh(node, "systemd-run", "--quiet", f"--unit=writer-{user}", f"--uid={user}", "sh", "-c", script)


def comes(cluster: Cluster, node: str, word: str, user: str = "trainer") -> None:
    """Wait until the job says this from now on."""
    seen = f"tail -n 0 -f /run/{user}.log | grep -qm 1 {word}"
    assert cluster.ssh(node, "timeout", str(SECONDS), "sh", "-c", seen).returncode == 0, word


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster of two nodes, and a server of data."""
    key = tmp_path_factory.mktemp("key") / "data"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    cluster.ensure(*QUICK, "--extra-vars", json.dumps({"ssh_trust_login_keys": [public]}))
    for node in ("node-1", "node-2"):
        cluster.shell(node, f"umask 077; echo '{key.read_text()}' >/root/data")
    cluster.ssh("node-3", "install", "-d", "-o", "trainer", "/srv/results")
    return cluster


@pytest.fixture
def data(server: Cluster) -> Cluster:
    """The same with the data mounted."""
    server.ensure(*PART, *mounts())
    assert as_user(server, "node-1", "trainer", "echo here >/data/re-sults/a").returncode == 0
    return server


def test_data_is_mounted_and_proven(server: Cluster) -> None:
    predicted = server.play(*PART, "--check", *mounts())
    done = server.play_ok(*PART, *mounts())
    # The packages that the login key's removal needs no change for.
    assert {task for task, _ in done.changes} == {task for task, _ in predicted.changes}
    assert ("storage : Mount the file systems on first use", "node-2") in done.changes
    assert server.play_ok(*PART, *mounts()).changed_hosts == set()
    assert as_user(server, "node-1", "trainer", "echo here >/data/re-sults/a").returncode == 0
    assert as_user(server, "node-2", "trainer", "cat /data/re-sults/a").stdout == "here\n"
    assert "green" in validated(server, *mounts())
    assert server.ssh("node-3", "ls", "-A", "/srv/results").stdout.split() == ["a"]
    assert "green" in validated(server, *mounts({"options": f"{MOUNT['options']},ro"}))


def test_a_server_that_dies_hangs_neither_a_job_nor_a_run_nor_the_boot(data: Cluster) -> None:
    write_on(data, "node-2", MOUNT["where"])
    comes(data, "node-2", "written")
    data.lab("fault", "kill", "node-3")
    comes(data, "node-2", "failed")
    done = timed(data, *PART, *mounts())
    assert (done.rc, done.changed_hosts) == (0, set()), done.output
    red = validated(data, *mounts())
    assert "red" in red
    assert f"{MOUNT['where']} on node-" in red
    assert "from trainer@node-3:/srv/results" in red
    # A new mount from a dead server, and boot.
    data.lab("fault", "reboot", "node-1")
    assert data.ssh("node-1", "timeout", "30", "ls", MOUNT["where"]).returncode not in (0, 124)
    # However often that fails, nobody writes to the local disk instead.
    for _ in range(7):
        as_user(data, "node-1", "root", f"touch {MOUNT['where']}/x")
    data.lab("fault", "start", "node-3")
    comes(data, "node-2", "written")
    assert as_user(data, "node-1", "trainer", f"tail -n 1 {MOUNT['where']}/log").returncode == 0
    assert "x" not in data.ssh("node-3", "ls", "/srv/results").stdout.split()
    assert "green" in validated(data, *mounts())
    data.ssh("node-2", "systemctl", "stop", "writer-trainer")


def test_a_mount_in_use_is_not_changed_and_its_user_is_named(data: Cluster) -> None:
    stay = ("systemd-run", "--quiet", "--unit=stay", f"--working-directory={MOUNT['where']}", "sleep", "600")
    data.ssh("node-2", *stay)
    refused = data.play_failing(*PART, *mounts({"options": f"{MOUNT['options']},noatime"}))
    assert re.search(r"/data/re-sults is in use by sleep \(process \d+\)", refused.flat)
    assert as_user(data, "node-2", "trainer", "cat /data/re-sults/a").stdout == "here\n"
    data.ssh("node-2", "systemctl", "stop", "stay")
    data.play_ok(*PART, *mounts({"options": f"{MOUNT['options']},noatime"}))
    assert as_user(data, "node-2", "trainer", "cat /data/re-sults/a").stdout == "here\n"
    assert ",noatime" in data.ssh("node-2", "cat", "/etc/systemd/system/data-re\\x2dsults.mount").stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": "/etc"}, "[mount-wrong]"),
        ({"where": "/srv/full"}, "/srv/full contains files, such as notes"),
        ({"where": "/data/new", "type": "none-such"}, "there is no /sbin/mount.none-such"),
    ],
)
def test_what_would_hide_files_or_cannot_be_mounted_is_refused(
    data: Cluster, change: dict[str, str], message: str
) -> None:
    data.shell("node-2", "mkdir -p /srv/full && touch /srv/full/notes")
    refused = data.play_failing(*PART, *mounts({}, change))
    assert message in refused.flat
    assert "node-2" not in refused.changed_hosts


def test_a_killed_run_is_repaired_and_a_mount_is_taken_off_although_its_server_is_dead(data: Cluster) -> None:
    # As a run leaves it that is killed after it has written the units.
    data.shell("node-2", "systemctl disable --now data-re\\\\x2dsults.automount")
    repaired = data.play(*PART, *mounts())
    assert ("storage : Mount the file systems on first use", "node-2") in repaired.changes
    assert as_user(data, "node-2", "trainer", "cat /data/re-sults/a").stdout == "here\n"
    data.lab("fault", "kill", "node-3")
    done = timed(data, *PART)
    assert done.rc == 0, done.output
    for node in ("node-1", "node-2"):
        assert "/data" not in data.ssh(node, "cat", "/proc/mounts").stdout
        assert data.shell(node, "ls /etc/systemd/system | grep data").stdout == ""
    assert data.play_ok(*PART).changed_hosts == set()
    data.lab("fault", "start", "node-3")


@pytest.fixture
def homes(cluster: Cluster) -> Cluster:
    """A cluster whose nodes mount the homes of the head."""
    cluster.ensure(*QUICK, *HOMES)
    assert as_user(cluster, "node-2", "alice", "umask 077; echo here >~/a; mkdir -p ~/sub").returncode == 0
    assert as_user(cluster, "node-1", "bob", "umask 077; echo hidden >~/secret").returncode == 0
    return cluster


def test_homes_are_shared_and_proven(homes: Cluster) -> None:
    assert homes.play_ok(*QUICK, *HOMES).changed_hosts == set()
    for node in ("node-1", "node-3"):
        assert as_user(homes, node, "alice", "cat ~/a; stat -c %U:%a ~/a ~/sub").stdout.split() == [
            "here", "alice:600", "alice:700",
        ]  # fmt: skip
        assert as_user(homes, node, "bob", "cat ~alice/a").returncode != 0
    seen = validated(homes, *HOMES, nodes="node-1,node-2,node-3")
    assert seen.count("green") == 4, seen
    assert "red" not in seen


def test_the_home_of_an_administrator_stays_where_it_is(homes: Cluster) -> None:
    as_user(homes, "node-2", "carol", "touch ~/here")
    assert homes.ssh("node-1", "test", "-e", "/home/carol/here").returncode == 1
    assert "carol" not in homes.ssh("node-1", "cat", "/etc/farandole/storage/home").stdout


KEY = "/etc/farandole/ssh/id_files"
SSH = ("ssh", "-i", KEY, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")


def attack(cluster: Cluster, target: str, *command: str, node: str = "node-2") -> str:
    """What root of a node gets with its key for files."""
    done = cluster.ssh(node, "timeout", "20", *SSH, target, *command)
    return done.stdout + done.stderr


def sftp(cluster: Cluster, user: str, path: str, server: str = "node-1") -> str:
    script = f"echo 'get {path} -' | sftp {' '.join(SSH[1:])} -b - {user}@{server}:/ 2>&1; cat ./-; rm -f ./-"
    # Also reaches a node that is revoked.
    config = ("-F", str(cluster.inventory / ".ssh" / "config"), "-o", "GlobalKnownHostsFile=/dev/null")
    command = ["ssh", *config, "node-2", f"cd $(mktemp -d) && {script}"]
    done = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return done.stdout


def namesake(cluster: Cluster) -> str:
    """What files-bob gets of a file of bob's."""
    key = "/etc/farandole/ssh/id_jobs/files-bob"
    script = f"cd && rm -f got && sftp -q -o BatchMode=yes -i {key} bob@node-1:secret got; cat got"
    return cluster.ssh("node-1", "runuser", "-l", "files-bob", "-c", script).stdout


def test_nobody_is_a_key_for_files_by_name(homes: Cluster) -> None:
    assert namesake(homes) == ""
    accepted = "/etc/farandole/ssh/principals/bob"
    homes.shell("node-1", f"cp -a {accepted} /root/kept && sed -i s/files:bob/files-bob/ {accepted}")
    assert namesake(homes) == "hidden\n"
    homes.ssh("node-1", "cp", "-a", "/root/kept", accepted)


def test_a_nodes_key_for_files_opens_nothing_else(homes: Cluster) -> None:
    assert "here" in sftp(homes, "alice", "/home/alice/a")
    assert "hidden" in sftp(homes, "bob", "/home/bob/secret")
    assert "hidden" not in sftp(homes, "alice", "/home/bob/secret")
    assert "Permission denied" in sftp(homes, "alice", "/etc/shadow")
    # No shell on the head, nothing at all as root, as an administrator, or on another node.
    assert "uid=" not in attack(homes, "alice@node-1", "id")
    for target in ("root@node-1", "carol@node-1", "alice@node-3", "trainer@node-3"):
        assert "Permission denied" in attack(homes, target, "id"), target
    assert "Permission denied" in sftp(homes, "alice", "/home/alice/a", "node-3")
    forward = homes.ssh("node-2", "timeout", "20", *SSH, "-W", "127.0.0.1:22", "alice@node-1")
    assert "SSH-2.0" not in forward.stdout
    # From another address.
    stolen = "install -m 600 /dev/null /root/stolen; install -m 644 /dev/null /root/stolen-cert.pub"
    homes.shell("node-3", stolen)
    for name in ("", "-cert.pub"):
        text = homes.ssh("node-2", "cat", f"{KEY}{name}").stdout
        homes.shell("node-3", f"echo '{text}' >/root/stolen{name}")
    script = f"echo 'ls' | sftp -i /root/stolen {' '.join(SSH[3:])} -b - alice@node-1 2>&1"
    assert "Permission denied" in homes.shell("node-3", script).stdout


def test_these_attacks_succeed_without_the_protection(homes: Cluster, tmp_path: Path) -> None:
    """With a certificate without its limits, and a head and another node that accept it for all."""
    public = tmp_path / "id.pub"
    public.write_text(homes.ssh("node-2", "cat", f"{KEY}.pub").stdout)
    command = [
        "ssh-keygen",
        "-q",
        "-s",
        str(homes.state / "ca/user_ca"),
        "-I",
        "x",
        "-n",
        "files:alice,alice",
        str(public),
    ]
    subprocess.run(command, check=True)
    unlimited = (tmp_path / "id-cert.pub").read_text()
    kept = homes.ssh("node-2", "cat", f"{KEY}-cert.pub").stdout
    homes.shell("node-2", f"echo '{unlimited}' >{KEY}-cert.pub")
    try:
        # On the other node the name of the user is enough.
        assert "uid=2001(alice)" in attack(homes, "alice@node-3", "id")
        homes.shell("node-1", "echo files:alice >/etc/farandole/ssh/principals/alice")
        assert "uid=2001(alice)" in attack(homes, "alice@node-1", "id")
    finally:
        homes.shell("node-2", f"echo '{kept}' >{KEY}-cert.pub")
    assert ("ssh_trust : Write certificates and settings of sshd and ssh", "node-1") in homes.play(
        *QUICK, *HOMES
    ).changes


def test_a_head_that_dies_and_comes_back(homes: Cluster) -> None:
    write_on(homes, "node-2", "/home/bob", "bob")
    comes(homes, "node-2", "written", "bob")
    homes.lab("fault", "kill", "node-1")
    comes(homes, "node-2", "failed", "bob")
    done = timed(homes, *QUICK, *HOMES)
    assert done.rc != 0
    assert "node-1" in done.output
    homes.lab("fault", "start", "node-1")
    comes(homes, "node-2", "written", "bob")
    homes.ssh("node-2", "systemctl", "stop", "writer-bob")
    assert "red" not in validated(homes, *HOMES, nodes="node-1,node-2,node-3")


def test_homes_that_are_no_longer_shared(homes: Cluster) -> None:
    people = ("--extra-vars", json.dumps({"cluster_users": PEOPLE}))
    stay = ("systemd-run", "--quiet", "--unit=stay", "--uid=bob", "--working-directory=/home/bob", "sleep", "600")
    homes.ssh("node-3", *stay)
    refused = homes.play_failing(*QUICK, *people)
    assert re.search(r"/home/bob is in use by sleep \(process \d+\).*-e base_end_jobs=true", refused.flat)
    # The head goes on serving them.
    assert homes.ssh("node-1", "ls", "/etc/farandole/storage/home").returncode == 0
    homes.ssh("node-3", "systemctl", "stop", "stay")
    homes.play_ok(*QUICK, *people)
    assert "sshfs" not in homes.ssh("node-3", "cat", "/proc/mounts").stdout
    assert homes.ssh("node-3", "ls", KEY).returncode != 0
    assert homes.ssh("node-1", "ls", "/etc/farandole/storage/home").returncode != 0
    assert "Principals" not in homes.ssh("node-1", "cat", "/etc/ssh/sshd_config.d/10-farandole.conf").stdout


def test_a_revoked_node_loses_the_homes(homes: Cluster) -> None:
    assert "here" in sftp(homes, "alice", "/home/alice/a")
    assert as_user(homes, "node-2", "alice", "echo before >~/before").returncode == 0
    revoked = (*QUICK, *HOMES, "--extra-vars", json.dumps({"ssh_trust_revoked": ["node-2"]}))
    # As if the kernel could not.
    ends_nothing = '#!/bin/sh\n[ "$1" = --kill ] || exec /usr/bin/ss "$@"\n'
    homes.shell("node-1", f"printf %s '{ends_nothing}' >/usr/local/bin/ss; chmod 755 /usr/local/bin/ss")
    assert "a revoked node stays connected" in homes.play_failing(*revoked).flat
    homes.ssh("node-1", "rm", "/usr/local/bin/ss")
    homes.play_ok(*revoked)
    assert "Permission denied" in sftp(homes, "alice", "/home/alice/a")
    # Nor does it keep what it had mounted.
    config = ("-F", str(homes.inventory / ".ssh" / "config"), "-o", "GlobalKnownHostsFile=/dev/null")
    writes = ["ssh", *config, "node-2", "timeout 20 runuser -u alice -- sh -c 'echo after >/home/alice/after'"]
    assert subprocess.run(writes, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode
    assert as_user(homes, "node-1", "alice", "cat ~/before ~/after").stdout == "before\n"
    homes.shell("node-1", ": >/etc/farandole/ssh/revoked_keys")
    assert "here" in sftp(homes, "alice", "/home/alice/a")
    homes.readmit("node-2")


def test_removal_leaves_nothing(homes: Cluster) -> None:
    homes.ensure(*QUICK, *HOMES, *mounts())
    homes.play_ok(playbook="playbooks/remove.yml")
    homes.applied = None
    for node in ("node-1", "node-3"):
        left = "grep -l 'role storage' -r /etc; ls -d /etc/farandole; grep -E 'sshfs|autofs' /proc/mounts"
        assert homes.shell(node, f"{left}; true").stdout == ""
