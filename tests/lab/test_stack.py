"""The stack on real nodes: build, install, join, damage, upgrade, roll back."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from clusters import ENVIRONMENT, LONG, ROOT, Cluster
from poisoned import poison

from farandole.stack.cache import Builds, lab_builds
from farandole.validation.nodes import program

NODES = 2
CURRENT = "/opt/farandole/current"
FRAMEWORKS = {"torch": "horovod.torch", "tensorflow": "horovod.tensorflow"}
# Tasks that compile; adding a node must not run them.
COMPILES = re.compile(r"Compile (OpenMPI|Horovod)|Create the Python environment|Pack the stack")
EARLIER_NUMPY = "numpy==2.3.4"


def stack_of(cluster: Cluster, node: str) -> str:
    """The id of a node's current stack, empty if it has none."""
    return cluster.ssh(node, "readlink", CURRENT).stdout.strip().removeprefix("stacks/")


def locked(cluster: Cluster) -> str:
    """The id of the locked stack."""
    stack: str = yaml.safe_load((cluster.inventory / "stack.lock.yml").read_text())["id"]
    return stack


def ranks(cluster: Cluster, framework: str, controller: str, *nodes: str) -> list[dict[str, object]]:
    """Run the allreduce probe on these nodes as the job user on the head; returns each rank's result."""
    probe = program("allreduce")
    count = str(len(nodes))
    done = cluster.ssh(
        "node-1", "runuser", "-u", "trainer", "--", "timeout", "120", "horovodrun", f"--{controller}", "-np", count,
        "-H", ",".join(f"{node}:1" for node in nodes), "python", "-c", probe, framework, "--expect", count,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]


def proven(cluster: Cluster, *nodes: str) -> bool:
    """Run one job of each framework over these nodes."""
    for framework, controller in (("torch", "gloo"), ("tensorflow", "mpi")):
        results = ranks(cluster, framework, controller, *nodes)
        assert sorted(str(rank["host"]) for rank in results) == sorted(nodes)
    return True


LATER = """
import pathlib, time
import horovod.torch as hvd, torch
hvd.init()
hvd.allreduce(torch.ones(1))
while not pathlib.Path.home().joinpath("go").exists():
    time.sleep(1)
import torch.utils.benchmark as late
print("imports from", late.__file__.split("/")[4])
"""

# What starts with a stack dies.
CRASHES = """
while sleep 0.2; do
    for pid in $(grep -lsz '^FARANDOLE_STACK=.*/{stack}$' /proc/[0-9]*/environ | cut -d / -f 3); do
        case $(readlink /proc/$pid/exe) in */python3*) kill -SEGV $pid ;; esac
    done
done
"""


@pytest.fixture(autouse=True)
def installed(cluster: Cluster) -> None:
    """The stack on the first two nodes."""
    if not stack_of(cluster, "node-1"):
        cluster.play_ok()


@pytest.fixture
def three(cluster: Cluster) -> Cluster:
    """Three nodes with the stack."""
    if cluster.running() < 3:
        cluster.lab("up", "--nodes", "3")
        cluster.play_ok()
    return cluster


def test_bare_nodes_get_the_stack_and_a_second_run_changes_nothing(cluster: Cluster) -> None:
    assert stack_of(cluster, "node-1") == stack_of(cluster, "node-2") == locked(cluster)
    assert set(cluster.play_ok().count("changed").values()) == {0}


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_rank_is_on_its_node_and_finds_no_error(cluster: Cluster, framework: str, controller: str) -> None:
    results = ranks(cluster, framework, controller, "node-1", "node-2")
    assert sorted(str(rank["host"]) for rank in results) == ["node-1", "node-2"]
    assert len({rank["machine"] for rank in results}) == 2
    assert {rank["stack"] for rank in results} == {locked(cluster)}
    assert {rank["controller"] for rank in results} == {controller}


def on_path(cluster: Cluster, node: str, *programs: str) -> list[str]:
    """The programs that a node has; asked one by one, because dash's `command -v` takes only one name."""
    return [name for name in programs if cluster.shell(node, f"command -v {name}").returncode == 0]


def test_the_build_leaves_nothing_and_the_worker_has_no_compiler(cluster: Cluster) -> None:
    for node in ("node-1", "node-2"):
        assert cluster.ssh(node, "ls", "-A", "/opt/farandole/build").returncode != 0
        assert cluster.ssh(node, "ls", "/opt/farandole/incoming").returncode != 0
    assert on_path(cluster, "node-1", "g++", "cmake") == ["g++", "cmake"]
    assert on_path(cluster, "node-2", "g++", "mpicc", "cmake") == []


def test_disabled_parts_are_not_built(cluster: Cluster) -> None:
    root = f"{CURRENT}/"

    def found(*tests: str) -> list[str]:
        # Symlinks are followed, because OpenMPI is outside the stack's folder.
        return cluster.ssh("node-2", "find", "-L", root, *tests).stdout.split()

    assert any("/mpi/" in path for path in found("-name", "libmpi.so"))
    assert found("(", "-name", "*.a", "-o", "-name", "*.la", ")") == []
    assert found("-type", "d", "-name", "tests") == []
    for libraries in ("venv/lib/python3*/site-packages/horovod/torch/*.so", "mpi/lib/*.so mpi/bin/orted"):
        sections = cluster.shell("node-1", f"cd {root} && readelf -S {libraries}").stdout
        assert ".text" in sections
        assert ".debug_info" not in sections


BYTE_CODE = """
import sys, horovod.torch
files = [vars(module).get("__cached__") or "" for module in list(sys.modules.values())]
files = [file for file in files if "site-packages" in file]
unchecked = bytes([1, 0, 0, 0])
print(len(files), sum(open(file, "rb").read(8)[4:] != unchecked for file in files))
"""


def test_python_finds_byte_code_that_is_valid_whatever_the_time_of_the_source(cluster: Cluster) -> None:
    """The job user cannot write it, and the archive has no times."""
    done = cluster.ssh("node-2", "runuser", "-u", "trainer", "--", f"{CURRENT}/venv/bin/python", "-c", BYTE_CODE)
    loaded, invalid = map(int, done.stdout.split())
    assert loaded > 500
    assert invalid == 0


def test_non_interactive_shells_find_the_stack(cluster: Cluster) -> None:
    """Non-interactive shells, without dot files."""
    version = cluster.job_ssh("node-1", "node-2", "mpirun", "--version")
    assert "(Open MPI) 4.1" in version.stdout
    assert cluster.job_ssh("node-1", "node-2", "horovodrun", "--version").stdout.strip() == "0.28.1"


def test_a_good_job_starts_without_a_warning(cluster: Cluster) -> None:
    """Here mpirun is always too late to put ssh into a process group, as it sometimes is on a busy machine."""
    late = """
        #include <sys/syscall.h>
        #include <unistd.h>
        int setpgid(pid_t process, pid_t group) {
            if (process) usleep(500000);
            return syscall(SYS_setpgid, process, group);
        }
    """
    script = f"printf %s {shlex.quote(late)} | gcc -w -shared -fPIC -x c -o /opt/late.so -"
    assert cluster.shell("node-1", script).returncode == 0
    done = cluster.ssh(
        "node-1", "runuser", "-u", "trainer", "--", "env", "LD_PRELOAD=/opt/late.so",
        "mpirun", "-np", "2", "-H", "node-1:1,node-2:1", "hostname",
    )  # fmt: skip
    assert sorted(done.stdout.split()) == ["node-1", "node-2"]
    assert done.stderr == ""


@LONG
def test_a_third_node_joins_without_a_compiler_from_an_archive_that_was_damaged(cluster: Cluster) -> None:
    spoil = "for f in /srv/farandole/stacks/*.zst; do printf spoilt | dd of=$f bs=1 seek=5000000 conv=notrunc; done"
    assert cluster.shell("node-1", spoil).returncode == 0
    cluster.lab("up", "--nodes", "3")
    done = cluster.play_ok()
    assert not COMPILES.search("\n".join(f"{task}" for task, _ in done.changes))
    assert {host for task, host in done.changes if task.startswith("stack :")} == {"node-3"}
    assert "depot : Upload missing files to the depot" in {task for task, _ in done.changes}
    assert stack_of(cluster, "node-3") == locked(cluster)
    assert on_path(cluster, "node-3", "g++") == []
    assert proven(cluster, "node-1", "node-2", "node-3")


@LONG
def test_an_archive_damaged_in_transit_is_refused_before_unpacking(three: Cluster) -> None:
    call = f"id=000000000000 mpi=0 user=trainer url=http://node-1:8480/stacks/none sha256={'0' * 64} size=8 unpacked=1"
    assert three.shell("node-1", "echo nothing >/srv/farandole/spoilt").returncode == 0
    for url, size, message in (
        ("stacks/none", 8, "cannot be fetched: Not Found"),
        ("", 8, "cannot be fetched: Forbidden"),
        ("spoilt", 8, "is damaged: its sha256 is"),
        ("spoilt", 8, "It was discarded"),
        ("spoilt", 7, "is longer than 7 bytes"),
    ):
        asked = call.replace("stacks/none", url).replace("size=8", f"size={size}")
        output = " ".join(ad_hoc(three, "node-3", "stack_install", asked).stdout.split())
        assert message in output, output
    assert three.ssh("node-3", "ls", "/opt/farandole/stacks").stdout.split() == [locked(three)]


def ad_hoc(cluster: Cluster, node: str, module: str, arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ansible", "-i", str(cluster.inventory), node, "-m", f"farandole.cluster.{module}", "-a", arguments],
        cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False,
    )  # fmt: skip


def proof(cluster: Cluster, node: str) -> dict[str, object]:
    """The validation's finding about a node's stack."""
    cluster.play("--tags", "quick", "--extra-vars", f"validation_hosts={node}", playbook="playbooks/validate.yml")
    result = json.loads((cluster.state / "reports/latest/result.json").read_text())
    finding: dict[str, object] = next(check for check in result["checks"] if check["id"] == f"stack.{node}")
    return finding


# Processes of a validation's job on a node.
OF_JOB = "grep -lz ^FARANDOLE_JOB= /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3"


def jobs_of(cluster: Cluster) -> list[str]:
    """What runs on the first two nodes for a validation."""
    return [pid for node in ("node-1", "node-2") for pid in cluster.shell(node, OF_JOB).stdout.split()]


@LONG
def test_an_interrupted_validation_ends_what_it_started(cluster: Cluster) -> None:
    """On the nodes a job that would hang for two minutes, here the playbook with all its processes."""
    with cluster.begin("validate", "--hosts", "node-1,node-2") as run:
        frozen = (
            f'for i in $(seq 600); do jobs=$({OF_JOB}); [ -n "$jobs" ] && kill -STOP $jobs && exit; sleep 0.1; done'
        )
        assert cluster.shell("node-2", f"{frozen}; exit 1").returncode == 0
        os.killpg(run.pid, signal.SIGINT)
        _, output = run.communicate(timeout=15)
    assert run.returncode == 130
    assert "there is no report of this run" in output
    deadline = time.monotonic() + 15
    while (left := jobs_of(cluster)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
    playbook = f"ansible-playbook -i {cluster.inventory} "
    assert subprocess.run(["pgrep", "--full", playbook], stdout=subprocess.DEVNULL, check=False).returncode == 1


@LONG
def test_a_half_removed_openmpi_is_detected_and_repaired(cluster: Cluster) -> None:
    """As after a kill during its removal: mpirun still prints its version."""
    assert proof(cluster, "node-2")["status"] == "green"
    half = "cd /opt/farandole/mpi/* && rm -rf bin/orted lib/openmpi/mca_oob_tcp*"
    assert cluster.shell("node-2", f"{half} && bin/mpirun --version").returncode == 0
    red = proof(cluster, "node-2")
    assert (red["status"], red["code"]) == ("red", "stack-altered")
    mark, _, site = str(red["cure"]).partition(", then ")
    for command in (mark, site):
        done = subprocess.run(
            shlex.split(command), cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout
    assert cluster.shell("node-2", "ls /opt/farandole/mpi/*/bin/orted").returncode == 0
    assert "proven: true" in ad_hoc(cluster, "node-2", "stack_proof", "").stdout
    assert proven(cluster, "node-1", "node-2")


def forget_stack(cluster: Cluster, node: str) -> None:
    """Leave a node without any stack. Moved away, because what is written after removing 20,000 files is slow."""
    away = "cd /opt/farandole && mv -t $(mktemp -d /opt/forgotten.XXXX) stacks mpi current"
    assert cluster.shell(node, away).returncode == 0


@LONG
def test_a_full_disk_is_reported_before_anything_changes(three: Cluster) -> None:
    forget_stack(three, "node-3")
    three.ssh("node-3", "mount", "-t", "tmpfs", "-o", "size=300m", "none", "/opt/farandole")
    try:
        # The probe measures /opt; the module measures the target folder itself.
        done = three.play_failing()
        assert "node-3" in done.output
        assert re.search(r"/opt/farandole has \d+ MiB free, and the stack needs \d+ MiB", done.output)
        assert three.ssh("node-3", "ls", "-A", "/opt/farandole/stacks").stdout == ""
    finally:
        three.ssh("node-3", "umount", "/opt/farandole")


@LONG
def test_a_node_that_loses_power_while_unpacking_recovers_and_a_missing_archive_is_packed_again(
    three: Cluster, tmp_path: Path
) -> None:
    if stack_of(three, "node-3"):
        forget_stack(three, "node-3")
    run = three.start()
    # On a busy machine cutting the power takes longer than unpacking the rest; so tar stops where it is.
    unpacking = (
        "for i in $(seq 3000); do test -d /opt/farandole/incoming/tree/stacks && exec kill -STOP $(pidof tar);"
        " sleep 0.02; done; exit 1"
    )
    assert three.shell("node-3", unpacking).returncode == 0
    three.lab("fault", "kill", "node-3")
    run.end(signal.SIGKILL)
    three.lab("fault", "start", "node-3")
    assert stack_of(three, "node-3") == ""
    assert three.ssh("node-3", "ls", "-A", "/opt/farandole/stacks").stdout == ""
    assert stack_of(three, "node-1") == stack_of(three, "node-2") == locked(three)
    three.ssh("node-1", "rm", "-rf", "/srv/farandole/stacks")
    repaired = three.play_ok("--extra-vars", f"stack_builds={tmp_path}")
    tasks = {task for task, _ in repaired.changes}
    assert "stack : Pack the stack" in tasks
    assert not {task for task in tasks if "Compile" in task}
    assert stack_of(three, "node-3") == locked(three)
    assert three.ssh("node-3", "ls", "/opt/farandole/incoming").returncode != 0
    assert proven(three, "node-1", "node-3")


@LONG
def test_a_second_lab_reuses_builds_but_not_those_of_another_cluster(cluster: Cluster, tmp_path: Path) -> None:
    second = Cluster("test-stack-second")
    second.reset(1)
    try:
        done = second.play_ok()
        assert not COMPILES.search(" ".join(task for task, _ in done.changes))
        assert stack_of(second, "node-1") == stack_of(cluster, "node-1")
        # Builds of another cluster are used only if this cluster is configured to use them, and then their code runs
        # as the job user.
        poison(tmp_path, lab_builds(), locked(second))
        assert ran_as(second) == []
        forget_stack(second, "node-1")
        second.play_ok("--extra-vars", f"stack_builds={tmp_path}")
        assert set(ran_as(second)) == {"trainer"}
    finally:
        second.lab("down")


def ran_as(cluster: Cluster) -> list[str]:
    """The accounts that ran the poisoned program."""
    return cluster.shell("node-1", "cat /tmp/poisoned /root/poisoned").stdout.split()


@LONG
def test_packages_of_the_users_own_cost_only_themselves(three: Cluster) -> None:
    """One with a wheel and one of which there are only sources, on a builder and two nodes that have the stack."""
    before, settings = locked(three), three.inventory / "group_vars/all.yml"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("stack_packages: [tzdata, docopt]\nstack_build_wheels: true\n")
    assert three.farandole("lock").returncode == 0
    # An earlier run may have built them.
    for built in (*lab_builds().glob(f"stacks/{locked(three)}.*"), *lab_builds().glob("parts/wheel-docopt-*")):
        built.unlink()
    added = three.play_ok()
    tasks = {task for task, _ in added.changes}
    assert {"stack : Build the wheel", "stack : Install your own packages"} < tasks
    assert not {task for task in tasks if re.search("Compile|Create the Python environment", task)}
    (packed,) = (lab_builds() / "stacks").glob(f"{locked(three)}.*.zst")
    assert packed.stat().st_size < 5_000_000
    for node in ("node-1", "node-2", "node-3"):
        asked = f"{CURRENT}/venv/bin/python -c 'import docopt, tzdata, horovod.torch; print(tzdata.__file__)'"
        shown = three.ssh(node, "runuser", "-l", "trainer", "-c", asked).stdout
        assert shown.startswith(f"{CURRENT}/venv/lib/")
        assert stack_of(three, node) == locked(three)
    assert proven(three, "node-1", "node-2")
    assert set(three.play_ok().count("changed").values()) == {0}
    # A changed file of the stack below it is found and repaired.
    three.shell("node-2", f"echo >>{CURRENT}/base/venv/bin/torchrun")
    repaired = three.play()
    # The head may no longer have its archive.
    by_stack = {task for task, _ in repaired.changes if not task.startswith("depot :")}
    assert by_stack == {"stack : Install the stack alongside the others"}
    settings.unlink()
    settings.parent.rmdir()
    assert three.farandole("lock").returncode == 0
    assert locked(three) == before
    back = three.play()
    assert {task for task, _ in back.changes} == {"stack : Switch to the stack"}
    assert stack_of(three, "node-3") == before


@LONG
def test_upgrade_and_rollback_switch_whole_stacks(three: Cluster, tmp_path: Path) -> None:
    before = locked(three)
    (tmp_path / "later.py").write_text(LATER)
    for options in (("--mpi", "--hosts", "node-1,node-2"), ("--gloo", "--hosts", "node-3")):
        begun = three.farandole("run", "--detach", *options, "--", "python", "later.py", folder=tmp_path)
        assert begun.returncode == 0, begun.stderr
    assert three.farandole("lock", "--want", EARLIER_NUMPY).returncode == 0
    assert locked(three) != before
    # What has changed is packed beside the whole, from a stack that another run may have had.
    for file in Builds(lab_builds()).stacks.glob(f"{locked(three)}.*"):
        file.unlink()
    upgraded = three.play_ok()
    # What runs goes on with the stack with which it began, also what it imports only now.
    for node in ("node-1", "node-2", "node-3"):
        three.shell(node, "touch /home/trainer/go")
    for run, ranks_of_it in (("1", 2), ("2", 1)):
        said = three.farandole("attach", run, folder=tmp_path)
        assert said.returncode == 0, said
        assert re.findall(r"imports from (\w+)$", said.stdout, re.MULTILINE) == [before] * ranks_of_it
    # Neither OpenMPI nor Horovod is compiled against numpy.
    assert not {task for task, _ in upgraded.changes if "Compile" in task}
    # Of 450 MB, only what differs.
    copied = re.search(r"copying (\d+) MB to .*, what the stack that they have\s+lacks", upgraded.output)
    assert copied, upgraded.output
    assert int(copied[1]) < 100
    assert "the whole stack" not in upgraded.output
    assert {stack_of(three, node) for node in ("node-1", "node-2", "node-3")} == {locked(three)}
    assert proven(three, "node-1", "node-2", "node-3")
    three.play_ok(playbook="playbooks/rollback.yml")
    assert {stack_of(three, node) for node in ("node-1", "node-2", "node-3")} == {before}
    assert proven(three, "node-1", "node-2")
    unknown = three.play_failing("--extra-vars", "stack_id=ffffffffffff", playbook="playbooks/rollback.yml")
    assert "no stack ffffffffffff is on every node or in" in unknown.output
    # Its modules load on each node, but jobs with it crash: no node switches to it.
    crashes = shlex.quote(CRASHES.format(stack=locked(three)))
    assert three.shell("node-2", f"systemd-run --quiet --unit crashes sh -c {crashes}").returncode == 0
    refused = three.play_failing()
    words = f"no node has switched to stack {locked(three)}, as a job with it failed on node-1 and node-2: "
    assert words in " ".join(refused.output.split())
    assert {stack_of(three, node) for node in ("node-1", "node-2", "node-3")} == {before}
    assert three.shell("node-2", "systemctl stop crashes").returncode == 0
    part = three.play_failing("--limit", "node-1,node-2")
    assert f"with stack {locked(three)} from then on, and node-3 may not have it" in " ".join(part.output.split())
    switched = three.farandole("upgrade", "--yes")
    assert switched.returncode == 0, switched
    assert "changed: stack : Switch to the stack on node-1 to node-3\n" in switched.stdout
    assert {stack_of(three, node) for node in ("node-1", "node-2", "node-3")} == {locked(three)}
    three.play_ok(playbook="playbooks/rollback.yml")
    three.play_ok("--extra-vars", f"stack_id={locked(three)}", playbook="playbooks/rollback.yml")
    assert stack_of(three, "node-3") == locked(three)


@LONG
def test_a_cluster_with_two_releases_is_refused(cluster: Cluster) -> None:
    cluster.lab("up", "--nodes", "4", "--suite", "trixie")
    refused = cluster.play_failing()
    assert "the nodes have 2 platforms" in refused.output
    assert "node-4: Debian 13" in refused.output
    assert "Move node-4 out of group cluster" in refused.output
    assert cluster.ssh("node-4", "id", "trainer").returncode == 1
