"""Trust over a cluster's life: mesh, revocation, a reinstalled node, a lying node, rotation, a lost CA."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import ENVIRONMENT, PREPARED, QUICK, ROOT, Cluster, Run, people, person

NODES = 3
KIND = PREPARED
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
    return cluster.play(*QUICK, *arguments)


def admit(cluster: Cluster) -> None:
    """Give the third node new keys, if a test has revoked the former ones."""
    if cluster.applied == (*QUICK, *REVOKE):
        cluster.readmit("node-3")


@pytest.fixture
def plain(cluster: Cluster) -> Cluster:
    """A cluster in which jobs start on the head."""
    admit(cluster)
    cluster.ensure(*QUICK)
    return cluster


@pytest.fixture
def mesh(cluster: Cluster) -> Cluster:
    """A cluster in which jobs start anywhere."""
    admit(cluster)
    cluster.ensure(*QUICK, *MESH)
    return cluster


@pytest.fixture
def revoked(cluster: Cluster) -> Cluster:
    """The same after the third node was revoked."""
    if cluster.applied != (*QUICK, *REVOKE):
        cluster.ensure(*QUICK, *MESH)
        cluster.ensure(*QUICK, *REVOKE)
    return cluster


def ca(cluster: Cluster) -> str:
    return (cluster.state / "ca" / "user_ca").read_text()


def steal_key(cluster: Cluster, node: str) -> None:
    """Copy the job key and its certificate, as a thief would."""
    script = f"for it in '' -cert.pub; do install -o trainer -m 600 {JOB_KEY}$it /run/stolen$it; done"
    assert cluster.shell(node, script).returncode == 0


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


def test_in_a_mesh_every_node_reaches_every_other(mesh: Cluster) -> None:
    for here in ("node-1", "node-2", "node-3"):
        for there in ("node-1", "node-2", "node-3"):
            result = mesh.job_ssh(here, there, "hostname")
            assert (result.stdout, result.stderr) == (f"{there}\n", "")


def test_a_revoked_node_is_refused_in_both_directions(revoked: Cluster) -> None:
    attack = "runuser -u trainer -- ssh -o BatchMode=yes node-2 hostname"
    assert "Permission denied" in revoked.console("node-3", attack).stderr
    assert "revoked by file" in revoked.job_ssh("node-2", "node-3", "hostname").stderr
    assert revoked.job_ssh("node-2", "node-1", "hostname").stdout == "node-1\n"
    # The lists are the reason for the refusal: without their lines both directions work again.
    with unprotected(revoked, REVOKED_USERS, "^ssh-", "node-1", "node-2"):
        assert revoked.console("node-3", attack).stdout == "node-2\n"
        assert "REVOKED HOST KEY" in revoked.job_ssh("node-2", "node-3", "hostname").stderr
        with unprotected(revoked, REVOKED_HOSTS, "^@revoked", "node-2"):
            assert revoked.job_ssh("node-2", "node-3", "hostname").stdout == "node-3\n"

    def attempts() -> str:
        """How often somebody found there a host key that they refuse."""
        return revoked.console("node-3", "journalctl --unit=ssh | grep --count preauth").stdout

    for options in (("--skip-tags", "base"), ()):
        assert trust(revoked, *options, *REVOKE).changed_hosts == set()
    before = attempts()
    removal = revoked.play_failing("--check", *REVOKE, playbook="playbooks/remove.yml")
    assert "node-3 is revoked, so nothing was done there" in removal.flat
    assert removal.changed_hosts == {"node-1", "node-2"}
    assert attempts() == before


def test_a_revoked_host_is_refused_by_all_local_users_and_the_control_machine(revoked: Cluster) -> None:
    assert "REVOKED HOST KEY" in root_ssh(revoked, "node-1", "node-3")
    with unprotected(revoked, REVOKED_HOSTS, "^@revoked", "node-1"):
        assert "Permission denied" in root_ssh(revoked, "node-1", "node-3")
    assert "was revoked" in ping(revoked, "node-3")
    assert "SUCCESS" in ping(revoked, "node-3", ansible_ssh_extra_args="")
    assert "SUCCESS" in ping(revoked, "node-2")


def test_a_revoked_host_cannot_return_with_another_type_of_host_key(revoked: Cluster) -> None:
    """Such a key was never signed, so it was not revoked; an operator's ssh learns such keys by itself."""
    drop_in, known = "/etc/ssh/sshd_config.d/00-other.conf", revoked.inventory / ".ssh" / "known_hosts"
    before = known.read_text()
    address = next(line for line in before.splitlines() if line.startswith("node-3,")).split()[0]
    key = revoked.console("node-3", "cut -d ' ' -f 1,2 /etc/ssh/ssh_host_ecdsa_key.pub").stdout
    change = f"echo 'HostKey /etc/ssh/ssh_host_ecdsa_key' >{drop_in} && systemctl restart ssh"
    assert revoked.console("node-3", change).returncode == 0
    known.write_text(f"{before}{address} {key}")
    try:
        assert "no matching host key type found" in ping(revoked, "node-3")
        assert "SUCCESS" in ping(revoked, "node-3", ansible_ssh_extra_args="")
    finally:
        assert revoked.console("node-3", f"rm {drop_in} && systemctl restart ssh").returncode == 0
        known.write_text(before)


def test_a_revoked_key_stays_refused_but_a_new_one_is_accepted(revoked: Cluster) -> None:
    # A connection left open by an earlier run would bypass the check.
    refused = revoked.play_failing(
        "--extra-vars", "ansible_control_path=none", *MESH, playbook="playbooks/preflight.yml"
    )
    assert "node-3: its host key is revoked" in refused.output
    # The job key is revoked too; the node creates a new one by itself.
    revoked.readmit("node-3")
    revoked.ensure(*QUICK, *MESH)
    assert revoked.job_ssh("node-3", "node-2", "hostname").stdout == "node-2\n"
    assert revoked.job_ssh("node-2", "node-3", "hostname").stdout == "node-3\n"


def test_replaced_keys_and_keys_of_former_launchers_are_refused(mesh: Cluster) -> None:
    for node in ("node-1", "node-2"):
        steal_key(mesh, node)
        assert stolen_ssh(mesh, node, "node-3").stdout == "node-3\n"
    mesh.ssh("node-1", "rm", JOB_KEY)
    mesh.play_ok(*QUICK)
    assert mesh.ssh("node-2", "ls", JOB_KEY).returncode == 2
    assert mesh.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"
    for node in ("node-1", "node-2"):
        assert "Permission denied" in stolen_ssh(mesh, node, "node-3").stderr
    with unprotected(mesh, REVOKED_USERS, "^ssh-", "node-3"):
        for node in ("node-1", "node-2"):
            assert stolen_ssh(mesh, node, "node-3").stdout == "node-3\n"


def test_a_worker_cannot_get_a_launcher_certificate(plain: Cluster) -> None:
    assert plain.ssh("node-2", "bash", "-c", LIE).returncode == 0
    try:
        refused = plain.play_failing(*QUICK)
        assert "node-2: it asks for a launcher's certificate" in refused.output
        assert plain.ssh("node-2", "ls", f"{JOB_KEY}-cert.pub").returncode == 2
        assert not (plain.state / "ca/issued/node-2.user-cert.pub").exists()
    finally:
        plain.ssh("node-2", "mv", "/usr/bin/python3.real", "/usr/bin/python3")


def test_a_lost_ca_does_not_split_the_cluster(plain: Cluster) -> None:
    kept = plain.state / "ca.kept"
    (plain.state / "ca").rename(kept)
    try:
        refused = plain.play_failing(*QUICK, "--limit", "node-1")
        assert "the CA of this cluster is missing" in refused.output
        assert not (plain.state / "ca").exists()
    finally:
        kept.rename(plain.state / "ca")
    assert plain.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"


def test_rotation_invalidates_old_certificates_and_the_cluster_works(plain: Cluster) -> None:
    old = ca(plain)
    steal_key(plain, "node-1")
    # A node that becomes a launcher again gets a new key in the same run.
    plain.play_ok(*QUICK, *MESH, "--extra-vars", "ssh_trust_rotate=true")
    assert ca(plain) != old
    for here, there in (("node-1", "node-2"), ("node-2", "node-3")):
        assert plain.job_ssh(here, there, "hostname").stdout == f"{there}\n"
    assert "Permission denied" in stolen_ssh(plain, "node-1", "node-2").stderr
    assert trust(plain, *MESH).changed_hosts == set()


def test_an_older_copy_of_the_ca_revives_no_key(plain: Cluster) -> None:
    folder, older = plain.state / "ca", plain.state / "ca.older"
    shutil.copytree(folder, older)
    steal_key(plain, "node-1")
    plain.ssh("node-1", "rm", JOB_KEY)
    plain.play_ok(*QUICK)
    assert "Permission denied" in stolen_ssh(plain, "node-1", "node-3").stderr
    for name in ("revoked_keys", "signed_keys"):
        shutil.copy2(older / name, folder / name)
    shutil.copytree(older / "issued", folder / "issued", dirs_exist_ok=True)
    # A full run would find out that the head has another key now.
    refused = plain.play_failing(*QUICK, "--limit", "node-3")
    assert "[revoked-unknown]" in refused.output
    assert "Permission denied" in stolen_ssh(plain, "node-1", "node-3").stderr
    # Without what the nodes remember, the key is good again.
    with unprotected(plain, REVOKED_USERS, "^ssh-", "node-3"):
        plain.play_ok(*QUICK, "--limit", "node-3")
        assert stolen_ssh(plain, "node-1", "node-3").stdout == "node-3\n"
    shutil.rmtree(folder)
    older.rename(folder)
    # What the refusal says.
    plain.play_ok(*QUICK, "--extra-vars", "ssh_trust_rotate=true")
    assert "Permission denied" in stolen_ssh(plain, "node-1", "node-3").stderr
    assert plain.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"
    assert trust(plain).changed_hosts == set()


def test_a_lying_node_gets_no_key_of_another_revoked(plain: Cluster) -> None:
    """It stops the cluster until the operator does what the refusal says, and no longer."""
    key = plain.ssh("node-1", "cut", "-d", " ", "-f", "1,2", f"{JOB_KEY}.pub").stdout.strip()
    lie = f"echo '{key} node-1' >>{REVOKED_USERS}"
    assert plain.shell("node-2", lie).returncode == 0
    refused = plain.play_failing(*QUICK)
    assert "node-2: it knows 1 revoked key of node-1 that" in refused.output
    assert "1 of 3 nodes say so [revoked-unknown]" in refused.output
    assert plain.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"
    plain.play_ok(*QUICK, "--extra-vars", "ssh_trust_rotate=true")
    assert plain.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"


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


def test_people_who_are_taken_off_the_list_are_locked_out_everywhere(plain: Cluster, tmp_path: Path) -> None:
    alice, bob = person("alice", 2001, tmp_path, admin=True), person("bob", 2002, tmp_path)
    key = tmp_path / "alice"
    plain.play_ok(*QUICK, *people(alice, bob))
    assert plain.person_ssh("alice", key, "node-1", "sudo -n id -un").stdout == "root\n"
    for node in ("node-1", "node-2"):
        left = f"bash -c '{LEAVE}' '{key.with_suffix('.pub').read_text()}'"
        assert plain.ssh(node, "runuser", "--login", "alice", "--command", left).returncode == 0
    assert trust(plain, *people(alice, bob)).changed_hosts == set()

    plain.play_ok(*QUICK, *people(bob))
    assert sleeping(plain) == ["node-1", "node-2"]
    assert plain.person_ssh("bob", tmp_path / "bob", "node-1", "ssh node-2 hostname").stdout == "node-2\n"
    for node in ("node-1", "node-2"):
        assert "Permission denied" in plain.person_ssh("alice", key, node, "id").stderr
    thief = ("ssh", "-F", "none", "-o", "BatchMode=yes", "-i", "/home/alice/alice", "alice@node-2", "hostname")
    assert "Permission denied" in plain.ssh("node-1", *thief).stderr

    # Each protection is enough: her own key needs both gone, and so does the stolen one.
    plain.ssh("node-2", "gpasswd", "--delete", "alice", "farandole-jobs")
    expired = plain.person_ssh("alice", key, "node-2", "id")
    assert (expired.returncode, "Permission denied" in expired.stderr) == (255, False)
    plain.ssh("node-2", "usermod", "--expiredate", "", "alice")
    assert plain.person_ssh("alice", key, "node-2", "id -un").stdout == "alice\n"
    plain.ssh("node-2", "gpasswd", "--add", "alice", "farandole-jobs")
    assert "Permission denied" in plain.person_ssh("alice", key, "node-2", "id").stderr
    assert "Permission denied" in plain.ssh("node-1", *thief).stderr
    with unprotected(plain, REVOKED_USERS, "^ssh-", "node-2"):
        assert plain.ssh("node-1", *thief).stdout == "node-2\n"

    ended = (*people(bob), "--extra-vars", "base_end_jobs=true")
    assert ("base : Create the job user and the users' accounts", "node-2") in trust(plain, *ended).changes
    assert [plain.ssh(node, "pgrep", "-u", "alice").returncode for node in ("node-1", "node-2")] == [1, 1]
    assert plain.ssh("node-2", "test", "-e", "/home/alice/.ssh/authorized_keys").returncode == 0
    assert trust(plain, *ended).changed_hosts == set()
