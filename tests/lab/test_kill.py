"""A run that is killed at any task, and started again, ends where an undisturbed one does."""

import os

import pytest
from clusters import Cluster

NODES = 2
TASKS = 100  # more than site.yml has
# How many it has, once a run came to its end before it was killed.
ended: list[int] = []
PICKED = (
    "base : Install the base packages",
    "ssh_trust : Write certificates and settings",
    "depot : Put what is missing on the depot",
)


def kill_points() -> list[int | str]:
    return [*range(1, TASKS)] if os.environ.get("FARANDOLE_EVERY_KILL_POINT") else [*PICKED]


def mends_itself(cluster: Cluster, where: str) -> None:
    mended = cluster.play()
    assert mended.rc == 0, f"after a kill at {where}\n{mended.output}"
    again = cluster.play()
    assert set(again.count("changed").values()) == {0}, f"after a kill at {where}\n{again.output}"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    stacks = [cluster.ssh(node, "readlink", "/opt/farandole/current").stdout for node in ("node-1", "node-2")]
    assert stacks[0] == stacks[1] != ""


@pytest.mark.parametrize("task", kill_points())
def test_killed_and_started_again(cluster: Cluster, task: int | str) -> None:
    if ended and isinstance(task, int):
        pytest.skip(f"site.yml has {ended[0]} tasks")
    cluster.reset(NODES)
    begun = cluster.play_until(task)
    if isinstance(task, int) and len(begun) < task:
        ended.append(len(begun))
        pytest.skip(f"site.yml has {ended[0]} tasks")
    assert isinstance(task, int) or task in begun[-1]
    mends_itself(cluster, begun[-1])


def test_killed_while_a_node_unpacks_its_stack(cluster: Cluster) -> None:
    cluster.reset(NODES)
    cluster.play_while("node-2", "test -e /opt/farandole/incoming/tree")
    assert cluster.ssh("node-2", "test", "-e", "/opt/farandole/current").returncode == 1
    mends_itself(cluster, "unpacking")
