"""One fault at a time: it is named by code and host, in time, and the cluster is green after the printed cure."""

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clusters import ENVIRONMENT, PREPARED, QUICK, ROOT, Cluster, Run
from faults import FAULTS, LOST, NO_CONNECTION, Fault, console, verb

from farandole.core.findings import Finding
from farandole.lab import lab

NODES = 3
KIND = PREPARED
# Ansible tries to reach a silent node several times, for ten seconds each.
SECONDS = 90
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """A cluster with everything but the stack."""
    cluster.play_ok(*QUICK)
    return cluster


def here(script: str) -> None:
    """Run a command on this machine, as the user who reads the finding."""
    done = subprocess.run(["sh", "-ec", script], cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def preflight(cluster: Cluster) -> Run:
    """What the user runs first."""
    done = cluster.farandole("preflight")
    return Run(done.returncode, done.stdout + done.stderr)


def findings(cluster: Cluster) -> Iterator[Finding]:
    for finding in json.loads((cluster.state / "preflight.json").read_text())["findings"]:
        yield Finding(**finding)


def site(cluster: Cluster, finding: Finding) -> None:
    """Run site.yml."""
    assert "run site.yml" in finding.cure
    cluster.play_ok(*QUICK)


@pytest.mark.parametrize(("fault", "cure"), [("kill", "start"), ("cut", "heal"), ("pause", "resume"), ("reboot", "")])
def test_a_node_is_lost_while_it_is_set_up(cluster: Cluster, fault: str, cure: str, record_property: Record) -> None:
    cluster.reset(NODES, *KIND)
    run = cluster.start(*QUICK)
    unpacking = "until grep -qs half-installed /var/lib/dpkg/updates/*; do sleep 0.02; done"
    assert cluster.ssh("node-2", "timeout", "300", "sh", "-c", unpacking).returncode == 0
    begun = time.monotonic()
    cluster.lab("fault", fault, "node-2")
    lost = run.end()
    seconds = time.monotonic() - begun
    assert lost.rc != 0
    assert {name for name, number in lost.count("unreachable").items() if number} == {"node-2"}, lost.output
    why = subprocess.run(
        ["farandole", "explain"], input=lost.output, text=True, capture_output=True, check=False
    ).stdout
    (code,) = set(re.findall(r"root cause .*\[(login-[\w-]+)\]", why)) or {why}
    assert seconds < SECONDS
    record_property("named", f"{LOST[fault]} while it is set up | `{code}` | {seconds:.0f}")
    if cure:
        cluster.lab("fault", cure, "node-2")
    cluster.play_ok(*QUICK)
    assert cluster.play_ok(*QUICK).changes == set()


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_a_fault_is_named_and_its_cure_helps(ready: Cluster, fault: Fault, record_property: Record) -> None:
    for command in fault.verbs:
        name, *options = command.split()
        ready.lab("fault", name, "node-2", *options)
    for node in fault.nodes if fault.script else ():
        console(ready, node, fault.script)
    try:
        finding = named(ready, fault, record_property)
        fault.cure(ready, finding)
        again(ready, finding.code, fault.severity)
    finally:
        for node in fault.nodes if fault.clear else ():
            console(ready, node, fault.clear)


def named(cluster: Cluster, fault: Fault, record_property: Record) -> Finding:
    """The finding, after checking everything that the user sees."""
    begun = time.monotonic()
    run = preflight(cluster)
    seconds = time.monotonic() - begun
    stop = fault.severity == "stop"
    # Of warnings there may be more: how fast connections are also depends on what else this machine does.
    matching = [
        finding
        for finding in findings(cluster)
        if finding.severity == fault.severity and (stop or finding.code == fault.code)
    ]
    assert matching, run.output
    assert {finding.host for finding in matching} == {fault.host}, run.output
    assert re.fullmatch(fault.code, matching[0].code), run.output
    assert (run.rc != 0) == stop, run.output
    output = " ".join(run.output.split())
    assert f"[{matching[0].code}]" in output and " ".join(matching[0].cure.split()) in output
    assert seconds < SECONDS
    record_property("named", f"{fault.name} | `{matching[0].code}` | {seconds:.0f}")
    return matching[0]


def again(cluster: Cluster, code: str, severity: str = "warn") -> None:
    """It is not found any more, and nothing else ends the run."""
    green = preflight(cluster)
    assert green.rc == 0, green.output
    # As to speed, there may be a warning on a busy machine.
    assert not [finding for finding in findings(cluster) if (finding.code, finding.severity) == (code, severity)], (
        green.output
    )


def test_a_changed_host_key_is_named_and_accepted_by_hand(ready: Cluster, record_property: Record) -> None:
    new = "rm /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub && ssh-keygen -A && systemctl restart ssh"
    console(ready, "node-2", f"{new}; {NO_CONNECTION}")
    fault = Fault("a host key has changed", "login-host-key-changed", site)
    finding = named(ready, fault, record_property)
    fingerprint = re.search(r"console: (.+?); only if that is the new key, run here: (.+?), then (.+)", finding.cure)
    assert fingerprint, finding.cure
    show, forget, log_in = fingerprint.groups()
    key = console(ready, "node-2", show).split()[1]
    here(forget)
    with subprocess.Popen(
        # ssh asks its terminal, and reads nothing that was typed before.
        ["script", "--quiet", "--command", f"{log_in} true", "/dev/null"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as ssh:  # fmt: skip
        assert ssh.stdin and ssh.stdout
        output = b""
        while b"(yes/no" not in output and (more := ssh.stdout.read(1)):
            output += more
        assert key.encode() in output, output
        ssh.stdin.write(b"yes\n")
        ssh.stdin.flush()
        assert ssh.wait(SECONDS) == 0
    # Now it is the other nodes that do not know it.
    unsigned = Fault("the nodes do not know a host key", "pair-login-failed", site, severity="warn")
    site(ready, named(ready, unsigned, record_property))
    again(ready, "pair-login-failed")


EXPIRED = ("-V", "20200101:20210101")


@pytest.mark.parametrize(
    ("ca", "node", "key", "options"),
    [
        pytest.param("host_ca", "node-2", "/etc/ssh/ssh_host_ed25519_key", ["-h", "-n", "node-2"], id="a node"),
        pytest.param("user_ca", "node-1", "/etc/farandole/ssh/id_job", ["-n", "trainer"], id="the job user"),
    ],
)
def test_an_expired_certificate_is_named_and_renewed(
    ready: Cluster, record_property: Record, tmp_path: Path, ca: str, node: str, key: str, options: list[str]
) -> None:
    public = tmp_path / "key.pub"
    public.write_text(console(ready, node, f"cat {key}.pub"))
    sign = ["ssh-keygen", "-q", "-s", str(ready.state / "ca" / ca), "-I", "expired", *options, *EXPIRED, str(public)]
    subprocess.run(sign, check=True)
    certificate = (tmp_path / "key-cert.pub").read_text()
    console(ready, node, f"printf %s {shlex.quote(certificate)} >{key}-cert.pub; systemctl reload ssh")
    begun = time.monotonic()
    red = preflight(ready)
    seconds = time.monotonic() - begun
    failures = [finding for finding in findings(ready) if finding.code == "pair-login-failed"]
    assert {finding.host for finding in failures} == ({"node-2"} if ca == "host_ca" else {"node-1", "node-2", "node-3"})
    whose = "a node" if ca == "host_ca" else "the job user"
    record_property("named", f"the certificate of {whose} has expired | `pair-login-failed` | {seconds:.0f}")
    assert "[pair-login-failed]" in red.output
    site(ready, failures[0])
    again(ready, "pair-login-failed")
    assert ready.play_ok(*QUICK).changes == set()


def test_an_address_that_two_machines_have_is_named(ready: Cluster, record_property: Record) -> None:
    address = lab.node(ready.name, "node-2").address
    mac = console(ready, "node-3", "cat /sys/class/net/eth0/address").strip()
    console(ready, "node-3", f"ip address add {address}/32 dev eth0")
    # Which of the two answers is a matter of luck; for node-1 it is the wrong one.
    console(ready, "node-1", f"ip neighbour replace {address} dev eth0 lladdr {mac}")
    try:
        named(ready, Fault("two machines have one address", "pair-address-shared", verb("heal")), record_property)
    finally:
        console(ready, "node-3", f"ip address delete {address}/32 dev eth0")
        console(ready, "node-1", f"ip neighbour delete {address} dev eth0")
    again(ready, "pair-address-shared")


def test_a_wrong_line_in_the_host_table_is_named(ready: Cluster, record_property: Record) -> None:
    console(ready, "node-2", "sed -i '1i 10.94.255.1 node-3' /etc/hosts")
    fault = Fault("a name means another address", "pair-name-wrong", site, severity="warn")
    finding = named(ready, fault, record_property)
    assert "a line with that name outside its block has to go" in finding.cure
    console(ready, "node-2", "sed -i '/^10.94.255.1 /d' /etc/hosts")
    site(ready, finding)
    again(ready, "pair-name-wrong")


DECOY = "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up"


def test_a_bridge_with_one_address_on_every_node_is_never_the_network(ready: Cluster, record_property: Record) -> None:
    nodes = [f"node-{index}" for index in range(1, NODES + 1)]
    for node in nodes:
        console(ready, node, DECOY)
    again(ready, "address-shared")
    chosen = json.loads((ready.state / "preflight.json").read_text())["fabric"]
    assert set(chosen["interfaces"].values()) == {"eth0"}
    # Only who asks for it gets it, and then it is refused.
    begun = time.monotonic()
    red = ready.play("--extra-vars", "fabric_network=172.17.0.0/16", playbook="playbooks/preflight.yml")
    seconds = time.monotonic() - begun
    assert red.rc != 0
    assert {finding.code for finding in findings(ready) if finding.severity == "stop"} == {"address-shared"}, red.output
    record_property("named", f"a docker0 is chosen by hand | `address-shared` | {seconds:.0f}")
    for node in nodes:
        console(ready, node, "ip link delete docker0")
    again(ready, "address-shared")


# On each node at the same time; without a key, who is refused by name has come past MaxStartups. These logins only take
# up sshd's places, whoever answers.
# Only the load of the logins counts: nothing is sent.
STORM = """
until [ $(date +%s) -ge {at} ]; do sleep 0.02; done
for login in 1 2 3; do
    ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR {to} true &
done
wait
"""


def storm(cluster: Cluster) -> list[str]:
    """What ssh says on all nodes but the head, which log in to it at the same time."""
    head, *others = lab.nodes(cluster.name)
    script = STORM.format(at=int(time.time()) + len(others), to=f"root@{head.address}")
    with ThreadPoolExecutor(len(others)) as pool:
        output = pool.map(lambda node: cluster.ssh(node.name, "sh", "-c", script).stderr, others)
    return [line for text in output for line in text.splitlines()]


def test_a_storm_of_logins_is_let_in(record_property: Record) -> None:
    cluster = Cluster("test-faults-storm")
    cluster.reset(32)
    try:
        stock = storm(cluster)
        dropped = [line for line in stock if "Permission denied" not in line]
        assert dropped, stock
        why = subprocess.run(
            ["farandole", "explain"], input="\n".join(stock), text=True, capture_output=True, check=False
        )
        assert "[peer-closed]" in why.stdout, why.stdout
        # The limit is the same for 2 nodes and for 64, so the others need not be set up.
        hosts = cluster.inventory / "hosts.yml"
        hosts.write_text(re.sub(r"    node-(?!1:|2:)\d+:\n.*\n", "", hosts.read_text()))
        done = cluster.play_ok(*QUICK)
        assert done.count("failed") == {"node-1": 0, "node-2": 0}
        ours = storm(cluster)
        assert len(ours) == 3 * 31
        assert {line for line in ours if "Permission denied" not in line} == set()
        record_property("named", f"32 nodes log in at once, {len(dropped)} of 93 logins dropped | `peer-closed` | -")
    finally:
        cluster.lab("down")
