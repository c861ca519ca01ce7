"""A run that is killed at any task and started again ends in the same state as an undisturbed one."""

import os

import pytest
from clusters import Cluster

NODES = 2
TASKS = 100  # more than site.yml has
# The number of tasks, once a run has finished before it could be killed.
ended: list[int] = []
PICKED = (
    "base : Install the base packages",
    "ssh_trust : Write certificates and settings",
    "depot : Upload missing files to the depot",
)


def kill_points() -> list[int | str]:
    return [*range(1, TASKS)] if os.environ.get("FARANDOLE_EVERY_KILL_POINT") else [*PICKED]


def assert_recovers(cluster: Cluster, where: str) -> None:
    recovered = cluster.play()
    assert recovered.rc == 0, f"after a kill at {where}\n{recovered.output}"
    again = cluster.play()
    assert set(again.count("changed").values()) == {0}, f"after a kill at {where}\n{again.output}"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    stacks = [cluster.ssh(node, "readlink", "/opt/farandole/current").stdout for node in ("node-1", "node-2")]
    assert stacks[0] == stacks[1] != ""


@pytest.mark.parametrize("task", kill_points())
def test_a_killed_run_recovers(cluster: Cluster, task: int | str) -> None:
    if ended and isinstance(task, int):
        pytest.skip(f"site.yml has {ended[0]} tasks")
    cluster.reset(NODES)
    begun = cluster.play_until(task)
    if isinstance(task, int) and len(begun) < task:
        ended.append(len(begun))
        pytest.skip(f"site.yml has {ended[0]} tasks")
    assert isinstance(task, int) or task in begun[-1]
    assert_recovers(cluster, begun[-1])


def test_a_run_killed_while_a_node_unpacks_its_stack_recovers(cluster: Cluster) -> None:
    cluster.reset(NODES)
    cluster.play_while("node-2", "test -e /opt/farandole/incoming/tree")
    assert cluster.ssh("node-2", "test", "-e", "/opt/farandole/current").returncode == 1
    assert_recovers(cluster, "unpacking")
