"""One fault at a time: preflight names it by code and host, in time, and the cluster is green after the cure."""

import json
import os
import re
import time

import pytest
from clusters import Cluster

NODES = 3
PREFLIGHT = "playbooks/preflight.yml"
# Ansible tries to reach a silent node several times, for ten seconds each.
SECONDS = 90
LONG = pytest.mark.skipif("FARANDOLE_EVERY_FAULT" not in os.environ, reason="`make test-faults` runs it")


@pytest.mark.parametrize(
    ("faults", "code", "cure"),
    [
        # The cures say in words what these verbs do: start the node, or let ssh through its firewall.
        pytest.param(["kill"], "login-no-route|login-timeout", "start", id="off"),
        pytest.param(["cut"], "login-no-route|login-timeout", "heal", marks=LONG, id="cut off"),
        pytest.param(["pause"], "login-timeout", "resume", marks=LONG, id="frozen"),
        # A reboot closes the connection that Ansible keeps open, which a firewall would let go on.
        pytest.param(["reboot", "block --port 22"], "login-timeout", "heal", marks=LONG, id="ssh dropped"),
        pytest.param(["reboot", "block --port 22 --reject"], "login-refused", "heal", id="ssh refused"),
    ],
)
def test_a_fault_is_named_and_its_cure_helps(cluster: Cluster, faults: list[str], code: str, cure: str) -> None:
    for fault in faults:
        verb, *options = fault.split()
        cluster.farandole("fault", verb, "node-2", *options)
    begun = time.monotonic()
    red = cluster.play(playbook=PREFLIGHT)
    seconds = time.monotonic() - begun
    found = json.loads((cluster.state / "preflight.json").read_text())["findings"]
    assert red.rc != 0, red.output
    assert [one["host"] for one in found] == ["node-2"], red.output
    assert re.fullmatch(code, found[0]["code"]), red.output
    assert f"[{found[0]['code']}]" in red.output
    assert seconds < SECONDS
    cluster.farandole("fault", cure, "node-2")
    green = cluster.play(playbook=PREFLIGHT)
    assert green.rc == 0, green.output
