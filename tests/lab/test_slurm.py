"""The queue: jobs of two people, limits, refusals, health, and what happens when a part of it dies in mid-job."""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from clusters import PREPARED, QUICK, Cluster, people, person, until

from farandole.validation import nodes as validation
from farandole.validation import plan
from farandole.validation.judge import Bars

NODES = 2
KIND = PREPARED
JOB = "/opt/farandole/samples/jobs/slurm.sh"
# What starts a sample on each node without anything by which ranks find each other.
ALONE = "unset $(env | sed -n 's/^\\(SLURM_[A-Z_]*\\)=.*/\\1/p'); exec python /opt/farandole/samples/pytorch_mnist.py"
TOO_MUCH = "import time; x = [(bytearray(20 << 20), time.sleep(0.2)) for _ in range(60)]"
# What a job's name would make if anything ran it.
NAMED = "/var/tmp/owned"  # noqa: S108
TRAIN = """
import sys, horovod.torch as hvd
hvd.init()
print("rank", hvd.rank(), "of", hvd.size())
sys.exit(int(sys.argv[1]))
"""
DDP = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "node", os.environ.get("SLURM_NODEID"))
"""
BATCH = ("--extra-vars", '{"slurm_partitions": [{"name": "batch"}]}')
# A health check comes after this many seconds at the latest.
INTERVAL = 5
TRAINED = "2 workers on 2 machines: accuracy 0.9"
IDLE = {"node-1": "idle", "node-2": "idle"}


def on_head(cluster: Cluster, script: str, user: str = "trainer") -> subprocess.CompletedProcess[str]:
    """Run a script as a person who has logged in on the head."""
    return cluster.ssh("node-1", "runuser", "-l", user, "-c", script)


def submit(cluster: Cluster, *arguments: str, user: str = "trainer") -> str:
    done = on_head(cluster, f"sbatch --parsable --output=job-%j {' '.join(arguments)}", user)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def told(cluster: Cluster, job: str, columns: str = "state") -> str:
    """What the accounting says of a job."""
    command = f"sacct --noheader --parsable2 --allocations --jobs={job} --format={columns}"
    return cluster.shell("node-1", command).stdout.strip()


def ended(cluster: Cluster, job: str, seconds: float = 90) -> str:
    until(lambda: told(cluster, job) not in ("", "PENDING", "RUNNING", "COMPLETING"), seconds)
    return told(cluster, job)


def printed(cluster: Cluster, job: str, user: str = "trainer") -> str:
    # A job's first node has what it prints.
    first = re.match(r"node-\[?(\d+)", told(cluster, job, "nodelist"))
    assert first, job
    return cluster.ssh(f"node-{first[1]}", "cat", f"/home/{user}/job-{job}").stdout


def nodes(cluster: Cluster) -> dict[str, str]:
    """The state of each node."""
    shown = cluster.ssh("node-1", "sinfo", "--Node", "--noheader", "--format=%N %T").stdout
    return dict(line.split() for line in shown.splitlines())


def reason(cluster: Cluster, node: str) -> str:
    return cluster.ssh("node-1", "sinfo", "--noheader", f"--nodes={node}", "--format=%E").stdout.strip()


def accounted(cluster: Cluster, wanted: str) -> bool:
    """Whether the last job is in the accounting in these words."""
    command = "sacct --noheader --parsable2 --allocations --format=user,jobname,nnodes,state,exitcode | tail -1"
    return bool(re.fullmatch(wanted, cluster.shell("node-1", command).stdout.strip()))


@pytest.fixture(scope="module", autouse=True)
def queue(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A queue for two people and the job user."""
    folder, variables = tmp_path_factory.mktemp("keys"), cluster.inventory / "group_vars/all.yml"
    variables.parent.mkdir(exist_ok=True)
    settings = {
        "slurm_enabled": True,
        "slurm_health_interval": INTERVAL,
        "slurm_accounts": {"caffe": {"users": ["alice"]}},
        "cluster_users": [person("alice", 2101, folder), person("bob", 2102, folder)],
    }
    variables.write_text(yaml.safe_dump(settings))
    done = cluster.play_ok()
    # Nobody sees the key by which the daemons trust each other.
    assert (cluster.state / "slurm/munge.key").read_text().strip() not in done.output
    yield
    shutil.rmtree(variables.parent, ignore_errors=True)


@pytest.fixture(autouse=True)
def shown(cluster: Cluster) -> Iterator[None]:
    """What the queue says, should the test fail."""
    yield
    print(cluster.shell("node-1", "date; sinfo -Nl; squeue; scontrol show jobs; journalctl -u slurmctld -n 60").stdout)


def test_the_next_run_changes_nothing(cluster: Cluster) -> None:
    until(lambda: nodes(cluster) == IDLE)
    assert cluster.play_ok().changes == set()


def test_two_people_queue_three_jobs(cluster: Cluster) -> None:
    users, name = ("alice", "bob", "alice"), f"'$(touch {NAMED}); %j'"
    jobs = [submit(cluster, "--exclusive", f"--job-name={name}", JOB, user=user) for user in users]
    waiting = cluster.ssh("node-1", "squeue", "--noheader", "--format=%i %u %T").stdout.splitlines()
    assert f"{jobs[2]} alice PENDING" in waiting
    assert [ended(cluster, job) for job in jobs] == ["COMPLETED"] * 3
    for job, user in zip(jobs, users, strict=True):
        assert told(cluster, job, "user,account,nnodes,exitcode") == f"{user}|users|2|0:0"
        assert TRAINED in printed(cluster, job, user)
    assert [cluster.ssh(node, "test", "-e", NAMED).returncode for node in ("node-1", "node-2")] == [1, 1]


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_other_launchers_start_as_many_ranks_as_tasks(cluster: Cluster, launcher: str) -> None:
    job = submit(cluster, f"--export=ALL,LAUNCHER={launcher}", JOB)
    assert ended(cluster, job) == "COMPLETED"
    assert TRAINED in printed(cluster, job)


def test_a_pbs_script_trains(cluster: Cluster) -> None:
    job = on_head(cluster, "qsub /opt/farandole/samples/jobs/pbs.sh").stdout.strip()
    assert job.isdigit()
    assert ended(cluster, job) == "COMPLETED"
    # It joins both outputs, and names the file as PBS does.
    shown = cluster.ssh("node-1", "cat", f"/home/trainer/horovod.o{job}").stdout
    assert TRAINED in shown
    until(lambda: cluster.ssh("node-1", "ls", "/run/farandole/pbs").stdout == "", 10)
    # Also if it tells Slurm to pass on no variable.
    script = r"cd && printf '#!/bin/sh\n#SBATCH --export=NONE\nhostname\n' >none.sh && qsub none.sh"
    assert ended(cluster, on_head(cluster, script).stdout.strip()) == "COMPLETED"
    # Slurm would kill an epilog of tasks with the ranks, and then say so in the job's output.
    assert cluster.shell("node-1", "scontrol show config | grep '^TaskEpilog *= (null)'").returncode == 0


def test_ranks_that_train_alone_fail(cluster: Cluster) -> None:
    cluster.shell("node-1", f"cat >/home/trainer/alone <<'END'\n{ALONE}\nEND")
    wrap = "'export FARANDOLE_RANKS=2; srun --mpi=none sh alone'"
    cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "scp", "/home/trainer/alone", "node-2:alone")
    job = submit(cluster, "--nodes=2", f"--wrap={wrap}")
    assert ended(cluster, job) == "FAILED"
    assert "this rank trains with 1 of 2 ranks, so each trains alone" in printed(cluster, job)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--nodes=3"], "it asks for 3 nodes; partition normal has 2"),
        (["--mem=9000G"], "MiB of memory on each node; the largest node of partition normal has"),
        (["--cpus-per-task=999"], "it asks for 999 cores of one node; the largest node of partition normal has"),
        (["--partition=fast"], "there is no partition fast; the partitions are: normal"),
        (["--job-name='x\x1b[2J'"], "its name has control characters"),
        (["--comment='x\u009b2J'"], "its comment has control characters"),
        (["--comment=$'x\\x9b2J'"], "its comment has control characters"),
        (["--output=$'x\\e]0;y'"], "its std_out has control characters"),
        (["--error=$'x\\e]0;y'"], "its std_err has control characters"),
        (["--input=$'x\\e]0;y'"], "its std_in has control characters"),
        (["--chdir=$'/tmp/\\e[2J'"], "its work_dir has control characters"),
        (["--mail-user=$'x\\e[2J'"], "its mail_user has control characters"),
        (["--wckey=$'x\\e[2J'"], "its wckey has control characters"),
        (["--account=caffe"], "you are not in the account caffe; yours: users"),
    ],
)
def test_what_can_never_run_is_refused_in_words(cluster: Cluster, options: list[str], why: str) -> None:
    done = on_head(cluster, f"sbatch {' '.join(options)} {JOB}")
    assert done.returncode and why in done.stderr


def test_what_others_see_of_a_job_has_nothing_that_terminals_obey(cluster: Cluster) -> None:
    """In words that are not those of sbatch, and with letters that are fine."""
    assert "its argv has control characters" in on_head(cluster, f"sbatch {JOB} $'\\e[2J'").stderr
    pbs = "/opt/farandole/samples/jobs/pbs.sh"
    assert on_head(cluster, f"qsub -o $'x\\e]0;y' {pbs}").returncode != 0
    fine = "scancel $(sbatch --parsable --hold --comment='Größe 語 🚀' --wrap=hostname)"
    assert on_head(cluster, fine).returncode == 0


def test_a_waiting_job_gets_no_name_that_terminals_obey(cluster: Cluster) -> None:
    job = submit(cluster, "--hold", "--wrap=hostname")
    assert on_head(cluster, f"scontrol update jobid={job} name='x\x1b[2J'").returncode != 0
    rename = f"scontrol update jobid={job} name=x && squeue --noheader --jobs={job} --format=%j; scancel {job}"
    assert on_head(cluster, rename).stdout == "x\n"


def test_the_queue_is_for_people_that_it_knows(cluster: Cluster) -> None:
    assert "root starts no jobs" in cluster.ssh("node-1", "sbatch", JOB).stderr
    cluster.ssh("node-1", "useradd", "--create-home", "zoe")
    assert "adds you to cluster_users and runs site.yml" in on_head(cluster, f"sbatch {JOB}", "zoe").stderr
    assert ended(cluster, submit(cluster, "--account=caffe", "--wrap=hostname", user="alice")) == "COMPLETED"


def test_a_job_that_uses_too_much_memory_is_ended(cluster: Cluster) -> None:
    job = submit(cluster, "--mem=100M", f"--wrap='python -c \"{TOO_MUCH}\"'")
    assert ended(cluster, job) in ("FAILED", "OUT_OF_MEMORY")
    assert "exceeded memory limit" in printed(cluster, job) or "oom-kill" in printed(cluster, job)


def test_the_validation_finds_that_limits_hold_and_that_a_job_over_its_time_leaves_nothing(cluster: Cluster) -> None:
    both = ["node-1", "node-2"]
    jobs = plan.jobs(both, ["pytorch"], 120, Bars(), quick=False, queue=both)
    task = validation.task(next(job for job in jobs if job["id"] == "queue.limits"))
    command = ("runuser", "-u", "trainer", "--", "python3", "-", json.dumps(task))
    done = cluster.shell("node-1", f"{shlex.join(command)} <<'END'\n{validation.program('job')}\nEND")
    answer = json.loads(done.stdout)
    assert (answer["code"], answer["wrong"], answer["left"]) == (0, [], {"node-1": [], "node-2": []}), answer
    assert len({rank["machine"] for rank in answer["ranks"]}) == 2


def test_a_health_check_drains_and_takes_back_only_what_it_drained(cluster: Cluster) -> None:
    assert cluster.shell("node-2", "mount -t tmpfs -o size=1m x /opt").returncode == 0
    took = until(lambda: nodes(cluster)["node-2"] == "drained", 60)
    assert re.match(
        r"farandole health: /opt is full \(less than 20 MiB or 100 inodes free\); find what fills it",
        reason(cluster, "node-2"),
    )
    cluster.ssh("node-2", "umount", "/opt")
    until(lambda: nodes(cluster)["node-2"] == "idle", 60)
    assert took < 60
    cluster.ssh("node-1", "scontrol", "update", "nodename=node-2", "state=drain", "reason=fan")
    cluster.shell("node-2", "mount -t tmpfs -o size=1m x /opt; sleep 12; umount /opt; sleep 12")
    assert (nodes(cluster)["node-2"], reason(cluster, "node-2")) == ("drained", "fan")
    cluster.ssh("node-1", "scontrol", "update", "nodename=node-2", "state=resume")


def check_every(cluster: Cluster, seconds: int) -> None:
    change = f"sed -i 's/^HealthCheckInterval=.*/HealthCheckInterval={seconds}/' /etc/slurm/slurm.conf"
    assert cluster.shell("node-1", f"{change} && scontrol reconfigure").returncode == 0


def test_a_node_is_checked_before_and_after_each_job(cluster: Cluster) -> None:
    fill, found = "mount -t tmpfs -o size=1m x /opt", r"farandole health: /opt is full"
    try:
        check_every(cluster, 3600)
        cluster.ssh("node-2", *fill.split())
        job = submit(cluster, "--nodelist=node-2", "--wrap='echo ran >>once'")
        until(lambda: nodes(cluster)["node-2"] == "drained")
        assert re.match(found, reason(cluster, "node-2"))
        until(lambda: told(cluster, job) == "PENDING")
        cluster.ssh("node-2", "umount", "/opt")
        check_every(cluster, INTERVAL)
        until(lambda: nodes(cluster)["node-2"] == "idle")
        cluster.ssh("node-1", "scontrol", "update", f"jobid={job}", "starttime=now")
        assert ended(cluster, job) == "COMPLETED"
        assert cluster.ssh("node-2", "cat", "/home/trainer/once").stdout == "ran\n"
        # As before, it would not start again after the loss of its node.
        assert " Requeue=0 " in cluster.ssh("node-1", "scontrol", "show", "job", job).stdout
        check_every(cluster, 3600)
        waits = "'until [ -e filled ]; do sleep 0.2; done; rm filled'"
        job = submit(cluster, "--nodelist=node-2", f"--wrap={waits}")
        until(lambda: told(cluster, job) == "RUNNING")
        cluster.shell("node-2", f"{fill} && touch /home/trainer/filled")
        assert ended(cluster, job) == "COMPLETED"
        until(lambda: bool(re.match(found, reason(cluster, "node-2"))))
    finally:
        cluster.shell("node-2", "umount /opt")
        check_every(cluster, INTERVAL)
    until(lambda: nodes(cluster)["node-2"] == "idle")


def test_a_gpu_belongs_to_one_job_and_a_lost_one_is_no_longer_offered(cluster: Cluster) -> None:
    # There is none here: Slurm itself looks at the devices alone, and gives them out by number.
    device = "touch {0} && mount --bind /dev/null {0}"
    cluster.shell("node-2", " && ".join(device.format(f"/dev/nvidia{number}") for number in (0, 1)))
    cluster.play_ok(*QUICK)
    assert nodes(cluster)["node-2"] == "idle"
    wait = "'echo GPU $CUDA_VISIBLE_DEVICES; until [ -e go ]; do sleep 0.2; done'"
    jobs = [submit(cluster, "--gres=gpu:1", "--mem=100M", f"--wrap={wait}") for _ in range(3)]
    until(lambda: [told(cluster, job) for job in jobs] == ["RUNNING", "RUNNING", "PENDING"])
    refused = on_head(cluster, "sbatch --gres=gpu:3 --wrap=hostname").stderr
    assert "it asks for 3 GPUs on each node; the nodes of partition normal have 2" in refused
    cluster.ssh("node-2", "touch", "/home/trainer/go")
    assert [ended(cluster, job) for job in jobs] == ["COMPLETED"] * 3
    assert sorted(printed(cluster, job) for job in jobs[:2]) == ["GPU 0\n", "GPU 1\n"]
    assert "gres/gpu=1" in told(cluster, jobs[2], "alloctres%80")
    # Horovod starts all ranks of a node in one step.
    step = "/usr/local/lib/farandole/slurm/ssh node-2 'echo GPU $CUDA_VISIBLE_DEVICES'"
    wish = ("--nodelist=node-2", "--ntasks=2", "--gpus-per-task=1", "--mem=100M")
    job = submit(cluster, *wish, f"--wrap={shlex.quote(step)}")
    assert (ended(cluster, job), printed(cluster, job)) == ("COMPLETED", "GPU 0,1\n")
    # A run has the share of a node that its slots are.
    run = cluster.farandole("run", "--hosts", "node-2", "-np", "1", "--", "sh", "-c", "echo GPUs $CUDA_VISIBLE_DEVICES")
    assert "GPUs 0,1" in run.stdout, run.stderr
    until(partial(accounted, cluster, r"trainer\|farandole-run-\d+\|1\|COMPLETED\|0:0"), 30)
    cluster.shell("node-2", "umount /dev/nvidia1 && rm /dev/nvidia1; systemctl restart slurmd")
    cluster.play_ok(*QUICK)
    until(lambda: nodes(cluster)["node-2"] == "idle")
    assert "gpu:1" in cluster.ssh("node-1", "sinfo", "--noheader", "--nodes=node-2", "--format=%G").stdout
    cluster.shell("node-2", "umount /dev/nvidia0 && rm /dev/nvidia0")


def test_an_excluded_node_is_drained_with_who_and_why(cluster: Cluster) -> None:
    assert cluster.farandole("node exclude", "node-2", "--why", "fan").returncode == 0
    cluster.play_ok(*QUICK)
    until(lambda: nodes(cluster)["node-2"] == "drained")
    assert re.match(r"farandole: excluded since \S+ by \S+: fan", reason(cluster, "node-2"))
    # A person wants it back, so it is proven.
    assert cluster.farandole("node include", "node-2").returncode == 0
    waits = cluster.play_ok(*QUICK)
    assert "[node-mended]" in waits.output
    assert nodes(cluster)["node-2"] == "drained"
    done = cluster.farandole("apply")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proven now, before they take part again: node-2" in done.stdout
    # With a star, it has not answered yet since slurmctld was started.
    until(lambda: nodes(cluster)["node-2"] == "idle")


@pytest.mark.parametrize("service", ["slurmctld", "slurmdbd", "mariadb"])
def test_a_job_goes_on_while_a_part_of_the_queue_is_dead(cluster: Cluster, service: str) -> None:
    job = submit(cluster, "--nodes=2", "--wrap='srun sleep 16; echo done'")
    until(lambda: told(cluster, job) == "RUNNING")
    # slurmctld saves its jobs every five seconds.
    time.sleep(7)
    cluster.ssh("node-1", "systemctl", "kill", "--signal=KILL", service)
    cluster.ssh("node-1", "systemctl", "stop", service)
    time.sleep(12)
    assert cluster.ssh("node-1", "grep", "-c", "done", f"/home/trainer/job-{job}").stdout == "1\n"
    cluster.ssh("node-1", "systemctl", "start", service)
    assert ended(cluster, job) == "COMPLETED"
    assert told(cluster, job, "user,nnodes,exitcode") == "trainer|2|0:0"


def test_farandole_run_goes_through_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for status, state in ((0, "COMPLETED|0:0"), (3, "FAILED|1:0")):
        done = cluster.farandole("run", "--", "python", "train.py", str(status), folder=tmp_path)
        assert "[1] rank 1 of 2" in done.stdout, done.stderr
        assert "the queue ends this run after 1:00:00; --time" in done.stdout + done.stderr
        wanted = rf"trainer\|farandole-run-\d+\|2\|{re.escape(state)}"
        # The accounting may be some seconds behind.
        until(partial(accounted, cluster, wanted), 30)
    # A run that is ended gives its nodes back.
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    assert cluster.farandole("run", "--time", "3", "--", "python", "train.py", folder=tmp_path).returncode != 0
    assert cluster.ssh("node-1", "squeue", "--noheader").stdout == ""
    until(lambda: nodes(cluster) == IDLE)


def test_other_launchers_of_farandole_run_go_through_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    for launcher, shape in (("torchrun", "torchrun"), ("python", "Horovod")):
        done = cluster.farandole("run", "--", launcher, "train.py", folder=tmp_path)
        assert f"2 ranks on 2 nodes, {shape}" in done.stdout, done.stderr
        nodes_of_ranks = dict(re.findall(r"rank (\d) of 2 node (\S+)", done.stdout))
        assert set(nodes_of_ranks) == {"0", "1"}
        # By which Lightning knows its place in the queue.
        assert launcher == "torchrun" or nodes_of_ranks == {"0": "0", "1": "1"}


def test_validation_runs_a_job_through_the_queue(cluster: Cluster) -> None:
    done = cluster.play("--tags", "quick", playbook="playbooks/validate.yml")
    assert re.search(r"^ +queue +green ", done.output, re.MULTILINE), done.output


# A job that waits for a word, and is then queued again.
AGAIN = "echo ran >>ran; until [ -e go ]; do sleep 0.2; done; scontrol requeue $SLURM_JOB_ID; sleep 60"


def test_a_person_who_was_removed_runs_nothing_any_more(cluster: Cluster, tmp_path: Path) -> None:
    later = ("--hold", "--begin=now+3600", "--begin=now+3600 --array=1-3")
    waiting = [submit(cluster, option, "--wrap=hostname", user="bob") for option in later]
    job = submit(cluster, "--requeue", "--nodelist=node-1", f"--wrap={shlex.quote(AGAIN)}", user="bob")
    until(lambda: told(cluster, job) == "RUNNING")
    busy = cluster.farandole("validate", "--idle", "--hosts", "node-1,node-2")
    assert (busy.returncode, "fewer than two nodes are idle: node-1 " in busy.stdout) == (75, True), busy
    cluster.play_ok(*QUICK, *people(person("alice", 2101, tmp_path)))
    assert cluster.ssh("node-1", "squeue", "--noheader", "--format=%A %T").stdout == f"{job} RUNNING\n"
    assert {told(cluster, other).split()[0] for other in waiting} == {"CANCELLED"}

    def queued_again() -> None:
        cluster.ssh("node-1", "touch", "/home/bob/go")
        until(lambda: told(cluster, job) == "PENDING")
        cluster.ssh("node-1", "rm", "/home/bob/go")
        # Slurm would wait for two minutes, and refuses another time for a job that it is still putting back.
        until(lambda: cluster.ssh("node-1", "scontrol", "update", f"jobid={job}", "starttime=now").returncode == 0)

    program = "/usr/local/libexec/farandole/prolog"
    cluster.ssh("node-1", "mount", "--bind", "/bin/true", program)
    queued_again()
    until(lambda: cluster.ssh("node-1", "cat", "/home/bob/ran").stdout == "ran\nran\n")
    cluster.ssh("node-1", "umount", program)
    queued_again()
    assert ended(cluster, job).startswith("CANCELLED")
    assert cluster.ssh("node-1", "cat", "/home/bob/ran").stdout == "ran\nran\n"
    # Nothing is drained by it.
    until(lambda: nodes(cluster) == IDLE)


def test_running_jobs_of_a_person_who_was_removed_are_cancelled_if_wished(cluster: Cluster, tmp_path: Path) -> None:
    listed = people(person("alice", 2101, tmp_path), person("bob", 2102, tmp_path))
    cluster.play_ok(*QUICK, *listed)
    job = submit(cluster, "--nodes=2", "--wrap='srun sleep 600'", user="bob")
    until(lambda: told(cluster, job) == "RUNNING")
    ending = ("--extra-vars", "base_end_jobs=true", *people(person("alice", 2101, tmp_path)))
    cluster.play_ok(*QUICK, *ending)
    assert ended(cluster, job).startswith("CANCELLED")


def test_jobs_go_on_while_a_node_joins_another_has_less_memory_and_the_partition_gets_another_name(
    cluster: Cluster,
) -> None:
    job = submit(cluster, "--nodes=2", "--wrap='srun sleep 60; echo done'")
    waits = submit(cluster, "--nodes=2", "--exclusive", "--wrap='srun hostname'")
    until(lambda: told(cluster, job) == "RUNNING")
    # As if it had had more memory when the settings were written.
    more = "sed -i '/^NodeName=node-2/s/RealMemory=[0-9]*/RealMemory=999999/' /etc/slurm/slurm.conf"
    cluster.shell("node-1", f"{more}; systemctl restart slurmctld")
    cluster.ssh("node-2", "systemctl", "restart", "slurmd")
    until(lambda: reason(cluster, "node-2").startswith("Low RealMemory"))
    cluster.lab("up", "--nodes", "3")
    cluster.play_ok(*QUICK, *BATCH)
    until(lambda: nodes(cluster).get("node-3") == "idle")
    assert "the partitions are: batch" in on_head(cluster, "sbatch --partition=normal --wrap=hostname").stderr
    assert told(cluster, job) in ("RUNNING", "COMPLETED")
    assert [ended(cluster, number) for number in (job, waits)] == ["COMPLETED", "COMPLETED"]
    assert reason(cluster, "node-2") == "none"
    joined = submit(cluster, "--nodes=3", "--wrap='srun hostname'")
    assert ended(cluster, joined) == "COMPLETED"
    assert sorted(printed(cluster, joined).split()) == ["node-1", "node-2", "node-3"]


def test_a_node_lost_in_mid_job_is_named_and_proven_before_it_gets_another_one(cluster: Cluster) -> None:
    job = submit(cluster, "--nodes=3", "--wrap='srun sleep 600'")
    again = submit(cluster, "--requeue", "--nodelist=node-3", "--wrap='sleep 20'")
    until(lambda: [told(cluster, number) for number in (job, again)] == ["RUNNING", "RUNNING"])
    cluster.lab("fault", "kill", "node-3")
    # After about 100 s, which begin anew as the queue reads its settings 45 s after its start in the test before.
    assert ended(cluster, job, 180) == "NODE_FAIL"
    assert nodes(cluster)["node-3"].startswith("down")
    cluster.lab("fault", "start", "node-3")
    until(lambda: nodes(cluster)["node-3"] == "down", 90)
    # As if this one had booted while the head was off, too, which a container never does by itself.
    check_every(cluster, 3600)
    booted = cluster.ssh("node-2", "cat", "/var/lib/farandole/boot").stdout
    cluster.ssh("node-2", "sh", "-c", "echo another >/var/lib/farandole/boot")
    early = submit(cluster, "--nodelist=node-2", "--wrap=true")
    until(lambda: nodes(cluster)["node-2"] == "drained")
    until(lambda: told(cluster, early) == "PENDING")
    assert reason(cluster, "node-2") == "farandole health: it has booted (farandole apply proves it)"
    # The head's disk is mended.
    check_every(cluster, INTERVAL)
    cluster.ssh("node-1", "sh", "-c", "mount --bind /opt /opt && mount -o remount,bind,ro /opt")
    until(lambda: reason(cluster, "node-1") == "farandole health: /opt can only be read; look at dmesg")
    cluster.ssh("node-1", "umount", "/opt")
    until(lambda: reason(cluster, "node-1") == "farandole health: it was mended (farandole apply proves it)")
    # Their own check takes none of them back.
    time.sleep(2 * INTERVAL)
    status = cluster.farandole("status")
    assert "the queue gives it no jobs (down: Not responding)" in status.stdout
    # It has no stack yet either.
    assert "next, to set the nodes up: farandole apply" in status.stdout
    # There is no time for the jobs.
    failed = cluster.farandole("apply", *BATCH, "--extra-vars", "validation_seconds=1")
    assert failed.returncode == 1
    no_jobs = "the queue gives node-1 to node-3 no jobs: the validation is red"
    assert no_jobs in failed.stderr, failed.stdout + failed.stderr
    assert nodes(cluster) == {"node-1": "drained", "node-2": "drained", "node-3": "down"}
    done = cluster.farandole("apply", *BATCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the queue gives them jobs again: node-1 to node-3" in done.stdout
    assert re.search(r"^queue\.node-3 +not measured .* the queue gives it no jobs now$", done.stdout, re.MULTILINE)
    assert cluster.ssh("node-2", "cat", "/var/lib/farandole/boot").stdout == booted
    assert ended(cluster, early) == "COMPLETED"

    # Only the job that asked for it starts again.
    def is_done() -> bool:
        on_head(cluster, f"scontrol update jobid={again} starttime=now")
        return told(cluster, again) == "COMPLETED"

    until(is_done, 300)
    assert told(cluster, job) == "NODE_FAIL"
    assert set(nodes(cluster).values()) == {"idle"}


def test_another_key_is_replaced(cluster: Cluster) -> None:
    cluster.shell("node-2", "date | sha512sum >/etc/munge/munge.key; systemctl restart munge slurmd")
    assert cluster.ssh("node-2", "sinfo").returncode != 0
    cluster.play_ok(*QUICK)
    until(lambda: nodes(cluster)["node-2"] == "idle")


def test_a_cluster_without_a_queue_keeps_nothing_of_it(cluster: Cluster) -> None:
    job = submit(cluster, "--nodes=3", "--wrap='srun sleep 600'")
    until(lambda: told(cluster, job) == "RUNNING")
    shutil.rmtree(cluster.inventory / "group_vars")
    cluster.play_ok(*QUICK)
    left = "pgrep -u trainer -x sleep; ls /etc/munge/munge.key /etc/slurm/slurm.conf; systemctl is-active slurmd"
    for node in ("node-1", "node-2", "node-3"):
        assert cluster.shell(node, left).stdout == "inactive\n"
    assert not (cluster.state / "slurm").exists()
    assert cluster.play_ok(*QUICK).changes == set()
