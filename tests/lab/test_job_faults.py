"""One fault at a time that a job or its stack meets: it is named, and jobs run again after the printed cure."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import ENVIRONMENT, PREPARED, ROOT, Cluster
from faults import LOST, console

from farandole.core.causes import causes

NODES = 2
KIND = PREPARED
SECONDS = 120
Record = Callable[[str, object], None]
# Reduces something again and again, and says when it has begun to; the last rank may want a lot of memory then.
TRAIN = """
import sys, time, torch, horovod.torch as hvd
hvd.init()
for step in range(int(sys.argv[1])):
    total = hvd.allreduce(torch.ones(1000), op=hvd.Sum).sum().item()
    assert total == 1000 * hvd.size(), total
    if step == 3:
        print("trains", flush=True)
        much = torch.ones(1 << 29) if sys.argv[2:] and hvd.rank() + 1 == hvd.size() else None
    time.sleep(0.05)
"""
# One of its ranks kills itself while the others reduce.
KILL = """
import os, sys, torch, horovod.torch as hvd
hvd.init()
for step in range(1000):
    if step == 20 and hvd.rank() == int(sys.argv[1]):
        os.kill(os.getpid(), 9)
    hvd.allreduce(torch.ones(1000), name=f"grad{step % 3}")
"""
ENDS = {code for code, cause in causes().items() if cause.leads}


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """A cluster with the stack."""
    cluster.play_ok()
    return cluster


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with a program."""
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def begin(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the program on both nodes."""
    return cluster.begin("run", *arguments, folder=folder, stderr=subprocess.STDOUT)


def works(cluster: Cluster, folder: Path, *options: str) -> None:
    """A job runs to its end."""
    with begin(cluster, folder, *options, "--", "python", "train.py", "10") as run:
        output, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, output
    assert output.count("trains") == NODES, output


def validate(cluster: Cluster, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of a validation, and what is not green."""
    done = cluster.farandole("validate", *options)
    checks = json.loads((cluster.state / "reports/latest/result.json").read_text())["checks"]
    bad = [check for check in checks if check["status"] in ("red", "slow")]
    assert all(f"[{check['code']}]" in done.stdout for check in bad), done.stdout
    return done.returncode, bad


def cured(cluster: Cluster, cure: str) -> None:
    """Run the commands of a printed cure, one after the other."""
    for command in ["ansible-playbook -i " + str(cluster.inventory) + " site.yml"] * ("run site.yml" in cure) or (
        cure.split(", then ")
    ):
        done = subprocess.run(
            ["sh", "-ec", command], cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


STACK = "cd /opt/farandole && id=$(basename $(readlink current)) &&"


@pytest.mark.parametrize(
    ("name", "script", "code"),
    [
        ("a file of the stack was changed", f"{STACK} echo '#' >>current/venv/bin/horovodrun", "stack-altered"),
        (
            "another stack on one node",
            f"{STACK} cp -al stacks/$id stacks/ffffffffffff && ln -sfn stacks/ffffffffffff current",
            "stack-altered",
        ),
        ("a node has another's host name", "hostname node-1", "peer-stranger"),
    ],
    ids=["changed file", "other stack", "host name"],
)
def test_validation_names_what_differs_on_a_node(
    ready: Cluster, record_property: Record, name: str, script: str, code: str
) -> None:
    console(ready, "node-2", script)
    begun = time.monotonic()
    status, bad = validate(ready, "--quick")
    seconds = time.monotonic() - begun
    assert status == 1
    named = next((check for check in bad if check["code"] == code), {})
    assert named and "node-2" in f"{named['hosts']} {named['cause']}", bad
    record_property("named", f"{name} | `{code}` | {seconds:.0f}")
    cured(ready, named["cure"])
    assert validate(ready, "--quick", "--idle") == (0, [])


def test_interfaces_with_other_names_carry_jobs(ready: Cluster, program: Path) -> None:
    rename = (
        "gate=$(ip -4 route show default | cut -d ' ' -f 3); ip link set {0} down; ip link set {0} name {1};"
        "ip link set {1} up; ip route replace default via $gate"
    )
    console(ready, "node-2", rename.format("eth0", "net7"))
    try:
        ready.play_ok()
        chosen = json.loads((ready.state / "preflight.json").read_text())["fabric"]["interfaces"]
        assert (chosen["node-1"], chosen["node-2"]) == ("eth0", "net7")
        for controller in ("--gloo", "--mpi"):
            works(ready, program, controller)
    finally:
        console(ready, "node-2", rename.format("net7", "eth0"))
    ready.play_ok()


def test_a_loopback_line_with_the_nodes_own_name_is_named_and_mended(ready: Cluster, record_property: Record) -> None:
    console(ready, "node-2", "sed -i '1i 127.0.1.1 node-2' /etc/hosts")
    begun = time.monotonic()
    red = ready.play("--extra-vars", "preflight_network=all", playbook="playbooks/preflight.yml")
    seconds = time.monotonic() - begun
    assert (red.rc, "[name-loopback]" in red.output) == (0, True), red.output
    record_property("named", f"127.0.1.1 in /etc/hosts | `name-loopback` | {seconds:.0f}")
    cured(ready, "run site.yml")
    assert "[name-loopback]" not in ready.play(playbook="playbooks/preflight.yml").output


@pytest.mark.parametrize(("fault", "cure"), [("cut", "heal"), ("pause", "resume"), ("kill", "start"), ("reboot", "")])
def test_a_node_that_is_lost_in_mid_training_is_named(
    ready: Cluster, program: Path, record_property: Record, fault: str, cure: str
) -> None:
    with begin(ready, program, "--", "python", "train.py", "100000") as run:
        assert run.stdout
        assert any("trains" in line for line in run.stdout)
        begun = time.monotonic()
        ready.lab("fault", fault, "node-2")
        output, _ = run.communicate(timeout=2 * SECONDS)
    seconds = time.monotonic() - begun
    assert run.returncode == 1, output
    assert re.search(r"cause: .*node-2.* \[node-silent\]", output), output
    assert seconds < SECONDS
    record_property("named", f"{LOST[fault]} in mid-training | `node-silent` | {seconds:.0f}")
    if cure:
        ready.lab("fault", cure, "node-2")
    works(ready, program)


def test_a_rank_that_is_killed_for_its_memory_is_named(ready: Cluster, program: Path, record_property: Record) -> None:
    ready.lab("fault", "memory", "node-2", "--mib", "1500")
    begun = time.monotonic()
    try:
        with begin(ready, program, "-np", "2", "--", "python", "train.py", "1000", "much") as run:
            output, _ = run.communicate(timeout=SECONDS)
    finally:
        ready.lab("fault", "heal", "node-2")
    seconds = time.monotonic() - begun
    assert run.returncode == 1, output
    assert re.search(r"cause: rank 1 on node-2 .*memory.* \[worker-killed\]", output), output
    record_property("named", f"a rank is killed for its memory | `worker-killed` | {seconds:.0f}")
    works(ready, program)


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_kills_itself_is_named(ready: Cluster, tmp_path: Path, controller: str, rank: int) -> None:
    (tmp_path / "train.py").write_text(KILL)
    with begin(ready, tmp_path, controller, "-np", "2", "--", "python", "train.py", str(rank)) as run:
        output, _ = run.communicate(timeout=SECONDS)
    assert run.returncode != 0
    cause = re.findall(r"^cause: (.*) \[(.*)\]$", output, re.MULTILINE)
    assert [code for _, code in cause] == ["worker-killed"], output
    assert cause[0][0].startswith(f"rank {rank} on node-{rank + 1} "), output
    explained = subprocess.run(
        [sys.executable, "-m", "farandole", "explain"], input=output.partition("\nrun ")[0], env=ENVIRONMENT, text=True,
        capture_output=True, check=False,
    ).stdout  # fmt: skip
    found = re.findall(r"^root cause \[(.*)\]", explained, re.MULTILINE)
    # If the other rank ends earlier than what has connected the launcher to this one, the log alone says only that.
    blamed = re.findall(r"Process name: (\d)", output)
    assert found[-1] in ENDS if found else blamed == [str(1 - rank)], output + explained


def test_a_slow_node_is_named(ready: Cluster, record_property: Record) -> None:
    ready.lab("fault", "slow", "node-2", "--percent", "20")
    begun = time.monotonic()
    try:
        _, bad = validate(ready, "--quick")
    finally:
        ready.lab("fault", "heal", "node-2")
    seconds = time.monotonic() - begun
    if "other programs keep all processors busy" in (ready.state / "reports/latest/result.json").read_text():
        pytest.skip("this machine is too busy to tell which node is slow")
    assert [(check["code"], check["hosts"]) for check in bad] == [("worker-slow", ["node-2"])], bad
    record_property("named", f"a slow node | `worker-slow` | {seconds:.0f}")
    assert not [check for check in validate(ready, "--quick")[1] if check["code"] == "worker-slow"]


def test_a_depot_that_cannot_be_reached_is_named_and_one_that_is_down_is_started(
    ready: Cluster, program: Path, record_property: Record
) -> None:
    console(ready, "node-2", "cd /opt/farandole && mv -t $(mktemp -d /opt/forgotten.XXXX) stacks mpi current")
    ready.lab("fault", "block", "node-1", "--from", "node-2", "--port", "8480", "--reject")
    begun = time.monotonic()
    red = ready.play()
    seconds = time.monotonic() - begun
    assert red.rc != 0
    assert {name for name, number in red.count("failed").items() if number} == {"node-2"}, red.output
    why = subprocess.run(["farandole", "explain"], input=red.output, text=True, capture_output=True, check=True).stdout
    assert re.findall(r"^root cause \[(.+?)\]", why, re.MULTILINE) == ["depot-unreachable"], why
    record_property("named", f"a node cannot reach the depot | `depot-unreachable` | {seconds:.0f}")
    # The cure opens the port; site.yml starts a depot that is down by itself.
    ready.lab("fault", "heal", "node-1")
    console(ready, "node-1", "systemctl stop farandole-depot")
    ready.play_ok()
    works(ready, program)
