"""Connections between nodes: measured by real programs on loopback addresses, and judged."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from farandole.core.bounds import descendants
from farandole.links import agents
from farandole.links import measure as measuring
from farandole.links.agents import Place
from farandole.links.judge import Bars, judge, record, slow_ways
from farandole.links.measure import Closed, Measured, Measurement, Misnamed, Narrow, measure
from farandole.links.rounds import chosen_rounds, pairs_of
from farandole.node.agent import CHECK, EACH, Endpoint, proof, stranger

SHELL = ("sh", "-c")


def places(number: int) -> list[Place]:
    """Nodes on this machine, each with an address of its own."""
    return [Place(f"node-{one}", f"127.0.94.{one}", SHELL, sys.executable) for one in range(1, number + 1)]


def codes(measured: Measured, bars: Bars | None = None) -> list[tuple[str, str, str]]:
    return [(one.host, one.code, one.severity) for one in judge(measured, bars or Bars(), "10.0.0.0/24")]


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 9, 33])
def test_in_each_round_everyone_takes_part_once_and_all_meet(number: int) -> None:
    names = [*range(number)]
    rounds = number - 1 if number % 2 == 0 else number
    met = set()
    for one in range(rounds):
        pairs = pairs_of(names, one)
        assert len(pairs) == number // 2
        assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)
        met |= {frozenset(pair) for pair in pairs}
    assert len(met) == number * (number - 1) // 2
    assert set(chosen_rounds(number)) <= {*range(rounds)}
    assert len(chosen_rounds(number)) == min(3, rounds)


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
    begun = time.monotonic()
    measured = measure(places(3))
    assert measured.rates == {}
    assert codes(measured) == []
    assert time.monotonic() - begun < 10
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


def test_an_address_of_another_machine_is_told() -> None:
    first, second, third = places(3)
    same = Place("node-3", "127.0.94.2", third.command, third.python)
    # Linux lets both listen on that address, on different ports; nobody else has node-3's.
    measured = measure([first, second, same])
    assert codes(measured) == []
    confused = Measured(
        ["a", "b", "c"], [Closed("a", "c", 5, "another machine"), Closed("b", "c", 5, "another machine")]
    )
    assert codes(confused) == [("c", "pair-address-shared", "stop")]


OWN, OTHER, ROUTER = "02:00:00:00:00:01", "02:00:00:00:00:02", "12:34:56:78:9a:bc"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"192.0.2.1": OWN, "192.0.2.2": OTHER}, False),
        ({"192.0.2.2": OTHER}, False),
        ({"192.0.2.1": "02:00:00:00:00:09"}, True),
        # It is a node, too.
        ({"192.0.2.1": OTHER, "192.0.2.2": OTHER}, True),
        # In some clouds, one machine answers for all.
        ({"192.0.2.1": ROUTER, "192.0.2.2": ROUTER}, False),
        ({"192.0.2.1": ROUTER, "192.0.2.254": ROUTER}, False),
    ],
)
def test_who_answers_at_an_address_is_known_by_its_hardware(seen: dict[str, str], expected: bool) -> None:
    assert stranger("192.0.2.1", {"192.0.2.1": [OWN], "192.0.2.2": [OTHER]}, seen) == expected


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


@pytest.mark.parametrize("said", LIARS.values(), ids=LIARS)
def test_a_node_that_does_anything_else_is_not_measured(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "START_S", 2)
    liar = Place("node-3", "127.0.94.3", ("sh", "-c", f"{said} #"), sys.executable)
    measured = measure([*places(2), liar])
    assert codes(measured) == [("node-3", "pair-unmeasured", "warn")]
    assert len(measured.silent["node-3"]) < 400
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
HONEST = {"closed": [], "path": [], "name": [], "failures": 0, "untried": 0, "delay_us": 5.0}
LIES: dict[str, object] = {
    "no object": 5,
    "itself": {**HONEST, "closed": [[2, 5, "refused"]]},
    "nobody": {**HONEST, "closed": [[7, 5, "refused"]]},
    "a reason of its own": {**HONEST, "closed": [[0, 5, "{user} [red]`reboot`"]]},
    "a word for a place": {**HONEST, "closed": [["node-1", 5, "refused"]]},
    "a row too short": {**HONEST, "path": [[0]]},
    "a field too many": {**HONEST, "more": 1},
    "no delay": {**HONEST, "delay_us": "-1"},
}


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
def test_a_lie_is_not_used(answer: object, tmp_path: Path) -> None:
    number = len(agents.PROGRAM.read_bytes())
    script = LYING.replace("NUMBER", str(number)).replace("ANSWER", repr(json.dumps(answer)))
    (tmp_path / "liar.py").write_text(script)
    liar = Place("node-3", "127.0.94.3", ("sh", "-c", f"{sys.executable} {tmp_path}/liar.py #"), sys.executable)
    measured = measure([*places(2), liar])
    assert measured.closed == [
        Closed(source, "node-3", port, "refused") for source in ("node-1", "node-2") for port in (1, 2, 3)
    ]
    assert [*measured.silent] == ["node-3"]
    assert codes(measured) == [("node-3", "pair-unmeasured", "warn")]


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
        ports = [int(row[1][9:], 16) for row in sockets if row[1][:8] == "025E007F" and row[3] == "0A"]
        for number, port in enumerate(200 * ports):
            one = socket.socket()
            one.bind((SOURCES[number % len(SOURCES)], 0))
            one.setblocking(False)
            one.connect_ex(("127.0.94.2", port))
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
    program = f"SOURCES = {sources}\n" + FLOODING.replace("NUMBER", str(len(agents.PROGRAM.read_bytes())))
    (tmp_path / "flood.py").write_text(program)
    return Place("node-3", "127.0.94.3", ("sh", "-c", f"{sys.executable} {tmp_path}/flood.py #"), sys.executable)


@pytest.mark.parametrize("protected", [True, False])
def test_many_silent_connections_of_one_node_keep_no_other_from_a_third(
    protected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = agents.PROGRAM.read_text()
    assert all(one in program for one in (LIMIT, TOLD, PROOF))
    if not protected:
        monkeypatch.setattr(agents, "PROGRAM", tmp_path / "agent.py")
        agents.PROGRAM.write_text(
            program.replace(LIMIT, NO_LIMIT).replace(PROOF, "PROOF_S, EACH = 60,").replace(TOLD, "pass")
        )
    measured = measure([*places(2), evil(tmp_path, "127.0.94.3")])
    assert measured.silent == {}
    closed = [found for found in codes(measured) if found[1] == "pair-node-closed"]
    assert closed == ([] if protected else [("node-2", "pair-node-closed", "stop")])
    assert {one.source for one in measured.closed} == (set() if protected else {"node-1", "node-3"})


@pytest.mark.parametrize("protected", [True, False])
def test_a_node_that_turned_others_away_is_not_called_closed(
    protected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if they were opened again and again.
    program = agents.PROGRAM.read_text().replace(PROOF, "PROOF_S, EACH = 60,")
    monkeypatch.setattr(agents, "PROGRAM", tmp_path / "agent.py")
    agents.PROGRAM.write_text(program if protected else program.replace(TOLD, "pass"))
    # Programs on both do that, of whoever.
    measured = measure([*places(2), evil(tmp_path, "127.0.94.1", "127.0.94.3")])
    found = [one for one in codes(measured) if one[0] == "node-2"]
    assert found == [("node-2", *(("pair-crowded", "warn") if protected else ("pair-node-closed", "stop")))]


@pytest.fixture
def alone() -> Endpoint:
    """A node that lets in connections from two addresses, its own and another one."""
    return Endpoint("node-1", "127.0.94.8", "word", [40000], ["127.0.94.8", "127.0.94.9"])


def connection(node: Endpoint, source: str, what: bytes = b"") -> socket.socket:
    made = socket.create_connection((node.address, node.listeners[0].getsockname()[1]), 5, (source, 0))
    made.sendall(what)
    return made


def test_a_node_lets_in_peers_only_a_few_times_each_and_for_a_second(alone: Endpoint) -> None:
    hello = proof("word", "client") + b"e"
    with connection(alone, "127.0.94.10", hello) as stranger_to_all, suppress(ConnectionError):
        assert stranger_to_all.recv(1) == b""
    silent = [connection(alone, "127.0.94.9") for _ in range(EACH)]
    # Another address does not wait for them.
    with connection(alone, "127.0.94.8", hello) as peer:
        assert peer.recv(CHECK) == proof("word", "node-1")
    with connection(alone, "127.0.94.9", hello) as too_many, suppress(ConnectionError):
        assert too_many.recv(1) == b""
    # Nor does a byte now and then prolong it.
    with connection(alone, "127.0.94.8") as slow, pytest.raises(ConnectionError):
        while True:
            slow.sendall(b"x")
            time.sleep(0.2)
    for one in silent:
        with one, suppress(ConnectionError):
            assert one.recv(1) == b""
    with connection(alone, "127.0.94.9", hello) as peer:
        assert peer.recv(CHECK) == proof("word", "node-1")


def test_a_node_without_a_free_descriptor_serves_when_it_has_one_again(alone: Endpoint) -> None:
    usual, hello = resource.getrlimit(resource.RLIMIT_NOFILE), proof("word", "client") + b"e"
    with socket.socket() as first, socket.socket() as second, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (second.fileno() + 1, usual[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, usual)
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        for one, patience in ((first, 5), (second, 0.5)):
            one.settimeout(patience)
            one.bind((alone.address, 0))
            one.connect(alone.listeners[0].getsockname())
            one.sendall(hello)
        # For this one, accept had a descriptor already.
        assert first.recv(CHECK) == proof("word", "node-1")
        with pytest.raises(TimeoutError):
            second.recv(CHECK)
        stack.close()
        second.settimeout(5)
        assert second.recv(CHECK) == proof("word", "node-1")


def test_a_path_that_loses_small_packets_too_is_not_narrow(alone: Endpoint) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.94.9", 0))

        def answer_once() -> None:
            _, sender = peer.recvfrom(1 << 16)
            peer.sendto(proof("word", "node-2"), sender)

        answering = threading.Thread(target=answer_once)
        answering.start()
        assert alone.try_path(1, "node-2", "127.0.94.9", peer.getsockname()[1], 1500) == ("well", None)
        answering.join()


def test_only_what_fails_a_third_time_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = []
    take = Measurement._reached

    def fail(self: Measurement, name: str, answer: Mapping[str, Any], present: Sequence[str]) -> None:
        """Of node-3 the others say twice that it is closed; node-2 says it for a third time, too."""
        answers.append(name)
        blind = name != "node-3" and (len(answers) <= 5 or name == "node-2")
        take(self, name, {**answer, "closed": [[2, 5000, "no answer"]] if blind else []}, present)

    monkeypatch.setattr(Measurement, "_reached", fail)
    assert codes(measure(places(3))) == [("node-2, node-3", "pair-link-closed", "stop")]
    assert sorted(answers) == ["node-1"] * 3 + ["node-2"] * 3 + ["node-3"]


ENDING = """
import sys
program = sys.stdin.buffer.read(NUMBER).decode()
program = program.replace("    say(node.about())", "    [one.shutdown(2) for one in node.listeners]; say(node.about())")
program = program.replace("    while line :=", "    if line :=")
exec(compile(program, "pairs", "exec"))
"""


def test_a_node_whose_program_ended_is_not_called_closed(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING.replace("NUMBER", str(len(agents.PROGRAM.read_bytes()))))
    ending = Place("node-3", "127.0.94.3", ("sh", "-c", f"{sys.executable} {tmp_path}/ending.py #"), sys.executable)
    measured = measure([*places(2), ending])
    assert {one.source for one in measured.closed} == {"node-1", "node-2"}
    assert codes(measured) == [("node-3", "pair-unmeasured", "warn")]


def shut(names: str, ways: Iterable[str]) -> Measured:
    """Nodes of one letter each, and ways like "ab" that are closed."""
    return Measured([*names], [Closed(way[0], way[1], 40000, "no answer") for way in ways])


def into(target: str, names: str) -> list[str]:
    return [name + target for name in names if name != target]


def out_of(source: str, names: str) -> list[str]:
    return [source + name for name in names if name != source]


SHUT = {
    "nothing": ("abc", [], []),
    "a node that lets nothing in": ("abc", into("c", "abc"), [("c", "pair-node-closed")]),
    "both ways": ("abcd", into("c", "abcd") + out_of("c", "abcd"), [("c", "pair-node-closed")]),
    "a node that reaches nobody": ("abcd", out_of("b", "abcd"), [("b", "pair-node-shut-in")]),
    "one way": ("abcd", ["ac"], [("a, c", "pair-link-closed")]),
    "two nodes": ("ab", ["ab"], [("a, b", "pair-link-closed")]),
    "two nodes, both ways": ("ab", ["ab", "ba"], [("b, a", "pair-link-closed"), ("a, b", "pair-link-closed")]),
    "two bad nodes": (
        "abcde", into("b", "abcde") + into("d", "abcde"), [("b", "pair-node-closed"), ("d", "pair-node-closed")]
    ),
    "most of four": (
        "abcd", into("a", "abcd") + into("b", "abcd"), [("a", "pair-node-closed"), ("b", "pair-node-closed")]
    ),
    "a node and a link": (
        "abcdef", [*into("f", "abcdef"), "bc"], [("b, c", "pair-link-closed"), ("f", "pair-node-closed")]
    ),
    "two groups": (
        "abcd", [one + other for one, other in permutations("abcd", 2) if (one in "ab") != (other in "ab")],
        [("all", "pair-groups-apart")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("names", "ways", "wanted"), SHUT.values(), ids=SHUT)
def test_a_bad_node_a_bad_link_and_bad_groups_are_told_apart(
    names: str, ways: list[str], wanted: list[tuple[str, str]]
) -> None:
    assert sorted(found[:2] for found in codes(shut(names, ways))) == sorted(wanted)


def test_a_closed_port_is_told_with_direction_port_and_rule() -> None:
    (found,) = judge(shut("abc", into("c", "abc")), Bars(), "10.0.0.0/24")
    assert "a, b cannot connect to it (TCP 40000: no answer)" in found.cause
    assert "ufw allow from 10.0.0.0/24" in found.cure
    (found,) = judge(shut("ab", ["ab"]), Bars())
    assert "it cannot be told which" in found.cause


def test_one_node_alone_cannot_claim_that_another_has_its_address() -> None:
    lied = Measured(["a", "b", "c"], [Closed("a", "c", 5, "another machine")])
    assert codes(lied) == [("a, c", "pair-link-closed", "stop")]
    # Nor if the one that could contradict is not measured.
    lied.silent = {"b": "it is off"}
    assert codes(lied)[1:] == [("a, c", "pair-address-shared", "stop")]
    lied.silent = {"a": "it is off"}
    assert codes(lied)[1:] == []


def test_a_narrow_path_names_the_node_that_all_have_in_common() -> None:
    narrow = [Narrow(name, "c", 1400, 1500) for name in "abd"]
    assert codes(Measured([*"abcd"], narrow=narrow)) == [("c", "pair-path-narrow", "stop")]
    (found,) = judge(Measured([*"abcd"], narrow=narrow[:1]), Bars())
    assert (found.host, found.code) == ("a, c", "pair-path-narrow")
    assert "1400 of 1500 bytes" in found.cause


def test_a_name_that_means_another_address() -> None:
    misnamed = Measured([*"ab"], misnamed=[Misnamed("a", "b", ("127.0.1.1",))])
    (found,) = judge(misnamed, Bars())
    assert (found.host, found.code) == ("a", "pair-name-wrong")
    assert "b means 127.0.1.1" in found.cause


def rated(names: str, rate: Callable[[str, str], float], speeds: dict[str, int] | None = None) -> Measured:
    """Nodes after all rounds, with the rates in MB/s."""
    measured = Measured([*names], speeds=speeds or {})
    for number in chosen_rounds(len(names)):
        for one, other in pairs_of([*names], number):
            measured.rates[one, other] = [1e6 * rate(one, other)]
            measured.rates[other, one] = [1e6 * rate(other, one)]
    return measured


def test_rates_that_are_alike_have_no_finding() -> None:
    assert codes(rated("abcdef", lambda one, _: 100 if one > "c" else 90)) == []
    assert codes(rated("ab", lambda one, _: 100 if one == "a" else 60)) == []


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_a_slow_node_is_named_and_not_its_partners(names: str) -> None:
    assert codes(rated(names, lambda *way: 11 if "b" in way else 112)) == [("b", "pair-slow-node", "stop")]
    assert codes(rated(names, lambda *way: 80 if "b" in way else 112)) == [("b", "pair-slow-node", "warn")]
    # In one direction only.
    assert codes(rated(names, lambda *way: 11 if way[1] == "b" else 112)) == [("b", "pair-slow-node", "stop")]


def test_the_share_and_the_floor_decide() -> None:
    uneven = rated("abcdefgh", lambda *way: 80 if "b" in way else 112)
    assert codes(uneven, Bars(share=0.7)) == []
    assert codes(uneven, Bars(share=0.7, floor_mbit=720)) == [("b", "pair-slow-node", "stop")]
    assert codes(uneven, Bars(floor_mbit=1000)) == [("all", "pair-slow-all", "stop")]
    assert slow_ways(uneven, Bars(share=0.72)) != slow_ways(uneven, Bars(share=0.71))


def test_a_slow_link_names_both_ends() -> None:
    one, other = pairs_of([*"abcdefgh"], chosen_rounds(8)[1])[1]
    (found,) = judge(rated("abcdefgh", lambda *way: 11 if way == (one, other) else 112), Bars())
    assert (found.host, found.code) == (f"{one}, {other}", "pair-slow-link")
    assert f"what {one} sends to {other} arrives with 11.0 MB/s; 112.0 MB/s is usual" in found.cause


def test_of_two_nodes_nobody_can_tell_which_is_slow() -> None:
    (found,) = judge(rated("ab", lambda one, _: 11 if one == "a" else 112), Bars())
    assert (found.host, found.code, found.severity) == ("a, b", "pair-slow-link", "warn")
    assert "it cannot be told which" in found.cause


def test_two_bad_nodes_that_met_each_other_are_both_named() -> None:
    bad = set(pairs_of([*"abcdefgh"], chosen_rounds(8)[0])[1])
    found = codes(rated("abcdefgh", lambda *way: 11 if bad & {*way} else 112))
    assert found == [(name, "pair-slow-node", "stop") for name in sorted(bad)]


def test_links_are_compared_with_links_of_the_same_speed() -> None:
    """Half of the nodes have slower interfaces than the rest."""
    speeds = {name: 10_000 if name in "abcd" else 1000 for name in "abcdefgh"}
    assert codes(rated("abcdefgh", lambda *way: 1000 if {*way} <= {*"abcd"} else 112, speeds)) == []


def test_a_slow_way_between_groups_is_one_finding() -> None:
    found = codes(rated("abcdefgh", lambda one, other: 112 if (one in "abcd") == (other in "abcd") else 30))
    assert found == [("all", "pair-slow-groups", "warn")]


def test_what_a_processor_does_not_fill_is_not_compared() -> None:
    assert codes(rated("abcd", lambda *way: 900 if "b" in way else 3000)) == []
    assert codes(rated("abcd", lambda *way: 800 if "b" in way else 3000)) == [("b", "pair-slow-node", "warn")]


def test_who_was_good_once_is_good() -> None:
    noisy = rated("abcd", lambda *way: 11 if "b" in way else 112)
    assert codes(noisy) != []
    noisy.alone = {way: [5e6, 111e6] for way in slow_ways(noisy, Bars())}
    assert codes(noisy) == []


def test_a_node_that_is_faster_alone_is_not_what_is_usual() -> None:
    even = rated("abc", lambda *_: 100)
    even.alone = {way: [300e6] for way in [("a", "b"), ("c", "b")]}
    assert codes(even) == []


def test_among_many_slow_links_those_count_that_are_slow_alone() -> None:
    one, other = pairs_of("abcdef", chosen_rounds(6)[0])[:2]
    busy = rated("abcdef", lambda *way: 11 if way in (one, other) else 112)
    assert {host for host, *_ in codes(busy)} == {", ".join(one), ", ".join(other)}
    busy.alone = {other: [12e6]}
    assert {host for host, *_ in codes(busy)} == {", ".join(other)}
