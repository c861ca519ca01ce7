"""One fault at a time: preflight names it by code and host, in time, and the cluster is green after the cure."""

import json
import os
import re
import time

import pytest
from clusters import Cluster, Run

NODES = 3
PREFLIGHT = "playbooks/preflight.yml"
# Ansible tries to reach a silent node several times, for ten seconds each.
SECONDS = 90
LONG = pytest.mark.skipif("FARANDOLE_EVERY_FAULT" not in os.environ, reason="`make test-faults` runs it")


@pytest.mark.parametrize(
    ("faults", "host", "code", "cure"),
    [
        # The cures say in words what these verbs do: start the node, let others through its firewall, change its cable.
        pytest.param(["kill"], "node-2", "login-no-route|login-timeout", "start", marks=LONG, id="off"),
        pytest.param(["cut"], "node-2", "login-no-route|login-timeout", "heal", marks=LONG, id="cut off"),
        pytest.param(["pause"], "node-2", "login-timeout", "resume", marks=LONG, id="frozen"),
        # A reboot closes the connection that Ansible keeps open, which a firewall would let go on.
        pytest.param(["reboot", "block --port 22"], "node-2", "login-timeout", "heal", marks=LONG, id="ssh dropped"),
        pytest.param(["reboot", "block --port 22 --reject"], "node-2", "login-refused", "heal", id="ssh refused"),
        pytest.param(["block --all-but-ssh"], "node-2", "pair-node-closed", "heal", id="all but ssh dropped"),
        pytest.param(["block --all-but-ssh --reject"], "node-2", "pair-node-closed", "heal", marks=LONG, id="refused"),
        pytest.param(["block --from node-3"], "node-3, node-2", "pair-link-closed", "heal", id="one direction dropped"),
        pytest.param(["throttle --mbit 100"], "node-2", "pair-slow-node", "heal", id="a slow link"),
    ],
)
def test_a_fault_is_named_and_its_cure_helps(
    cluster: Cluster, faults: list[str], host: str, code: str, cure: str
) -> None:
    for fault in faults:
        verb, *options = fault.split()
        cluster.farandole("fault", verb, "node-2", *options)
    begun = time.monotonic()
    red = preflight(cluster)
    seconds = time.monotonic() - begun
    (found,) = findings(cluster)
    assert red.rc != 0, red.output
    assert found["host"] == host, red.output
    assert re.fullmatch(code, found["code"]), red.output
    assert f"[{found['code']}]" in red.output
    assert seconds < SECONDS
    cluster.farandole("fault", cure, "node-2")
    green = preflight(cluster)
    assert green.rc == 0, green.output


def test_another_mtu_is_a_warning(cluster: Cluster) -> None:
    cluster.farandole("fault", "mtu", "node-2", "--bytes", "1400")
    warned = preflight(cluster)
    assert warned.rc == 0, warned.output
    assert "[link-differs]" in warned.output
    cluster.farandole("fault", "heal", "node-2")
    assert "[link-differs]" not in preflight(cluster).output


def preflight(cluster: Cluster) -> Run:
    """What `farandole preflight` runs."""
    return cluster.play("--extra-vars", "preflight_network=all", playbook=PREFLIGHT)


def findings(cluster: Cluster) -> list[dict[str, str]]:
    """Those that end the run; how fast connections are also depends on what else this machine does."""
    found = json.loads((cluster.state / "preflight.json").read_text())["findings"]
    return [one for one in found if one["severity"] == "stop"]
