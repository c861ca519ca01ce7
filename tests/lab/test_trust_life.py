"""What becomes of trust over time: mesh, rotation, revocation, a node that is reinstalled."""

from clusters import Cluster, Run

NODES = 3
REVOKE = ("--extra-vars", '{"ssh_trust_revoked": ["node-3"], "ssh_trust_mesh": true}')


def trust(cluster: Cluster, *arguments: str) -> Run:
    """All of site.yml that has to do with trust."""
    return cluster.play("--skip-tags", "stack", *arguments)


def ca(cluster: Cluster) -> str:
    return (cluster.state / "ca" / "user_ca").read_text()


def test_in_a_mesh_every_node_reaches_every_other(cluster: Cluster) -> None:
    assert trust(cluster, "--extra-vars", "ssh_trust_mesh=true").rc == 0
    for here in ("node-1", "node-2", "node-3"):
        for there in ("node-1", "node-2", "node-3"):
            result = cluster.job_ssh(here, there, "hostname")
            assert (result.stdout, result.stderr) == (f"{there}\n", "")


def test_a_revoked_node_is_refused_by_all_others_in_both_directions(cluster: Cluster) -> None:
    done = trust(cluster, *REVOKE)
    assert done.rc == 0, done.output
    assert "Permission denied" in cluster.job_ssh("node-3", "node-2", "hostname").stderr
    assert "revoked by file" in cluster.job_ssh("node-2", "node-3", "hostname").stderr
    assert cluster.job_ssh("node-2", "node-1", "hostname").stdout == "node-1\n"
    # It is the list that refuses: without its lines both ways are open again.
    for node in ("node-1", "node-2"):
        cluster.ssh(node, "sed", "-i.kept", "/^ssh-/d", "/etc/farandole/ssh/revoked_keys")
    assert cluster.job_ssh("node-3", "node-2", "hostname").stdout == "node-2\n"
    assert cluster.job_ssh("node-2", "node-3", "hostname").stdout == "node-3\n"
    for node in ("node-1", "node-2"):
        cluster.ssh(node, "mv", "/etc/farandole/ssh/revoked_keys.kept", "/etc/farandole/ssh/revoked_keys")
    assert trust(cluster, *REVOKE).count("changed") == {"node-1": 0, "node-2": 0, "node-3": 0}


def test_a_revoked_key_is_not_signed_again_but_a_new_one_is(cluster: Cluster) -> None:
    refused = trust(cluster, "--extra-vars", "ssh_trust_mesh=true")
    assert refused.rc != 0
    assert "node-3: its host key is revoked" in refused.output
    cluster.ssh("node-3", "rm", "/etc/ssh/ssh_host_ed25519_key", "/etc/farandole/ssh/id_job")
    done = trust(cluster, "--extra-vars", "ssh_trust_mesh=true")
    assert done.rc == 0, done.output
    assert cluster.job_ssh("node-3", "node-2", "hostname").stdout == "node-2\n"
    assert cluster.job_ssh("node-2", "node-3", "hostname").stdout == "node-3\n"


def test_leaving_the_mesh_takes_the_workers_keys_away(cluster: Cluster) -> None:
    assert trust(cluster).rc == 0
    assert cluster.ssh("node-2", "ls", "/etc/farandole/ssh/id_job").returncode == 2
    assert "Permission denied" in cluster.job_ssh("node-2", "node-3", "hostname").stderr
    assert cluster.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"


def test_rotation_makes_the_old_keys_worthless_and_the_cluster_works(cluster: Cluster) -> None:
    old = ca(cluster)
    cluster.ssh("node-1", "cp", "/etc/farandole/ssh/id_job-cert.pub", "/run/old-cert.pub")
    assert trust(cluster, "--extra-vars", "ssh_trust_rotate=true").rc == 0
    assert ca(cluster) != old
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    former = cluster.ssh(
        "node-1", "runuser", "-u", "trainer", "--", "ssh", "-F", "none", "-o", "BatchMode=yes",
        "-o", "IdentityFile=/etc/farandole/ssh/id_job", "-o", "CertificateFile=/run/old-cert.pub", "node-2", "true",
    )  # fmt: skip
    assert "Permission denied" in former.stderr
    assert set(trust(cluster).count("changed").values()) == {0}
