"""Properties of the whole of site.yml, starting from bare nodes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clusters import ENVIRONMENT, QUICK, ROOT, Cluster, people, person
from elsewhere import SAFE, install, run
from plays import play

from farandole.jobs.ask import COMMAND

NODES = 2
TWO = ("--limit", "node-1,node-2")
SECRET = "correct horse battery staple"  # noqa: S105, it protects the CA of a lab

# Like another control machine, which cannot see this one's processes.
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc")
# Runs only what is tagged `always`: preflight, and the lock of site.yml.
LOCK = ("--tags", "no-such-tag", *QUICK)


def snapshot(cluster: Cluster, node: str) -> str:
    """All files below /etc, all accounts and all packages, as one text."""
    script = "cd / && find etc -type f -exec sha256sum {} + | sort -k 2; getent passwd; dpkg --get-selections"
    return cluster.ssh(node, "sh", "-c", script).stdout


def web(cluster: Cluster) -> list[str]:
    """After the boot: where nginx listens on the head, whether Debian's unit may start, and any policy-rc.d."""
    script = (
        "systemctl is-system-running --wait >/dev/null;"
        "ss --no-header -ltnp | grep nginx | grep -o ':[0-9]* ' | tr -d ': ' | sort -u;"
        "systemctl is-enabled nginx; cat /usr/sbin/policy-rc.d 2>/dev/null"
    )
    return cluster.ssh("node-1", "sh", "-c", script).stdout.split()


@pytest.fixture
def joining(cluster: Cluster) -> Cluster:
    """Two nodes after site.yml, and a third one that a run has left out."""
    if cluster.applied != TWO:
        if cluster.running() != 2:
            cluster.reset(2)
        cluster.ensure()
        cluster.farandole("up", "--nodes", "3")
        cluster.ensure(*TWO)
    return cluster


@pytest.fixture
def site(cluster: Cluster) -> Cluster:
    """Three nodes after site.yml."""
    if cluster.running() != 3:
        cluster.farandole("up", "--nodes", "3")
        cluster.applied = None
    cluster.ensure()
    return cluster


def test_check_mode_changes_nothing_and_predicts_the_changes(bare: Cluster) -> None:
    # Regression test: with such a folder any account could keep the control machine from sending files.
    block = ("runuser", "-u", "nobody", "--", "mkdir", "/var/tmp/farandole-landing-0")  # noqa: S108
    assert bare.ssh("node-1", *block).returncode == 0
    before = snapshot(bare, "node-1")
    predicted = bare.play("--check", "--diff")
    assert predicted.rc == 0, predicted.output
    assert snapshot(bare, "node-1") == before
    assert not (bare.state / "ca").exists()
    done = bare.play()
    assert done.rc == 0, done.output
    assert predicted.changes == done.changes
    assert done.changes
    landings = bare.ssh("node-1", "sh", "-c", "cd /var/tmp && ls -d farandole-*").stdout
    assert landings == "farandole-landing-0\n"
    assert web(bare) == ["8480", "masked"]


def test_limit_leaves_a_third_node_bare(joining: Cluster) -> None:
    assert joining.ssh("node-3", "id", "trainer").returncode == 1
    assert joining.ssh("node-3", "test", "-e", "/etc/farandole").returncode == 1


def test_a_node_that_loses_power_while_joining_recovers_and_leaves_the_others_unchanged(joining: Cluster) -> None:
    # The run is killed before it turns to the other nodes.
    killed = joining.play_while("node-3", "grep -qs half-installed /var/lib/dpkg/updates/*")
    joining.farandole("fault", "kill", "node-3")
    assert "preflight : Check the nodes" in killed.tasks
    assert {host for _, host in killed.changes} <= {"node-3"}
    joining.farandole("fault", "start", "node-3")
    # A state that is rarely hit: a package at the very end of unpacking, as dpkg records it.
    torn = "/^Package: libzstd1$/,/^Status:/ s/^Status: .*/Status: install reinstreq unpacked/"
    joining.ssh("node-3", "sed", "--in-place", torn, "/var/lib/dpkg/status")
    assert "libzstd1" in joining.ssh("node-3", "dpkg", "--audit").stdout
    done = joining.play()
    assert done.rc == 0, done.output
    assert joining.ssh("node-3", "dpkg", "--audit").stdout == ""
    assert {host for _, host in done.changes} == {"node-3", "node-1"}
    # The control machine signs; Ansible attributes that to the first host.
    assert {task for task, host in done.changes if host == "node-1"} == {
        "ssh_trust : Sign the keys of all nodes on the control machine"
    }
    assert joining.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"


def test_the_second_run_changes_nothing_and_asks_each_node_once(site: Cluster) -> None:
    done = site.play("-vvv")
    assert done.count("changed") == {"node-1": 0, "node-2": 0, "node-3": 0}, done.output
    logins = Counter(re.findall(r"^<(\S+)> SSH: EXEC", done.output, re.MULTILINE))
    # Other than the head, for all that the following tasks want to know.
    assert min(logins.values()) == 1, logins


def test_the_user_and_the_key_that_are_typed_win_over_the_inventory(site: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert farandole(site, "preflight").returncode == 0
    for option in (("--user", "nosuchuser"), ("--private-key", str(key))):
        refused = farandole(site, "preflight", *option)
        assert (refused.returncode, "[login-denied]" in refused.stdout) == (1, True), option
        runs = farandole(site, "runs", *option)
        assert (runs.returncode, "Permission denied" in runs.stderr) == (1, True), option
    # Plain Ansible takes its options for less than the inventory.
    plain = site.play("--user", "nosuchuser", playbook="playbooks/preflight.yml")
    assert (plain.rc, "[option-ignored]" in plain.output) == (2, True)


def status(cluster: Cluster) -> tuple[int, dict[str, Any], str]:
    """The exit status, and what is said to programs and to people."""
    done, shown = farandole(cluster, "status", "--json"), farandole(cluster, "status")
    assert done.returncode == shown.returncode, done.stderr
    assert CONTROL.search(shown.stdout) is None
    return done.returncode, json.loads(done.stdout), shown.stdout


# Root of a node can let it say anything, as much and as slowly as it likes.
LIES = {
    """printf '{"stack": "%s\\033[2J", "slots": {}, "uses": []}\\n' all-is-well""": "answer-malformed",
    "yes all is well": "answer-malformed",
    "sleep 60": "node-silent",
}
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def test_status_tells_the_truth_in_seconds_whatever_a_node_does(site: Cluster) -> None:
    code, found, shown = status(site)
    assert (code, found["good"]) == (0, True), shown
    lock = found["lock"]
    assert {node["stack"] for node in found["nodes"].values()} == {lock}
    assert all(node["slots"] > 0 for node in found["nodes"].values())
    current = "/opt/farandole/current"
    assert site.ssh("node-2", "mv", current, f"{current}.away").returncode == 0
    code, found, _ = status(site)
    assert (code, found["nodes"]["node-2"]["code"]) == (1, "node-not-set-up")
    assert site.ssh("node-2", "mv", f"{current}.away", current).returncode == 0
    for lie, liar in LIES.items():
        said = f"case $BASH_EXECUTION_STRING in '{COMMAND}') {lie};; esac"
        assert site.ssh("node-2", "sh", "-c", f"echo {shlex.quote(said)} > /root/.bashrc").returncode == 0
        code, found, shown = status(site)
        assert (code, found["nodes"]["node-1"]["code"], found["nodes"]["node-2"]["code"]) == (1, "", liar), shown
    assert site.ssh("node-2", "rm", "/root/.bashrc").returncode == 0
    site.farandole("fault", "pause", "node-2")
    code, found, shown = status(site)
    assert (code, found["nodes"]["node-2"]["code"]) == (1, "login-timeout"), shown
    assert "no answer (ssh root@" in shown
    site.farandole("fault", "resume", "node-2")


LOOSEN = ("chmod", "600", "/etc/security/limits.d/90-farandole.conf")
LOOSENED = "changed: base : Write limits and package holds on node-2\n"


def test_apply_says_what_changes_also_in_another_terminal(site: Cluster) -> None:
    assert site.ssh("node-2", *LOOSEN).returncode == 0
    command = [sys.executable, "-m", "farandole", "apply", "-i", str(site.inventory), *QUICK]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline() == "Preflight\n"
        watched = farandole(site, "watch").stdout
        said = run.stdout.read()
    assert run.returncode == 0, said
    assert said.count("changed: ") == 1
    assert LOOSENED in said
    assert LOOSENED in watched
    # Plain Ansible has the same summary, and is watched in the same way.
    summary = r"^\d hosts in 0:\d\d: nothing changed, nothing failed$"
    assert re.search(summary, site.play(*QUICK).output, re.MULTILINE)
    assert re.search(summary, farandole(site, "watch").stdout, re.MULTILINE)


def test_apply_says_what_was_done_when_it_is_interrupted(site: Cluster) -> None:
    assert site.ssh("node-2", *LOOSEN).returncode == 0
    command = [sys.executable, "-m", "farandole", "apply", "-i", str(site.inventory), *QUICK]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as run:  # fmt: skip
        assert run.stdout
        assert LOOSENED in iter(run.stdout.readline, "")
        os.killpg(run.pid, signal.SIGINT)
        said, error = run.communicate(timeout=15)
    assert run.returncode == 130
    assert "interrupted during: " in said
    assert "until then 1 change on node-2\n" in said
    assert "run the same command again" in error


def test_apply_ends_with_cause_and_cure(site: Cluster) -> None:
    site.farandole("fault", "cut", "node-2")
    try:
        failed = farandole(site, "apply", *QUICK)
    finally:
        site.farandole("fault", "heal", "node-2")
    assert failed.returncode not in (0, 1)
    summary, _, why = failed.stdout.partition("\nlog: ")
    # The node is named by the finding, and no other one is blamed.
    assert summary.splitlines()[-1].endswith(": nothing changed, failed")
    assert "node-2" in why
    assert "cure:" in why.splitlines()[-1] + why.splitlines()[-2]


def test_state_of_another_inventory_with_the_same_name_is_refused(site: Cluster, tmp_path: Path) -> None:
    other = shutil.copytree(site.inventory, tmp_path / site.name)
    refused = play(other)
    assert refused.rc != 0
    assert refused.changed_hosts == set()
    assert f"belongs to the inventory {site.inventory}, and this one is {other}" in refused.flat
    # The recorded owner is the reason for the refusal.
    owner = (site.state / "inventory").rename(tmp_path / "owner")
    admitted = play(other, *LOCK)
    owner.rename(site.state / "inventory")
    assert admitted.rc == 0, admitted.output


@contextmanager
def halted_run(cluster: Cluster) -> Iterator[int]:
    """A run that is stopped in the middle of its changes, and killed at the end."""
    run = cluster.start(*QUICK)
    try:
        run.until(lambda seen: "base : Install the base packages" in seen.tasks)
        os.kill(run.process.pid, signal.SIGSTOP)
        yield run.process.pid
    finally:
        run.end(signal.SIGKILL)


def test_a_second_concurrent_run_is_refused(site: Cluster, tmp_path: Path) -> None:
    other_state = ("--extra-vars", f"base_state_dir={tmp_path / 'state'}")
    with halted_run(site) as pid:
        refused = site.play()
        assert refused.rc != 0
        assert refused.changed_hosts == set()
        assert f"on this machine (process {pid}, since" in refused.flat
        assert f"kill {pid}" in refused.flat
        # Only the head knows about both: another clone here, and another machine with the same state folder.
        assert f"on this machine (process {pid}, since" in site.play(*LOCK, *other_state).flat
        elsewhere = site.play(*LOCK, before=ELSEWHERE)
        assert elsewhere.rc != 0
        assert re.search(rf"from 10\.94\.\d+\.1 \(process {pid}, since", elsewhere.flat), elsewhere.output
        # The record on the head is the reason for the refusal.
        site.ssh("node-1", "mv", "/var/lib/farandole-run", "/run/kept")
        admitted = site.play(*LOCK, before=ELSEWHERE)
        site.ssh("node-1", "mv", "/run/kept", "/var/lib/farandole-run")
        assert admitted.rc == 0, admitted.output
        assert site.play(*LOCK, before=ELSEWHERE).rc != 0
    # After the kill, runs from anywhere are admitted at once.
    done = site.play(*LOCK, before=ELSEWHERE)
    assert done.rc == 0, done.output
    done = site.play(*LOCK)
    assert done.rc == 0, done.output
    assert "WARNING" not in done.output


DRIFT = {
    ("base : Write limits and package holds", "echo x >>/etc/security/limits.d/90-farandole.conf"),
    (
        "base : Create the accounts of those who start jobs",
        "groupadd --force other && usermod --gid other trainer && echo trainer:known | chpasswd",
    ),
    (
        "ssh_trust : Write certificates and settings of sshd and ssh",
        "chmod 600 /etc/ssh/ssh_config.d/10-farandole.conf",
    ),
    ("ssh_trust : Reload sshd if its settings have changed", "touch /etc/ssh/sshd_config.d/10-farandole.conf"),
    (
        "stack : Install the stack alongside the others",
        "cd /opt/farandole/current/venv/bin && cp --preserve horovodrun /tmp && "
        "sed --in-place s/import/imporT/ horovodrun && touch --reference=/tmp/horovodrun horovodrun",
    ),
}


def test_drift_is_predicted_and_mended_although_most_tasks_ask_no_node(site: Cluster) -> None:
    for _, command in DRIFT:
        assert site.ssh("node-2", "sh", "-c", command).returncode == 0
    expected = {(task, "node-2") for task, _ in DRIFT}
    assert site.play("--check").changes == expected
    assert site.play().changes == expected
    account = site.ssh("node-2", "sh", "-c", "id -gn trainer; getent shadow trainer | cut -d : -f 2").stdout
    assert account.split() == ["trainer", "*"]
    assert site.play().changes == set()


def test_all_nodes_have_the_same_host_table(site: Cluster) -> None:
    tables = {site.ssh(f"node-{index}", "cat", "/etc/hosts").stdout for index in (1, 2, 3)}
    assert len(tables) == 1


def test_the_validation_play_is_green_and_names_faults(site: Cluster) -> None:
    assert "clean connections: 6" in site.play("--tags", "quick", playbook="playbooks/validate.yml").output
    limited = site.play("--limit", "node-2", playbook="playbooks/validate.yml")
    assert limited.rc != 0
    assert "nothing would be proven" in limited.output
    site.farandole("fault", "cut", "node-3")
    try:
        red = site.play("--limit", "node-1", playbook="playbooks/validate.yml")
        assert red.rc != 0
        assert re.search(r"\[peer-(timeout|no-route|unreachable|silent)\]", red.output), red.output
    finally:
        site.farandole("fault", "heal", "node-3")


# Runs of the user's own programs. They import no framework, which would take most of the time.

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


def farandole(cluster: Cluster, name: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farandole", name, "-i", str(cluster.inventory), *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, text=True, capture_output=True, check=False)


def begin(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run of train.py, and wait until the program runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "farandole", "run", "-i", str(cluster.inventory), *arguments],
        cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    assert any("rank" in line for line in process.stdout)
    return process


def running(cluster: Cluster) -> list[str]:
    """The processes of runs on all nodes, by the mark that they inherit."""
    script = "grep -lz ^FARANDOLE_JOB= /proc/[0-9]*/environ 2>/dev/null"
    return [
        pid for node in ("node-1", "node-2", "node-3") for pid in cluster.ssh(node, "sh", "-c", script).stdout.split()
    ]


@pytest.mark.parametrize("in_git", [False, True])
def test_a_program_runs_with_its_files_on_every_node(site: Cluster, project: Path, *, in_git: bool) -> None:
    if in_git:
        subprocess.run(["git", "init", "--quiet", project], check=True)
    done = farandole(site, "run", "--fetch", "results", "--", "python", "train.py", folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"[{rank}] rank {rank} on node-{rank + 1}" in done.stdout
    assert "the nodes get these links, but not what they lead to: away -> /etc/hostname" in done.stderr
    files = [".farandoleignore", ".gitignore", "away", "old", "old/2", "some data", ODD, "train.py"]
    assert {line.partition("] ")[2] for line in done.stdout.splitlines() if "[" in line[3:]} == {str(files)}
    assert (project / "results/rank").read_text() == "0"
    (project / "train.py").write_text("print('changed')")
    (project / ODD).unlink()
    again = farandole(site, "run", "--mpi", "-np", "2", "--", "python", "train.py", folder=project)
    assert sorted(again.stdout.splitlines()) == ["[0] changed", "[1] changed"]
    assert "finished after" in farandole(site, "runs").stdout.splitlines()[-1]


def test_a_failed_run_says_which_rank_and_why(site: Cluster, project: Path) -> None:
    done = farandole(site, "run", "--", "python", "train.py", "fail", folder=project)
    assert done.returncode == 1
    assert "cause: rank 1 on node-2: ValueError: the learning rate is negative" in done.stderr
    assert "ValueError: the learning rate" in farandole(site, "logs").stdout


def test_an_interrupt_ends_a_run_on_every_node(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "600")
    assert len(running(site)) > 3
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "is ended on every node" in said
    assert running(site) == []
    assert "stopped after" in farandole(site, "runs").stdout.splitlines()[-1]
    latest = farandole(site, "runs").stdout.split("\n")[-2].split()[0]
    twice = farandole(site, "stop", latest)
    assert twice.returncode == 1
    assert "has already ended: stopped after" in twice.stderr


def test_a_lost_control_machine_ends_nothing_and_another_can_attach(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "10")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    attached = farandole(site, "attach")
    assert attached.returncode == 0, attached.stderr
    assert "[2] rank 2 on node-3" in attached.stdout
    assert "finished after" in attached.stderr
    number = re.findall(r"run (\d+): finished", attached.stderr)[0]
    assert farandole(site, "fetch", number, "results", folder=project).returncode == 0
    assert (project / "results/rank").read_text() == "0"
    none = farandole(site, "fetch", number, "none", folder=project)
    assert (none.returncode, "none" in none.stderr) == (1, True)


def test_a_node_that_is_lost_in_mid_run_ends_it_and_is_named(site: Cluster, project: Path) -> None:
    process = begin(site, project, "--", "python", "train.py", "600")
    site.farandole("fault", "kill", "node-3")
    _, said = process.communicate(timeout=120)
    site.farandole("fault", "start", "node-3")
    assert process.returncode == 1
    assert "cause: node-3 stopped responding [node-silent]\ncure: start or reconnect node-3" in said
    assert running(site) == []


def test_a_full_disk_on_a_node_is_named_and_leaves_nothing_running(site: Cluster, project: Path) -> None:
    full = "mount -t tmpfs -o size=32k,uid=2000 tmpfs /home/trainer/runs"
    assert site.ssh("node-2", "sh", "-c", full).returncode == 0
    (project / "large").write_bytes(b"x" * 100_000)
    done = farandole(site, "run", "--", "python", "train.py", folder=project)
    site.ssh("node-2", "umount", "/home/trainer/runs")
    assert done.returncode == 1
    assert re.search(r"could not be copied: node-2: .*(No space left|the disk is full)", done.stderr), done.stderr
    assert running(site) == []


def test_a_node_that_is_off_when_a_run_starts_is_named(site: Cluster, project: Path) -> None:
    site.farandole("fault", "cut", "node-2")
    done = farandole(site, "run", "--", "python", "train.py", folder=project)
    site.farandole("fault", "heal", "node-2")
    assert done.returncode == 1
    assert re.search(r"cause: .*node-2 \[job-node-unreachable\]\ncure: start or reconnect node-2", done.stderr), done
    assert "the folder could not be copied: node-2" in farandole(site, "runs").stdout.splitlines()[-1]


def test_a_full_disk_on_the_head_ends_no_run(site: Cluster, project: Path) -> None:
    runs = "/home/trainer/runs"
    small = f"mount -t tmpfs -o size=1m,uid=2000,mode=700 tmpfs {runs}"
    assert site.ssh("node-1", "sh", "-c", small).returncode == 0
    script = "import time\nfor step in range(150):\n    print('rank', step, 'x' * 2000)\n    time.sleep(0.1)\n"
    (project / "train.py").write_text(script)
    try:
        process = begin(site, project, "--hosts", "node-2", "--", "python", "train.py")
        site.ssh("node-1", "sh", "-c", f"dd if=/dev/zero of={runs}/filler bs=1k")
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert re.search(r"finished after .* [1-9]\d* bytes of output could not be kept on the head: No space", said), (
            said
        )
        none = farandole(site, "run", "--", "python", "train.py", folder=project)
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
        done = farandole(site, "run", "--hosts", node, "--fetch", "out", "--", "python", "train.py", folder=project)
        said = done.stdout + done.stderr
        assert done.returncode == 1, said
        assert sorted(re.findall(r"(out/\S+) is refused: ", said)) == refused
        assert (project / "out/latest").read_text() == "weights"
        assert sorted(path.name for path in (project / "out").rglob("*")) == ["clone", "latest", "model"]
        shutil.rmtree(project / "out")


def test_who_keeps_the_lock_of_the_slots_is_named(site: Cluster, project: Path) -> None:
    lock = "/run/farandole/slots/.lock"
    site.ssh("node-1", "systemd-run", "--unit=hog", "--uid=nobody", "flock", lock, "sleep", "60")
    done = farandole(site, "run", "--", "python", "train.py", folder=project)
    site.ssh("node-1", "systemctl", "stop", "hog")
    assert re.search(rf"process (\d+) of nobody keeps {lock} locked.*: kill \1, or as root", done.stderr), done
    assert done.returncode == 1
    assert farandole(site, "run", "--", "python", "train.py", folder=project).returncode == 0


def test_runs_wait_for_each_other_or_take_free_nodes(site: Cluster, project: Path) -> None:
    first = begin(site, project, "-np", "2", "--", "python", "train.py", "600")
    refused = farandole(site, "run", "-np", "2", "--", "python", "train.py", folder=project)
    assert refused.returncode == 1
    assert re.search(
        r"too few free slots for -np 2: run \d+ of trainer, since \d\d:\d\d, on node-1, node-2", refused.stderr
    )
    beside = farandole(site, "run", "-np", "1", "--", "python", "train.py", folder=project)
    assert "[0] rank 0 on node-3" in beside.stdout
    waiting = farandole(site, "run", "--wait", "--detach", "--", "python", "train.py", folder=project)
    number = re.findall(r"run (\d+) is started", waiting.stderr)[0]
    assert "waiting: python train.py" in farandole(site, "runs").stdout.splitlines()[-1]
    farandole(site, "stop", str(int(number) - 3))
    first.communicate(timeout=60)
    then = farandole(site, "attach", number)
    assert then.returncode == 0, then.stderr
    assert "[2] rank 2 on node-3" in then.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "python", "none.py"], "there is no none.py in this folder"),
        (["--time", "2x", "--", "python", "train.py"], "'2x' is no time: write 90s, 30m, 2h or 1d"),
        (["--hosts", "node-9", "--", "python", "train.py"], "there is no node node-9; the nodes are node-1, node-2"),
        (["-np", "7", "--", "python", "train.py"], "-np 7: node-1, node-2, node-3 have 3 slots"),
        (["--fetch", "../x", "--", "python", "train.py"], "--fetch ../x: name something below this folder"),
        (["--time", "3", "--", "python", "train.py", "600"], "ended at its limit of 3 s (--time)"),
    ],
)
def test_a_run_that_cannot_be(site: Cluster, project: Path, arguments: list[str], words: str) -> None:
    done = farandole(site, "run", *arguments, folder=project)
    assert done.returncode != 0
    assert words in done.stderr
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
    refused = farandole(site, "run", *own["bob"], "-np", "2", "--", "python", "train.py", folder=project)
    (hers,) = re.findall(r"run (\d+) of alice, since \d\d:\d\d, on node-1, node-2", refused.stderr)
    beside = farandole(site, "run", *own["bob"], "-np", "1", "--", "python", "train.py", folder=project)
    assert "[0] rank 0 on node-3" in beside.stdout, beside.stderr
    assert f"run {hers} of alice on node-1, node-2" in farandole(site, "runs", *own["bob"]).stdout
    assert farandole(site, "stop", *own["bob"], "999").returncode == 1
    # Whatever they try there, it is as if the other's files did not exist.
    folder = f"/home/alice/runs/{hers}"
    for path in (f"{folder}/output", f"{folder}/code/train.py", "/etc/farandole/ssh/id_jobs/alice"):
        assert "Permission denied" in on_head(site, keys, "bob", f"cat {path}").stderr
        assert on_head(site, keys, "alice", f"cat {path}").returncode == 0
    ranks = "pgrep -u alice -f train.py"
    assert "not permitted" in on_head(site, keys, "bob", f"kill -9 $({ranks})").stderr
    assert on_head(site, keys, "alice", ranks).stdout.split()
    waiting = farandole(site, "run", *own["bob"], "--wait", "--detach", "--", "python", "train.py", folder=project)
    number = re.findall(r"run (\d+) is started", waiting.stderr)[0]
    assert f"run {hers}: stopped" in on_head(site, keys, "alice", f"farandole stop {hers}").stdout
    first.communicate(timeout=60)
    then = farandole(site, "attach", *own["bob"], number)
    assert "[2] rank 2 on node-3" in then.stdout, then.stderr


def test_no_secret_is_logged_and_the_ca_is_encrypted(site: Cluster, tmp_path: Path) -> None:
    vault, secrets = tmp_path / "vault-password", tmp_path / "secrets.yml"
    vault.write_text("of the vault\n")
    secrets.write_text(f"ssh_trust_ca_passphrase: {SECRET}\n")
    subprocess.run(["ansible-vault", "encrypt", "--vault-password-file", vault, secrets], check=True)
    unlocked = ("--vault-password-file", str(vault), "--extra-vars", f"@{secrets}")
    kept = shutil.copytree(site.state / "ca", tmp_path / "ca")
    verbose = site.play("-vvv", "--diff", *unlocked)
    assert verbose.rc == 0, verbose.output
    assert SECRET not in verbose.output
    assert "PRIVATE KEY" not in verbose.output
    opened = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", site.state / "ca" / "user_ca"], capture_output=True, check=False
    )
    assert b"incorrect passphrase" in opened.stderr
    locked_out = site.play()
    assert locked_out.rc != 0
    assert "ssh_trust_ca_passphrase" in locked_out.output
    assert site.play(*QUICK, *unlocked).rc == 0
    shutil.rmtree(site.state / "ca")
    kept.rename(site.state / "ca")


def test_a_user_with_sudo_works_like_root(site: Cluster) -> None:
    make = (
        "apt-get install --yes --no-install-recommends sudo >&2 && useradd --create-home admin"
        " && echo 'admin ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/admin"
        " && install -d -o admin -m 700 /home/admin/.ssh"
        " && install -o admin /root/.ssh/authorized_keys /home/admin/.ssh/"
    )
    for node in ("node-1", "node-2", "node-3"):
        assert site.ssh(node, "sh", "-c", make).returncode == 0
    done = site.play("--extra-vars", "ansible_user=admin")
    assert done.rc == 0, done.output
    assert done.changed_hosts == set()
    assert "[1] node-2" in farandole(site, "run", "-u", "admin", "--", "hostname").stdout


def test_the_installed_collection_does_the_same_from_another_folder(site: Cluster, tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "ansible.cfg").write_text(
        f"{SAFE}collections_path = collections\n[ssh_connection]\npipelining = true\n"
    )
    done = run(tmp_path, "ansible-playbook", "-i", site.inventory, "farandole.cluster.site", *QUICK)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^node-\S+ .* changed=(\d+) .* failed=0 ", done.stdout, re.MULTILINE) == ["0"] * 3
    # It notes what the clone's ansible.cfg has besides.
    assert "forks = 32" in done.stdout
    assert "pipelining = true" not in done.stdout


DEPOT = """
- hosts: head
  gather_facts: false
  become: true
  roles: [farandole.cluster.depot]
"""


def test_a_head_killed_while_nginx_is_installed_serves_only_the_depot(cluster: Cluster, tmp_path: Path) -> None:
    cluster.reset(1)
    playbook = tmp_path / "depot.yml"
    playbook.write_text(DEPOT)
    cluster.play_while("node-1", "test -e /usr/sbin/nginx", playbook=str(playbook))
    cluster.farandole("fault", "kill", "node-1")
    cluster.farandole("fault", "start", "node-1")
    # Finishing the installation by hand and rebooting does not start Debian's default site.
    assert cluster.ssh("node-1", "dpkg", "--configure", "--pending").returncode == 0
    assert web(cluster) == ["masked"]
    cluster.farandole("fault", "reboot", "node-1")
    assert web(cluster) == ["masked"]
    recovered = cluster.play(playbook=str(playbook))
    assert recovered.rc == 0, recovered.output
    assert web(cluster) == ["8480", "masked"]
    assert cluster.play(playbook=str(playbook)).changed_hosts == set()
