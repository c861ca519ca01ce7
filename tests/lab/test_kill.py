"""A run that is killed at any task, and started again, ends where an undisturbed one does."""

import os

import pytest
from clusters import Cluster

NODES = 2
TASKS = 100  # more than site.yml has; a run that ends before its number ends the loop
PICKED = (
    "base : Install the base packages",
    "ssh_trust : Write certificates and settings",
    "depot : Put what is missing on the depot",
    "stack : Install the stack beside the others",
)


def kill_points() -> list[int | str]:
    return [*range(1, TASKS)] if os.environ.get("FARANDOLE_EVERY_KILL_POINT") else [*PICKED]


@pytest.mark.parametrize("task", kill_points())
def test_killed_and_started_again(cluster: Cluster, task: int | str) -> None:
    cluster.reset(NODES)
    begun = cluster.play_until(task)
    if task not in (len(begun), *filter(lambda name: name in begun[-1], PICKED)):
        assert isinstance(task, int), f"no task {task} among {begun}"
        pytest.skip(f"site.yml has {len(begun)} tasks")
    mended = cluster.play()
    assert mended.rc == 0, f"after a kill at {begun[-1]}\n{mended.output}"
    again = cluster.play()
    assert set(again.count("changed").values()) == {0}, f"after a kill at {begun[-1]}\n{again.output}"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    current = {cluster.ssh(node, "readlink", "/opt/farandole/current").stdout for node in ("node-1", "node-2")}
    assert len(current) == 1
    assert all(current)
