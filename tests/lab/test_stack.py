"""The stack on real nodes: build, install, join, damage, upgrade, roll back."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from clusters import ENVIRONMENT, ROOT, Cluster

from farandole.core.files import sha256
from farandole.stack.cache import lab_builds
from farandole.validation.nodes import program

NODES = 2
CURRENT = "/opt/farandole/current"
FRAMEWORKS = {"torch": "horovod.torch", "tensorflow": "horovod.tensorflow"}
# Tasks that compile; adding a node must not run them.
COMPILES = re.compile(r"Compile (OpenMPI|Horovod)|Make the Python environment|Pack the stack")
EARLIER_NUMPY = "numpy==2.3.4"


def stack_of(cluster: Cluster, node: str) -> str:
    """The id of a node's current stack, empty if it has none."""
    return cluster.ssh(node, "readlink", CURRENT).stdout.strip().removeprefix("stacks/")


def locked(cluster: Cluster) -> str:
    """The id of the locked stack."""
    found: str = yaml.safe_load((cluster.inventory / "stack.lock.yml").read_text())["id"]
    return found


def ranks(cluster: Cluster, framework: str, controller: str, *nodes: str) -> list[dict[str, object]]:
    """Run the allreduce probe on these nodes as the job user on the head; returns each rank's result."""
    probe = program("allreduce")
    count = str(len(nodes))
    done = cluster.ssh(
        "node-1", "runuser", "-u", "trainer", "--", "timeout", "120", "horovodrun", f"--{controller}", "-np", count,
        "-H", ",".join(f"{node}:1" for node in nodes), "python", "-c", probe, framework, "--expect", count,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(found) for found in re.findall(r"\{.*\}", done.stdout)]


def proven(cluster: Cluster, *nodes: str) -> bool:
    """Run one job of each framework over these nodes."""
    for framework, controller in (("torch", "gloo"), ("tensorflow", "mpi")):
        found = ranks(cluster, framework, controller, *nodes)
        assert sorted(str(rank["host"]) for rank in found) == sorted(nodes)
    return True


def test_bare_nodes_get_the_stack(cluster: Cluster) -> None:
    done = cluster.play()
    assert done.rc == 0, done.output
    assert stack_of(cluster, "node-1") == stack_of(cluster, "node-2") == locked(cluster)


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_rank_is_on_its_node_and_has_the_exact_sum(cluster: Cluster, framework: str, controller: str) -> None:
    found = ranks(cluster, framework, controller, "node-1", "node-2")
    assert sorted(str(rank["host"]) for rank in found) == ["node-1", "node-2"]
    assert len({rank["machine"] for rank in found}) == 2
    assert {rank["stack"] for rank in found} == {locked(cluster)}
    assert {rank["controller"] for rank in found} == {controller}
    assert {rank["wanted"] for rank in found} == {3}
    assert all(one["exact"] for rank in found for one in rank["sums"])  # type: ignore[attr-defined]


def test_a_second_run_changes_nothing(cluster: Cluster) -> None:
    assert set(cluster.play().count("changed").values()) == {0}


def on_path(cluster: Cluster, node: str, *programs: str) -> list[str]:
    """The programs that a node has; asked one by one, because dash's `command -v` takes only one name."""
    return [name for name in programs if cluster.ssh(node, "sh", "-c", f"command -v {name}").returncode == 0]


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
        sections = cluster.ssh("node-1", "sh", "-c", f"cd {root} && readelf -S {libraries}").stdout
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
    assert cluster.ssh("node-1", "sh", "-c", script).returncode == 0
    done = cluster.ssh(
        "node-1", "runuser", "-u", "trainer", "--", "env", "LD_PRELOAD=/opt/late.so",
        "mpirun", "-np", "2", "-H", "node-1:1,node-2:1", "hostname",
    )  # fmt: skip
    assert sorted(done.stdout.split()) == ["node-1", "node-2"]
    assert done.stderr == ""


def test_a_third_node_joins_without_a_compiler_from_an_archive_that_was_damaged(cluster: Cluster) -> None:
    spoil = "for f in /srv/farandole/stacks/*.zst; do printf spoilt | dd of=$f bs=1 seek=5000000 conv=notrunc; done"
    assert cluster.ssh("node-1", "sh", "-c", spoil).returncode == 0
    cluster.farandole("up", "--nodes", "3")
    done = cluster.play()
    assert done.rc == 0, done.output
    assert not COMPILES.search("\n".join(f"{task}" for task, _ in done.changes))
    assert {host for task, host in done.changes if task.startswith("stack :")} == {"node-3"}
    assert "depot : Upload missing files to the depot" in {task for task, _ in done.changes}
    assert stack_of(cluster, "node-3") == locked(cluster)
    assert on_path(cluster, "node-3", "g++") == []
    assert proven(cluster, "node-1", "node-2", "node-3")


def test_an_archive_damaged_in_transit_is_refused_before_unpacking(cluster: Cluster) -> None:
    call = f"id=000000000000 mpi=0 user=trainer url=http://node-1:8480/stacks/none sha256={'0' * 64} size=8 unpacked=1"
    assert cluster.ssh("node-1", "sh", "-c", "echo nothing >/srv/farandole/spoilt").returncode == 0
    for url, size, words in (
        ("stacks/none", 8, "cannot be fetched: Not Found"),
        ("", 8, "cannot be fetched: Forbidden"),
        ("spoilt", 8, "is damaged: its sha256 is"),
        ("spoilt", 8, "It was discarded"),
        ("spoilt", 7, "is longer than 7 bytes"),
    ):
        asked = call.replace("stacks/none", url).replace("size=8", f"size={size}")
        said = " ".join(ad_hoc(cluster, "node-3", "stack_install", asked).stdout.split())
        assert words in said, said
    assert cluster.ssh("node-3", "ls", "/opt/farandole/stacks").stdout.split() == [locked(cluster)]


def ad_hoc(cluster: Cluster, node: str, module: str, arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ansible", "-i", str(cluster.inventory), node, "-m", f"farandole.cluster.{module}", "-a", arguments],
        cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False,
    )  # fmt: skip


def proof(cluster: Cluster, node: str) -> dict[str, object]:
    """The validation's finding about a node's stack."""
    cluster.play("--tags", "quick", "--extra-vars", f"validation_hosts={node}", playbook="playbooks/validate.yml")
    result = json.loads((cluster.state / "reports/latest/result.json").read_text())
    found: dict[str, object] = next(check for check in result["checks"] if check["id"] == f"stack.{node}")
    return found


# Processes of a validation's job on a node.
OF_JOB = "grep -lz ^FARANDOLE_JOB= /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3"


def jobs_of(cluster: Cluster) -> list[str]:
    """What runs on the first two nodes for a validation."""
    return [pid for node in ("node-1", "node-2") for pid in cluster.ssh(node, "sh", "-c", OF_JOB).stdout.split()]


def test_an_interrupted_validation_ends_what_it_started(cluster: Cluster) -> None:
    """On the nodes a job that would hang for two minutes, here the playbook with all its processes."""
    command = [sys.executable, "-m", "farandole", "validate", "-i", str(cluster.inventory), "--hosts", "node-1,node-2"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as run:  # fmt: skip
        frozen = (
            f'for i in $(seq 600); do jobs=$({OF_JOB}); [ -n "$jobs" ] && kill -STOP $jobs && exit; sleep 0.1; done'
        )
        assert cluster.ssh("node-2", "sh", "-c", f"{frozen}; exit 1").returncode == 0
        os.killpg(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=15)
    assert run.returncode == 130
    assert "there is no report of this run" in said
    deadline = time.monotonic() + 15
    while (left := jobs_of(cluster)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
    playbook = f"ansible-playbook -i {cluster.inventory} "
    assert subprocess.run(["pgrep", "--full", playbook], stdout=subprocess.DEVNULL, check=False).returncode == 1


def test_a_half_removed_openmpi_is_detected_and_repaired(cluster: Cluster) -> None:
    """As after a kill during its removal: mpirun still prints its version."""
    assert proof(cluster, "node-2")["status"] == "green"
    half = "cd /opt/farandole/mpi/* && rm -rf bin/orted lib/openmpi/mca_oob_tcp*"
    assert cluster.ssh("node-2", "sh", "-c", f"{half} && bin/mpirun --version").returncode == 0
    red = proof(cluster, "node-2")
    assert (red["status"], red["code"]) == ("red", "stack-altered")
    mark, _, site = str(red["cure"]).partition(", then ")
    for command in (mark, site):
        done = subprocess.run(
            shlex.split(command), cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout
    assert cluster.ssh("node-2", "sh", "-c", "ls /opt/farandole/mpi/*/bin/orted").returncode == 0
    assert "proven: true" in ad_hoc(cluster, "node-2", "stack_proof", "").stdout
    assert proven(cluster, "node-1", "node-2")


def forget_stack(cluster: Cluster, node: str) -> None:
    """Leave a node without any stack. Moved away, because what is written after removing 20,000 files is slow."""
    away = "cd /opt/farandole && mv -t $(mktemp -d /opt/forgotten.XXXX) stacks mpi current"
    assert cluster.ssh(node, "sh", "-c", away).returncode == 0


def test_a_full_disk_is_reported_before_anything_changes(cluster: Cluster) -> None:
    forget_stack(cluster, "node-3")
    cluster.ssh("node-3", "mount", "-t", "tmpfs", "-o", "size=300m", "none", "/opt/farandole")
    try:
        # The probe measures /opt; the module measures the target folder itself.
        done = cluster.play()
        assert done.rc != 0
        assert "node-3" in done.output
        assert re.search(r"/opt/farandole has \d+ MiB free, and the stack needs \d+ MiB", done.output)
        assert cluster.ssh("node-3", "ls", "-A", "/opt/farandole/stacks").stdout == ""
    finally:
        cluster.ssh("node-3", "umount", "/opt/farandole")


def test_a_node_that_loses_power_while_unpacking_recovers_and_a_missing_archive_is_packed_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.start()
    # On a busy machine cutting the power takes longer than unpacking the rest; so tar stops where it is.
    unpacking = (
        "for i in $(seq 3000); do test -d /opt/farandole/incoming/tree/stacks && exec kill -STOP $(pidof tar);"
        " sleep 0.02; done; exit 1"
    )
    assert cluster.ssh("node-3", "sh", "-c", unpacking).returncode == 0
    cluster.farandole("fault", "kill", "node-3")
    run.end(signal.SIGKILL)
    cluster.farandole("fault", "start", "node-3")
    assert stack_of(cluster, "node-3") == ""
    assert cluster.ssh("node-3", "ls", "-A", "/opt/farandole/stacks").stdout == ""
    assert stack_of(cluster, "node-1") == stack_of(cluster, "node-2") == locked(cluster)
    cluster.ssh("node-1", "rm", "-rf", "/srv/farandole/stacks")
    mended = cluster.play("--extra-vars", f"stack_builds={tmp_path}")
    assert mended.rc == 0, mended.output
    tasks = {task for task, _ in mended.changes}
    assert "stack : Pack the stack" in tasks
    assert not {task for task in tasks if "Compile" in task}
    assert stack_of(cluster, "node-3") == locked(cluster)
    assert cluster.ssh("node-3", "ls", "/opt/farandole/incoming").returncode != 0
    assert proven(cluster, "node-1", "node-3")


BUILD = """
- hosts: head
  gather_facts: false
  become: true
  tasks:
    - name: Build
      farandole.cluster.build_step:
        name: a long build
        directory: {directory}
        script: "echo begun >>begun; sleep {seconds}; {end}"
"""
SCRATCH = "/opt/farandole/build/test"


def test_a_build_survives_its_control_machine_and_is_not_restarted(cluster: Cluster, tmp_path: Path) -> None:
    playbook = tmp_path / "build.yml"
    playbook.write_text(BUILD.format(directory=SCRATCH, seconds=15, end="echo ended >ended"))
    cluster.play_while("node-1", f"test -e {SCRATCH}/begun", playbook=str(playbook))
    assert cluster.ssh("node-1", "cat", f"{SCRATCH}/ended").returncode != 0
    assert cluster.play(playbook=str(playbook)).rc == 0
    left = cluster.ssh("node-1", "sh", "-c", f"cd {SCRATCH} && cat begun ended")
    assert left.stdout.split() == ["begun", "ended"]


STEPS = """
- hosts: head
  gather_facts: false
  become: true
  tasks:
    - name: Build
      farandole.cluster.build_step:
        name: "{{{{ item.name }}}}"
        directory: "{directory}/{{{{ item.name }}}}"
        script: "{{{{ item.script }}}}; echo done >>{directory}/{{{{ item.name }}}}.done"
        build: {build}
        creates: "{directory}/{{{{ item.name }}}}.done"
      loop:
        - {{name: first, script: "true"}}
        - {{name: second, script: "echo begun >>begun; sleep {seconds}"}}
"""


def test_later_steps_survive_too_and_finished_steps_are_not_repeated(cluster: Cluster, tmp_path: Path) -> None:
    playbook = tmp_path / "steps.yml"
    playbook.write_text(STEPS.format(directory=SCRATCH, build="a", seconds=15))
    cluster.play_while("node-1", f"test -e {SCRATCH}/second/begun", playbook=str(playbook))
    left = f"cd {SCRATCH}; cat first.done second/begun second.done 2>/dev/null"
    assert cluster.ssh("node-1", "sh", "-c", left).stdout.split() == ["done", "begun"]
    done = cluster.play(playbook=str(playbook))
    assert done.rc == 0, done.output
    assert cluster.ssh("node-1", "sh", "-c", left).stdout.split() == ["done", "begun", "done"]
    # Steps left running by another build are ended, so that the new one starts at once.
    cluster.ssh("node-1", "rm", "-r", SCRATCH)
    playbook.write_text(STEPS.format(directory=SCRATCH, build="b", seconds=600))
    cluster.play_while("node-1", f"test -e {SCRATCH}/second/begun", playbook=str(playbook))
    playbook.write_text(STEPS.format(directory=SCRATCH, build="c", seconds=0))
    assert cluster.play(playbook=str(playbook)).rc == 0
    cluster.ssh("node-1", "rm", "-r", "/opt/farandole/build")


BESIDE = """
- hosts: head
  gather_facts: false
  become: true
  tasks:
    - name: Start the first step
      farandole.cluster.build_step:
        <<: &first
          {{name: first, directory: {directory}/first, script: "{first}", build: a, unit: farandole-build-first}}
        wait: false
    - name: Do the second
      farandole.cluster.build_step: {{name: second, directory: {directory}/second, script: touch done, build: a}}
    - name: Wait for the first
      farandole.cluster.build_step: *first
"""
AWAIT = "for i in $(seq 100); do [ ! -e ../second/done ] || break; sleep 0.1; done; rm ../second/done"


def test_a_step_can_run_beside_another_and_be_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    playbook = tmp_path / "steps.yml"
    playbook.write_text(BESIDE.format(directory=SCRATCH, first=f"echo begun >>begun; {AWAIT}"))
    done = cluster.play(playbook=str(playbook))
    assert done.rc == 0, done.output
    assert cluster.ssh("node-1", "cat", f"{SCRATCH}/first/begun").stdout == "begun\n"
    # If it fails, that is said when it is waited for.
    cluster.ssh("node-1", "rm", "-r", SCRATCH)
    playbook.write_text(BESIDE.format(directory=SCRATCH, first=f"{AWAIT}; exit 7"))
    done = cluster.play(playbook=str(playbook))
    assert "first failed (7)" in done.output
    # If its build is given up, the first step of another build ends it.
    cluster.ssh("node-1", "rm", "-r", SCRATCH)
    playbook.write_text(BESIDE.format(directory=SCRATCH, first="echo begun >begun; sleep 600"))
    cluster.play_while("node-1", f"test -e {SCRATCH}/first/begun", playbook=str(playbook))
    playbook.write_text(STEPS.format(directory=SCRATCH, build="b", seconds=0))
    assert cluster.play(playbook=str(playbook)).rc == 0
    assert cluster.ssh("node-1", "systemctl", "is-active", "farandole-build-first").stdout.strip() == "inactive"
    cluster.ssh("node-1", "rm", "-r", "/opt/farandole/build")


def test_a_failed_build_shows_the_end_and_the_path_of_its_log(cluster: Cluster, tmp_path: Path) -> None:
    playbook = tmp_path / "build.yml"
    playbook.write_text(
        BUILD.format(directory=SCRATCH, seconds=1, end="echo 'x.c:1:1: error: no such thing' >&2; exit 7")
    )
    failed = cluster.play(playbook=str(playbook))
    assert failed.rc != 0
    assert "a long build failed (7)" in failed.output
    assert "error: no such thing" in failed.output
    assert f"{SCRATCH}/a-long-build.log" in failed.output
    assert cluster.ssh("node-1", "systemctl", "is-active", "farandole-build").stdout.strip() == "inactive"
    cluster.ssh("node-1", "rm", "-rf", "/opt/farandole/build")


@pytest.mark.parametrize("place", ["/var/tmp/farandole-build", "/home/trainer"])  # noqa: S108
def test_root_does_not_run_files_planted_by_the_job_user(cluster: Cluster, tmp_path: Path, place: str) -> None:
    """Python searches its working directory first, so one planted file would be enough."""
    folder, owned = f"{place}/test", "/root/owned"
    plant = f'mkdir -p {folder} && echo \'open("{owned}", "w")\' >{folder}/venv.py'
    assert cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "sh", "-c", plant).returncode == 0
    # The planted file works for whoever works there.
    assert cluster.ssh("node-1", "sh", "-c", f"cd {folder} && python3 -m venv --help && rm {owned}").returncode == 0
    playbook = tmp_path / "build.yml"
    playbook.write_text(BUILD.format(directory=folder, seconds=0, end="python3 -m venv --help"))
    refused = cluster.play(playbook=str(playbook))
    assert refused.rc != 0
    assert f"a long build: root does not build in {folder}" in refused.output
    assert cluster.ssh("node-1", "ls", owned, f"{folder}/begun").stdout == ""
    cluster.ssh("node-1", "rm", "-rf", folder, "/var/tmp/farandole-build")  # noqa: S108


def test_a_build_is_isolated_from_the_job_user(cluster: Cluster, tmp_path: Path) -> None:
    plant = f"mkdir -p {SCRATCH} && touch {SCRATCH}/venv.py"
    assert cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "sh", "-c", plant).returncode != 0
    playbook = tmp_path / "build.yml"
    playbook.write_text(
        BUILD.format(directory=SCRATCH, seconds=0, end="echo $PATH $HOME $PWD >seen; ls -A /tmp >>seen")
    )
    cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "touch", "/tmp/planted")  # noqa: S108
    assert cluster.play(playbook=str(playbook)).rc == 0
    seen = cluster.ssh("node-1", "sh", "-c", f"cat {SCRATCH}/seen; rm -r /opt/farandole/build /tmp/planted").stdout
    assert seen == f"/usr/sbin:/usr/bin:/sbin:/bin {SCRATCH} {SCRATCH}\n"


CONFINED = """
- hosts: head
  gather_facts: false
  become: true
  tasks:
    - name: Build
      farandole.cluster.build_step:
        name: the code of a package
        directory: {directory}
        root: false
        script: |
          id -u
          for path in /opt /opt/farandole /etc /srv/farandole .; do touch $path/written && echo $path; done
          ls /home/trainer /root && echo home
          cat /etc/shadow && echo shadow
          grep -c eth /proc/net/dev && echo network
          touch $CACHE_DIRECTORY/made
          sleep 600 &
"""


def test_the_code_of_a_package_is_confined_while_it_is_built(cluster: Cluster, tmp_path: Path) -> None:
    playbook = tmp_path / "build.yml"
    playbook.write_text(CONFINED.format(directory=SCRATCH))
    done = cluster.play(playbook=str(playbook))
    assert done.rc == 0, done.output
    said = cluster.ssh("node-1", "cat", f"{SCRATCH}/the-code-of-a-package.log").stdout
    refused = [line for line in said.splitlines() if "Permission denied" in line or "Read-only file system" in line]
    assert (len(refused), len(said.splitlines())) == (8, 10), said
    left = "ls /var/cache/private/farandole-build; pgrep --full 'sleep [6]00'; rm -r /var/cache/*/farandole-build"
    assert cluster.ssh("node-1", "sh", "-c", f"{left} {SCRATCH}").stdout.split() == ["made"]


# Socket of a service, shared memory, a name space in which it is root; a program that outlives the step if it can.
REACHING = """
- hosts: head
  gather_facts: false
  become: true
  tasks:
    - name: Build
      farandole.cluster.build_step:
        name: the code of a package
        directory: {directory}
        root: {root}
        script: |
          connect='import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(sys.argv[1])'
          python3 -c "$connect" /run/systemd/journal/stdout && echo service
          touch /dev/shm/left && echo memory
          unshare --user --map-root-user id -u && echo namespace
          (trap '' TERM HUP INT; while :; do sleep 0.2; done) &
"""


@pytest.mark.parametrize(("root", "reached"), [(False, ["memory"]), (True, ["service", "memory", "namespace"])])
def test_the_code_of_a_package_reaches_no_service_and_is_ended_at_once(
    cluster: Cluster, tmp_path: Path, root: bool, reached: list[str]
) -> None:
    playbook = tmp_path / "build.yml"
    playbook.write_text(REACHING.format(directory=SCRATCH, root=root))
    started = time.monotonic()
    done = cluster.play(playbook=str(playbook))
    assert done.rc == 0, done.output
    # Root's own steps, which are trusted, get the usual 90 seconds.
    assert (time.monotonic() - started > 60) == root
    said = cluster.ssh("node-1", "cat", f"{SCRATCH}/the-code-of-a-package.log").stdout.splitlines()
    assert [line for line in said if line in ("service", "memory", "namespace")] == reached
    # The memory was its own.
    assert cluster.ssh("node-1", "rm", "/dev/shm/left").returncode == (not root)  # noqa: S108
    cluster.ssh("node-1", "rm", "-rf", SCRATCH, "/var/cache/private/farandole-build")


TAKING = """
- hosts: head
  gather_facts: false
  become: true
  tasks:
    - name: Build
      farandole.cluster.build_step:
        name: the code of a package
        directory: {directory}
        root: false
        script: |
          mkdir -p $CACHE_DIRECTORY/wheel
          cd $CACHE_DIRECTORY/wheel
          touch evil-1.0-py3-none-any.whl other-1.0-py3-none-any.whl "$(printf 'evil-2\\n--pre\\nx.whl')"
          chmod 4755 evil-1.0-py3-none-any.whl || chmod 755 evil-1.0-py3-none-any.whl
          ln -s /etc/shadow evil-3-py3-none-any.whl
    - name: Take
      farandole.cluster.build_step:
        name: take the wheel
        directory: {directory}
        script: "{{{{ lookup('file', '{take}') }}}}"
        environment: {{NAME: evil}}
"""


@pytest.mark.parametrize("check", ["", "! -name '*[!A-Za-z0-9._+!-]*'", "-type f"])
def test_root_takes_the_wheel_and_nothing_else(cluster: Cluster, tmp_path: Path, check: str) -> None:
    """Each of the two checks is needed."""
    playbook, take = tmp_path / "build.yml", tmp_path / "take.sh"
    text = (ROOT / "roles/stack/files/take.sh").read_text()
    assert check in text
    take.write_text(text.replace(check, "") if check else text)
    playbook.write_text(TAKING.format(directory=SCRATCH, take=take))
    done = cluster.play(playbook=str(playbook))
    listed = cluster.ssh("node-1", "tar", "--list", "--verbose", "--zstd", "--file", f"{SCRATCH}/wheel.tar.zst").stdout
    cluster.ssh("node-1", "rm", "-rf", SCRATCH)
    wheels = [line.split()[0] for line in listed.splitlines()[1:]]
    assert done.rc == 0, done.output
    assert (wheels == ["-rwxr-xr-x"]) == (not check), listed


def test_a_second_lab_reuses_builds_but_not_those_of_another_cluster(cluster: Cluster, tmp_path: Path) -> None:
    second = Cluster("test-stack-second")
    second.reset(1)
    try:
        done = second.play()
        assert done.rc == 0, done.output
        assert not COMPILES.search(" ".join(task for task, _ in done.changes))
        assert stack_of(second, "node-1") == stack_of(cluster, "node-1")
        # Builds of another cluster are used only if this cluster is configured to use them, and then their code runs
        # as the job user.
        poison(tmp_path, lab_builds(), locked(second))
        assert ran_as(second) == []
        forget_stack(second, "node-1")
        done = second.play("--extra-vars", f"stack_builds={tmp_path}")
        assert done.rc == 0, done.output
        assert set(ran_as(second)) == {"trainer"}
    finally:
        second.farandole("down")


def ran_as(cluster: Cluster) -> list[str]:
    """The accounts that ran the poisoned program."""
    return cluster.ssh("node-1", "sh", "-c", "cat /tmp/poisoned /root/poisoned").stdout.split()


def poison(builds: Path, honest: Path, stack: str) -> None:
    """Make a packed stack as a malicious root on a builder could: consistent, but with a different mpirun."""
    record = next((honest / "stacks").glob(f"{stack}.*.zst.json"))
    about = json.loads(record.read_text())
    trees, packed = builds / "trees", builds / "stacks" / record.name.removesuffix(".json")
    trees.mkdir()
    packed.parent.mkdir()
    subprocess.run(["tar", "-C", trees, "--zstd", "-xf", record.with_suffix("")], check=True)
    (mpi,) = (trees / "mpi").iterdir()
    mpirun = mpi / "bin/mpirun"
    mpirun.unlink()
    mpirun.write_text(
        '#!/bin/sh\nid -un >>/tmp/poisoned; id -un 2>/dev/null >>/root/poisoned\nexec "${0%mpirun}orterun" "$@"\n'
    )
    mpirun.chmod(0o755)
    (mpi / "contents").unlink()
    listed = [sys.executable, "-I", str(ROOT / "plugins/module_utils/contents.py"), str(mpi)]
    about["contents"][f"mpi/{mpi.name}"] = subprocess.check_output(listed, text=True).strip()
    subprocess.run(["tar", "-C", trees, "-I", "zstd -1 -T0", "-cf", packed, "stacks", "mpi"], check=True)
    about["sha256"] = sha256(packed)
    (packed.parent / record.name).write_text(json.dumps(about))
    shutil.rmtree(trees)


def lock_again(cluster: Cluster, *wanted: str) -> None:
    """Write a new lock, as a user would."""
    command = [sys.executable, "-m", "farandole", "lock", "-i", str(cluster.inventory), *wanted]
    subprocess.run(command, cwd=ROOT, check=True)


def test_packages_of_the_users_own_cost_only_themselves(cluster: Cluster) -> None:
    """One with a wheel and one of which there are only sources, on a builder and two nodes that have the stack."""
    before, settings = locked(cluster), cluster.inventory / "group_vars/all.yml"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("stack_packages: [tzdata, docopt]\nstack_build_wheels: true\n")
    lock_again(cluster)
    # An earlier run may have built them.
    for built in (*lab_builds().glob(f"stacks/{locked(cluster)}.*"), *lab_builds().glob("parts/wheel-docopt-*")):
        built.unlink()
    added = cluster.play()
    assert added.rc == 0, added.output
    tasks = {task for task, _ in added.changes}
    assert {"stack : Build the wheel", "stack : Install your own packages"} < tasks
    assert not {task for task in tasks if re.search("Compile|Make the Python environment", task)}
    (packed,) = (lab_builds() / "stacks").glob(f"{locked(cluster)}.*.zst")
    assert packed.stat().st_size < 5_000_000
    for node in ("node-1", "node-2", "node-3"):
        asked = f"{CURRENT}/venv/bin/python -c 'import docopt, tzdata, horovod.torch; print(tzdata.__file__)'"
        shown = cluster.ssh(node, "runuser", "-l", "trainer", "-c", asked).stdout
        assert shown.startswith(f"{CURRENT}/venv/lib/")
        assert stack_of(cluster, node) == locked(cluster)
    assert proven(cluster, "node-1", "node-2")
    assert set(cluster.play().count("changed").values()) == {0}
    # A changed file of the stack below it is found and mended.
    cluster.ssh("node-2", "sh", "-c", f"echo >>{CURRENT}/base/venv/bin/torchrun")
    mended = cluster.play()
    # The head may no longer have its archive.
    by_stack = {task for task, _ in mended.changes if not task.startswith("depot :")}
    assert by_stack == {"stack : Install the stack alongside the others"}
    settings.unlink()
    settings.parent.rmdir()
    lock_again(cluster)
    assert locked(cluster) == before
    back = cluster.play()
    assert {task for task, _ in back.changes} == {"stack : Switch to the stack"}
    assert stack_of(cluster, "node-3") == before


def test_upgrade_and_rollback_switch_whole_stacks(cluster: Cluster) -> None:
    before = locked(cluster)
    lock_again(cluster, "--want", EARLIER_NUMPY)
    assert locked(cluster) != before
    upgraded = cluster.play()
    assert upgraded.rc == 0, upgraded.output
    # Neither OpenMPI nor Horovod is compiled against numpy.
    assert not {task for task, _ in upgraded.changes if "Compile" in task}
    assert {stack_of(cluster, node) for node in ("node-1", "node-2", "node-3")} == {locked(cluster)}
    assert proven(cluster, "node-1", "node-2", "node-3")
    back = cluster.play(playbook="playbooks/rollback.yml")
    assert back.rc == 0, back.output
    assert {stack_of(cluster, node) for node in ("node-1", "node-2", "node-3")} == {before}
    assert proven(cluster, "node-1", "node-2")
    unknown = cluster.play("--extra-vars", "stack_id=ffffffffffff", playbook="playbooks/rollback.yml")
    assert unknown.rc != 0
    assert "no stack ffffffffffff is on every node or in" in unknown.output
    forth = cluster.play("--extra-vars", f"stack_id={locked(cluster)}", playbook="playbooks/rollback.yml")
    assert forth.rc == 0, forth.output
    assert stack_of(cluster, "node-3") == locked(cluster)


def test_a_cluster_with_two_releases_is_refused(cluster: Cluster) -> None:
    cluster.farandole("up", "--nodes", "4", "--suite", "trixie")
    refused = cluster.play()
    assert refused.rc != 0
    assert "the nodes have 2 platforms" in refused.output
    assert "node-4: Debian 13" in refused.output
    assert "Move node-4 out of group cluster" in refused.output
    assert cluster.ssh("node-4", "id", "trainer").returncode == 1
