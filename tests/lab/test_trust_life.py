"""Trust over a cluster's life: mesh, revocation, a reinstalled node, a lying node, rotation, a lost CA."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusters import ENVIRONMENT, ROOT, Cluster, Run, people, person

NODES = 3
MESH = ("--extra-vars", "ssh_trust_mesh=true")
REVOKE = ("--extra-vars", '{"ssh_trust_revoked": ["node-3"], "ssh_trust_mesh": true}')
JOB_KEY = "/etc/farandole/ssh/id_job"
REVOKED_USERS, REVOKED_HOSTS = "/etc/farandole/ssh/revoked_keys", "/etc/ssh/ssh_known_hosts"
# A python3 whose answer adds a job key although the node is not a launcher.
LIE = r"""
ssh-keygen -q -t ed25519 -N '' -f /run/lie
cat >/run/python3 <<'END'
#!/bin/sh
answer=$(/usr/bin/python3.real "$@") || exit
printf '%s\n' "$answer" | sed "s|\"job_keys\": {}|\"job_keys\": {\"trainer\": \"$(cut -d ' ' -f 1,2 /run/lie.pub)\"}|"
END
chmod 755 /run/python3 && mv /usr/bin/python3 /usr/bin/python3.real && ln -s /run/python3 /usr/bin/python3
"""


def trust(cluster: Cluster, *arguments: str) -> Run:
    """Run the parts of site.yml that manage trust."""
    return cluster.play("--skip-tags", "stack", *arguments)


def ca(cluster: Cluster) -> str:
    return (cluster.state / "ca" / "user_ca").read_text()


def console(cluster: Cluster, node: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script on a node without checking its host key, as at its console: the tests change that key."""
    config = cluster.inventory / ".ssh" / "config"
    options = ["-o", "GlobalKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"]
    return subprocess.run(
        ["ssh", "-F", config, *options, node, script],
        text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def steal_key(cluster: Cluster, node: str) -> None:
    """Copy the job key and its certificate, as a thief would."""
    script = f"for it in '' -cert.pub; do install -o trainer -m 600 {JOB_KEY}$it /run/stolen$it; done"
    assert cluster.ssh(node, "sh", "-c", script).returncode == 0


def stolen_ssh(cluster: Cluster, node: str, target: str) -> subprocess.CompletedProcess[str]:
    """Use ssh with the stolen key only."""
    options = ("-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-i", "/run/stolen")
    return cluster.ssh(node, "runuser", "-u", "trainer", "--", "ssh", *options, target, "hostname")


def root_ssh(cluster: Cluster, node: str, target: str) -> str:
    """The error of ssh for a local user who is not the job user and has no key: shows how far the login got."""
    return cluster.ssh(node, "ssh", "-o", "BatchMode=yes", target, "hostname").stderr


def ping(cluster: Cluster, node: str, **variables: str) -> str:
    """Run Ansible's ping with the node's plain key among the operator's known hosts."""
    known = f"ansible_ssh_common_args='-o UserKnownHostsFile={cluster.inventory}/.ssh/known_hosts'"
    extra = [f"{name}='{value}'" for name, value in variables.items()]
    done = subprocess.run(
        ["ansible", "-i", cluster.inventory, node, "-m", "ping", "-e", " ".join([known, *extra])],
        cwd=ROOT, env={**ENVIRONMENT, "ANSIBLE_SSH_ARGS": "-o ControlMaster=no"}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    return done.stdout


@contextmanager
def unprotected(cluster: Cluster, file: str, lines: str, *nodes: str) -> Iterator[None]:
    """Remove the lines that cause the refusal, for a while."""
    for node in nodes:
        assert cluster.ssh(node, "sed", "-i.kept", f"/{lines}/d", file).returncode == 0
    try:
        yield
    finally:
        for node in nodes:
            cluster.ssh(node, "mv", f"{file}.kept", file)


def test_in_a_mesh_every_node_reaches_every_other(cluster: Cluster) -> None:
    assert trust(cluster, *MESH).rc == 0
    for here in ("node-1", "node-2", "node-3"):
        for there in ("node-1", "node-2", "node-3"):
            result = cluster.job_ssh(here, there, "hostname")
            assert (result.stdout, result.stderr) == (f"{there}\n", "")


def test_a_revoked_node_is_refused_in_both_directions(cluster: Cluster) -> None:
    done = trust(cluster, *REVOKE)
    assert done.rc == 0, done.output
    attack = "runuser -u trainer -- ssh -o BatchMode=yes node-2 hostname"
    assert "Permission denied" in console(cluster, "node-3", attack).stderr
    assert "revoked by file" in cluster.job_ssh("node-2", "node-3", "hostname").stderr
    assert cluster.job_ssh("node-2", "node-1", "hostname").stdout == "node-1\n"
    # The lists are the reason for the refusal: without their lines both directions work again.
    with unprotected(cluster, REVOKED_USERS, "^ssh-", "node-1", "node-2"):
        assert console(cluster, "node-3", attack).stdout == "node-2\n"
        assert "REVOKED HOST KEY" in cluster.job_ssh("node-2", "node-3", "hostname").stderr
        with unprotected(cluster, REVOKED_HOSTS, "^@revoked", "node-2"):
            assert cluster.job_ssh("node-2", "node-3", "hostname").stdout == "node-3\n"
    assert set(trust(cluster, *REVOKE).count("changed").values()) == {0}


def test_a_revoked_host_is_refused_by_all_local_users_and_the_control_machine(cluster: Cluster) -> None:
    assert "REVOKED HOST KEY" in root_ssh(cluster, "node-1", "node-3")
    with unprotected(cluster, REVOKED_HOSTS, "^@revoked", "node-1"):
        assert "Permission denied" in root_ssh(cluster, "node-1", "node-3")
    assert "was revoked" in ping(cluster, "node-3")
    assert "SUCCESS" in ping(cluster, "node-3", ansible_ssh_extra_args="")
    assert "SUCCESS" in ping(cluster, "node-2")


def test_a_revoked_host_cannot_return_with_another_type_of_host_key(cluster: Cluster) -> None:
    """Such a key was never signed, so it was not revoked; an operator's ssh learns such keys by itself."""
    drop_in, known = "/etc/ssh/sshd_config.d/00-other.conf", cluster.inventory / ".ssh" / "known_hosts"
    before = known.read_text()
    address = next(line for line in before.splitlines() if line.startswith("node-3,")).split()[0]
    key = console(cluster, "node-3", "cut -d ' ' -f 1,2 /etc/ssh/ssh_host_ecdsa_key.pub").stdout
    change = f"echo 'HostKey /etc/ssh/ssh_host_ecdsa_key' >{drop_in} && systemctl restart ssh"
    assert console(cluster, "node-3", change).returncode == 0
    known.write_text(f"{before}{address} {key}")
    try:
        assert "no matching host key type found" in ping(cluster, "node-3")
        assert "SUCCESS" in ping(cluster, "node-3", ansible_ssh_extra_args="")
    finally:
        assert console(cluster, "node-3", f"rm {drop_in} && systemctl restart ssh").returncode == 0
        known.write_text(before)


def test_a_revoked_key_stays_refused_but_a_new_one_is_accepted(cluster: Cluster) -> None:
    # A connection left open by an earlier run would bypass the check.
    refused = cluster.play("--extra-vars", "ansible_control_path=none", *MESH, playbook="playbooks/preflight.yml")
    assert refused.rc != 0
    assert "node-3: its host key is revoked" in refused.output
    # The job key is revoked too; the node creates a new one by itself.
    renew = "rm /etc/ssh/ssh_host_ed25519_key* && ssh-keygen -A && systemctl restart ssh"
    assert console(cluster, "node-3", renew).returncode == 0
    cluster.farandole("inventory")
    done = trust(cluster, *MESH)
    assert done.rc == 0, done.output
    assert cluster.job_ssh("node-3", "node-2", "hostname").stdout == "node-2\n"
    assert cluster.job_ssh("node-2", "node-3", "hostname").stdout == "node-3\n"


def test_replaced_keys_and_keys_of_former_launchers_are_refused(cluster: Cluster) -> None:
    for node in ("node-1", "node-2"):
        steal_key(cluster, node)
        assert stolen_ssh(cluster, node, "node-3").stdout == "node-3\n"
    cluster.ssh("node-1", "rm", JOB_KEY)
    assert trust(cluster).rc == 0
    assert cluster.ssh("node-2", "ls", JOB_KEY).returncode == 2
    assert cluster.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"
    for node in ("node-1", "node-2"):
        assert "Permission denied" in stolen_ssh(cluster, node, "node-3").stderr
    with unprotected(cluster, REVOKED_USERS, "^ssh-", "node-3"):
        for node in ("node-1", "node-2"):
            assert stolen_ssh(cluster, node, "node-3").stdout == "node-3\n"


def test_a_worker_cannot_get_a_launcher_certificate(cluster: Cluster) -> None:
    assert cluster.ssh("node-2", "bash", "-c", LIE).returncode == 0
    try:
        refused = trust(cluster)
        assert refused.rc != 0
        assert "node-2: it asks for a launcher's certificate" in refused.output
        assert cluster.ssh("node-2", "ls", f"{JOB_KEY}-cert.pub").returncode == 2
        assert not (cluster.state / "ca/issued/node-2.user-cert.pub").exists()
    finally:
        cluster.ssh("node-2", "mv", "/usr/bin/python3.real", "/usr/bin/python3")


def test_a_lost_ca_does_not_split_the_cluster(cluster: Cluster) -> None:
    kept = cluster.state / "ca.kept"
    (cluster.state / "ca").rename(kept)
    try:
        refused = trust(cluster, "--limit", "node-1")
        assert refused.rc != 0
        assert "the CA of this cluster is missing" in refused.output
        assert not (cluster.state / "ca").exists()
    finally:
        kept.rename(cluster.state / "ca")
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"


def test_rotation_invalidates_old_certificates_and_the_cluster_works(cluster: Cluster) -> None:
    old = ca(cluster)
    steal_key(cluster, "node-1")
    # A node that becomes a launcher again gets a new key in the same run.
    done = trust(cluster, *MESH, "--extra-vars", "ssh_trust_rotate=true")
    assert done.rc == 0, done.output
    assert ca(cluster) != old
    for here, there in (("node-1", "node-2"), ("node-2", "node-3")):
        assert cluster.job_ssh(here, there, "hostname").stdout == f"{there}\n"
    assert "Permission denied" in stolen_ssh(cluster, "node-1", "node-2").stderr
    assert set(trust(cluster, *MESH).count("changed").values()) == {0}


def test_an_older_copy_of_the_ca_revives_no_key(cluster: Cluster) -> None:
    folder, older = cluster.state / "ca", cluster.state / "ca.older"
    # No longer a mesh: only the head's key is signed.
    assert trust(cluster).rc == 0
    shutil.copytree(folder, older)
    steal_key(cluster, "node-1")
    cluster.ssh("node-1", "rm", JOB_KEY)
    assert trust(cluster).rc == 0
    assert "Permission denied" in stolen_ssh(cluster, "node-1", "node-3").stderr
    for name in ("revoked_keys", "signed_keys"):
        shutil.copy2(older / name, folder / name)
    shutil.copytree(older / "issued", folder / "issued", dirs_exist_ok=True)
    # A full run would find out that the head has another key now.
    refused = trust(cluster, "--limit", "node-3")
    assert refused.rc != 0
    assert "[revoked-unknown]" in refused.output
    assert "Permission denied" in stolen_ssh(cluster, "node-1", "node-3").stderr
    # Without what the nodes remember, the key is good again.
    with unprotected(cluster, REVOKED_USERS, "^ssh-", "node-3"):
        assert trust(cluster, "--limit", "node-3").rc == 0
        assert stolen_ssh(cluster, "node-1", "node-3").stdout == "node-3\n"
    shutil.rmtree(folder)
    older.rename(folder)
    # What the refusal says.
    assert trust(cluster, "--extra-vars", "ssh_trust_rotate=true").rc == 0
    assert "Permission denied" in stolen_ssh(cluster, "node-1", "node-3").stderr
    assert cluster.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"
    assert set(trust(cluster).count("changed").values()) == {0}


def test_a_lying_node_gets_no_key_of_another_revoked(cluster: Cluster) -> None:
    """It stops the cluster until the operator does what the refusal says, and no longer."""
    key = cluster.ssh("node-1", "cut", "-d", " ", "-f", "1,2", f"{JOB_KEY}.pub").stdout.strip()
    lie = f"echo '{key} node-1' >>{REVOKED_USERS}"
    assert cluster.ssh("node-2", "sh", "-c", lie).returncode == 0
    refused = trust(cluster)
    assert refused.rc != 0
    assert "node-2: it knows 1 revoked key of node-1 that" in refused.output
    assert "1 of 3 nodes say so [revoked-unknown]" in refused.output
    assert cluster.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"
    done = trust(cluster, "--extra-vars", "ssh_trust_rotate=true")
    assert done.rc == 0, done.output
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"


# What somebody could leave behind: a key in each home, a copy of the job key, a program, and one that is always
# another process before anybody can kill it.
LEAVE = """
mkdir -p -m 700 .ssh && echo "$0" >.ssh/authorized_keys
setsid sleep 900 >/dev/null 2>&1 </dev/null &
setsid perl -e "\\$SIG{TERM} = q(IGNORE); while (1) { exit if fork; select undef, undef, undef, 0.02 }" \\
  >/dev/null 2>&1 </dev/null &
keys=/etc/farandole/ssh/id_jobs
[ ! -e $keys/alice ] || cp $keys/alice $keys/alice-cert.pub .
"""


def sleeping(cluster: Cluster) -> list[str]:
    """The nodes on which her program runs."""
    nodes = ("node-1", "node-2")
    return [node for node in nodes if cluster.ssh(node, "pgrep", "-u", "alice", "sleep").returncode == 0]


def test_people_who_are_taken_off_the_list_are_locked_out_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    alice, bob = person("alice", 2001, tmp_path, admin=True), person("bob", 2002, tmp_path)
    key = tmp_path / "alice"
    done = trust(cluster, *people(alice, bob))
    assert done.rc == 0, done.output
    assert cluster.person_ssh("alice", key, "node-1", "sudo -n id -un").stdout == "root\n"
    for node in ("node-1", "node-2"):
        left = (
            "runuser",
            "--login",
            "alice",
            "--command",
            f"bash -c '{LEAVE}' '{key.with_suffix('.pub').read_text()}'",
        )
        assert cluster.ssh(node, *left).returncode == 0
    assert set(trust(cluster, *people(alice, bob)).count("changed").values()) == {0}

    done = trust(cluster, *people(bob))
    assert done.rc == 0, done.output
    assert sleeping(cluster) == ["node-1", "node-2"]
    assert cluster.person_ssh("bob", tmp_path / "bob", "node-1", "ssh node-2 hostname").stdout == "node-2\n"
    for node in ("node-1", "node-2"):
        assert "Permission denied" in cluster.person_ssh("alice", key, node, "id").stderr
    thief = ("ssh", "-F", "none", "-o", "BatchMode=yes", "-i", "/home/alice/alice", "alice@node-2", "hostname")
    assert "Permission denied" in cluster.ssh("node-1", *thief).stderr

    # Each protection is enough: her own key needs both gone, and so does the stolen one.
    cluster.ssh("node-2", "gpasswd", "--delete", "alice", "farandole-jobs")
    expired = cluster.person_ssh("alice", key, "node-2", "id")
    assert (expired.returncode, "Permission denied" in expired.stderr) == (255, False)
    cluster.ssh("node-2", "usermod", "--expiredate", "", "alice")
    assert cluster.person_ssh("alice", key, "node-2", "id -un").stdout == "alice\n"
    cluster.ssh("node-2", "gpasswd", "--add", "alice", "farandole-jobs")
    assert "Permission denied" in cluster.person_ssh("alice", key, "node-2", "id").stderr
    assert "Permission denied" in cluster.ssh("node-1", *thief).stderr
    with unprotected(cluster, REVOKED_USERS, "^ssh-", "node-2"):
        assert cluster.ssh("node-1", *thief).stdout == "node-2\n"

    ended = (*people(bob), "--extra-vars", "base_end_jobs=true")
    assert ("base : Create the accounts of those who start jobs", "node-2") in trust(cluster, *ended).changes
    assert [cluster.ssh(node, "pgrep", "-u", "alice").returncode for node in ("node-1", "node-2")] == [1, 1]
    assert cluster.ssh("node-2", "test", "-e", "/home/alice/.ssh/authorized_keys").returncode == 0
    assert set(trust(cluster, *ended).count("changed").values()) == {0}
