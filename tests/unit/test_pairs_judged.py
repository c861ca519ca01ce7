"""What is judged of connections between nodes that were measured."""

from collections.abc import Callable, Iterable
from itertools import permutations

import pytest

from farandole.links.judge import Bars, far, judge, slow_ways
from farandole.links.measure import Closed, Measured, Misnamed, Narrow, chosen_rounds, pairs_of
from farandole.node.agent import stranger


def codes(measured: Measured, bars: Bars | None = None) -> list[tuple[str, str, str]]:
    return [(item.host, item.code, item.severity) for item in judge(measured, bars or Bars(), "10.0.0.0/24")]


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 9, 33])
def test_in_each_round_everyone_takes_part_once_and_all_meet(number: int) -> None:
    names = [*range(number)]
    rounds = number - 1 if number % 2 == 0 else number
    met = set()
    for place in range(rounds):
        pairs = pairs_of(names, place)
        assert len(pairs) == number // 2
        assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)
        met |= {frozenset(pair) for pair in pairs}
    assert len(met) == number * (number - 1) // 2
    assert set(chosen_rounds(number)) <= {*range(rounds)}
    assert len(chosen_rounds(number)) == min(3, rounds)


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
        "abcd", [first + second for first, second in permutations("abcd", 2) if (first in "ab") != (second in "ab")],
        [("all", "pair-groups-apart")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("names", "ways", "wanted"), SHUT.values(), ids=SHUT)
def test_a_bad_node_a_bad_link_and_bad_groups_are_told_apart(
    names: str, ways: list[str], wanted: list[tuple[str, str]]
) -> None:
    assert sorted(finding[:2] for finding in codes(shut(names, ways))) == sorted(wanted)


def test_a_closed_port_is_told_with_direction_port_and_rule() -> None:
    (finding,) = judge(shut("abc", into("c", "abc")), Bars(), "10.0.0.0/24")
    assert "a, b cannot connect to it (TCP 40000: no answer)" in finding.cause
    assert "ufw allow from 10.0.0.0/24" in finding.cure
    (finding,) = judge(shut("ab", ["ab"]), Bars())
    assert "it cannot be told which" in finding.cause


def test_one_node_alone_cannot_claim_that_another_has_its_address() -> None:
    lies = [Closed(name, "c", 5, "another machine") for name in "ab"]
    assert codes(Measured(["a", "b", "c"], lies)) == [("c", "pair-address-shared", "stop")]
    lied = Measured(["a", "b", "c"], lies[:1])
    assert codes(lied) == [("a, c", "pair-link-closed", "stop")]
    # Nor if the one that could contradict is not measured.
    lied.silent = {"b": "it is off"}
    assert codes(lied)[1:] == [("a, c", "pair-address-shared", "stop")]
    lied.silent = {"a": "it is off"}
    assert codes(lied)[1:] == []


def test_a_narrow_path_names_the_node_that_all_have_in_common() -> None:
    narrow = [Narrow(name, "c", 1400, 1500) for name in "abd"]
    assert codes(Measured([*"abcd"], narrow=narrow)) == [("c", "pair-path-narrow", "stop")]
    (finding,) = judge(Measured([*"abcd"], narrow=narrow[:1]), Bars())
    assert (finding.host, finding.code, "1400 of 1500 bytes" in finding.cause) == ("a, c", "pair-path-narrow", True)
    (finding,) = judge(Measured([*"ab"], misnamed=[Misnamed("a", "b", ("127.0.1.1",))]), Bars())
    assert (finding.host, finding.code, "b means 127.0.1.1" in finding.cause) == ("a", "pair-name-wrong", True)


def rated(names: str, rate: Callable[[str, str], float], speeds: dict[str, int] | None = None) -> Measured:
    """Nodes after all rounds, with the rates in MB/s, whose interfaces have the same speed if nothing else is said."""
    measured = Measured([*names], speeds=dict.fromkeys(names, 10_000) if speeds is None else speeds)
    for number in chosen_rounds(len(names)):
        for first, second in pairs_of([*names], number):
            measured.rates[first, second] = [1e6 * rate(first, second)]
            measured.rates[second, first] = [1e6 * rate(second, first)]
    return measured


TWO = rated("ab", lambda source, _: 11 if source == "a" else 112)
# Half of the nodes have slower interfaces than the rest.
HALF = {name: 10_000 if name in "abcd" else 1000 for name in "abcdefgh"}
RATED: dict[str, tuple[Measured, list[tuple[str, str, str]]]] = {
    "alike": (rated("abcdef", lambda source, _: 100 if source > "c" else 90), []),
    "two alike": (rated("ab", lambda source, _: 100 if source == "a" else 60), []),
    "of two, one": (TWO, [("a, b", "pair-slow-link", "warn")]),
    "interfaces": (rated("abcdefgh", lambda *way: 1000 if {*way} <= {*"abcd"} else 112, HALF), []),
    "groups": (
        rated("abcdefgh", lambda first, second: 112 if (first in "abcd") == (second in "abcd") else 30),
        [("all", "pair-slow-groups", "warn")],
    ),
    "more than a processor fills": (rated("abcd", lambda *way: 900 if "b" in way else 3000), []),
    "less than it fills": (
        rated("abcd", lambda *way: 800 if "b" in way else 3000), [("b", "pair-slow-node", "warn")]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("measured", "findings"), RATED.values(), ids=RATED)
def test_only_nodes_and_links_that_can_be_blamed_are_slow(
    measured: Measured, findings: list[tuple[str, str, str]]
) -> None:
    assert codes(measured) == findings


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_a_slow_node_is_named_and_not_its_partners(names: str) -> None:
    assert codes(rated(names, lambda *way: 11 if "b" in way else 112)) == [("b", "pair-slow-node", "stop")]
    assert codes(rated(names, lambda *way: 80 if "b" in way else 112)) == [("b", "pair-slow-node", "warn")]
    # In one direction only.
    assert codes(rated(names, lambda *way: 11 if way[1] == "b" else 112)) == [("b", "pair-slow-node", "stop")]


# Virtual machines, of which all but b share a host.
UNKNOWN: dict[str, tuple[Measured, list[tuple[str, str, str]]]] = {
    "another host": (
        rated("abcd", lambda *way: 112 if "b" in way else 3000, {}), [("b", "pair-slow-node", "warn")]
    ),
    "a busier host": (rated("abcd", lambda *way: 600 if "b" in way else 3000, {}), []),
    "two on each of two hosts": (
        rated("abcd", lambda *way: 1000 if (way[0] in "ab") == (way[1] in "ab") else 112, {}),
        [("all", "pair-slow-groups", "warn")],
    ),
    "one way": (rated("abcd", lambda *way: 11 if way == ("a", "d") else 112, {}), [("a, d", "pair-slow-link", "warn")]),
    # Two others say how fast it ought to be.
    "beside known ones": (
        rated("abcd", lambda *way: 11 if "b" in way else 112, dict.fromkeys("bcd", 1000)),
        [("b", "pair-slow-node", "stop")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("measured", "findings"), UNKNOWN.values(), ids=UNKNOWN)
def test_no_node_is_refused_for_a_speed_that_nothing_promises(
    measured: Measured, findings: list[tuple[str, str, str]]
) -> None:
    assert codes(measured) == findings


def test_a_floor_holds_for_interfaces_of_unknown_speed() -> None:
    measured, _ = UNKNOWN["another host"]
    assert codes(measured, Bars(floor_mbit=1000)) == [("b", "pair-slow-node", "stop")]


@pytest.mark.parametrize(
    ("delays", "said"),
    [
        ({"a": 800.0, "b": 820.0, "c": 790.0}, ""),
        ({"a": 3348.0, "b": 6060.0, "c": 4185.0}, "a packet needs 6.1 ms there and back, 3.8 ms are usual"),
        ({"a": 100.0, "b": 600.0, "c": 110.0}, ""),
        ({"a": 6674.0, "b": 5924.0, "c": 1622.0}, ""),
        ({"b": 6060.0}, ""),
        ({}, ""),
    ],
)
def test_a_slow_node_whose_packets_are_late_is_said_to_be(delays: dict[str, float], said: str) -> None:
    measured = rated("abc", lambda *way: 11 if "b" in way else 112)
    measured.delays_us.update(delays)
    assert (said in far("b", measured), bool(far("b", measured))) == (True, bool(said))
    assert codes(measured) == [("b", "pair-slow-node", "stop")]


def test_a_node_that_sends_slowly_is_named_beside_another_slow_link() -> None:
    measured = rated("abc", lambda *way: 2 if way[0] == "b" else 60 if way == ("a", "c") else 112)
    assert codes(measured) == [("b", "pair-slow-node", "stop"), ("a, c", "pair-slow-link", "warn")]


def test_the_share_and_the_floor_decide() -> None:
    uneven = rated("abcdefgh", lambda *way: 80 if "b" in way else 112)
    assert codes(uneven, Bars(share=0.7)) == []
    assert codes(uneven, Bars(share=0.7, floor_mbit=720)) == [("b", "pair-slow-node", "stop")]
    assert codes(uneven, Bars(floor_mbit=1000)) == [("all", "pair-slow-all", "stop")]
    assert slow_ways(uneven, Bars(share=0.72)) != slow_ways(uneven, Bars(share=0.71))


def test_a_slow_link_names_both_ends() -> None:
    source, target = pairs_of([*"abcdefgh"], chosen_rounds(8)[1])[1]
    (finding,) = judge(rated("abcdefgh", lambda *way: 11 if way == (source, target) else 112), Bars())
    assert (finding.host, finding.code) == (f"{source}, {target}", "pair-slow-link")
    assert f"what {source} sends to {target} arrives with 11.0 MB/s; 112.0 MB/s is usual" in finding.cause
    assert "it cannot be told which" in judge(TWO, Bars())[0].cause


def test_two_bad_nodes_that_met_each_other_are_both_named() -> None:
    bad = set(pairs_of([*"abcdefgh"], chosen_rounds(8)[0])[1])
    findings = codes(rated("abcdefgh", lambda *way: 11 if bad & {*way} else 112))
    assert findings == [(name, "pair-slow-node", "stop") for name in sorted(bad)]


def test_a_node_that_reached_the_usual_rate_once_is_good() -> None:
    noisy = rated("abcd", lambda *way: 11 if "b" in way else 112)
    assert codes(noisy) != []
    noisy.alone = {way: [5e6, 111e6] for way in slow_ways(noisy, Bars())}
    assert codes(noisy) == []
    # What it reaches alone is not what is usual.
    even = rated("abc", lambda *_: 100)
    even.alone = {way: [300e6] for way in [("a", "b"), ("c", "b")]}
    assert codes(even) == []


def test_among_many_slow_links_those_count_that_are_slow_alone() -> None:
    first, second = pairs_of("abcdef", chosen_rounds(6)[0])[:2]
    busy = rated("abcdef", lambda *way: 11 if way in (first, second) else 112)
    assert {host for host, *_ in codes(busy)} == {", ".join(first), ", ".join(second)}
    busy.alone = {second: [12e6]}
    assert {host for host, *_ in codes(busy)} == {", ".join(second)}
