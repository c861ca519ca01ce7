"""What patches of the series mend in horovodrun; on the head, which logs in to the other node."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from horovod.runner import launch
from horovod.runner.util.remote import get_ssh_command


def test_host_keys_are_checked_and_nobody_is_asked() -> None:
    words = shlex.split(get_ssh_command("true", "node-2"))
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} <= {*words}


def test_it_needs_no_distutils() -> None:
    code = "import sys; sys.modules['distutils'] = None; import horovod.runner.launch"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_of_an_earlier_start_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "true"])
    assert launch.parse_args().disable_cache


def test_no_framework_is_imported_to_know_what_was_built() -> None:
    code = (
        "import resource; from horovod.common.util import gloo_built, mpi_built; assert gloo_built() and mpi_built(); "
        "assert not resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("way", ["--gloo", "--mpi"])
def test_a_job_logs_in_to_each_node_once(way: str, tmp_path: Path) -> None:
    logins = tmp_path / "logins"
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{logins}\nexec /usr/bin/ssh "$@"\n')
    ssh.chmod(0o755)
    places = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ranks = ["-np", "2", "-H", "node-1:1,node-2:1"]
    done = subprocess.run(
        ["horovodrun", way, *ranks, "hostname"], env=places, text=True, capture_output=True, check=True
    )
    assert {line.split(":")[-1].split(">")[-1].strip() for line in done.stdout.splitlines()} >= {"node-1", "node-2"}
    assert len(logins.read_text().splitlines()) == 1
