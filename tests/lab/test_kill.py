"""A run that is killed at any task, and started again, ends where an undisturbed one does."""

import os

import pytest
from clusters import Cluster

NODES = 2
TASKS = 30  # more than site.yml has; a run that ends before its number ends the loop
PICKED = (9, 14, 22)


def kill_points() -> list[int]:
    return list(range(1, TASKS)) if os.environ.get("FARANDOLE_EVERY_KILL_POINT") else list(PICKED)


@pytest.mark.parametrize("task", kill_points())
def test_killed_and_started_again(cluster: Cluster, task: int) -> None:
    cluster.reset(NODES)
    begun = cluster.play_until(task)
    if len(begun) < task:
        pytest.skip(f"site.yml has {len(begun)} tasks")
    mended = cluster.play()
    assert mended.rc == 0, f"after a kill at {begun[-1]}\n{mended.output}"
    again = cluster.play()
    assert set(again.count("changed").values()) == {0}, f"after a kill at {begun[-1]}\n{again.output}"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
