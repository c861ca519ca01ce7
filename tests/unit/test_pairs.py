"""Connections between nodes, measured by real programs on loopback addresses."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from farandole.core.bounds import descendants
from farandole.inventory.cluster import Node
from farandole.links import agents
from farandole.links import measure as measuring
from farandole.links.agents import Place
from farandole.links.examine import place, summary
from farandole.links.fabric import Fabric
from farandole.links.judge import Bars, judge, record
from farandole.links.measure import Closed, Measured, Measurement, measure
from farandole.node import agent
from farandole.node.agent import CHECK, EACH, Endpoint, proof

SHELL = ("sh", "-c")
# Others that run these tests at the same time, or a part of them, have other addresses; one of them is flooded.
NET = os.getpid() % 200 + 20


def places(number: int) -> list[Place]:
    """Nodes on this machine, each with an address of its own."""
    return [
        Place(f"node-{place}", f"127.0.{NET}.{place}", SHELL, sys.executable, interface="lo")
        for place in range(1, number + 1)
    ]


def odd(script: Path, text: str, number: int = 3) -> Place:
    """A node that runs a program of its own, which is given ours."""
    script.write_text(text.replace("NUMBER", str(len(agents.PROGRAM.read_bytes()))))
    command = ("sh", "-c", f"{sys.executable} {script} #")
    return Place(f"node-{number}", f"127.0.{NET}.{number}", command, sys.executable)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for less long for what fails."""
    monkeypatch.setattr(measuring, "START_S", 4)
    monkeypatch.setattr(measuring, "LATER_S", 0.1)


def codes(measured: Measured, bars: Bars | None = None) -> list[tuple[str, str, str]]:
    return [(item.host, item.code, item.severity) for item in judge(measured, bars or Bars(), "10.0.0.0/24")]


def test_healthy_nodes_have_no_finding_and_rates_in_every_round() -> None:
    measured = measure(places(4), lambda _: [("node-1", "node-2")], names=False)
    assert codes(measured, Bars(0.01)) == []
    assert all(len(measured.delays_us) == 4 and delay > 0 for delay in measured.delays_us.values())
    assert len(measured.rates[("node-1", "node-2")]) == 2
    assert len(measured.alone[("node-1", "node-2")]) == measuring.TRIES
    assert all(rate > 0 for rates in measured.rates.values() for rate in rates)
    known = record(measured)
    assert [*known["nodes"]] == measured.names
    assert known["usual_mb_per_s"] > 0


def test_without_rates_it_is_quick_and_leaves_no_process() -> None:
    measured = measure(places(3))
    assert (measured.rates, codes(measured)) == ({}, [])
    assert measured.seconds < 10
    assert descendants(os.getpid()) == []


def test_a_connection_that_failed_while_all_were_busy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []
    take = Measurement._reached

    def busy(self: Measurement, name: str, answer: Mapping[str, Any], present: Sequence[str]) -> None:
        answers.append(name)
        late = [[(present.index(name) + 1) % 3, 5000, "no answer"]] if len(answers) <= len(present) else []
        take(self, name, {**answer, "closed": [*answer["closed"], *late]}, present)

    monkeypatch.setattr(Measurement, "_reached", busy)
    assert measure(places(3)).closed == []
    assert len(answers) == 6


def test_two_nodes_may_have_one_address() -> None:
    first, second, third = places(3)
    same = Place("node-3", f"127.0.{NET}.2", third.command, third.python)
    # Linux lets both listen on that address, on different ports; nobody else has node-3's.
    assert codes(measure([first, second, same])) == []


def test_a_node_that_cannot_listen_is_not_measured_and_the_others_are() -> None:
    absent = Place("node-3", "192.0.2.9", SHELL, sys.executable)
    measured = measure([*places(2), absent])
    assert codes(measured) == [("node-3", "pair-unmeasured", "warn")]
    assert "192.0.2.9" in measured.silent["node-3"]
    assert sorted(measured.delays_us) == ["node-1", "node-2"]


LIARS = {
    "ends at once": "exit",
    "says why": "echo no such shell >&2; exit",
    "greets without end": "yes",
    "one long line": "head -c 10000000 /dev/zero; sleep 60; :",
    "says nothing": "sleep 60; :",
    "answers with text": f"{sys.executable} -c 'import sys; d=sys.stdin.buffer.read(); print(d)'",
}


@pytest.mark.usefixtures("soon")
def test_a_node_that_does_anything_else_is_not_measured() -> None:
    odd = [
        Place(f"node-{number}", f"127.0.{NET}.{number}", ("sh", "-c", f"{output} #"), sys.executable)
        for number, output in enumerate(LIARS.values(), 3)
    ]
    measured = measure([*places(2), *odd])
    assert {*codes(measured)} == {(place.name, "pair-unmeasured", "warn") for place in odd}
    assert all(len(why) < 400 for why in measured.silent.values())
    assert measured.seconds < 15


LYING = """
import json, sys
program = sys.stdin.buffer.read(NUMBER)
secret = sys.stdin.buffer.readline().decode().strip()
first = sys.stdin.buffer.readline()
print(secret, json.dumps({"ports": [1, 2, 3], "datagrams": 5, "mtu": 1500, "speed": 0, "hardware": []}), flush=True)
for line in sys.stdin.buffer:
    print(secret, ANSWER, flush=True)
"""
HONEST = {"closed": [], "path": [], "name": [], "untried": 0, "delay_us": 5.0}
LIES: dict[str, object] = {
    "no object": 5,
    "itself": {**HONEST, "closed": [[3, 5, "refused"]]},
    "nobody": {**HONEST, "closed": [[99, 5, "refused"]]},
    "a reason of its own": {**HONEST, "closed": [[0, 5, "{user} [red]`reboot`"]]},
    "a word for a place": {**HONEST, "closed": [["node-1", 5, "refused"]]},
    "a row too short": {**HONEST, "path": [[0]]},
    "a field too many": {**HONEST, "more": 1},
    "no delay": {**HONEST, "delay_us": "-1"},
}


@pytest.mark.usefixtures("soon")
def test_a_lie_is_not_used(tmp_path: Path) -> None:
    liars = [
        odd(tmp_path / f"{number}.py", LYING.replace("ANSWER", repr(json.dumps(lie))), number)
        for number, lie in enumerate(LIES.values(), 3)
    ]
    measured = measure([*places(2), *liars])
    assert {*measured.closed} == {
        Closed(source, place.name, port, "refused")
        for source in ("node-1", "node-2") for place in liars for port in (1, 2, 3)
    }  # fmt: skip
    assert sorted(measured.silent) == sorted(place.name for place in liars)
    assert {*codes(measured)} == {(place.name, "pair-unmeasured", "warn") for place in liars}


# Node-3 runs this program, as root there can: before it answers, it opens many connections to node-2 and says nothing.
FLOODING = """
import re, resource, socket, sys, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
program = sys.stdin.buffer.read(NUMBER).decode()
held = []
def flood():
    while not held:
        sockets = [line.split() for line in open("/proc/net/tcp")]
        ports = [int(row[1][9:], 16) for row in sockets if row[1][:8] == HEX and row[3] == "0A"]
        for number, port in enumerate(200 * ports):
            one = socket.socket()
            one.bind((SOURCES[number % len(SOURCES)], 0))
            one.setblocking(False)
            one.connect_ex((TARGET, port))
            held.append(one)
            time.sleep(0.0002)
    time.sleep(0.5)
usual = "    say(node.about())\\n"
exec(compile(program.replace(usual, "    flood()\\n" + usual), "pairs", "exec"))
"""
LIMIT = "{peer: threading.BoundedSemaphore(each) for peer in peers}"
TOLD = "self.crowding.add(address)"
PROOF = "PROOF_S, EACH = 1,"
NO_LIMIT = "dict.fromkeys(peers, threading.BoundedSemaphore(128))"


def evil(tmp_path: Path, *sources: str) -> Place:
    """A node-3 from which connections with these addresses come."""
    return odd(
        tmp_path / "flood.py", f"SOURCES, TARGET, HEX = {sources}, '127.0.{NET}.2', '02{NET:02X}007F'\n{FLOODING}"
    )


@pytest.mark.parametrize("protected", [True, False])
def test_many_silent_connections_of_one_node_keep_no_other_from_a_third(
    protected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = agents.PROGRAM.read_text()
    assert all(setting in program for setting in (LIMIT, TOLD, PROOF))
    if not protected:
        monkeypatch.setattr(agents, "PROGRAM", tmp_path / "agent.py")
        agents.PROGRAM.write_text(
            program.replace(LIMIT, NO_LIMIT).replace(PROOF, "PROOF_S, EACH = 60,").replace(TOLD, "pass")
        )
    measured = measure([*places(2), evil(tmp_path, f"127.0.{NET}.3")])
    assert measured.silent == {}
    closed = [finding for finding in codes(measured) if finding[1] == "pair-node-closed"]
    assert closed == ([] if protected else [("node-2", "pair-node-closed", "stop")])
    assert {link.source for link in measured.closed} == (set() if protected else {"node-1", "node-3"})


@pytest.mark.parametrize("protected", [True, False])
def test_a_node_that_turned_others_away_is_not_called_closed(
    protected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if they were opened again and again.
    program = agents.PROGRAM.read_text().replace(PROOF, "PROOF_S, EACH = 60,")
    monkeypatch.setattr(agents, "PROGRAM", tmp_path / "agent.py")
    agents.PROGRAM.write_text(program if protected else program.replace(TOLD, "pass"))
    # Programs on both do that, of whoever.
    measured = measure([*places(2), evil(tmp_path, f"127.0.{NET}.1", f"127.0.{NET}.3")])
    findings = [finding for finding in codes(measured) if finding[0] == "node-2"]
    assert findings == [("node-2", *(("pair-crowded", "warn") if protected else ("pair-node-closed", "stop")))]


@pytest.fixture
def alone() -> Endpoint:
    """A node that lets in connections from two addresses, its own and another one."""
    return Endpoint("node-1", f"127.0.{NET}.8", "word", [40000], [f"127.0.{NET}.8", f"127.0.{NET}.9"], "lo")


def connection(node: Endpoint, source: str, greeting: bytes = b"") -> socket.socket:
    made = socket.create_connection((node.address, node.listeners[0].getsockname()[1]), 5, (source, 0))
    made.sendall(greeting)
    return made


def test_a_node_lets_in_peers_only_a_few_times_each_and_for_a_second(alone: Endpoint) -> None:
    hello = proof("word", "client") + b"e"
    with connection(alone, f"127.0.{NET}.10", hello) as stranger_to_all, suppress(ConnectionError):
        assert stranger_to_all.recv(1) == b""
    silent = [connection(alone, f"127.0.{NET}.9") for _ in range(EACH)]
    # Another address does not wait for them.
    with connection(alone, f"127.0.{NET}.8", hello) as peer:
        assert peer.recv(CHECK) == proof("word", "node-1")
    with connection(alone, f"127.0.{NET}.9", hello) as too_many, suppress(ConnectionError):
        assert too_many.recv(1) == b""
    # Nor does a byte now and then prolong it.
    with connection(alone, f"127.0.{NET}.8") as slow, pytest.raises(ConnectionError):
        while True:
            slow.sendall(b"x")
            time.sleep(0.2)
    for peer in silent:
        with peer, suppress(ConnectionError):
            assert peer.recv(1) == b""
    with connection(alone, f"127.0.{NET}.9", hello) as peer:
        assert peer.recv(CHECK) == proof("word", "node-1")


def test_a_node_without_a_free_descriptor_serves_when_it_has_one_again(alone: Endpoint) -> None:
    usual, hello = resource.getrlimit(resource.RLIMIT_NOFILE), proof("word", "client") + b"e"
    with socket.socket() as first, socket.socket() as second, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (second.fileno() + 1, usual[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, usual)
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        for peer in (first, second):
            peer.settimeout(0.5)
            peer.bind((alone.address, 0))
            peer.connect(alone.listeners[0].getsockname())
            peer.sendall(hello)
        # A waiting accept has a descriptor for one of them already.
        with pytest.raises(TimeoutError):
            second.recv(CHECK)
        stack.close()
        for peer in (first, second):
            peer.settimeout(5)
            assert peer.recv(CHECK) == proof("word", "node-1")


def test_a_node_that_fails_with_all_of_many_others_hides_none(alone: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody listens there.
    others = [[f"node-{number}", f"127.0.{NET}.{number}", [1, 2, 3], 4, 1500, [], ""] for number in range(10, 110)]
    peers = [["node-1", alone.address, [], 0, 1500, [], ""], *others]
    answer = alone.reach(peers, 0, None, 30, names=False)
    assert sorted(answer["closed"]) == [[at, port, "refused"] for at in range(1, 101) for port in (1, 2, 3)]
    assert answer["untried"] == 0
    # Nor do those look well that are too many to be told.
    monkeypatch.setattr(agent, "REPORTED", 200)
    answer = alone.reach(peers, 0, None, 30, names=False)
    assert (len(answer["closed"]), answer["untried"]) == (200, 100)


def test_each_node_is_tried_once_before_any_is_tried_again(alone: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    # One attempt at a time.
    monkeypatch.setattr(agent, "LEAST", 1)
    monkeypatch.setattr(agent, "ALL", 1)
    tried: list[int] = []

    def turn_away(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                tried.append(server.getsockname()[1])
                connection.close()

    with socket.create_server((alone.address, 0)) as first, socket.create_server((alone.address, 0)) as second:
        for server in (first, second):
            threading.Thread(target=turn_away, args=(server,), daemon=True).start()
        ports = [server.getsockname()[1] for server in (first, second)]
        others = [[f"node-{number}", alone.address, ports, 4, 1500, [], ""] for number in range(2, 12)]
        alone.reach([["node-1", alone.address, [], 0, 1500, [], ""], *others], 0, None, 30, names=False)
    assert tried == [ports[0]] * 10 + [ports[1]] * 10


def test_the_hardware_address_of_the_interface_for_jobs_is_told_whatever_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "INTERFACES", tmp_path)
    for number in range(100):
        interface = tmp_path / f"veth{number}"
        interface.mkdir()
        (interface / "address").write_text(f"02:00:00:00:00:{number:02x}\n")
    assert agent.hardware(interface)[0] == f"02:00:00:00:00:{99:02x}"
    assert len(agent.hardware(interface)) == len({*agent.hardware(interface)}) == agent.ADDRESSES


def test_a_path_that_loses_small_packets_too_is_not_narrow(alone: Endpoint) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind((f"127.0.{NET}.9", 0))

        def answer_once() -> None:
            _, sender = peer.recvfrom(1 << 16)
            peer.sendto(proof("word", "node-2"), sender)

        answering = threading.Thread(target=answer_once)
        answering.start()
        assert alone.try_path(1, "node-2", f"127.0.{NET}.9", peer.getsockname()[1], 1500) == ("well", None)
        answering.join()


NARROWER = """
import socket, subprocess, threading
from farandole.node.agent import Endpoint, proof

subprocess.run(["ip", "link", "set", "lo", "up", "mtu", "1500"], check=True)
node = Endpoint("node-1", "127.0.0.8", "word", [40000], ["127.0.0.9"], "")
# Its route goes through another interface than the one that it knows.
node.mtu = 9000
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.bind(("127.0.0.9", 0))

def answer():
    while True:
        got, sender = peer.recvfrom(1 << 16)
        if len(got) <= most:
            peer.sendto(proof("word", "node-2"), sender)

for most in (9000, 1400):
    threading.Thread(target=answer, daemon=True).start()
    print(node.try_path(1, "node-2", "127.0.0.9", peer.getsockname()[1], 9000))
"""


def test_what_the_kernel_refuses_to_send_is_not_lost_and_hides_nothing() -> None:
    apart = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network of its own")
    done = subprocess.run([*apart, sys.executable, "-c", NARROWER], capture_output=True, text=True, check=False)
    assert done.stdout == "('well', None)\n('path', [1, 1400, 1500])\n", done.stderr


def test_a_node_is_measured_on_the_interface_with_its_address_be_it_the_second_one() -> None:
    links = [{"name": "eth0", "address": "192.0.2.1"}, *({"name": "eth1", "address": f"10.0.0.{at}"} for at in (1, 9))]
    own = {"_preflight_probe": {"probe": {"interfaces": links}, "login": {"shared": ["sh", "-c"]}}}
    chosen = place(Node("node-1", "192.0.2.1"), {"node-1": own}, Fabric(addresses={"node-1": "10.0.0.9"}))
    assert (chosen.address, chosen.named, chosen.interface) == ("10.0.0.9", "192.0.2.1", "eth1")
    # Without one, neither MTU nor speed is known.
    about = Endpoint("node-1", f"127.0.{NET}.8", "word", [40000], [f"127.0.{NET}.8"], "").about()
    assert (about["mtu"], about["speed"]) == (0, 0)


def test_only_what_fails_a_third_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LATER_S", 0.1)
    answers: list[str] = []
    take = Measurement._reached

    def fail(self: Measurement, name: str, answer: Mapping[str, Any], present: Sequence[str]) -> None:
        """Of node-3 the others say twice that it is closed; node-2 says it for a third time, too."""
        answers.append(name)
        blind = name != "node-3" and (len(answers) <= 5 or name == "node-2")
        take(self, name, {**answer, "closed": [[2, 5000, "no answer"]] if blind else []}, present)

    monkeypatch.setattr(Measurement, "_reached", fail)
    # On a busy machine, nodes may also be called crowded, which stops nothing.
    stops = [row for row in codes(measure(places(3))) if row[2] == "stop"]
    assert stops == [("node-2, node-3", "pair-link-closed", "stop")]
    assert sorted(answers) == ["node-1"] * 3 + ["node-2"] * 3 + ["node-3"]


ENDING = """
import sys
program = sys.stdin.buffer.read(NUMBER).decode()
program = program.replace("    say(node.about())", "    [one.shutdown(2) for one in node.listeners]; say(node.about())")
program = program.replace("    while line :=", "    if line :=")
exec(compile(program, "pairs", "exec"))
"""


def test_a_node_whose_program_ended_is_not_called_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LATER_S", 0.1)
    measured = measure([*places(2), odd(tmp_path / "ending.py", ENDING)])
    assert {link.source for link in measured.closed} == {"node-1", "node-2"}
    assert codes(measured) == [("node-3", "pair-unmeasured", "warn")]


HURRIED = """
import sys
program = sys.stdin.buffer.read(NUMBER).decode()
exec(compile(program.replace("wait(tasks, seconds)", "wait(tasks, 0)"), "pairs", "exec"))
"""


def test_a_node_that_has_no_time_to_try_all_others_is_named(tmp_path: Path) -> None:
    measured = measure([*places(2), odd(tmp_path / "hurried.py", HURRIED)])
    assert codes(measured) == [("node-3", "pair-unmeasured", "warn")]
    assert "not over in time" in judge(measured, Bars())[0].cause
    assert summary(measured).startswith("not all connections tried")
    assert summary(measure(places(2))).startswith("all connections tried")
