"""A job's script runs in the environment of PBS, and leaves nothing behind."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.node import allocation
from farandole.node.qsub import pbs_job

from .loading import ROOT, install
from .prefix import program


def test_slurm_says_in_short_how_many_tasks_each_node_has() -> None:
    assert allocation.counts("2(x3),1") == [2, 2, 2, 1]


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a program as the kernel and Slurm do for a script, with a scontrol of our own."""
    (tmp_path / "nodes").mkdir()
    scontrol = program(tmp_path / "scontrol", "printf 'node-1\\nnode-2\\n'")
    places = {"/usr/bin/scontrol": scontrol, "/run/farandole/pbs": str(tmp_path / "nodes")}
    install(tmp_path, "farandole.node.qsub", places, pbs_job="pbs_job")
    install(tmp_path, "farandole.node", places, hosts="allocation")
    knowledge = {"interpreter": ["/bin/sh"], "keep": ["A", "name"], "start": str(tmp_path)}
    environment = {
        "SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "a\nexport EVIL=1", "SLURM_JOB_PARTITION": "normal",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)",
        "A": "kept", "name": "ana", "PATH": "/nowhere", "HOME": str(tmp_path), "FARANDOLE_PBS": json.dumps(knowledge),
    }  # fmt: skip

    def started(name: str, script: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script").write_text(script)
        command, given = [str(tmp_path / name), str(tmp_path / "script"), "a b"], {**environment, **changes}
        return subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=False)

    return started


def test_a_script_gets_the_variables_of_pbs(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("export A=profile B=profile\numask 027\n")
    done = start(
        "pbs-job",
        'cat "$PBS_NODEFILE"; echo "$PBS_JOBID $PBS_NP $PBS_NUM_PPN $PBS_QUEUE $PBS_ENVIRONMENT $A $B $name ${EVIL-}"\n'
        'umask; pwd; echo "$#:$1 ${FARANDOLE_PBS-unset}"\nstat -c %a "$PBS_NODEFILE"; exit 7',
    )
    assert done.stdout.splitlines() == [
        "node-1", "node-1", "node-2", "node-2", "42 4 2 normal PBS_BATCH kept profile ana ", "0027", str(tmp_path),
        "1:a b unset", "600",
    ], done.stderr  # fmt: skip
    assert done.returncode == 7
    assert [path.name.partition(".")[0] for path in (tmp_path / "nodes").iterdir()] == ["42"]


def test_horovodrun_gets_the_hosts_of_the_allocation(start: Start) -> None:
    assert start("hosts").stdout == "-np 4 -H node-1:2,node-2:2\n"
    changed = start("hosts", SLURM_TASKS_PER_NODE="3,1", SLURM_NTASKS="2")
    assert changed.stdout == "-np 2 -H node-1:3,node-2:1\n"


def test_nobody_else_sees_the_values_of_variables(start: Start, tmp_path: Path) -> None:
    # The arguments of a process can be read by everybody on the node, its environment by its owner alone.
    (tmp_path / ".bash_profile").write_text("tr '\\0' '\\n' </proc/$$/cmdline >arguments\n")
    done = start("pbs-job", 'echo "$A"; ls nodes | wc -l; grep SigIgn /proc/self/status', A="a\nsecret of mine")
    arguments = (tmp_path / "arguments").read_text()
    assert "pbs-job" in arguments and "secret" not in arguments
    # Only the node file is left, and no signal is ignored that was not before.
    ignored = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
    before = int(ignored.split()[1], 16) & ~(1 << 12 | 1 << 24)
    assert done.stdout.splitlines() == ["a", "secret of mine", "1", f"SigIgn:\t{before:016x}"], done.stderr


def test_a_job_without_its_node_file_does_not_start(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nodes").rmdir()
    done = start("pbs-job", "echo started")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the job was not started" in done.stderr


def test_what_the_shell_itself_sets_is_not_kept() -> None:
    environment = {"A": "1 2", "SLURM_X": "2", "PWD": "/", "UID": "0", "BASH_FUNC_f%%": "() { :; }"}
    assert pbs_job.kept(environment, "all") == "export A='1 2'\nexport SLURM_X=2\n"
    assert pbs_job.kept(environment, []) == "export SLURM_X=2\n"


def test_the_epilog_removes_only_this_jobs_files(tmp_path: Path) -> None:
    text = (ROOT / "src/farandole/node/epilog").read_text().replace("/run/farandole/pbs", str(tmp_path / "pbs"))
    job = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "42"}
    # It must not fail, even without the folder: Slurm would drain the node.
    subprocess.run(["sh", "-c", text], env={**job, "SLURM_JOB_UID": "0"}, check=True)
    (tmp_path / "pbs").mkdir()
    for name in ("42.abc", "42.d e", "421.abc", "4.abc"):
        (tmp_path / "pbs" / name).touch()
    (tmp_path / "pbs/42.folder").mkdir()
    for uid, left in ((os.getuid() + 1, 5), (os.getuid(), 3)):
        subprocess.run(["sh", "-c", text], env={**job, "SLURM_JOB_UID": str(uid)}, check=True)
        assert len([*(tmp_path / "pbs").iterdir()]) == left
    assert {path.name for path in (tmp_path / "pbs").iterdir()} == {"42.folder", "421.abc", "4.abc"}


def test_modules_need_a_function() -> None:
    """A shell without it is told what to write."""
    done = subprocess.run(
        ["sh", ROOT / "roles/modules/files/module", "purge"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert ". /etc/farandole/modules.sh" in done.stderr
