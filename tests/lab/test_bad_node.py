"""A node that is off: the others go on without it, and it takes part again."""

from __future__ import annotations

import json
import subprocess

from clusters import ENVIRONMENT, ROOT, Cluster

NODES = 4
# What starts jobs is not needed to see who takes part.
BARE = ("--skip-tags", "stack")
EXCLUDE = (*BARE, "--extra-vars", "on_bad_node=exclude")


def excluded(cluster: Cluster) -> str:
    path = cluster.state / "excluded.yml"
    return path.read_text() if path.exists() else ""


def test_a_node_that_is_off_stops_a_run_that_is_not_told_otherwise(cluster: Cluster) -> None:
    cluster.farandole("fault", "kill", "node-4")
    stopped = cluster.play(*BARE)
    assert stopped.rc != 0
    assert "[login-" in stopped.output and "[exclusion-possible]" in stopped.output
    assert excluded(cluster) == ""
    # Nothing is left to do for a run that is limited to it.
    alone = cluster.play(*EXCLUDE, "--limit", "node-4")
    assert alone.rc != 0 and excluded(cluster) == ""


def test_the_others_are_set_up_without_it_and_a_second_run_changes_nothing(cluster: Cluster) -> None:
    predicted = cluster.play(*EXCLUDE, "--check")
    assert predicted.rc == 0, predicted.output
    assert excluded(cluster) == ""
    done = cluster.play(*EXCLUDE)
    assert done.rc == 0, done.output
    assert {host for _, host in done.changes} == {"node-1", "node-2", "node-3"}
    assert "node-4:" in excluded(cluster) and "by: check" in excluded(cluster)
    assert [*json.loads((cluster.state / "preflight.json").read_text())["hosts"]] == ["node-1", "node-2", "node-3"]
    # It is known now, so it stops nothing any more.
    again = cluster.play(*BARE)
    assert (again.rc, again.changes) == (0, set()), again.output
    assert "[node-excluded]" in again.output


def test_a_node_that_is_back_takes_part_unless_a_person_keeps_it_out(cluster: Cluster) -> None:
    cluster.farandole("fault", "start", "node-4")
    before = excluded(cluster)
    node(cluster, "confirm", "node-4")
    assert excluded(cluster) != before
    kept = cluster.play(*EXCLUDE)
    assert (kept.rc, kept.changes) == (0, set()), kept.output
    assert "[node-set-aside]" in kept.output and "node-4:" in excluded(cluster)
    node(cluster, "include", "node-4")
    back = cluster.play(*EXCLUDE)
    assert back.rc == 0, back.output
    # Its keys are signed on the control machine, which Ansible reports as a change of the first node.
    assert {host for task, host in back.changes if "Sign the keys" not in task} == {"node-4"}
    again = cluster.play(*BARE)
    assert (again.rc, again.changes) == (0, set()), again.output


def test_a_check_takes_back_what_it_left_out(cluster: Cluster) -> None:
    cluster.farandole("fault", "kill", "node-3")
    assert cluster.play(*EXCLUDE).rc == 0
    assert "node-3:" in excluded(cluster)
    cluster.farandole("fault", "start", "node-3")
    # Whatever on_bad_node is now.
    back = cluster.play(*BARE)
    assert (back.rc, back.changes) == (0, set()), back.output
    assert "[node-returned]" in back.output
    assert "node-3:" not in excluded(cluster)


def node(cluster: Cluster, *words: str) -> None:
    """Run `farandole node`."""
    command = ["farandole", "node", *words, "-i", str(cluster.inventory)]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
