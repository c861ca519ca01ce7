"""Role firewall: only nodes can connect to the ports that jobs use, and the machine's own rules stay as they are.

This machine, which is in the lab's network but not in the cluster, plays the outsider. The last tests change and remove
the firewall.
"""

import json
import re
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import plays
import pytest

ROOT = Path(__file__).parents[2]
# Services over both TCP and UDP, over IPv4 and IPv6. Nobody but this machine itself can reach the last one.
SERVE = """
import selectors, socket
ready = selectors.DefaultSelector()
for port in (80, 5000, 6006, 8080):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        one = socket.socket(socket.AF_INET6, kind)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("::", port))
        if kind == socket.SOCK_STREAM:
            one.listen()
        ready.register(one, selectors.EVENT_READ)
while True:
    for key, _ in ready.select():
        if key.fileobj.type == socket.SOCK_STREAM:
            client, _ = key.fileobj.accept()
            client.sendall(b"here")
            client.close()
        else:
            data, sender = key.fileobj.recvfrom(64)
            key.fileobj.sendto(b"here", sender)
"""
# Says whether a service answers: its arguments are the address, the port and the protocol.
ASK = """
import socket, sys
address, port, protocol = sys.argv[1:]
target = socket.getaddrinfo(address, int(port))[0]
with socket.socket(target[0], socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM) as one:
    one.settimeout(1.5)
    try:
        one.connect(target[4])
        one.sendall(b"?")
        print(one.recv(4).decode())
    except TimeoutError:
        print("silence")
"""
# What a machine's owner may have: tables of nftables.service, of a container engine, a port that leads to another.
OWNERS = """
table inet filter {
  chain input { type filter hook input priority 0; policy accept; ip saddr 203.0.113.0/24 drop; }
  chain forward { type filter hook forward priority 0; policy accept; }
}
table ip nat {
  chain DOCKER { iifname "docker0" counter return; }
  chain PREROUTING {
    type nat hook prerouting priority dstnat;
    fib daddr type local jump DOCKER
    tcp dport 443 redirect to :8080
  }
}
table ip filter {
  chain DOCKER-USER { counter return; }
  chain FORWARD { type filter hook forward priority filter; jump DOCKER-USER; }
}
"""
OURS = re.compile(r"table inet farandole \{.*?\n\}\n", re.DOTALL)


def by_stranger(address, port, protocol="tcp"):
    """What this machine gets from a service of a node."""
    asked = ["python3", "-c", ASK, address, str(port), protocol]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def everything(address, ask):
    return {(port, protocol): ask(address, port, protocol) for port in (80, 5000) for protocol in ("tcp", "udp")}


ALL = {(port, protocol): "here" for port in (80, 5000) for protocol in ("tcp", "udp")}
NO_JOBS = ALL | {(5000, "tcp"): "silence", (5000, "udp"): "silence"}


@pytest.fixture(scope="module")
def target(worker):
    """The node that is asked, with its services."""
    worker.check_output("setsid -f python3 -c %s >/dev/null 2>&1 </dev/null", SERVE)
    worker.check_output("for i in $(seq 50); do ss -Hltn sport 8080 | grep -q . && exit; sleep 0.1; done; exit 1")
    return worker


@pytest.fixture(scope="module")
def owners(target):
    """Rules of the machine's owner, as the kernel lists them."""
    target.check_output("echo %s >/root/owners && nft -f /root/owners", OWNERS)
    return lambda: OURS.sub("", target.check_output("nft --stateless list ruleset") + "\n")


@pytest.fixture(scope="module")
def link_local(target, addresses):
    """The target's IPv6 address, as this machine reaches it."""
    shown = json.loads(subprocess.check_output(["ip", "-json", "route", "get", addresses["node-2"]]))
    own = json.loads(target.check_output("ip -6 -json address show dev eth0 scope link"))
    return f"{own[0]['addr_info'][0]['local']}%{shown[0]['dev']}"


@pytest.fixture
def play(inventory_path):
    """Set the firewall up with these variables, and return the hosts that changed, and the warnings."""

    def run(**variables):
        playbook = str(Path(__file__).parent / "firewall.yml")
        done = plays.play(inventory_path, "--extra-vars", json.dumps(variables), playbook=playbook)
        assert done.rc == 0, done.output
        return done.changed_hosts, done.flat

    return run


@pytest.mark.usefixtures("target")
def test_a_stranger_reaches_only_what_jobs_do_not_use(head, addresses):
    assert everything(addresses["node-2"], by_stranger) == NO_JOBS
    by_member = lambda *words: head.check_output("python3 -c %s %s %s %s", ASK, *map(str, words))  # noqa: E731
    assert everything(addresses["node-2"], by_member) == ALL


def test_nor_does_one_that_uses_ipv6(link_local):
    assert everything(link_local, by_stranger) == NO_JOBS


@pytest.mark.usefixtures("owners")
def test_the_owners_rules_still_apply(addresses):
    assert by_stranger(addresses["node-2"], 443) == "here"
    assert by_stranger(addresses["node-2"], 8080) == "silence"


def test_it_comes_back_when_the_owners_rules_are_loaded_again(target, addresses):
    target.check_output("systemctl start nftables && systemctl reload nftables")
    listed = "for i in $(seq 30); do nft list table inet farandole && exit; sleep 0.1; done; exit 1"
    for verb in ("reload", "restart"):
        target.check_output(f"nft delete table inet farandole; systemctl {verb} nftables; {listed}")
        assert by_stranger(addresses["node-2"], 5000) == "silence"
    target.check_output("systemctl stop nftables")


def test_a_run_mends_it_and_leaves_the_owners_rules_alone(head, target, owners, addresses, play):
    # As if node-2 had just joined; and somebody has added a rule.
    shut_out = (
        f"sed -i 's/, {addresses['node-2']}//' /etc/farandole/firewall.nft && systemctl reload farandole-firewall"
    )
    head.check_output(f"{shut_out} && nft insert rule inet farandole input meta mark 1 accept")
    target.check_output("nft flush ruleset; nft -f /root/owners")
    before = owners()
    assert "DOCKER-USER" in before
    assert by_stranger(addresses["node-2"], 5000) == "here", "without the firewall, this test proves nothing"
    changed, output = play(firewall_enabled=True)
    assert changed == {"node-1", "node-2"}
    assert "node-1: warning: its firewall, which Farandole set up, does not let in node-2 yet" in output
    assert "pair-" not in output
    now = head.check_output("nft list table inet farandole")
    assert addresses["node-2"] in now and "mark" not in now
    assert (owners(), by_stranger(addresses["node-2"], 5000)) == (before, "silence")


def test_a_port_can_stay_open_and_sshs_always_is(target, addresses, play):
    target.check_output("printf 'Port 22\nPort 5022\n' >/etc/ssh/sshd_config.d/99-port.conf && systemctl reload ssh")
    try:
        changed, output = play(firewall_enabled=True, firewall_open=["6006"])
        assert changed == {"node-1", "node-2"}
        assert "can connect to ports 5000, 8080 from now on" in output
        assert by_stranger(addresses["node-2"], 6006) == by_stranger(addresses["node-2"], 6006, "udp") == "here"
        assert by_stranger(addresses["node-2"], 5000) == "silence"
        with closing(socket.create_connection((addresses["node-2"], 5022), timeout=2)) as connection:
            assert connection.recv(4) == b"SSH-"
    finally:
        target.check_output("rm /etc/ssh/sshd_config.d/99-port.conf && systemctl reload ssh")


def test_a_port_that_is_none_is_refused(play):
    with pytest.raises(AssertionError, match="70000 is neither a port"):
        play(firewall_enabled=True, firewall_open=["70000"])


def test_it_is_there_after_a_boot(worker, inventory_path, addresses):
    worker.check_output("nft flush ruleset")
    command = ["farandole", "lab", "fault", "reboot", "node-2", "--name", inventory_path.name]
    subprocess.run(command, cwd=ROOT, check=True)
    assert worker.check_output("nft list tables") == "table inet farandole"
    # A port where nobody listens refuses whom the firewall lets in.
    with pytest.raises(TimeoutError):
        socket.create_connection((addresses["node-2"], 5000), timeout=1)


def test_turned_off_it_leaves_nothing(nodes, addresses, play):
    assert play(firewall_enabled=False)[0] == {"node-1", "node-2"}
    for host in nodes.values():
        assert "farandole" not in host.check_output("nft list tables")
        assert host.check_output("find /etc -name '*farandole*firewall*' -o -path '*farandole/firewall*'") == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((addresses["node-2"], 5000), timeout=1)
