"""Runs of users' own programs, which import no framework, as that would take most of the time."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import LONG, PREPARED, QUICK, Cluster, people, person, until

from farandole.node.head.reap import GRACE

NODES = 3
KIND = PREPARED
SITE = ()

TRAIN = """
import os, pathlib, socket, sys, time
print("rank", os.environ["HOROVOD_RANK"], "on", socket.gethostname())
print(sorted(map(str, pathlib.Path(".").rglob("*"))))
if sys.argv[1:] == ["fail"] and os.environ["HOROVOD_RANK"] == "1":
    raise ValueError("the learning rate is negative")
elif sys.argv[1:] and sys.argv[1] != "fail":
    time.sleep(float(sys.argv[1]))
pathlib.Path("results").mkdir(exist_ok=True)
pathlib.Path("results/rank").write_text(os.environ["HOROVOD_RANK"])
"""
ODD = "some data/it's $HOME; [1]*.txt"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a program, files with odd names, and files that stay here."""
    for file in (ODD, "old/1.log", "old/2", "cache/2", "cache/[x]"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "away").symlink_to("/etc/hostname")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / ".farandoleignore").write_text("cache/\n")
    return tmp_path


def begin(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run of train.py, and wait until the program runs."""
    process = cluster.begin("run", *arguments, folder=folder)
    assert process.stdout
    assert any("] rank" in line for line in process.stdout), process.communicate()[1]
    return process


def running(cluster: Cluster) -> list[str]:
    """The processes of runs on all nodes, by the mark that they inherit."""
    script = "grep -lz ^FARANDOLE_JOB= /proc/[0-9]*/environ 2>/dev/null"
    return [pid for node in ("node-1", "node-2", "node-3") for pid in cluster.shell(node, script).stdout.split()]


@pytest.mark.parametrize("in_git", [False, True])
def test_a_program_runs_with_its_files_on_every_node(site: Cluster, project: Path, *, in_git: bool) -> None:
    if in_git:
        subprocess.run(["git", "init", "--quiet", project], check=True)
    done = site.farandole("run", "--fetch", "results", "--", "python", "train.py", folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"[{rank}] rank {rank} on node-{rank + 1}" in done.stdout
    assert "the nodes get these links, but not what they point to: away -> /etc/hostname" in done.stderr
    files = [".farandoleignore", ".gitignore", "away", "old", "old/2", "some data", ODD, "train.py"]
    assert {line.partition("] ")[2] for line in done.stdout.splitlines() if "[" in line[3:]} == {str(files)}
    assert (project / "results/rank").read_text() == "0"
    (project / "train.py").write_text("print('changed')")
    (project / ODD).unlink()
    again = site.farandole("run", "--mpi", "-np", "2", "--", "python", "train.py", folder=project)
    assert sorted(again.stdout.splitlines()) == ["[0] changed", "[1] changed", "farandole: 2 ranks on 2 nodes, MPI"]
    assert "finished after" in site.farandole("runs").stdout.splitlines()[-1]


def test_a_failed_run_says_which_rank_and_why(site: Cluster, project: Path) -> None:
    done = site.farandole("run", "--", "python", "train.py", "fail", folder=project)
    assert done.returncode == 1
    assert "cause: rank 1 on node-2: ValueError: the learning rate is negative" in done.stderr
    assert "ValueError: the learning rate" in site.farandole("logs").stdout


def test_nothing_is_started_on_a_node_with_a_fault(site: Cluster, project: Path) -> None:
    site.lab("fault", "fill", "node-2", "/tmp")  # noqa: S108
    try:
        done = site.farandole("run", "--", "python", "train.py", folder=project)
    finally:
        site.lab("fault", "heal", "node-2")
    assert done.returncode == 1
    assert re.search(r"^cause: .*node-2 is not fit for jobs: /tmp is full \(.* \[job-node-faulty\]$", done.stderr, re.M)
    assert "[1] rank 1" not in done.stdout


def test_an_interrupt_ends_a_run_on_every_node(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "600")
    assert len(running(site)) > 3
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, output = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "is ended on every node" in output
    # The launcher has ended by itself.
    assert time.monotonic() - begun < GRACE
    assert running(site) == []
    assert "stopped after" in site.farandole("runs").stdout.splitlines()[-1]
    latest = site.farandole("runs").stdout.split("\n")[-2].split()[0]
    twice = site.farandole("stop", latest)
    assert twice.returncode == 1
    assert "has already ended: stopped after" in twice.stderr


@LONG
def test_a_lost_control_machine_ends_nothing_and_another_can_attach(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "10")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    attached = site.farandole("attach")
    assert attached.returncode == 0, attached.stderr
    assert "[2] rank 2 on node-3" in attached.stdout
    assert "finished after" in attached.stderr
    number = re.findall(r"run (\d+): finished", attached.stderr)[0]
    assert site.farandole("fetch", number, "results", folder=project).returncode == 0
    assert (project / "results/rank").read_text() == "0"
    none = site.farandole("fetch", number, "none", folder=project)
    assert (none.returncode, "none" in none.stderr) == (1, True)


def test_a_node_that_is_lost_in_mid_run_ends_it_and_is_named(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "600")
    site.lab("fault", "kill", "node-3")
    _, output = process.communicate(timeout=120)
    site.lab("fault", "start", "node-3")
    assert process.returncode == 1
    assert "cause: node-3 stopped responding [node-silent]\ncure: start or reconnect node-3" in output
    assert running(site) == []


@LONG
def test_a_head_that_is_lost_in_mid_run_is_named_and_keeps_what_was_saved(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "600")
    site.lab("fault", "kill", "node-1")
    _, output = process.communicate(timeout=120)
    assert "unless that node went down, the run goes on there" in output
    site.lab("fault", "start", "node-1")
    until(lambda: site.farandole("runs").returncode == 0)
    attached = site.farandole("attach")
    assert attached.returncode == 1
    assert "ended by a restart of the head on node-1:1, " in attached.stderr
    assert "cause: node-1, the head, was shut down or lost power during the run [head-restarted]" in attached.stderr
    number = re.findall(r"run (\d+): ended", attached.stderr)[0]
    assert site.farandole("fetch", number, "train.py", folder=project).returncode == 0
    assert running(site) == []


@LONG
def test_a_full_disk_on_a_node_is_named_and_leaves_nothing_running(site: Cluster, project: Path) -> None:
    full = "mount -t tmpfs -o size=32k,uid=2000 tmpfs /home/trainer/runs"
    assert site.shell("node-2", full).returncode == 0
    (project / "large").write_bytes(b"x" * 100_000)
    done = site.farandole("run", "--", "python", "train.py", folder=project)
    site.ssh("node-2", "umount", "/home/trainer/runs")
    assert done.returncode == 1
    assert re.search(r"could not be copied: node-2: .*(No space left|the disk is full)", done.stderr), done.stderr
    assert running(site) == []


@LONG
def test_a_node_that_is_off_when_a_run_starts_is_named(site: Cluster, project: Path) -> None:
    site.lab("fault", "cut", "node-2")
    done = site.farandole("run", "--", "python", "train.py", folder=project)
    site.lab("fault", "heal", "node-2")
    assert done.returncode == 1
    assert re.search(r"cause: .*node-2 \[job-node-unreachable\]\ncure: start or reconnect node-2", done.stderr), done
    assert "the folder could not be copied: node-2" in site.farandole("runs").stdout.splitlines()[-1]


@LONG
def test_a_full_disk_on_the_head_ends_no_run(site: Cluster, project: Path) -> None:
    runs = "/home/trainer/runs"
    small = f"mount -t tmpfs -o size=1m,uid=2000,mode=700 tmpfs {runs}"
    assert site.shell("node-1", small).returncode == 0
    script = "import time\nfor step in range(150):\n    print('rank', step, 'x' * 2000)\n    time.sleep(0.1)\n"
    (project / "train.py").write_text(script)
    try:
        process = begin(site, project, "--hosts", "node-2", "--", "python", "train.py")
        site.shell("node-1", f"dd if=/dev/zero of={runs}/filler bs=1k")
        _, output = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert re.search(
            r"finished after .* [1-9]\d* bytes of output could not be kept on the head: No space", output
        ), output
        none = site.farandole("run", "--", "python", "train.py", folder=project)
        assert "No space left" in none.stderr
    finally:
        site.ssh("node-1", "umount", runs)


def test_nothing_that_a_job_wrote_is_obeyed_here(site: Cluster, project: Path) -> None:
    script = """
import os, pathlib
out = pathlib.Path("out")
for part in ("repository/objects", "repository/refs", "clone/.git"):
    (out / part).mkdir(parents=True)
(out / "repository/HEAD").write_text("ref: refs/heads/main")
(out / "model").write_text("weights")
(out / "latest").symlink_to("model")
(out / "settings").symlink_to("../.git/config")
"""
    (project / "train.py").write_text(script)
    refused = ["out/clone/.git", "out/repository", "out/settings"]
    for node in ("node-1", "node-2"):
        done = site.farandole("run", "--hosts", node, "--fetch", "out", "--", "python", "train.py", folder=project)
        output = done.stdout + done.stderr
        assert done.returncode == 1, output
        assert sorted(re.findall(r"(out/\S+) is refused: ", output)) == refused
        assert (project / "out/latest").read_text() == "weights"
        assert sorted(path.name for path in (project / "out").rglob("*")) == ["clone", "latest", "model"]
        shutil.rmtree(project / "out")


@LONG
def test_who_keeps_the_lock_of_the_slots_is_named(site: Cluster, project: Path) -> None:
    lock = "/run/farandole/slots/.lock"
    site.ssh("node-1", "systemd-run", "--unit=hog", "--uid=nobody", "flock", lock, "sleep", "60")
    done = site.farandole("run", "--", "python", "train.py", folder=project)
    site.ssh("node-1", "systemctl", "stop", "hog")
    assert re.search(rf"process (\d+) of nobody keeps {lock} locked.*: kill \1, or as root", done.stderr), done
    assert done.returncode == 1
    assert site.farandole("run", "--", "python", "train.py", folder=project).returncode == 0


@LONG
def test_runs_wait_for_each_other_or_take_free_nodes(site: Cluster, project: Path) -> None:
    first = begin(site, project, "-np", "2", "--", "python", "train.py", "600")
    refused = site.farandole("run", "-np", "2", "--", "python", "train.py", folder=project)
    assert refused.returncode == 1
    assert re.search(
        r"too few free slots for -np 2: run \d+ of trainer, since \d\d:\d\d, on node-1, node-2", refused.stderr
    )
    busy = site.farandole("validate", "--idle")
    assert (busy.returncode, "fewer than two nodes are idle: node-1, node-2 " in busy.stdout) == (75, True), busy
    beside = site.farandole("run", "-np", "1", "--", "python", "train.py", folder=project)
    assert "[0] rank 0 on node-3" in beside.stdout
    waiting = site.farandole("run", "--wait", "--detach", "--", "python", "train.py", folder=project)
    number = re.findall(r"run (\d+) is started", waiting.stderr)[0]
    assert "waiting: python train.py" in site.farandole("runs").stdout.splitlines()[-1]
    site.farandole("stop", str(int(number) - 3))
    first.communicate(timeout=60)
    then = site.farandole("attach", number)
    assert then.returncode == 0, then.stderr
    assert "[2] rank 2 on node-3" in then.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "python", "none.py"], "there is no none.py in this folder"),
        (["--time", "2x", "--", "python", "train.py"], "'2x' is not a duration: write 90s, 30m, 2h or 1d"),
        (["--hosts", "node-9", "--", "python", "train.py"], "there is no node node-9; the nodes are node-1, node-2"),
        (["-np", "7", "--", "python", "train.py"], "-np 7: node-1, node-2, node-3 have 3 slots"),
        (["--fetch", "../x", "--", "python", "train.py"], "--fetch ../x: name something below this folder"),
        (["--time", "3", "--", "python", "train.py", "600"], "ended at its limit of 3 s (--time)"),
    ],
)
def test_a_run_that_cannot_be(site: Cluster, project: Path, arguments: list[str], message: str) -> None:
    done = site.farandole("run", *arguments, folder=project)
    assert done.returncode != 0
    assert message in done.stderr
    assert running(site) == []


def on_head(cluster: Cluster, tmp_path: Path, name: str, script: str) -> subprocess.CompletedProcess[str]:
    return cluster.person_ssh(name, tmp_path / name, "node-1", script)


@pytest.fixture
def keys(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the keys of alice and bob, who are in the inventory."""
    folder, variables = tmp_path_factory.mktemp("keys"), cluster.inventory / "group_vars/all.yml"
    variables.parent.mkdir()
    variables.write_text(people(person("alice", 2101, folder), person("bob", 2102, folder))[1])
    yield folder
    shutil.rmtree(variables.parent)


def test_two_people_run_programs_side_by_side_and_reach_nothing_of_each_other(
    site: Cluster, project: Path, keys: Path
) -> None:
    site.ensure(*QUICK)
    own = {name: ("--user", name, "--private-key", str(keys / name)) for name in ("alice", "bob")}
    first = begin(site, project, *own["alice"], "-np", "2", "--", "python", "train.py", "600")
    refused = site.farandole("run", *own["bob"], "-np", "2", "--", "python", "train.py", folder=project)
    (hers,) = re.findall(r"run (\d+) of alice, since \d\d:\d\d, on node-1, node-2", refused.stderr)
    beside = site.farandole("run", *own["bob"], "-np", "1", "--", "python", "train.py", folder=project)
    assert "[0] rank 0 on node-3" in beside.stdout, beside.stderr
    assert f"run {hers} of alice on node-1, node-2" in site.farandole("runs", *own["bob"]).stdout
    assert site.farandole("stop", *own["bob"], "999").returncode == 1
    # Whatever they try there, it is as if the other's files did not exist.
    folder = f"/home/alice/runs/{hers}"
    for path in (f"{folder}/output", f"{folder}/code/train.py", "/etc/farandole/ssh/id_jobs/alice"):
        assert "Permission denied" in on_head(site, keys, "bob", f"cat {path}").stderr
        assert on_head(site, keys, "alice", f"cat {path}").returncode == 0
    ranks = "pgrep -u alice -f train.py"
    assert "not permitted" in on_head(site, keys, "bob", f"kill -9 $({ranks})").stderr
    assert on_head(site, keys, "alice", ranks).stdout.split()
    waiting = site.farandole("run", *own["bob"], "--wait", "--detach", "--", "python", "train.py", folder=project)
    number = re.findall(r"run (\d+) is started", waiting.stderr)[0]
    assert f"run {hers}: stopped" in on_head(site, keys, "alice", f"farandole stop {hers}").stdout
    first.communicate(timeout=60)
    then = site.farandole("attach", *own["bob"], number)
    assert "[2] rank 2 on node-3" in then.stdout, then.stderr
