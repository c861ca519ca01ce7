"""A node that is off: the others go on without it, and it takes part again."""

import json
from collections.abc import Iterator

import pytest
from clusters import QUICK, Cluster

NODES = 4
# Other labs have Debian 12.
KIND = ("--suite", "trixie")
# What starts jobs is not needed to see who takes part.
SITE = QUICK
EXCLUDE = (*QUICK, "--extra-vars", "on_bad_node=exclude")


def excluded(cluster: Cluster) -> str:
    path = cluster.state / "excluded.yml"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def off(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster of which one node is off."""
    cluster.lab("fault", "kill", "node-4")
    yield cluster
    cluster.lab("fault", "start", "node-4")


@pytest.fixture
def without(cluster: Cluster) -> Cluster:
    """One that was set up without its last node, which is back now."""
    if not (cluster.applied in (QUICK, EXCLUDE) and "node-4:" in excluded(cluster)):
        cluster.reset(NODES, *KIND)
        cluster.lab("fault", "kill", "node-4")
        cluster.ensure(*EXCLUDE)
        cluster.lab("fault", "start", "node-4")
    return cluster


@pytest.mark.usefixtures("off")
def test_a_node_that_is_off_stops_a_run_that_is_not_told_otherwise(bare: Cluster) -> None:
    stopped = bare.play_failing(*QUICK)
    assert "[login-" in stopped.output and "[exclusion-possible]" in stopped.output
    assert excluded(bare) == ""
    # Nothing is left to do for a run that is limited to it.
    alone = bare.play(*EXCLUDE, "--limit", "node-4")
    assert alone.rc != 0 and excluded(bare) == ""


@pytest.mark.usefixtures("off")
def test_the_others_are_set_up_without_it_and_a_second_run_changes_nothing(bare: Cluster) -> None:
    bare.play_ok(*EXCLUDE, "--check")
    assert excluded(bare) == ""
    done = bare.play_ok(*EXCLUDE)
    assert {host for _, host in done.changes} == {"node-1", "node-2", "node-3"}
    assert "node-4:" in excluded(bare) and "by: check" in excluded(bare)
    assert [*json.loads((bare.state / "preflight.json").read_text())["hosts"]] == ["node-1", "node-2", "node-3"]
    # It is known now, so it stops nothing any more.
    again = bare.play(*QUICK)
    assert (again.rc, again.changes) == (0, set()), again.output
    assert "[node-excluded]" in again.output


def test_a_node_that_is_back_takes_part_unless_a_person_keeps_it_out(without: Cluster) -> None:
    before = excluded(without)
    assert without.farandole("node confirm", "node-4").returncode == 0
    assert excluded(without) != before
    kept = without.play(*EXCLUDE)
    assert (kept.rc, kept.changes) == (0, set()), kept.output
    assert "[node-set-aside]" in kept.output and "node-4:" in excluded(without)
    assert without.farandole("node include", "node-4", "--unproven").returncode == 0
    back = without.play_ok(*EXCLUDE)
    # Its keys are signed on the control machine, which Ansible reports as a change of the first node.
    assert {host for task, host in back.changes if "Sign the keys" not in task} == {"node-4"}
    again = without.play(*QUICK)
    assert (again.rc, again.changes) == (0, set()), again.output


def test_what_a_check_left_out_is_proven_before_it_takes_part_again(site: Cluster) -> None:
    site.lab("fault", "kill", "node-3")
    site.play_ok(*EXCLUDE)
    assert "node-3:" in excluded(site)
    site.lab("fault", "start", "node-3")
    # Whatever on_bad_node is now.
    back = site.play(*QUICK)
    assert (back.rc, back.changes) == (0, set()), back.output
    assert "[node-mended]" in back.output and "node-3:" in excluded(site)
