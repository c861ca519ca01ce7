"""Nodes that pass the stack on to each other, with the firewall that lets only the cluster's nodes in."""

import base64
import re
import signal

from clusters import Cluster, until
from plays import Play

NODES = 6
SITE = ("--extra-vars", '{"firewall_enabled": true}')
WORKERS = [f"node-{number}" for number in range(2, NODES + 1)]
PORT = 8480
TASK = "stack : Install the stack alongside the others"
# What somebody on a node has put there to hurt the others: bytes that are wrong, no answer, or too few of them.
BAD = """
import socket, sys, threading, time
listener = socket.create_server(("", PORT), backlog=50)
HEAD = b"HTTP/1.1 206 Partial Content\\r\\n\\r\\n"
def answer(connection):
    try:
        connection.recv(4096)
        if KIND == "silent":
            time.sleep(600)
        connection.sendall(HEAD)
        while True:
            connection.sendall(bytes(1 << 16))
            if KIND == "slow":
                time.sleep(1)
    except OSError:
        pass
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""


def sent(cluster: Cluster, node: str) -> int:
    """The bytes that a node has sent over the network."""
    return int(cluster.ssh(node, "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)


def size(cluster: Cluster) -> int:
    """The size of the archive on the head's depot."""
    return int(cluster.shell("node-1", "stat --format %s /srv/farandole/stacks/*.zst").stdout)


def listening(cluster: Cluster) -> list[str]:
    """The nodes other than the head on which a process passes something on."""
    return [node for node in WORKERS if cluster.shell(node, "pgrep -x farandole-peer").returncode == 0]


def put_bad_peer(cluster: Cluster, node: str, kind: str) -> None:
    program = base64.b64encode(BAD.replace("PORT", str(PORT)).replace("KIND", repr(kind)).encode()).decode()
    start = f"echo {program} | base64 -d >/root/bad.py; systemd-run --quiet --unit bad-peer python3 /root/bad.py"
    assert cluster.shell(node, start).returncode == 0


def lacking(cluster: Cluster) -> None:
    """Take the stack away from all nodes but the head, and whatever was put in the place of what passes it on."""
    for node in WORKERS:
        script = "systemctl stop bad-peer; cd /opt/farandole && rm -rf stacks mpi current"
        assert cluster.shell(node, script).returncode == 0


def passing_on(cluster: Cluster) -> Play:
    """A run in which the nodes that the head sends the archive to, slowly, have a part of it and pass it on."""
    cluster.ensure(*SITE)
    lacking(cluster)
    cluster.lab("fault", "throttle", "node-1")
    run = cluster.start(*SITE)
    until(lambda: listening(cluster) == ["node-2", "node-3"], 300)
    before = sent(cluster, "node-3")
    until(lambda: sent(cluster, "node-3") > before + (50 << 20), 300)
    return run


def have_the_stack(cluster: Cluster) -> list[str]:
    return [
        node for node in WORKERS if cluster.shell(node, "test -e /opt/farandole/current/manifest.json").returncode == 0
    ]


def test_the_head_sends_the_archive_to_two_nodes(cluster: Cluster) -> None:
    # It sends a lot to measure the connections of nodes that are new to it.
    cluster.play_ok(playbook="playbooks/preflight.yml")
    before = {node: sent(cluster, node) for node in ("node-1", "node-2")}
    done = cluster.play_ok(*SITE)
    archives = {node: (sent(cluster, node) - count) / size(cluster) for node, count in before.items()}
    assert "which pass it on to each other" in done.flat
    assert "[WARNING]" not in done.output, done.output
    assert archives["node-1"] < 3
    assert 1.9 < archives["node-2"] < 3
    assert have_the_stack(cluster) == WORKERS
    again = cluster.play_ok(*SITE)
    assert set(again.count("changed").values()) == {0}, again.output
    until(lambda: not listening(cluster), 60)


def test_bad_peers_cost_a_retry_and_are_named(cluster: Cluster) -> None:
    cluster.ensure(*SITE)
    lacking(cluster)
    for node, kind in (("node-2", "lying"), ("node-3", "silent"), ("node-4", "slow")):
        put_bad_peer(cluster, node, kind)
    # Two at a time: each fetches from the one two places before it.
    done = cluster.play_ok(*SITE, "--forks", "2")
    # Ansible shows the same warning of several nodes once.
    named = sorted(re.findall(r"node-\d sent (?:wrong bytes|0 KiB|[1-9]\d+ KiB)", done.flat))
    assert [re.sub(r"[1-9]\d+ KiB", "few", text) for text in named] == [
        "node-2 sent wrong bytes", "node-3 sent 0 KiB", "node-4 sent few"
    ], done.output  # fmt: skip
    assert {host for task, host in done.changes if task == TASK} == {*WORKERS}
    assert have_the_stack(cluster) == WORKERS
    # The others have no children.
    assert listening(cluster) == []


def test_a_peer_that_loses_its_power_costs_the_others_a_retry(cluster: Cluster) -> None:
    run = passing_on(cluster)
    cluster.lab("fault", "kill", "node-2")
    done = run.end()
    cluster.lab("fault", "heal", "node-1")
    cluster.lab("fault", "start", "node-2")
    assert {host for _, host in done.failures} == {"node-2"}, done.output
    assert re.search(r"node-2 (stopped before the end|sent \d+ KiB)", done.flat), done.output
    cluster.play_ok(*SITE)
    assert have_the_stack(cluster) == WORKERS


def test_a_peer_that_is_revoked_meanwhile_is_asked_by_nobody_and_gets_nothing(cluster: Cluster) -> None:
    run = passing_on(cluster)
    revoked = (*SITE, "--extra-vars", '{"ssh_trust_revoked": ["node-3"]}')
    # Nobody changes the cluster beside another run, so that one has to end.
    assert "is being changed" in cluster.play_failing(*revoked).flat
    run.end(signal.SIGINT)
    cluster.lab("fault", "heal", "node-1")
    done = cluster.play_ok(*revoked)
    assert "node-3 sent" not in done.flat
    assert have_the_stack(cluster) == [node for node in WORKERS if node != "node-3"]
    ask = f"timeout 5 bash -c 'exec 3<>/dev/tcp/node-1/{PORT}'"
    assert cluster.shell("node-2", ask).returncode == 0
    assert cluster.console("node-3", ask).returncode != 0
    cluster.readmit("node-3")
    cluster.play_ok(*SITE)
    assert have_the_stack(cluster) == WORKERS
