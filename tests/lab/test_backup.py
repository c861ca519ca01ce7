"""A backup of a cluster, taken over after its head was destroyed and this machine lost its state."""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from clusters import PREPARED, Cluster, until

NODES = 3
KIND = PREPARED
SITE = ("--skip-tags", "stack,build_tools")
# The name of a table with which the former head would give orders to the next one's MariaDB.
ORDER = "`zz` TO slurm_acct_db.q; CREATE DATABASE told; #"
RUNS = "mkdir -p runs/7/code && cd runs && echo {} >7/run.json && echo hello >7/output && touch .last 7/code/x"


def settings(cluster: Cluster, **variables: object) -> None:
    path = cluster.inventory / "group_vars/all.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"slurm_enabled": True, **variables}))


@pytest.fixture(scope="module")
def queue(cluster: Cluster) -> Iterator[Cluster]:
    """Three nodes with a queue, as the only test that changes that comes last."""
    settings(cluster)
    cluster.ensure(*SITE)
    yield cluster
    # What a user wrote is kept when a lab is removed.
    shutil.rmtree(cluster.inventory / "group_vars")


@pytest.fixture
def password(tmp_path: Path) -> Path:
    (tmp_path / "password").write_text("correct horse\n")
    return tmp_path / "password"


def on(cluster: Cluster, node: str, script: str) -> str:
    """What a script of the job user's prints."""
    done = cluster.ssh(node, "runuser", "-l", "trainer", "-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def submit(cluster: Cluster, node: str, *options: str, program: str = "hostname") -> str:
    return on(cluster, node, f"sbatch --parsable --output=/dev/null {' '.join(options)} --wrap '{program}'")


def jobs(cluster: Cluster, node: str) -> dict[str, str]:
    """The jobs that the accounting knows, and their states."""
    shown = cluster.shell(node, "sacct --allusers -X --noheader --parsable2 --format=jobid,state").stdout
    return dict(line.split("|") for line in shown.splitlines())


def waiting(cluster: Cluster, node: str) -> dict[str, str]:
    shown = cluster.shell(node, "squeue --noheader --states=PENDING --format='%i %r'").stdout
    return dict(line.split(maxsplit=1) for line in shown.splitlines())


def requeued(cluster: Cluster, node: str, job: str) -> bool:
    """Whether a job that runs would start again when its node is lost."""
    return "Requeue=1" in cluster.shell(node, f"scontrol show job {job}").stdout.split()


def well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def revoked(cluster: Cluster) -> set[str]:
    """Whose keys are revoked here."""
    return {line.split()[-1] for line in (cluster.state / "ca/revoked_keys").read_text().splitlines()}


def move_head(cluster: Cluster, node: str) -> None:
    """Make another node the head; the first one is destroyed."""
    hosts = cluster.inventory / "hosts.yml"
    mark, _, text = hosts.read_text().partition("\n")
    content = yaml.safe_load(text)
    content["cluster"]["hosts"].pop("node-1", None)
    content["head"]["hosts"] = {node: None}
    hosts.write_text(f"{mark}\n{yaml.safe_dump(content)}")


def fill(cluster: Cluster, node: str) -> None:
    """Leave little of the disk of the database; on a full one, MariaDB would wait instead of stopping."""
    cluster.shell(node, "systemctl stop slurmctld slurmdbd mariadb")
    cluster.lab("fault", "fill", node, "/var/lib/mysql")
    script = "cd /var/lib/mysql && truncate --size=-20M filler && chown mysql: . && systemctl start mariadb"
    cluster.shell(node, f"{script} && systemctl start slurmdbd slurmctld")


def heal(cluster: Cluster, node: str) -> None:
    cluster.shell(node, "systemctl stop slurmctld slurmdbd mariadb")
    cluster.lab("fault", "heal", node)
    cluster.shell(node, "systemctl start mariadb && systemctl start slurmdbd && sleep 1 && systemctl start slurmctld")


def test_a_backup_does_not_disturb_a_run_that_changes_the_cluster(queue: Cluster, tmp_path: Path) -> None:
    run = queue.start(*SITE)
    run.until(lambda seen: any("Refuse if another run" in task for task in seen.tasks))
    done = queue.farandole("backup", str(tmp_path / "file"))
    assert run.end().rc == 0
    assert done.returncode == 1
    assert "this cluster is being changed by" in done.stdout + done.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_destroyed_head_is_replaced_from_a_backup(
    queue: Cluster, tmp_path: Path, password: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, secret, told = str(tmp_path / "file"), ("--password-file", str(password)), dict[str, float]()

    def timed(what: str, *words: str) -> subprocess.CompletedProcess[str]:
        begun = time.monotonic()
        done = queue.farandole(*words)
        told[what] = time.monotonic() - begun
        return done

    ended = [submit(queue, "node-1") for _ in range(2)]
    runs = submit(queue, "node-1", "--nodelist=node-3", "--exclusive", "--requeue", program="sleep 600")
    waits = submit(queue, "node-1", "--nodelist=node-3")
    own = submit(queue, "node-1", "--hold")
    on(queue, "node-1", RUNS)
    tables = f"CREATE TABLE zz (i int); CREATE TABLE `{ORDER.replace('`', '``')}` (i int)"
    assert queue.shell("node-1", f"mariadb slurm_acct_db --execute {shlex.quote(tables)}").returncode == 0
    until(lambda: [jobs(queue, "node-1").get(job) for job in (*ended, runs)] == ["COMPLETED"] * 2 + ["RUNNING"])
    assert requeued(queue, "node-1", runs)
    well(timed("backup", "backup", file, *secret))

    # Everything is lost: the head, and the folder of the state, which knew that the head was revoked.
    queue.lab("fault", "kill", "node-1")
    move_head(queue, "node-2")
    settings(queue, ssh_trust_revoked=["node-1"])
    well(timed("apply with another head", "apply", *SITE))
    assert revoked(queue) == {"node-1"}
    shutil.rmtree(queue.state)
    settings(queue)
    well(timed("restore", "restore", file, *secret))
    assert revoked(queue) == set()
    # Nothing is signed before all nodes have been asked.
    assert "was restored from a backup" in queue.farandole("apply", *SITE, "--limit", "node-2").stdout
    well(timed("apply with a new CA", "apply", *SITE))
    assert revoked(queue) == {"node-1"}

    fill(queue, "node-2")
    full = queue.farandole("restore", file, "--head", *secret)
    assert full.returncode == 1
    assert re.search(r"node-2: the accounting: /var/lib/mysql/ has \d+ MiB free, but", full.stdout + full.stderr)
    heal(queue, "node-2")
    # A job that the backup lacks is not forgotten unless that is wanted, also one that its person holds.
    newer = submit(queue, "node-2", "--hold")
    refused = queue.farandole("restore", file, "--head", *secret)
    assert refused.returncode == 1
    assert f"jobs that the backup lacks ({newer})" in refused.stdout + refused.stderr
    assert waiting(queue, "node-2") == {newer: "JobHeldUser"}
    well(timed("restore --head", "restore", file, "--head", "--replace", *secret))

    known = queue.shell(
        "node-2", "mariadb --skip-column-names --execute 'SHOW DATABASES; SHOW TABLES IN slurm_acct_db'"
    )
    assert "told" not in known.stdout.splitlines() and ORDER in known.stdout.splitlines()
    assert {job: jobs(queue, "node-2").get(job) for job in ended} == dict.fromkeys(ended, "COMPLETED")
    assert waiting(queue, "node-2") == {waits: "JobHeldUser", own: "JobHeldUser"}
    assert on(queue, "node-2", "cat runs/7/output; ls -A runs runs/7").split() == [
        "hello", "runs:", ".last", "7", "runs/7:", "output", "run.json",
    ]  # fmt: skip
    assert not requeued(queue, "node-2", runs)
    # The queue takes jobs at once, counts on, and starts none again that has run.
    new = submit(queue, "node-2", "--nodes=2", program="srun hostname")
    assert int(new) > int(own)
    on(queue, "node-2", f"scontrol release {waits}")
    until(lambda: [jobs(queue, "node-2").get(job) for job in (new, waits)] == ["COMPLETED"] * 2)
    until(lambda: jobs(queue, "node-2").get(runs) == "NODE_FAIL")
    # Once more, as after an interruption.
    assert "jobs that the backup lacks" in queue.farandole("restore", file, "--head", *secret).stdout
    well(queue.farandole("apply", *SITE))
    assert queue.play_ok(*SITE).changes == set()
    with capsys.disabled():
        print("".join(f"\n{seconds:6.0f} s  {what}" for what, seconds in told.items()))


def test_homes_are_saved_if_that_is_wished(queue: Cluster, tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    on(queue, "node-2", "mkdir results && cd results && echo old | tee one >both && ln -s /etc/shadow link")
    well(queue.farandole("backup", file, "--homes"))
    on(queue, "node-2", "cd results && rm one link && echo new >both")
    well(queue.farandole("restore", file, "--head", "--replace"))
    # What is there stays.
    assert on(queue, "node-2", "cd results && cat one both && readlink link").split() == ["old", "new", "/etc/shadow"]


def test_a_former_head_is_a_node_like_others(queue: Cluster) -> None:
    move_head(queue, "node-3")
    done = queue.play_ok(*SITE)
    assert ("slurm : Stop the queue of a former head", "node-2") in done.changes, done.output
    assert queue.shell("node-2", "systemctl is-active slurmctld slurmdbd slurmd").stdout.split() == [
        "inactive", "inactive", "active",
    ]  # fmt: skip
    job = submit(queue, "node-2", "--nodelist=node-2")
    until(lambda: jobs(queue, "node-3").get(job) == "COMPLETED")
    assert queue.play_ok(*SITE).changes == set()
