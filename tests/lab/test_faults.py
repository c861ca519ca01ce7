"""One fault at a time: it is named by code and host, in time, and the cluster is green after the printed cure."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import ENVIRONMENT, ROOT, Cluster, Run

from farandole.lab import lab
from farandole.lab.podman import podman

NODES = 3
# What starts jobs is not needed here.
BARE = ("--skip-tags", "stack")
# Ansible tries to reach a silent node several times, for ten seconds each.
SECONDS = 90
LONG = pytest.mark.skipif("FARANDOLE_EVERY_FAULT" not in os.environ, reason="`make test-faults` runs it")
Record = Callable[[str, object], None]
LOST = {"cut": "a node is cut off", "pause": "a node freezes", "kill": "a node loses power", "reboot": "a node reboots"}


@dataclass(frozen=True)
class Finding:
    """What preflight has found, and printed."""

    host: str
    code: str
    severity: str
    cause: str
    cure: str


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """A cluster with everything but the stack."""
    done = cluster.play(*BARE)
    assert done.rc == 0, done.output
    return cluster


def console(cluster: Cluster, node: str, script: str) -> str:
    """What a script prints that root runs on the console of a node."""
    return podman("exec", lab.node(cluster.name, node).container, "sh", "-ec", script)


def here(script: str) -> None:
    """Run a command on this machine, as the user who reads the finding."""
    done = subprocess.run(["sh", "-ec", script], cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def preflight(cluster: Cluster) -> Run:
    """What the user runs first."""
    done = subprocess.run(
        ["farandole", "preflight", "-i", str(cluster.inventory)],
        cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return Run(done.returncode, done.stdout)


def findings(cluster: Cluster) -> Iterator[Finding]:
    for found in json.loads((cluster.state / "preflight.json").read_text())["findings"]:
        yield Finding(**found)


Cure = Callable[[Cluster, Finding], None]


def verb(*words: str) -> Cure:
    """Do what a cure says in words: start the node, correct its clock, change its cable."""
    return lambda cluster, _: void(cluster.farandole("fault", words[0], "node-2", *words[1:]))


def void(_: object) -> None:
    """For a command of which only success matters."""


def command(found: Finding, pattern: str) -> str:
    """The command in a printed cure."""
    match = re.search(pattern, found.cure)
    assert match, found.cure
    return match[1]


def typed(pattern: str, *then: str, node: str = "", **words: str) -> Cure:
    """Type the command of the cure on the node's console, with these words for those in capitals; then these verbs."""

    def cure(cluster: Cluster, found: Finding) -> None:
        text = command(found, pattern)
        for word, meant in words.items():
            text = re.sub(rf"\b{word}\b", meant, text)
        console(cluster, node or found.host, text)
        for one in then:
            cluster.farandole("fault", one, node or found.host)

    return cure


def taken_out(pattern: str, culprit: str) -> Cure:
    """Look with the command of the cure for a line in a file, and take it out."""

    def cure(cluster: Cluster, found: Finding) -> None:
        # grep's status is not 0 if one of the files is missing.
        shown = console(cluster, found.host, command(found, pattern) + " || :")
        (file, number), *_ = re.findall(rf"^([^:\n]+):(\d+):.*{culprit}", shown, re.MULTILINE)
        console(cluster, found.host, f"sed -i {number}d {shlex.quote(file)}")

    return cure


def removed(option: str = "") -> Cure:
    """Look with the command of the cure for what is large, and remove it."""

    def cure(cluster: Cluster, found: Finding) -> None:
        shown = console(cluster, found.host, command(found, r"^(du .+?) on it").replace("du ", f"du {option} "))
        largest = [line.split("\t")[1] for line in shown.splitlines() if line.split("\t")[1].endswith("/filler")]
        assert largest, shown
        console(cluster, found.host, f"rm -r {shlex.quote(largest[0])}")

    return cure


def site(cluster: Cluster, found: Finding) -> None:
    """Run site.yml."""
    assert "run site.yml" in found.cure
    done = cluster.play(*BARE)
    assert done.rc == 0, done.output


@dataclass(frozen=True)
class Fault:
    """What goes wrong on a node, what it is called, and what its cure comes to."""

    name: str
    code: str
    cure: Cure
    verbs: Sequence[str] = ()
    script: str = ""
    nodes: Sequence[str] = ("node-2",)
    host: str = "node-2"
    severity: str = "stop"
    # What the fault leaves on the node beside itself.
    clear: str = ""


NO_CONNECTION = "loginctl terminate-user root"
# As in the example that Debian's nftables brings, with one rule for ssh.
FIREWALL = """
apt-get -qq install --no-install-recommends nftables >/dev/null 2>&1
nft -f - <<END
table inet filter {{
  chain input {{ type filter hook input priority filter; policy {input}; {inputs} }}
  chain output {{ type filter hook output priority filter; policy {output}; {outputs} }}
}}
END
"""
OPEN = {"input": "accept", "inputs": "", "output": "accept", "outputs": ""}
USUAL = 'ct state established,related accept; iif "lo" accept;'
NO_FIREWALL = "nft delete table inet filter"
NODE_3 = "$(getent ahostsv4 node-3 | head -n 1 | cut -d ' ' -f 1)"
OTHERS = """
mkdir -p /opt/conda/bin /opt/conda/lib
cd /opt/conda/bin
printf '#!/bin/sh\nexit 9\n' | tee mpirun orted python >python3
chmod +x *
touch ../lib/libmpi.so.40
"""
FIRST = 'runuser -u trainer -- sh -c \'cd && touch .bashrc && sed -i "1i {}" .bashrc || echo "{}" >.bashrc\''

FAULTS = [
    Fault("a node is off", "login-no-route|login-timeout", verb("start"), ["kill"]),
    Fault("a node is cut off", "login-no-route|login-timeout", verb("heal"), ["cut"]),
    Fault("a node is frozen", "login-timeout", verb("resume"), ["pause"]),
    Fault("a firewall drops ssh", "login-timeout", verb("heal"), ["block --port 22"], NO_CONNECTION),
    Fault(
        "no sshd runs",
        "login-refused",
        typed("run (.+?) on its console"),
        script=f"systemctl disable --now ssh; {NO_CONNECTION}",
    ),
    Fault(
        "a firewall lets in nothing but ssh",
        "pair-node-closed",
        typed("(nft insert .+? accept)"),
        script=FIREWALL.format(**{**OPEN, "input": "drop", "inputs": f"{USUAL} tcp dport 22 accept;"}),
        clear=NO_FIREWALL,
    ),
    Fault(
        "a firewall refuses all but ssh",
        "pair-node-closed",
        typed("(nft insert .+? accept)"),
        script=FIREWALL.format(**{**OPEN, "inputs": f"{USUAL} tcp dport 22 accept; reject;"}),
        clear=NO_FIREWALL,
    ),
    Fault(
        "a firewall drops what one other node sends",
        "pair-link-closed",
        typed("(nft insert .+? accept)", node="node-2"),
        script=FIREWALL.format(**{**OPEN, "inputs": f"{USUAL} ip saddr {NODE_3} drop;"}),
        clear=NO_FIREWALL,
        host="node-3, node-2",
    ),
    Fault(
        "a firewall lets nothing out",
        "pair-node-shut-in",
        typed("(nft insert .+? accept)"),
        script=FIREWALL.format(**{**OPEN, "output": "drop", "outputs": USUAL}),
        clear=NO_FIREWALL,
    ),
    Fault("a link carries 100 Mbit/s", "pair-slow-node", verb("heal"), ["throttle --mbit 100"]),
    Fault(
        "an MTU that differs",
        "link-differs",
        typed(r"(ip link set .+ mtu N)", INTERFACE="eth0", N="1500"),
        ["mtu --bytes 1400"],
        severity="warn",
    ),
    Fault(
        "two nodes have one machine id",
        "machines-shared",
        typed("as root: (.+), then reboot", "reboot"),
        script="echo 0123456789abcdef0123456789abcdef >/etc/machine-id",
        nodes=["node-1", "node-2"],
    ),
    Fault(
        "a node has no machine id",
        "machine-id-missing",
        typed("as root: (.+), then reboot", "reboot"),
        script=": >/etc/machine-id",
    ),
    Fault("a clock is an hour ahead", "clock-wrong", verb("heal"), ["skew --seconds 3600"]),
    Fault("a clock is an hour behind", "clock-wrong", verb("heal"), ["skew --seconds -3600"]),
    Fault("a full disk", "node-disk-full", removed(), ["fill /opt"], clear="umount /opt"),
    Fault("no inodes left", "node-disk-full", removed("--inodes"), ["fill --inodes /opt"], clear="umount /opt"),
    Fault(
        "a small /dev/shm",
        "shm-small",
        typed("run on it (mount .+?);"),
        script="mount -o remount,size=64m /dev/shm",
        severity="warn",
    ),
    Fault(
        "noexec on /tmp",
        "mount-noexec",
        typed("run on it (.+?), and take"),
        script="mount -o remount,noexec /tmp",
        severity="warn",
    ),
    Fault(
        "noexec on /opt",
        "stack-noexec",
        typed("run on it (.+?), and take"),
        script="mount -t tmpfs -o noexec,size=8g none /opt",
        clear="umount /opt",
    ),
    Fault(
        "/opt is mounted read-only",
        "disk-read-only",
        typed("run (mount .+)"),
        script="mount -t tmpfs -o ro,size=8g none /opt",
        clear="umount /opt",
    ),
    Fault(
        "another OpenMPI and a conda Python come first in PATH",
        "command-shadowed",
        taken_out("with (grep .+?) on it", "/opt/conda"),
        severity="warn",
        clear="rm -r /opt/conda",
        script=OTHERS + FIRST.replace("{}", "export PATH=/opt/conda/bin:\\$PATH"),
    ),
    Fault(
        "another OpenMPI's libraries come first",
        "library-shadowed",
        taken_out("with (grep .+?) on it", "/opt/conda"),
        severity="warn",
        clear="rm -r /opt/conda",
        script=OTHERS + "echo LD_LIBRARY_PATH=/opt/conda/lib >>/etc/environment",
    ),
    Fault(
        "another Python's home is set",
        "variable-harmful",
        taken_out("with (grep .+?) on it", "/opt/conda"),
        script="echo PYTHONHOME=/opt/conda >>/etc/environment",
        severity="warn",
    ),
    Fault(
        "few files may be open",
        "limit-low",
        taken_out("with (grep .+?) on it", "512"),
        severity="warn",
        script="echo 'trainer - nofile 512' >/etc/security/limits.d/99-site.conf",
    ),
]
SHORT = {
    "no sshd runs", "a firewall lets in nothing but ssh", "a firewall drops what one other node sends",
    "a link carries 100 Mbit/s", "a clock is an hour ahead", "a full disk",
    "another OpenMPI and a conda Python come first in PATH",
}  # fmt: skip


@LONG
@pytest.mark.parametrize(("fault", "cure"), [("kill", "start"), ("cut", "heal"), ("pause", "resume"), ("reboot", "")])
def test_a_node_is_lost_while_it_is_set_up(cluster: Cluster, fault: str, cure: str, record_property: Record) -> None:
    cluster.reset(NODES)
    run = cluster.start(*BARE)
    unpacking = "until grep -qs half-installed /var/lib/dpkg/updates/*; do sleep 0.02; done"
    assert cluster.ssh("node-2", "timeout", "300", "sh", "-c", unpacking).returncode == 0
    begun = time.monotonic()
    cluster.farandole("fault", fault, "node-2")
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
        cluster.farandole("fault", cure, "node-2")
    mended = cluster.play(*BARE)
    assert mended.rc == 0, mended.output
    assert cluster.play(*BARE).changes == set()


@pytest.mark.parametrize(
    "fault", [pytest.param(one, id=one.name, marks=() if one.name in SHORT else LONG) for one in FAULTS]
)
def test_a_fault_is_named_and_its_cure_helps(ready: Cluster, fault: Fault, record_property: Record) -> None:
    for words in fault.verbs:
        name, *options = words.split()
        ready.farandole("fault", name, "node-2", *options)
    for node in fault.nodes if fault.script else ():
        console(ready, node, fault.script)
    try:
        found = named(ready, fault, record_property)
        fault.cure(ready, found)
        again(ready, found.code, fault.severity)
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
    found = [one for one in findings(cluster) if one.severity == fault.severity and (stop or one.code == fault.code)]
    assert found, run.output
    assert {one.host for one in found} == {fault.host}, run.output
    assert re.fullmatch(fault.code, found[0].code), run.output
    assert (run.rc != 0) == stop, run.output
    said = " ".join(run.output.split())
    assert f"[{found[0].code}]" in said and " ".join(found[0].cure.split()) in said
    assert seconds < SECONDS
    record_property("named", f"{fault.name} | `{found[0].code}` | {seconds:.0f}")
    return found[0]


def again(cluster: Cluster, code: str, severity: str = "warn") -> None:
    """It is not found any more, and nothing else ends the run."""
    green = preflight(cluster)
    assert green.rc == 0, green.output
    # As to speed, there may be a warning on a busy machine.
    assert not [one for one in findings(cluster) if (one.code, one.severity) == (code, severity)], green.output


@LONG
def test_a_changed_host_key_is_named_and_accepted_by_hand(ready: Cluster, record_property: Record) -> None:
    new = "rm /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub && ssh-keygen -A && systemctl restart ssh"
    console(ready, "node-2", f"{new}; {NO_CONNECTION}")
    fault = Fault("a host key has changed", "login-host-key-changed", site)
    found = named(ready, fault, record_property)
    fingerprint = re.search(r"console: (.+?); only if that is the new key, run here: (.+?), then (.+)", found.cure)
    assert fingerprint, found.cure
    show, forget, log_in = fingerprint.groups()
    key = console(ready, "node-2", show).split()[1]
    here(forget)
    with subprocess.Popen(
        # ssh asks its terminal, and reads nothing that was typed before.
        ["script", "--quiet", "--command", f"{log_in} true", "/dev/null"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as ssh:  # fmt: skip
        assert ssh.stdin and ssh.stdout
        said = b""
        while b"(yes/no" not in said and (more := ssh.stdout.read(1)):
            said += more
        assert key.encode() in said, said
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
@LONG
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
    found = [one for one in findings(ready) if one.code == "pair-login-failed"]
    assert {one.host for one in found} == ({"node-2"} if ca == "host_ca" else {"node-1", "node-2", "node-3"})
    whose = "a node" if ca == "host_ca" else "the job user"
    record_property("named", f"the certificate of {whose} has expired | `pair-login-failed` | {seconds:.0f}")
    assert "[pair-login-failed]" in red.output
    site(ready, found[0])
    again(ready, "pair-login-failed")
    assert ready.play(*BARE).changes == set()


@LONG
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


@LONG
def test_a_wrong_line_in_the_host_table_is_named(ready: Cluster, record_property: Record) -> None:
    console(ready, "node-2", "sed -i '1i 10.94.255.1 node-3' /etc/hosts")
    fault = Fault("a name means another address", "pair-name-wrong", site, severity="warn")
    found = named(ready, fault, record_property)
    assert "a line with that name outside its block has to go" in found.cure
    console(ready, "node-2", "sed -i '/^10.94.255.1 /d' /etc/hosts")
    site(ready, found)
    again(ready, "pair-name-wrong")


DECOY = "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up"


@LONG
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
    assert {one.code for one in findings(ready) if one.severity == "stop"} == {"address-shared"}, red.output
    record_property("named", f"a docker0 is chosen by hand | `address-shared` | {seconds:.0f}")
    for node in nodes:
        console(ready, node, "ip link delete docker0")
    again(ready, "address-shared")


# On each node at the same time; without a key, who is refused by name has come past MaxStartups.
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
        said = pool.map(lambda one: cluster.ssh(one.name, "sh", "-c", script).stderr, others)
    return [line for text in said for line in text.splitlines()]


@LONG
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
        done = cluster.play(*BARE)
        assert done.rc == 0, done.output
        assert done.count("failed") == {"node-1": 0, "node-2": 0}
        ours = storm(cluster)
        assert len(ours) == 3 * 31
        assert {line for line in ours if "Permission denied" not in line} == set()
        record_property("named", f"32 nodes log in at once, {len(dropped)} of 93 logins dropped | `peer-closed` | -")
    finally:
        cluster.farandole("down")
