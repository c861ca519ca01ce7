"""A run that is killed at any task and started again ends in the same state as an undisturbed one."""

import os

import pytest
from clusters import Cluster, Run

NODES = 2
TASKS = 100  # more than site.yml has
# The number of tasks, once a run has finished before it could be killed.
ended: list[int] = []
PICKED = (
    "base : Install the base packages",
    "ssh_trust : Write certificates and settings",
    "depot : Upload missing files to the depot",
)
# The roles before the depot. Later ones have tasks in several plays, which hides when a run has finished them.
PREPARE = {"base", "build_tools", "ssh_trust"}


def kill_points() -> list[tuple[int | str, ...]]:
    """The tasks at which one run after another is killed, once for each start from bare nodes."""
    every = range(1, TASKS) if os.environ.get("FARANDOLE_EVERY_KILL_POINT") else ()
    return [*((task,) for task in every), PICKED]


def changed_again(run: Run, finished: set[str]) -> set[tuple[str, str]]:
    """What a run changed in the roles that the run before it had finished."""
    return {(task, host) for task, host in run.changes if role(task) in finished}


def role(task: str) -> str:
    return task.partition(" : ")[0]


def assert_recovers(cluster: Cluster, where: str, finished: set[str]) -> None:
    recovered = cluster.play()
    assert recovered.rc == 0, f"after a kill at {where}\n{recovered.output}"
    assert changed_again(recovered, finished) == set()
    again = cluster.play()
    assert set(again.count("changed").values()) == {0}, f"after a kill at {where}\n{again.output}"
    assert cluster.job_ssh("node-1", "node-2", "hostname").stdout == "node-2\n"
    stacks = [cluster.ssh(node, "readlink", "/opt/farandole/current").stdout for node in ("node-1", "node-2")]
    assert stacks[0] == stacks[1] != ""


@pytest.mark.parametrize("tasks", kill_points())
def test_killed_runs_recover(cluster: Cluster, tasks: tuple[int | str, ...]) -> None:
    """Each run repairs what the one before it left, so the next has nothing to change in the roles that it finished."""
    if ended and isinstance(tasks[0], int):
        pytest.skip(f"site.yml has {ended[0]} tasks")
    cluster.reset(NODES)
    finished: set[str] = set()
    for task in tasks:
        run = cluster.play_until(task)
        if isinstance(task, int) and len(run.tasks) < task:
            ended.append(len(run.tasks))
            pytest.skip(f"site.yml has {ended[0]} tasks")
        assert isinstance(task, int) or task in run.tasks[-1]
        assert changed_again(run, finished) == set()
        finished = PREPARE & {role(done) for done in run.tasks} - {role(run.tasks[-1])}
    if tasks == PICKED:
        assert finished == PREPARE
        cluster.play_while("node-2", "test -e /opt/farandole/incoming/tree")
        assert cluster.ssh("node-2", "test", "-e", "/opt/farandole/current").returncode == 1
    assert_recovers(cluster, run.tasks[-1], finished)
