"""The choice among several networks that all nodes share."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.inventory import facts
from farandole.links import fabric
from farandole.preflight import networks
from farandole.preflight.networks import Networks

from .loading import load

FIRST, SECOND, THIRD = "10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/16"
NEW: dict[str, Any] = {"network": "", "first": "", "networks": {}, "addresses": {}}
NAMES = ["a", "b", "c"]


def link(name: str, address: str, prefix: int = 24) -> dict[str, Any]:
    return {"name": name, "address": address, "prefix": prefix}


def node(number: int, *more: dict[str, Any], speeds: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A node in the first and in the second network, with a docker0 that is the same everywhere."""
    links = [link("lo", "127.0.0.1", 8), link("docker0", "172.17.0.1", 16), link("eth0", f"10.0.0.{number}")]
    machine = {"links": {name: {"speed": speed} for name, speed in (speeds or {}).items()}}
    probe = {"interfaces": [*links, link(f"ib{number}", f"10.1.0.{number}"), *more], "machine": machine}
    return {"cluster_ip": f"10.0.0.{number}", "_preflight_probe": {"probe": probe}}


def cluster(*more: dict[str, Any], **speeds: int) -> dict[str, dict[str, Any]]:
    return {name: node(number, *more, speeds=speeds) for number, name in enumerate(NAMES, 1)}


def measuring(*answers: dict[str, float | None]) -> Callable[[fabric.Fabric], float | None]:
    """Says what a network carries: the first answer at first, and then the next, if there is one."""
    asked: dict[str, int] = {}

    def measure(network: fabric.Fabric) -> float | None:
        turn = asked[network.network] = asked.get(network.network, -1) + 1
        return answers[min(turn, len(answers) - 1)][network.network]

    return measure


def never(network: fabric.Fabric) -> float | None:
    raise AssertionError(f"{network.network} is measured again")


def known(choice: Networks, hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """What a later run reads."""
    chosen = fabric.choose([*hostvars], hostvars, choice.wanted)
    return {**NEW, **json.loads(json.dumps({"network": chosen.network, **choice.known()}))}


def choose(
    hostvars: Mapping[str, Any], *answers: dict[str, float | None],
    pinned: str = "", former: Any = NEW, again: bool = False,
) -> Networks:  # fmt: skip
    """Choose where these are the answers to measurements, or where nothing may be measured."""
    return networks.choose([*hostvars], hostvars, pinned, former, measuring(*answers) if answers else None, again=again)


def test_the_network_that_carries_most_is_chosen_and_its_addresses_are_known() -> None:
    choice = choose(cluster(), {FIRST: 110.0, SECOND: 900.0})
    assert (choice.wanted, choice.first, choice.rates) == (SECOND, FIRST, {FIRST: 110.0, SECOND: 900.0})
    assert choice.addresses["b"] == ["10.0.0.2", "10.1.0.2"]
    (note,) = choice.findings
    assert (note.code, note.severity, note.host) == ("network-chosen", "note", "all")
    assert f"jobs use {SECOND}: {FIRST} carries 110 MB/s; {SECOND} carries 900 MB/s" in note.cause


def test_a_network_that_connects_nothing_is_no_choice() -> None:
    assert choose(cluster(), {FIRST: 110.0, SECOND: None}).wanted == ""
    assert choose(cluster(), {FIRST: None, SECOND: 110.0}).wanted == ""
    fast = cluster(eth0=1000, ib1=10_000, ib2=10_000, ib3=10_000)
    assert choose(fast, {FIRST: None, SECOND: None}).wanted == ""
    # Every node has docker0's network, but with the same address; one has no address in the second.
    lone = {**cluster(), "c": {**node(3), "_preflight_probe": {"probe": {"interfaces": [link("eth0", "10.0.0.3")]}}}}
    assert choose(lone, {}) == Networks()


def test_another_network_takes_over_only_if_it_is_clearly_faster_twice() -> None:
    assert choose(cluster(), {FIRST: 100.0, SECOND: 149.0}).wanted == ""
    assert choose(cluster(), {FIRST: 100.0, SECOND: 151.0}).wanted == SECOND
    assert choose(cluster(), {FIRST: 20.0, SECOND: 110.0}, {FIRST: 110.0, SECOND: 105.0}).wanted == ""
    # Above a gigabyte per second, one connection says no more than the interfaces do.
    assert choose(cluster(), {FIRST: 1100.0, SECOND: 3000.0}).wanted == ""
    speeds = {"eth0": 10_000, "ib1": 100_000, "ib2": 100_000, "ib3": 100_000}
    assert choose(cluster(**speeds), {FIRST: 1100.0, SECOND: 1050.0}).wanted == SECOND
    assert choose(cluster(**{**speeds, "ib3": 10_000}), {FIRST: 1100.0, SECOND: 3000.0}).wanted == ""


def test_what_was_chosen_stays_and_is_not_measured_again() -> None:
    hostvars = cluster()
    former = known(choose(hostvars, {FIRST: 110.0, SECOND: 900.0}), hostvars)
    later = networks.choose(NAMES, hostvars, "", former, never, again=False)
    assert (later.wanted, later.rates, later.addresses) == (SECOND, former["networks"], former["addresses"])
    assert choose(hostvars, {FIRST: 300.0, SECOND: 250.0}, former=former, again=True).wanted == SECOND
    assert choose(hostvars, {FIRST: 300.0, SECOND: 100.0}, former=former, again=True).wanted == ""
    # A network more is a reason to measure.
    more = {name: node(number, link("ib9", f"10.2.0.{number}", 16)) for number, name in enumerate(NAMES, 1)}
    assert choose(more, {FIRST: 110.0, SECOND: 900.0, THIRD: 1300.0}, former=former).wanted == SECOND
    assert choose(more, {FIRST: 110.0, SECOND: 200.0, THIRD: 2000.0}, former=former).wanted == THIRD


def test_without_measurements_the_interfaces_speeds_count() -> None:
    assert choose(cluster()).wanted == ""
    assert choose(cluster(eth0=1000, ib1=10_000, ib2=10_000, ib3=10_000)).wanted == SECOND
    assert choose(cluster(eth0=1000, ib1=10_000, ib2=10_000)).wanted == ""
    (note,) = choose(cluster(eth0=1000)).findings
    assert f"{FIRST} has interfaces of 1000 Mbit/s; {SECOND} was not measured" in note.cause


def test_the_addresses_of_nodes_that_are_left_out_are_known_too() -> None:
    hostvars = cluster()
    former = known(choose(hostvars, {FIRST: 110.0, SECOND: 900.0}), hostvars)
    away = {**hostvars, "c": {"cluster_ip": "10.0.0.3"}}
    here = networks.choose(NAMES[:2], hostvars, "", former, never, again=False, others=["c"])
    gone = networks.choose(NAMES[:2], away, "", former, never, again=False, others=["c"])
    new = networks.choose(NAMES[:2], hostvars, "", NEW, None, again=False, others=["c"])
    assert here.addresses == gone.addresses == new.addresses == former["addresses"]
    # In other networks than then, it has to say them; one that is in none of them is let in by its first address only.
    unknown = networks.choose(
        NAMES[:2], away, "", {**former, "networks": {FIRST: 1.0}}, None, again=False, others=["c"]
    )
    assert [*unknown.addresses] == NAMES[:2]
    alone = {**hostvars, "c": {**node(3), "_preflight_probe": {"probe": {"interfaces": [link("eth0", "10.0.0.3")]}}}}
    assert [*networks.choose(NAMES[:2], alone, "", NEW, None, again=False, others=["c"]).addresses] == NAMES[:2]


def test_limit_keeps_what_was_chosen_for_all() -> None:
    hostvars = cluster()
    former = known(choose(hostvars, {FIRST: 110.0, SECOND: 900.0}), hostvars)
    limited = {**hostvars, "c": {"cluster_ip": "10.0.0.3"}}
    choice = networks.choose(NAMES, limited, "", former, None, again=False)
    assert (choice.wanted, choice.addresses) == (SECOND, former["addresses"])
    assert known(choice, limited) == former
    assert choose(limited) == Networks()
    # A pinned network is another matter, but the addresses are not forgotten.
    pinned = choose(limited, pinned=FIRST, former=former)
    assert (pinned.wanted, pinned.addresses) == (FIRST, former["addresses"])


def test_a_node_that_is_no_longer_in_the_chosen_network_is_named() -> None:
    hostvars = cluster()
    former = known(choose(hostvars, {FIRST: 110.0, SECOND: 900.0}), hostvars)
    away = {"_preflight_probe": {"probe": {"interfaces": [link("eth0", "10.0.0.2")]}}}
    for lone in ({**hostvars, "b": {**node(2), **away}}, {**cluster(), "a": {"cluster_ip": "10.0.0.1"}}):
        lone["b"] = {**node(2), **away}
        wanted = networks.choose(NAMES, lone, "", former, never, again=False).wanted
        (finding,) = fabric.choose(NAMES, lone, wanted).findings
        assert (finding.host, finding.code) == ("b", "network-not-on-node")
    # If no node is there any more, the network is gone.
    gone = {
        name: {**own, "_preflight_probe": {"probe": {"interfaces": [link("eth0", own["cluster_ip"])]}}}
        for name, own in hostvars.items()
    }
    assert networks.choose(NAMES, gone, "", former, never, again=False) == Networks()


def test_the_user_decides() -> None:
    hostvars = cluster()
    former = known(choose(hostvars, {FIRST: 110.0, SECOND: 900.0}), hostvars)
    pinned = choose(hostvars, {}, pinned=FIRST, former=former, again=True)
    assert (pinned.wanted, pinned.findings) == (FIRST, ())
    assert networks.choose(NAMES, hostvars, "", known(pinned, hostvars), never, again=False).wanted == SECOND
    # Who changes the cluster's addresses wants that network, as long as no other is clearly faster.
    moved = {name: {**own, "cluster_ip": own["cluster_ip"].replace("10.0", "10.1")} for name, own in hostvars.items()}
    assert choose(moved, {FIRST: 300.0, SECOND: 250.0}, former=former, again=True).wanted == ""


def test_a_record_of_another_version_or_none_is_no_former_choice(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    for text in ("", "[]", '{"fabric": {}}', '{"fabric": {"network": 7}}', '{"fabric": {"network": "{{ x }}"}}'):
        file.write_text(text)
        assert networks.former_in(file) == NEW
        assert networks.shared_in(str(tmp_path)) == {"network": "", "addresses": {}}
    file.write_text(json.dumps({"fabric": {"network": FIRST, "interfaces": {"a": "eth0"}}}))
    assert networks.former_in(file) == {**NEW, "network": FIRST}
    assert networks.shared_in(str(tmp_path)) == {"network": "", "addresses": {}}
    chosen = replace(Networks(SECOND, FIRST, {FIRST: 1.0, SECOND: None}), addresses={"a": ["10.0.0.1", "10.1.0.1"]})
    file.write_text(json.dumps({"fabric": {"network": SECOND, **chosen.known()}}))
    shared = {"network": SECOND, "addresses": {"a": ["10.0.0.1", "10.1.0.1"]}}
    assert networks.shared_in(str(tmp_path)) == shared
    # What roles know after preflight.
    before = facts.plain(facts.describe({"cluster": NAMES}, tmp_path))
    after = load("filter", "farandole").FilterModule().filters()["cluster_checked"](before, {"b": "it is broken"})
    assert after == {**before, **shared, "excluded": {"b": "it is broken"}, "members": ["a", "c"], "left_out": ["b"]}


@pytest.mark.parametrize("liar", NAMES)
def test_one_node_cannot_make_the_others_use_a_network_that_is_none(liar: str) -> None:
    hostvars = cluster()
    own = hostvars[liar]["_preflight_probe"]["probe"]["interfaces"]
    own += [link("eth9", "203.0.113.9"), link("eth8", "169.254.1.1", 16), link("eth7", "0.0.0.1", 0)]
    assert set(choose(hostvars, {FIRST: 100.0, SECOND: 100.0}).rates) == {FIRST, SECOND}
