"""Faults of one node, what they are called, and how the cures that are printed are applied."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusters import Cluster

from farandole.core.findings import Finding
from farandole.lab import lab
from farandole.lab.podman import podman

LOST = {"cut": "a node is cut off", "pause": "a node freezes", "kill": "a node loses power", "reboot": "a node reboots"}


def console(cluster: Cluster, node: str, script: str) -> str:
    """What a script prints that root runs on the console of a node."""
    return podman("exec", lab.node(cluster.name, node).container, "sh", "-ec", script)


Cure = Callable[[Cluster, Finding], None]


def verb(*arguments: str) -> Cure:
    """Do what a cure says in words: start the node, correct its clock, change its cable."""
    return lambda cluster, _: void(cluster.lab("fault", arguments[0], "node-2", *arguments[1:]))


def void(_: object) -> None:
    """For a command of which only success matters."""


def command(finding: Finding, pattern: str) -> str:
    """The command in a printed cure."""
    match = re.search(pattern, finding.cure)
    assert match, finding.cure
    return match[1]


def typed(pattern: str, *then: str, node: str = "", **meanings: str) -> Cure:
    """Type the command of the cure on the node's console, with these words for those in capitals; then these verbs."""

    def cure(cluster: Cluster, finding: Finding) -> None:
        text = command(finding, pattern)
        for word, meant in meanings.items():
            text = re.sub(rf"\b{word}\b", meant, text)
        console(cluster, node or finding.host, text)
        for name in then:
            cluster.lab("fault", name, node or finding.host)

    return cure


def taken_out(pattern: str, culprit: str) -> Cure:
    """Look with the command of the cure for a line in a file, and take it out."""

    def cure(cluster: Cluster, finding: Finding) -> None:
        # grep's status is not 0 if one of the files is missing.
        shown = console(cluster, finding.host, command(finding, pattern) + " || :")
        (file, number), *_ = re.findall(rf"^([^:\n]+):(\d+):.*{culprit}", shown, re.MULTILINE)
        console(cluster, finding.host, f"sed -i {number}d {shlex.quote(file)}")

    return cure


def removed(option: str = "") -> Cure:
    """Look with the command of the cure for what is large, and remove it."""

    def cure(cluster: Cluster, finding: Finding) -> None:
        shown = console(cluster, finding.host, command(finding, r"^(du .+?) on it").replace("du ", f"du {option} "))
        largest = [line.split("\t")[1] for line in shown.splitlines() if line.split("\t")[1].endswith("/filler")]
        assert largest, shown
        console(cluster, finding.host, f"rm -r {shlex.quote(largest[0])}")

    return cure


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


def firewall(name: str, code: str, host: str = "node-2", **rules: str) -> Fault:
    """A firewall that blocks too much; the cure inserts a rule."""
    script = FIREWALL.format(**{**OPEN, **rules})
    return Fault(name, code, typed("(nft insert .+? accept)", node="node-2"), [], script, host=host, clear=NO_FIREWALL)


def mounted(name: str, code: str, options: str, pattern: str = "run on it (.+?), and take") -> Fault:
    """A file system mounted in a way that does not fit; the cure mounts it again."""
    new = options.startswith("-t")
    kind = {"clear": "umount /opt"} if new else {"severity": "warn"}
    return Fault(name, code, typed(pattern), [], f"mount {options}", **kind)


def shadowed(name: str, code: str, script: str, culprit: str = "/opt/conda", clear: str = "") -> Fault:
    """A setting of the machine that gets in the way; the cure finds its line."""
    cure = taken_out("with (grep .+?) on it", culprit)
    return Fault(name, code, cure, [], script, severity="warn", clear=clear)


REBOOT = typed("as root: (.+), then reboot", "reboot")
FAULTS = [
    Fault("a node is off", "login-no-route|login-timeout", verb("start"), ["kill"]),
    Fault("a node is cut off", "login-no-route|login-timeout", verb("heal"), ["cut"]),
    Fault("a node is frozen", "login-timeout", verb("resume"), ["pause"]),
    Fault("a firewall drops ssh", "login-timeout", verb("heal"), ["block --port 22"], NO_CONNECTION),
    Fault(
        "no sshd runs", "login-refused", typed("run (.+?) on its console"), [],
        f"systemctl disable --now ssh; {NO_CONNECTION}",
    ),
    firewall(
        "a firewall lets in nothing but ssh", "pair-node-closed", input="drop", inputs=f"{USUAL} tcp dport 22 accept;"
    ),
    firewall("a firewall refuses all but ssh", "pair-node-closed", inputs=f"{USUAL} tcp dport 22 accept; reject;"),
    firewall(
        "a firewall drops what one other node sends", "pair-link-closed", "node-3, node-2",
        inputs=f"{USUAL} ip saddr {NODE_3} drop;",
    ),
    firewall("a firewall lets nothing out", "pair-node-shut-in", output="drop", outputs=USUAL),
    Fault("a link carries 100 Mbit/s", "pair-slow-node", verb("heal"), ["throttle --mbit 100"]),
    Fault(
        "an MTU that differs", "link-differs", typed(r"(ip link set .+ mtu N)", INTERFACE="eth0", N="1500"),
        ["mtu --bytes 1400"], severity="warn",
    ),
    Fault(
        "two nodes have one machine id", "machines-shared", REBOOT, [],
        "echo 0123456789abcdef0123456789abcdef >/etc/machine-id", ["node-1", "node-2"],
    ),
    Fault("a node has no machine id", "machine-id-missing", REBOOT, [], ": >/etc/machine-id"),
    Fault("a clock is an hour ahead", "clock-wrong", verb("heal"), ["skew --seconds 3600"]),
    Fault("a clock is an hour behind", "clock-wrong", verb("heal"), ["skew --seconds -3600"]),
    Fault("a full disk", "node-disk-full", removed(), ["fill /opt"], clear="umount /opt"),
    Fault("no inodes left", "node-disk-full", removed("--inodes"), ["fill --inodes /opt"], clear="umount /opt"),
    mounted("a small /dev/shm", "shm-small", "-o remount,size=64m /dev/shm", "run on it (mount .+?);"),
    mounted("noexec on /tmp", "mount-noexec", "-o remount,noexec /tmp"),
    mounted("noexec on /opt", "stack-noexec", "-t tmpfs -o noexec,size=8g none /opt"),
    mounted("/opt is mounted read-only", "disk-read-only", "-t tmpfs -o ro,size=8g none /opt", "run (mount .+)"),
    shadowed(
        "another OpenMPI and a conda Python come first in PATH", "command-shadowed",
        OTHERS + FIRST.replace("{}", "export PATH=/opt/conda/bin:\\$PATH"), clear="rm -r /opt/conda",
    ),
    shadowed(
        "another OpenMPI's libraries come first", "library-shadowed",
        OTHERS + "echo LD_LIBRARY_PATH=/opt/conda/lib >>/etc/environment", clear="rm -r /opt/conda",
    ),
    shadowed("another Python's home is set", "variable-harmful", "echo PYTHONHOME=/opt/conda >>/etc/environment"),
    shadowed(
        "few files may be open", "limit-low", "echo 'trainer - nofile 512' >/etc/security/limits.d/99-site.conf", "512"
    ),
]  # fmt: skip
