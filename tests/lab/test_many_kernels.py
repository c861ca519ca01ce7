"""As many nodes with kernels of their own as a large cluster has, each with as little memory as it needs."""

import json

from clusters import Cluster

from farandole.lab.machine import LEAST_MIB

NODES = 64
KIND = ("--kernel", "own", "--memory", str(LEAST_MIB))


def test_all_of_them_answer_preflight(cluster: Cluster) -> None:
    # Two cores cannot let 32 of them in at a time before these lose patience.
    done = cluster.play_ok("--forks", "6", playbook="playbooks/preflight.yml")
    assert not done.failures
    report = json.loads((cluster.state / "preflight.json").read_text())
    assert len(report["hosts"]) == NODES
    assert {one["code"] for one in report["findings"]} <= {"memory-small", "pair-unmeasured", "shm-small"}
