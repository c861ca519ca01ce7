"""Which nodes are left out: what a check may decide, what a person decides, and the record of both."""

import json
import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.core.findings import Finding
from farandole.inventory import excluded
from farandole.inventory.excluded import Checked, Decision, Entry
from farandole.inventory.facts import describe
from farandole.jobs import start as jobs
from farandole.trust.authority import Members

from .machines import hosts_phase, probe

NODES = [f"node-{number}" for number in range(1, 7)]
SINCE = "2026-01-02T03:04:05Z"
CHECK = Entry(SINCE, "check", "", "login-timeout", "it does not respond", "preflight")
CONFIRMED = Entry(SINCE, "check", "ada", "login-timeout", "it does not respond", "preflight")
PERSON = Entry(SINCE, "person", "ada", "", "its fan is loud", "")
ELSEWHERE = Entry(SINCE, "check", "", "pair-slow", "its link is slow", "pairs")


def bad(host: str, code: str = "login-timeout", severity: Any = "stop") -> Finding:
    return Finding(host, code, f"{host} is bad", "mend it", severity)


def checked(**changes: Any) -> Checked:
    usual = {"cluster": NODES, "servers": {"node-1"}, "tested": NODES, "measurement": "preflight", "inventory": "i"}
    return Checked(**{**usual, **changes})


def decide(
    *findings: Finding, entries: dict[str, Entry] | None = None, exclude: bool = True, **changes: Any
) -> Decision:
    return excluded.decide(findings, entries or {}, checked(**changes), exclude=exclude)


def told(decision: Decision) -> list[tuple[str, str, str]]:
    return [(finding.host, finding.code, finding.severity) for finding in decision.findings]


def test_a_bad_node_is_left_out_with_the_reason() -> None:
    decision = decide(bad("node-3"), bad("node-3", "disk-full"), bad("node-2", severity="warn"))
    (name, entry) = next(iter(decision.entries.items()))
    assert (name, *decision.entries) == ("node-3", "node-3")
    assert (entry.by, entry.person, entry.code, entry.measurement) == ("check", "", "login-timeout", "preflight")
    assert entry.why == "node-3 is bad"
    assert told(decision) == [
        ("node-3", "login-timeout", "warn"),
        ("node-3", "disk-full", "warn"),
        ("node-2", "login-timeout", "warn"),
        ("node-3", "node-excluded", "warn"),
    ]


def test_stop_only_says_that_it_is_possible() -> None:
    decision = decide(bad("node-3"), exclude=False)
    assert decision.entries == {}
    assert told(decision) == [("node-3", "login-timeout", "stop"), ("node-3", "exclusion-possible", "note")]


@pytest.mark.parametrize(
    ("hosts", "changes"),
    [
        # The head, a builder, all of them, and a link that no exclusion explains.
        (["node-1"], {}),
        (["node-2"], {"servers": {"node-1", "node-2"}}),
        (["all"], {}),
        (["node-3", "all"], {}),
        (["node-3", "inventory"], {}),
        (["node-2, node-3, node-4"], {}),
        # Fewer than two nodes, or than half of them, are left.
        (["node-2"], {"cluster": NODES[:2], "tested": NODES[:2]}),
        (["node-1, node-2"], {"cluster": NODES[:2], "tested": NODES[:2]}),
        (["node-3", "node-4", "node-5", "node-6"], {}),
        # The run was limited to it.
        (["node-3"], {"tested": ["node-3"]}),
    ],
)
def test_what_always_stops_a_run_and_excludes_nobody(hosts: Sequence[str], changes: dict[str, Any]) -> None:
    decision = decide(*[bad(host) for host in hosts], **changes)
    assert decision.entries == {}
    assert told(decision) == [(host, "login-timeout", "stop") for host in hosts]


def test_half_of_the_nodes_is_enough() -> None:
    assert [*decide(*[bad(host) for host in NODES[3:]]).entries] == NODES[3:]
    # What a person took out is not missed.
    out = dict.fromkeys(("node-2", "node-3"), PERSON)
    assert [*decide(*[bad(host) for host in NODES[4:]], entries=out).entries] == ["node-2", "node-3", *NODES[4:]]


@pytest.mark.parametrize(
    ("findings", "names"),
    [
        # Whoever says so, the other one may be the cause: it can drop what a node sends, or claim that a node does.
        (["node-2, node-5"], []),
        (["node-6, node-1"], []),
        (["node-1, node-6"], []),
        (["node-2, node-5", "node-5, node-2"], []),
        (["node-2, node-5", "node-5, node-3"], []),
        # A bad node explains its bad links, in whatever order they are reported.
        (["node-2, node-5", "node-2"], ["node-2"]),
        (["node-2, node-5", "node-3, node-5"], ["node-5"]),
        (["node-2, node-5", "node-2, node-3"], ["node-2"]),
        (["node-2, node-1", "node-3, node-1"], []),
    ],
)
def test_a_bad_link_costs_an_end_that_has_two_of_them(findings: list[str], names: list[str]) -> None:
    assert [*decide(*[bad(host, "pair-slow") for host in findings]).entries] == names


@pytest.mark.parametrize("exclude", [True, False])
def test_what_passes_the_same_check_again_waits_for_its_proof(exclude: bool) -> None:
    entries = {"node-2": CHECK, "node-3": CONFIRMED, "node-4": PERSON, "node-5": ELSEWHERE, "gone": CHECK}
    decision = decide(entries=entries, exclude=exclude)
    mended = replace(CHECK, mended=True)
    assert decision.entries == entries | {"node-2": mended}
    assert ("node-2", "node-mended", "warn") in told(decision)
    # It may fail again before that, and what is not asked stays as it is.
    assert decide(bad("node-2"), entries={"node-2": mended}, exclude=exclude).entries == {"node-2": CHECK}
    assert decide(entries={"node-2": mended}, exclude=exclude, tested=["node-1"]).entries == {"node-2": mended}
    # So does one that all others depend on now: it takes part once it was asked.
    waits = decide(entries={"node-1": mended}, exclude=exclude, tested=["node-2", "node-3"])
    assert (waits.entries, told(waits)) == ({"node-1": mended}, [("node-1", "node-mended", "stop")])
    # Not if it was not asked, or is still bad: that stops no run any more.
    assert decide(entries=entries, exclude=exclude, tested=["node-1", "node-6"]).entries == entries
    still = decide(bad("node-2"), entries=entries, exclude=exclude)
    assert still.entries == entries
    assert ("node-2", "login-timeout", "warn") in told(still)
    # A run that stops for another reason changes nothing.
    assert decide(bad("node-1"), entries=entries, exclude=exclude).entries == entries


@pytest.mark.parametrize(
    ("name", "entry", "changes"),
    [
        ("node-2", CHECK, {"tested": ["node-2"]}),
        ("node-2", ELSEWHERE, {"tested": ["node-2"]}),
        ("node-1", CHECK, {}),
        ("node-1", ELSEWHERE, {"tested": ["node-2"]}),
    ],
)
def test_a_run_stops_if_it_is_limited_to_a_node_that_is_left_out_or_it_is_the_head_now(
    name: str, entry: Entry, changes: dict[str, Any]
) -> None:
    decision = decide(bad(name), entries={name: entry}, **changes)
    assert decision.entries == {name: entry}
    assert told(decision) == [(name, "login-timeout", "stop"), (name, "node-excluded", "stop")]
    # The head, as nothing could prove it without itself, takes part as soon as it passes.
    passed = decide(entries={name: entry}, **changes)
    if entry is CHECK and name == "node-1":
        assert (passed.entries, passed.findings) == ({}, [])
    else:
        assert passed.entries == {name: entry}
        assert told(passed) == [(name, "node-mended" if entry is CHECK else "node-excluded", "stop")]


@pytest.mark.parametrize(
    ("entries", "changes", "severities"),
    [
        ({"node-2": PERSON, "node-3": CHECK, "gone": PERSON}, {}, ["warn"]),
        ({"node-2": PERSON}, {"tested": ["node-3"]}, []),
        ({"node-2": PERSON}, {"tested": ["node-2"]}, ["stop"]),
        ({"node-2": CHECK}, {"tested": ["node-2"]}, []),
        ({"node-1": CONFIRMED, "node-2": PERSON}, {}, ["stop", "warn"]),
    ],
)
def test_what_a_person_set_aside_is_told_first(
    entries: dict[str, Entry], changes: dict[str, Any], severities: list[str]
) -> None:
    findings = excluded.set_aside(entries, checked(**changes))
    assert [finding.severity for finding in findings] == severities
    assert all(finding.code == "node-set-aside" and SINCE in finding.cause for finding in findings)


def test_the_record_is_private_and_read_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    odd = Entry(SINCE, "check", "", "", "{{ 7 * 7 }} 'x': # [y]\\x1b", "preflight")
    with excluded.changing(state) as entries:
        entries.update({"node-2": PERSON, "node-3": odd})
    assert excluded.read(state) == {"node-2": PERSON, "node-3": odd}
    path = state / "excluded.yml"
    assert [stat.S_IMODE(place.stat().st_mode) for place in (state, path)] == [0o700, 0o600]
    before = path.stat().st_ino
    with excluded.changing(state):
        pass
    assert path.stat().st_ino == before
    cluster = describe({"cluster": NODES[:4], "head": NODES[3:4], "slurm": NODES[:3]}, state, ["node-1"])
    why = f"excluded since {SINCE} by ada: its fan is loud"
    assert ([*cluster.excluded], cluster.excluded["node-2"]) == (["node-2", "node-3"], why)
    assert (cluster.set_aside, cluster.left_out) == (["node-2"], ["node-1", "node-2", "node-3"])
    assert (cluster.trusted, cluster.members, cluster.queue) == (NODES[1:4], ["node-4"], NODES[1:3])
    assert excluded.unmeasured(cluster.excluded, NODES, ["node-1", "node-3"]) == {"node.node-2": why}
    assert excluded.unmeasured({}, NODES, ["node-1"], "node-3,gone") == {"node.node-3": "it runs jobs"}


ENTRY = "{since: '2026-01-02T03:04:05Z', by: check, person: '', code: x, why: y, measurement: preflight}"


@pytest.mark.parametrize(
    "content",
    [
        "node-2: [",
        "- node-2",
        "node-2: true",
        "node-2: {}",
        f"../node: {ENTRY}",
        f"node-2: {ENTRY.replace('check', 'nobody')}",
        f"node-2: {ENTRY.replace('2026', 'then')}",
        f"node-2: {ENTRY.replace('why: y', 'why: [y]')}",
        f"node-2: {ENTRY.replace('why: y', 'more: y')}",
        "node-2: !!python/object/apply:os.system [id]",
        "\x00",
        "[" * 20_000,
        "x" * (1 << 20) + "x",
    ],
)
def test_a_broken_record_is_refused_and_not_replaced(tmp_path: Path, content: str) -> None:
    record = tmp_path / "excluded.yml"
    record.write_text(f"node-2: {ENTRY}\n")
    assert [*excluded.read(tmp_path)] == ["node-2"]
    record.write_text(content)
    with pytest.raises(FarandoleError, match=r"excluded.yml cannot be used: ") as error, excluded.changing(tmp_path):
        raise AssertionError
    assert len(str(error.value)) < 600
    assert record.read_text() == content


# The command


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    hosts = {name: {"ansible_host": f"192.0.2.{number}"} for number, name in enumerate(NODES, 1)}
    cluster = {"hosts": hosts, "vars": {"base_state_dir": str(tmp_path / "state")}}
    groups = {"cluster": cluster, "head": {"hosts": {"node-1": None}}, "builders": {"hosts": {"node-6": None}}}
    (folder / "hosts.yml").write_text(json.dumps(groups))
    return folder


def node(inventory: Path, *arguments: str) -> str:
    """What `farandole node` says, or refuses."""
    done = CliRunner().invoke(app, ["node", *arguments, "-i", str(inventory)])
    assert done.exception is None or isinstance(done.exception, FarandoleError), done.output
    return str(done.exception or done.output)


def test_a_person_leaves_nodes_out_and_takes_them_back(inventory: Path) -> None:
    state = inventory.parent / "state"
    assert node(inventory, "list") == "no node is left out\n"
    assert node(inventory, "exclude", "node-3", "--why", "its fan\x1b[31m is loud").startswith("node-3 is left out\n")
    assert excluded.read(state)["node-3"].why == r"its fan\x1b[31m is loud"
    with excluded.changing(state) as entries:
        entries["node-4"], entries["gone"] = CHECK, CHECK
    assert "already" not in node(inventory, "confirm", "node-4")
    assert excluded.read(state)["node-4"].person
    shown = node(inventory, "list")
    assert all(word in shown for word in ("node-3", "fan", "node-4", "login-timeout", "no longer in the inventory"))
    assert node(inventory, "include", "node-3", "--unproven").startswith("node-3 takes part again; it was")
    assert node(inventory, "include", "gone").startswith("gone takes part again; it was")
    assert [*excluded.read(state)] == ["node-4"]


@pytest.mark.parametrize("entry", [PERSON, CONFIRMED, CHECK])
def test_a_node_that_a_person_includes_is_left_out_until_it_is_proven(inventory: Path, entry: excluded.Entry) -> None:
    state = inventory.parent / "state"
    with excluded.changing(state) as entries:
        entries["node-3"] = entry
    assert "node-3 takes part again once it is proven; it was excluded since" in node(inventory, "include", "node-3")
    included = replace(entry, included=True)
    assert excluded.read(state) == {"node-3": included}
    assert "included again, and not proven yet" in node(inventory, "list")
    # Runs look at it again, and go on without it if it is bad.
    passed = decide(entries={"node-3": included})
    assert passed.entries == {"node-3": replace(included, mended=True)}
    assert told(passed) == [("node-3", "node-mended", "warn")]
    failed = decide(bad("node-3"), entries={**passed.entries})
    assert failed.entries == {"node-3": included}
    assert [note for note in told(failed) if note[1] == "node-excluded"] == [("node-3", "node-excluded", "warn")]
    # A person may think again.
    assert node(inventory, "confirm", "node-3").startswith("node-3 stays out")
    assert excluded.read(state)["node-3"].held
    node(inventory, "include", "node-3")
    assert node(inventory, "exclude", "node-3", "--why", "smoke").startswith("node-3 is left out")
    assert excluded.read(state)["node-3"].held


@pytest.mark.parametrize("decision", [["exclude", "node-3", "--why", "smoke"], ["confirm", "node-3"]])
def test_a_person_may_keep_a_node_that_an_upgrade_has_left_out(inventory: Path, decision: list[str]) -> None:
    state = inventory.parent / "state"
    with excluded.changing(state) as entries:
        entries["node-3"] = replace(PERSON, code="upgrade")
    assert "already" not in node(inventory, *decision)
    entry = excluded.read(state)["node-3"]
    # With that code, the upgrade would take it back.
    assert (entry.by, entry.code) == ("person", "")
    assert "already stays out until a person includes it" in node(inventory, "confirm", "node-3")


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["exclude", "node-9", "--why", "x"], "there is no node node-9; the nodes are node-1, "),
        (["exclude", "node-1", "--why", "x"], "node-1 cannot be left out: it is the head"),
        (["exclude", "node-6", "--why", "x"], "node-6 cannot be left out: it builds the stack"),
        (["exclude", "node-3", "--why", " "], "--why is empty"),
        (["exclude", "node-2", "--why", "x"], "node-2 is already excluded since .*farandole node confirm"),
        (["exclude", "node-4", "--why", "x"], "node-4 is already excluded since .*loud$"),
        # What continues it is `farandole replace`.
        (["exclude", "node-5", "--why", "x"], "node-5 is already excluded since .*loud$"),
        (["confirm", "node-5"], "node-5 already stays out until a person includes it"),
        (["include", "node-9"], "there is no node node-9"),
        (["include", "node-3"], "node-3 is not left out"),
        (["include", "node-2", "--prove", "--unproven"], "--prove and --unproven: give one of them"),
        (["include", "node-9", "--prove"], "there is no node node-9"),
        (["confirm", "node-9"], "there is no node node-9"),
        (["confirm", "node-3"], "node-3 is not left out; to do that: farandole node exclude"),
        (["confirm", "node-4"], "node-4 already stays out until a person includes it"),
    ],
)
def test_what_the_command_refuses(inventory: Path, arguments: list[str], refusal: str) -> None:
    entries = {"node-2": CHECK, "node-4": PERSON, "node-5": replace(PERSON, code="replace")}
    with excluded.changing(inventory.parent / "state") as known:
        known.update(entries)
    assert re.search(refusal, node(inventory, *arguments))
    assert excluded.read(inventory.parent / "state") == entries


def test_a_run_does_not_use_them(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.left_out(inventory, "") == []
    with excluded.changing(inventory.parent / "state") as entries:
        entries.update({"node-2": PERSON, "gone": PERSON})
    assert jobs.left_out(inventory, "") == ["node-2"]
    assert "node-2 is left out: excluded since" in capsys.readouterr().err
    assert jobs.left_out(inventory, "node-1,node-3") == []
    with pytest.raises(FarandoleError, match=r"--hosts: node-2 is left out: .*farandole node include node-2"):
        jobs.left_out(inventory, "node-1, node-2")


def test_a_new_authority_does_not_wait_for_them() -> None:
    members = Members(NODES, ["trainer"], ["node-1"], [], ["node-2"], ["node-1"], NODES[3:])
    assert members.left_out == {"node-3"}


# Preflight


def preflight(state: Path, probes: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """What preflight says of nodes, of which some do not answer."""
    hostvars = {}
    for number, (name, own) in enumerate(probes.items(), 1):
        address = f"192.0.2.{number}"
        login = {"host": address, "port": None, "user": None, "account": "root", "command": f"ssh {address}"}
        reply = {"unreachable_reason": "Connection refused"} if own is DOWN else {"probe": probe(name, address, **own)}
        hostvars[name] = {"ansible_host": address, "_preflight_probe": {"skew": 0.0, **reply, "login": login}}
    groups = {"cluster": [*hostvars], "head": [*hostvars][:1]}
    variables = {"hostvars": hostvars, "groups": groups, "ansible_play_hosts_all": [*hostvars], "inventory_dir": "i"}
    return hosts_phase(variables, state, **{"stack": False, "on_bad_node": "exclude", **changes})


DOWN: dict[str, Any] = {"down": True}
FINE: dict[str, dict[str, Any]] = {name: {} for name in NODES[:4]}


def test_preflight_goes_on_without_a_node_that_is_down(tmp_path: Path) -> None:
    answer = preflight(tmp_path, {**FINE, "node-3": DOWN}, check_mode=True)
    assert (answer["failed"], [*answer["excluded"]], excluded.read(tmp_path)) == (False, ["node-3"], {})
    assert preflight(tmp_path, {**FINE, "node-3": DOWN}, on_bad_node="stop")["failed"]
    assert not preflight(tmp_path, {**FINE, "node-3": DOWN})["failed"]
    assert [*excluded.read(tmp_path)] == ["node-3"]
    assert [*json.loads((tmp_path / "preflight.json").read_text())["hosts"]] == ["node-1", "node-2", "node-4"]
    # Known to be bad, it stops no run.
    assert not preflight(tmp_path, {**FINE, "node-3": DOWN}, on_bad_node="stop")["failed"]
    assert [*preflight(tmp_path, FINE, on_bad_node="stop")["excluded"]] == ["node-3"]
    assert excluded.read(tmp_path)["node-3"].mended


@pytest.mark.parametrize(
    "lie",
    [
        # The machine id and the address of another node, a network that suits nobody else.
        {"machine_id": "node-4"},
        {"machine_id": "node-4", "addresses": ["192.0.2.4", "192.0.2.2"]},
        {"interfaces": [{"name": "eth0", "address": "192.0.2.4", "prefix": 24}]},
        {"interfaces": [{"name": "eth0", "address": "192.0.2.2", "prefix": 30}]},
    ],
)
def test_what_one_node_says_excludes_no_other(tmp_path: Path, lie: dict[str, Any]) -> None:
    preflight(tmp_path, {**FINE, "node-2": lie})
    assert "node-4" not in excluded.read(tmp_path)


def test_the_words_of_an_excluded_node_count_no_more(tmp_path: Path) -> None:
    lie = {"machine_id": "node-4", "os_version": "7"}
    assert preflight(tmp_path, {**FINE, "node-2": lie}, on_bad_node="stop")["failed"]
    answer = preflight(tmp_path, {**FINE, "node-2": lie})
    assert (answer["failed"], [*answer["excluded"]]) == (False, ["node-2"])
