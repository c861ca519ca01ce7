"""What is due on nodes, and in which order. tests/lab/test_waves.py does it."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli import upgrade
from farandole.cli.app import app
from farandole.cli.apply import lost_in
from farandole.cli.change import PLAYBOOK, Change, alone, proven
from farandole.cli.proof import prove_lost, take_back
from farandole.cli.upgrade import go
from farandole.core.errors import FarandoleError, Interrupted
from farandole.inventory import excluded
from farandole.inventory.facts import describe
from farandole.inventory.run_lock import take, this_run
from farandole.plays.playbook import Login
from farandole.plays.upgrade import Due, note, noted, shown, waves
from farandole.stack.lock import identity, path_of, write

from .loading import ROOT, load
from .stack import LOCK

module = load("modules", "system_upgrade")
SIMULATION = """\
The following packages have been kept back:
  openmpi-bin libopenmpi3
  ucx
The following NEW packages will be installed:
  linux-image-6.1.0-41-amd64
Inst base-files [12.4+deb12u5] (12.4+deb12u12 Debian:12.11/oldstable [amd64]) []
Inst linux-image-6.1.0-41-amd64 (6.1.158-1 Debian-Security:12/oldstable-security [amd64])
Conf base-files (12.4+deb12u12 Debian:12.11/oldstable [amd64])
"""
ANSWER = {
    "packages": [], "kept": [], "kernel": "6.1", "next_kernel": "6.1", "drivers": [], "reboot": False, "stack": "",
}  # fmt: skip
NOTHING = Due((), (), "6.1.0-37-amd64", "6.1.0-37-amd64", (), reboot=False, stack="")


def test_a_simulation_of_apt_says_what_would_be_upgraded() -> None:
    packages, kept = module.planned(SIMULATION)
    assert packages == [
        ["base-files", "12.4+deb12u5", "12.4+deb12u12"],
        ["linux-image-6.1.0-41-amd64", "", "6.1.158-1"],
    ]
    assert kept == ["openmpi-bin", "libopenmpi3", "ucx"]
    assert module.planned("") == ([], [])


@pytest.mark.parametrize(
    ("running", "installed", "next_kernel"),
    [
        ("6.1.0-9-amd64", ["6.1.0-9-amd64", "6.1.0-10-amd64"], "6.1.0-10-amd64"),
        # Another flavour is not what this machine boots.
        ("6.1.0-9-amd64", ["6.1.0-9-amd64", "6.1.0-10-cloud-amd64"], "6.1.0-9-amd64"),
        ("6.1.0-9-cloud-amd64", ["6.1.0-9-cloud-amd64", "6.1.0-10-cloud-amd64"], "6.1.0-10-cloud-amd64"),
        ("5.15.0-91-generic", ["5.15.0-91-generic", "6.5.0-14-generic"], "6.5.0-14-generic"),
        ("6.12.9+deb13-amd64", ["6.12.9+deb13-amd64", "6.12.63+deb13-amd64"], "6.12.63+deb13-amd64"),
        ("6.12.9+deb13-amd64", ["6.12.9+deb13-amd64", "6.12.63+deb13-rt-amd64"], "6.12.9+deb13-amd64"),
        ("6.12.9+deb13-cloud-amd64", ["6.12.63+deb13-cloud-amd64", "6.12.74+deb13-amd64"], "6.12.63+deb13-cloud-amd64"),
        # The next release of Debian, and backports.
        ("6.1.0-37-amd64", ["6.1.0-37-amd64", "6.12.63+deb13-amd64"], "6.12.63+deb13-amd64"),
        ("6.1.0-0.deb11.5-amd64", ["6.1.0-0.deb11.5-amd64", "6.1.0-0.deb11.17-amd64"], "6.1.0-0.deb11.17-amd64"),
        ("6.12.9+bpo-amd64", ["6.12.9+bpo-amd64", "6.12.9+deb12-amd64"], "6.12.9+deb12-amd64"),
        ("6.12.9+bpo-amd64", ["6.12.9+bpo-amd64", "6.12.12+bpo-amd64"], "6.12.12+bpo-amd64"),
        # Somebody's own kernel, or none of its own at all.
        ("6.18.5", ["6.1.0-9-amd64"], "6.18.5"),
        ("6.18.5-mine", ["6.18.5-mine", "6.18.6-mine", "6.12.63+deb13-amd64"], "6.18.5-mine"),
        ("6.1.0-9-amd64", [], "6.1.0-9-amd64"),
    ],
)
def test_the_next_kernel_is_the_last_one_of_its_flavour(running: str, installed: list[str], next_kernel: str) -> None:
    assert module.newest(running, installed) == next_kernel


@pytest.mark.parametrize(
    ("due", "canary", "size", "parts"),
    [
        (["a", "b", "c", "d"], "", 2, [["b"], ["c", "d"], ["a"]]),
        (["b", "c", "d"], "", 1, [["b"], ["c"], ["d"]]),
        (["a", "b", "c", "d"], "d", 8, [["d"], ["b", "c"], ["a"]]),
        (["a", "b", "builder", "c"], "", 8, [["b"], ["c"], ["builder"], ["a"]]),
        (["a"], "", 1, [["a"]]),
        # There is nothing to do on the one that was to begin.
        (["b", "c"], "d", 8, [["b"], ["c"]]),
    ],
)
def test_one_node_begins_and_those_that_all_depend_on_come_last(
    due: list[str], canary: str, size: int, parts: list[list[str]]
) -> None:
    assert waves(due, ["builder", "a"], canary, size) == parts


def test_what_is_due_is_shown_once_for_nodes_that_are_alike() -> None:
    old = Due(
        [["curl", "7", "8"], ["new", "", "1"]], ["ucx"], "6.1.0-37-amd64", "6.1.0-41-amd64", (), reboot=True, stack=""
    )
    assert replace(NOTHING, drivers=["nvidia"], reboot=True).words() == "a reboot for the driver nvidia"
    assert [*shown({"node-1": old, "node-2": old, "node-3": NOTHING})] == [
        "nodes           to upgrade",
        "node-1, node-2  2 packages, kernel 6.1.0-37-amd64 to 6.1.0-41-amd64, 1 package kept back (ucx)",
        "node-3          nothing",
        "  curl 7 to 8",
        "  new 1",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"packages": [["\x1b[2J", "", "1"]]},
        {"packages": [["curl", "1"]]},
        {"kernel": "$(x)"},
        {"drivers": ["a b"]},
        {"reboot": "yes"},
        {"stack": "../../etc"},
    ],
)
def test_a_nodes_answer_has_a_strict_form(answer: dict[str, object], tmp_path: Path) -> None:
    note(tmp_path, {"node-1": ANSWER})
    assert noted(tmp_path) == {"node-1": Due([], [], "6.1", "6.1", [], reboot=False, stack="")}
    with pytest.raises(FarandoleError):
        note(tmp_path, {"node-1": ANSWER | answer if answer else {}})
    (tmp_path / "upgrade.json").write_text(json.dumps({"node-1": ANSWER})[:-3])
    with pytest.raises(FarandoleError, match=r"upgrade\.json"):
        noted(tmp_path)


@pytest.fixture
def left_out(tmp_path: Path) -> excluded.Entry:
    """What is known of node-2, which somebody has left out."""
    entry = excluded.by_person("carol", "its fan is loud")
    with excluded.changing(tmp_path) as entries:
        entries["node-2"] = entry
    return entry


def changing(state: Path) -> Change:
    cluster = describe({"cluster": ["node-1", "node-2", "node-3"], "head": ["node-1"]}, state)
    return Change(state, Login(), cluster, "again")


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_node_that_is_not_proven_stays_left_out(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: excluded.Entry
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(_change: Change, playbook: str, *arguments: str) -> bool:
        ran.append((playbook, *arguments))
        if failing == 3 and len(ran) == 2:
            raise Interrupted("stop")
        return len(ran) != failing + 1

    def back() -> str:
        with alone(tmp_path):
            return change.brought_back({"node-2": left_out}, lambda: change.returning(["node-2"]))

    monkeypatch.setattr(Change, "run", run)
    change = changing(tmp_path)
    if failing == 3:
        with pytest.raises(Interrupted):
            back()
    else:
        assert back()
    assert excluded.read(tmp_path) == {"node-2": left_out}
    with alone(tmp_path):
        assert excluded.read(tmp_path) == {"node-2": left_out}
    # The head learns of it last, and before the node's slurmd starts, which the head's slurmctld has to know.
    ran = [step if step[0] == "site.yml" else step[:3] for step in ran]
    steps = [("site.yml", "--limit", "node-2", "--skip-tags", "slurm"), ("playbooks/validate.yml", "--tags", "quick")]
    head = ("site.yml", "--limit", "node-1,node-2", "--tags", "fabric,slurm,monitoring", *proven(["node-2"]))
    assert ran == (steps if failing == 3 else [*steps, head][: failing + 1])
    monkeypatch.setattr(Change, "run", lambda *_: True)
    assert back() == "" and excluded.read(tmp_path) == {}


def test_a_power_cut_leaves_a_node_out_that_was_being_proven(tmp_path: Path, left_out: excluded.Entry) -> None:
    entry = replace(left_out, code="replace")
    script = (
        "import os, pathlib, sys; from farandole.inventory import excluded; from farandole.cli.change import alone\n"
        "state = pathlib.Path(sys.argv[1])\n"
        "with alone(state):\n"
        f"    excluded.begin_proof(state, 'node-2', excluded.{entry!r})\n"
        "    print(excluded.read(state), flush=True); sys.stdin.read(1); os._exit(9)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as command:
        assert command.stdout and command.stdout.readline() == "{}\n"
        # Others see that it takes part, as long as that one lives.
        assert excluded.read(tmp_path) == {}
        with excluded.changing(tmp_path) as entries:
            entries["node-3"] = left_out
        command.communicate("x")
    assert [*excluded.read(tmp_path)] == ["node-2", "node-3"]
    change = changing(tmp_path)
    # Another proof does not forget it, and what is not being proven is as earlier versions have it.
    with alone(tmp_path):
        assert change.brought_back({"node-3": left_out}, lambda: "") == ""
        assert excluded.read(tmp_path) == {"node-2": entry}
    assert "proving" not in (tmp_path / excluded.FILE).read_text()


@pytest.mark.parametrize(("good", "included"), [(True, False), (False, False), (True, True)])
def test_apply_takes_back_what_is_mended_once_it_is_proven(
    good: bool, included: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = excluded.Entry(excluded.now(), "check", "", "login-timeout", "it was off", "preflight")
    mended = replace(failed, mended=True)
    before = {
        "node-2": replace(mended, person="carol", included=True) if included else mended,
        "node-3": replace(mended, person="carol"),
        "node-4": failed,
        "gone": mended,
        "node-5": mended,
    }
    with excluded.changing(tmp_path) as entries:
        entries |= before
    ran: list[tuple[str, ...]] = []

    def run(change: Change, playbook: str, *arguments: str) -> bool:
        ran.append((playbook, *arguments[:2], *change.more))
        return good or playbook == "site.yml"

    monkeypatch.setattr(Change, "run", run)
    nodes = [f"node-{number}" for number in range(1, 6)]
    cluster = describe({"cluster": nodes, "head": nodes[:1]}, tmp_path, revoked=["node-5"])
    monkeypatch.setattr("farandole.cli.proof.cluster_of", lambda *_, **__: cluster)
    take_back(tmp_path, Login(ask_become_pass=True), [], [], as_json=False)
    assert ran == []
    with nullcontext() if good else pytest.raises(FarandoleError, match="left out as before, node-2: its validation"):
        take_back(tmp_path, Login(), ["--forks", "9"], [], as_json=False)
    steps = [
        ("site.yml", "--limit", "node-2", "--forks", "9"),
        ("playbooks/validate.yml", "--tags", "quick", "--forks", "9"),
        # All nodes, as apply has told all of them that it is left out.
        ("site.yml", "--tags", "fabric,slurm,monitoring", "--forks", "9"),
    ]
    # If it fails, that is said again, as an apply of somebody else may have told the head otherwise meanwhile.
    assert ran == steps
    left = excluded.read(tmp_path)
    assert left == (before if not good else {name: entry for name, entry in before.items() if name != "node-2"})


@pytest.mark.parametrize(
    ("good", "lost"),
    [
        (True, ["node-2", "node-3", "stranger", "node-7", "node-8"]),
        (False, ["node-2", "node-3"]),
        (True, ["node-7"]),
        # After a power cut of all nodes, there is no other one.
        (True, [f"node-{number}" for number in range(1, 9)]),
    ],
)
def test_nodes_that_the_queue_has_lost_get_jobs_again_once_they_are_proven(
    good: bool, lost: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(_change: Change, playbook: str, *arguments: str) -> bool:
        ran.append((playbook, *arguments))
        return good

    nodes = [f"node-{number}" for number in range(1, 9)]
    cluster = describe({"cluster": nodes, "head": nodes[:1]}, tmp_path, revoked=["node-7"])
    with excluded.changing(tmp_path) as entries:
        entries["node-8"] = excluded.by_person("ada", "its fan is loud")
    monkeypatch.setattr(Change, "run", run)
    change = Change(tmp_path, Login(), cluster, "farandole apply")
    failed = r"the queue gives node-2, node-3 no jobs: the validation is red; .*apply; .*farandole node exclude node-3"
    with nullcontext() if good else pytest.raises(FarandoleError, match=failed):
        prove_lost(change, lost)
    known = [name for name in lost if name in nodes[:6]]
    hosts, limit = (",".join(dict.fromkeys(["node-1", *known])) for _ in range(2))
    steps = [
        ("playbooks/validate.yml", "--tags", "quick", "--extra-vars", json.dumps({"validation_hosts": hosts})),
        ("site.yml", "--limit", limit, "--tags", "slurm", *proven(known)),
    ]
    assert ran == ([] if not known else steps if good else steps[:1])


def test_one_node_alone_is_proven_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(Change, "run", lambda *arguments: not ran.append(arguments[-1]))  # type: ignore[func-returns-value]
    cluster = describe({"cluster": ["node-1", "node-2"], "head": ["node-1"]}, tmp_path)
    with excluded.changing(tmp_path) as entries:
        entries["node-2"] = excluded.by_person("ada", "its fan is loud")
    prove_lost(Change(tmp_path, Login(), cluster, "farandole apply"), ["node-1"])
    assert ran == ['{"validation_hosts": "node-1"}', '{"slurm_proven": ["node-1"]}']


def test_what_is_lost_is_proven_though_what_is_mended_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mended = excluded.Entry(excluded.now(), "check", "", "login-timeout", "it was off", "preflight", mended=True)
    with excluded.changing(tmp_path) as entries:
        entries["node-2"] = mended
    cluster = describe({"cluster": ["node-1", "node-2", "node-3"], "head": ["node-1"]}, tmp_path)
    monkeypatch.setattr("farandole.cli.proof.cluster_of", lambda *_, **__: cluster)
    hosts: list[str] = []

    def run(_change: Change, playbook: str, *arguments: str) -> bool:
        hosts.extend(arguments[-1:] if playbook == "playbooks/validate.yml" else ())
        return len(hosts) != 1

    monkeypatch.setattr(Change, "run", run)
    with pytest.raises(FarandoleError, match="left out as before, node-2: its validation is red"):
        take_back(tmp_path, Login(), [], ["node-3"], as_json=False)
    assert hosts == ['{"validation_hosts": "node-1,node-2"}', '{"validation_hosts": "node-1,node-3"}']


def test_the_names_of_lost_nodes_are_read_from_what_ansible_prints(tmp_path: Path) -> None:
    tell = yaml.safe_load((ROOT / "roles/slurm/tasks/set_up.yml").read_text())[-1]
    names = [f"gpu-worker-{number}" for number in range(1, 41)]
    known = {"_slurm_drains": {"lost": names}, "__slurm_is_head": True, "slurm_proof": True}
    play = {"hosts": "localhost", "gather_facts": False, "vars": known, "tasks": [tell]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    command = ["ansible-playbook", "-c", "local", "-i", "localhost,", str(tmp_path / "play.yml")]
    log = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    # It is folded.
    assert f"{', '.join(names)}:" not in log
    assert lost_in(log) == names
    assert lost_in("nothing") == []


def test_what_a_person_decides_during_a_proof_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: excluded.Entry
) -> None:
    smoke = excluded.by_person("dave", "smoke")
    monkeypatch.setattr(Change, "run", lambda *_: True)

    def steps() -> str:
        with excluded.changing(tmp_path) as entries:
            entries["node-2"] = smoke
        return why

    for why in ("", "its validation is red"):
        with alone(tmp_path):
            failed = changing(tmp_path).brought_back({"node-2": left_out}, steps)
        assert failed == (why or "somebody has left out node-2 meanwhile")
        assert excluded.read(tmp_path) == {"node-2": smoke}


@pytest.mark.parametrize("person", [True, False])
@pytest.mark.parametrize(
    ("bad", "step", "why"),
    [
        ("node-1", 2, "its validation is red"),
        ("node-2", 2, "its validation is red"),
        ("node-2", 3, "preflight has left it out again"),
    ],
)
def test_a_node_is_not_proven_if_a_check_leaves_it_or_its_partner_out(
    bad: str, step: int, why: str, person: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: excluded.Entry,
) -> None:  # fmt: skip
    steps = iter(range(1, 4))
    late = excluded.Entry(excluded.now(), "check", "", "clock-skewed", "late", "preflight")
    former = left_out if person else replace(late, why="it was off", mended=True)

    def run(*_: object) -> bool:
        # As preflight does with on_bad_node, and what was run on the other nodes is green.
        if next(steps) == step:
            with excluded.changing(tmp_path) as entries:
                entries[bad] = late
        return True

    monkeypatch.setattr(Change, "run", run)
    change = changing(tmp_path)
    with alone(tmp_path):
        assert change.brought_back({"node-2": former}, lambda: change.returning(["node-2"])) == why
    # What a person has said is not forgotten for what a check has found since, and else that is what is known.
    assert excluded.read(tmp_path)["node-2"] == (former if person or bad == "node-1" else late)


def test_who_was_left_out_during_a_proof_of_several_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mended = excluded.Entry(excluded.now(), "check", "", "login-timeout", "it was off", "preflight", mended=True)

    def run(_change: Change, playbook: str, *_: str) -> bool:
        if playbook == "playbooks/validate.yml":
            with excluded.changing(tmp_path) as entries:
                entries["node-3"] = excluded.by_person("dave", "smoke")
        return True

    with excluded.changing(tmp_path) as entries:
        entries |= dict.fromkeys(["node-2", "node-3"], mended)
    monkeypatch.setattr(Change, "run", run)
    cluster = describe({"cluster": ["node-1", "node-2", "node-3"], "head": ["node-1"]}, tmp_path)
    monkeypatch.setattr("farandole.cli.proof.cluster_of", lambda *_, **__: cluster)
    with pytest.raises(FarandoleError, match="left out as before, node-3: somebody has left out node-3 meanwhile"):
        take_back(tmp_path, Login(), [], [], as_json=False)
    assert "taking part again: node-2\n" in capsys.readouterr().out
    assert [*excluded.read(tmp_path)] == ["node-3"]


@pytest.mark.parametrize(("name", "good"), [("a", 2), ("b", 3), ("c", 3)])
def test_an_upgrade_is_remembered_until_its_end(
    name: str, good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"cluster": ["a", "b", "c", "d"], "head": ["a"], "builders": ["b"]}
    change = Change(tmp_path, Login(), describe(groups, tmp_path), "again")
    # The node takes part again, and the head has perhaps heard of it.
    done = iter([True] * good + [False] * 2)
    monkeypatch.setattr(Change, "run", lambda *_: next(done))
    with pytest.raises(FarandoleError, match="failed after its upgrade") as refused:
        go(change, [[name]], "{}", lambda *_: "again")
    assert ("the head may give it jobs until" in str(refused.value)) == (name == "c")
    assert ("runs may be refused until this succeeds: farandole apply -i" in str(refused.value)) == (name != "c")
    assert ("As all depend on it, it is not" in str(refused.value)) == (name != "c")
    assert change.begun() == {name}
    # Jobs go on where all depend on a node.
    assert [entry.code for entry in excluded.read(tmp_path).values()] == ([excluded.UPGRADE] if name == "c" else [])
    monkeypatch.setattr(Change, "run", lambda *_: True)
    assert change.upgrade([name], "{}") == ""
    assert change.begun() == set() and excluded.read(tmp_path) == {}


def test_who_is_left_out_by_a_person_after_an_upgrade_has_begun_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: excluded.Entry
) -> None:
    ran: list[str] = []

    def run(_change: Change, playbook: str, *_: str) -> bool:
        ran.append(playbook)
        if playbook == PLAYBOOK:
            with excluded.changing(tmp_path) as entries:
                entries["node-3"] = left_out
        return True

    monkeypatch.setattr(Change, "run", run)
    change = changing(tmp_path)
    # Before its wave, and in the middle of it.
    with pytest.raises(FarandoleError, match="node-2: somebody has left out node-2 meanwhile"):
        go(change, [["node-2"]], "{}", lambda *_: "again")
    # Nothing but that the head hears of it.
    assert ran == ["site.yml"] and excluded.read(tmp_path) == {"node-2": left_out}
    assert change.upgrade(["node-3"], "{}") == "" and change.begun() == set()
    assert excluded.read(tmp_path) == {"node-2": left_out, "node-3": left_out}


def test_a_run_of_somebody_else_between_two_steps_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farandole.cli.change.LOOK_S", 0.1)
    with subprocess.Popen(["sleep", "1"]) as other:
        take(tmp_path, this_run(other.pid))
        monkeypatch.setattr("farandole.cli.change.play", lambda *_, **__: other.poll())
        assert changing(tmp_path).run("site.yml")
    assert capsys.readouterr().err.count("waiting: this cluster is being changed by ") == 1


def answering(patch: pytest.MonkeyPatch, answers: dict[str, dict[str, object]]) -> None:
    """What the nodes answer from now on."""
    patch.setattr(upgrade, "forget", lambda state: note(state, answers))


def inventory_of(folder: Path) -> Path:
    """An inventory of three nodes that do not answer."""
    where = {"ansible_host": "127.0.0.1", "ansible_port": 1, "base_state_dir": str(folder)}
    nodes = {"hosts": dict.fromkeys(["node-1", "node-2", "node-3"]), "vars": where}
    inventory = folder / "mine/hosts.yml"
    inventory.parent.mkdir()
    inventory.write_text(yaml.safe_dump({"cluster": nodes, "head": {"hosts": {"node-1": None}}}))
    return inventory


def test_what_is_shown_meanwhile_is_not_part_of_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path))
    command = ["upgrade", "-i", str(inventory_of(tmp_path)), "--json"]
    told = CliRunner().invoke(app, [*command, "--check"])
    assert (told.exit_code, told.stdout) == (1, "")
    assert "node-1" in told.stderr
    error = CliRunner().invoke(app, [*command, "--yes"]).exception
    assert isinstance(error, FarandoleError) and "--check" in str(error)


def test_no_node_is_asked_if_all_that_are_named_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = inventory_of(tmp_path)
    with excluded.changing(tmp_path) as entries:
        entries["node-3"] = excluded.by_person("carol", "its fan is loud")
    # What an earlier one has noted.
    good = ANSWER | {"reboot": True}
    answering(monkeypatch, {"node-1": good, "node-3": good})
    ran: list[str] = []

    def run(*arguments: object, **_: str) -> int:
        ran.extend(map(str, arguments))
        return 0

    monkeypatch.setattr(Change, "run", run)
    monkeypatch.setattr(upgrade, "viewed", run)
    command = ["upgrade", "-i", str(inventory), "--hosts", "node-3"]
    for more in ([], ["--check"], ["--yes", "--reboot", "always"]):
        error = CliRunner().invoke(app, [*command, *more]).exception
        assert isinstance(error, FarandoleError) and f"node include node-3 --prove -i {inventory}" in str(error)
    told = CliRunner().invoke(app, [*command, "--check", "--json"])
    nothing = {"format": 1, "stack": "", "left_out": ["node-3"], "silent": [], "nodes": {}}
    assert json.loads(told.stdout) == nothing and ran == []
    told = CliRunner().invoke(app, [*command[:-1], "node-1,node-3", "--check", "--json"])
    assert [*json.loads(told.stdout)["nodes"]] == ["node-1"] and ran[-2:] == ["--limit", "node-1"]


def test_the_head_says_that_no_job_has_a_node_before_it_is_upgraded() -> None:
    tasks = yaml.safe_load((ROOT / "roles/base/tasks/upgrade.yml").read_text())[0]["block"]
    asks = [task for task in tasks if task.get("farandole.cluster.stack_use", {}).get("node")]
    upgrades = [task for task in tasks if "farandole.cluster.system_upgrade" in task]
    assert len(asks) == 1 and tasks.index(asks[0]) < tasks.index(upgrades[0])
    assert asks[0]["delegate_to"] == "{{ cluster_facts.head }}"
    # Once it is drained, it gets no other one meanwhile.
    assert tasks.index(asks[0]) > max(i for i, task in enumerate(tasks) if "farandole.cluster.slurm_drains" in task)


@pytest.mark.parametrize(
    ("reboot", "parts"),
    [
        ("needed", [["node-3"], ["node-2"], ["node-1"]]),
        ("always", [["node-3"], ["node-2"], ["node-1"]]),
        # The reboot of node-3 is left to somebody else.
        ("never", [["node-2"], ["node-1"]]),
    ],
)
def test_a_reboot_that_is_not_wanted_is_not_due(
    reboot: str, parts: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory, went = inventory_of(tmp_path), list[list[str]]()
    old = ANSWER | {"reboot": True}
    new = old | {"packages": [["curl", "7", "8"]], "reboot": False}
    answering(monkeypatch, {"node-1": new, "node-2": old, "node-3": old})
    # It was cut off before its proof.
    changing(tmp_path).note_begun(["node-2"])
    monkeypatch.setattr(Change, "run", lambda *_: True)
    monkeypatch.setattr(upgrade, "go", lambda _change, parts, *_: went.extend(parts))
    command = ["upgrade", "-i", str(inventory), "--yes", "--canary", "node-3", "--reboot", reboot]
    assert CliRunner().invoke(app, command).exit_code == 0 and went == parts


def test_a_node_that_does_not_answer_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory, went = inventory_of(tmp_path), list[list[str]]()
    due = {"node-1": ANSWER, "node-2": ANSWER | {"packages": [["curl", "7", "8"]]}}

    def run(*_: object) -> bool:
        # What has counted before does not.
        assert noted(tmp_path) == {}
        note(tmp_path, due)
        return False

    def upgraded(*options: str) -> tuple[int, str]:
        note(tmp_path, due | {"node-3": ANSWER})
        done = CliRunner().invoke(app, ["upgrade", "-i", str(inventory), *options])
        return done.exit_code, f"{done.output}{done.exception}"

    monkeypatch.setattr(Change, "run", run)
    monkeypatch.setattr(upgrade, "go", lambda _change, parts, *_: went.extend(parts))
    code, said = upgraded("--yes")
    assert (code, went) == (1, [["node-2"]]) and "could not be asked, and so not upgraded: node-3\n" in said
    assert "upgraded: node-2\n" in said and "not upgraded: node-3; once all answer, to continue: farandole upg" in said
    code, said = upgraded("--check")
    assert code == 1 and "node-2  1 package\n" in said
    assert "--canary: node-3 could not be asked" in upgraded("--canary", "node-3", "--yes")[1]
    # It may be silent because of its upgrade.
    changing(tmp_path).note_begun(["node-3"])
    went.clear()
    code, said = upgraded("--yes")
    assert (code, went) == (1, []) and f"to go on without it: farandole node confirm node-3 -i {inventory}" in said
    # Jobs begin with the stack of the head, and it says who has a node.
    due.pop("node-1")
    assert upgraded("--yes")[0] == 1 and went == []


def test_another_stack_comes_first_and_on_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory, ran = inventory_of(tmp_path), list[tuple[str, ...]]()
    lock = LOCK | {"id": identity(LOCK)}
    write(path_of(inventory), lock)
    has, lacks = ANSWER | {"stack": lock["id"]}, ANSWER | {"stack": "bbbb00000000"}
    answering(monkeypatch, {"node-1": has, "node-2": lacks, "node-3": lacks})
    # It was left out when the others switched, so it lacks the stack with which it is to be proven.
    with excluded.changing(tmp_path) as entries:
        entries["node-3"] = replace(excluded.by_person("carol", "it is being upgraded"), code=excluded.UPGRADE)

    def run(_change: Change, playbook: str, *arguments: str) -> bool:
        ran.append((playbook, *arguments[:4], *(["in"] if "node-3" not in excluded.read(tmp_path) else [])))
        return playbook != failing

    monkeypatch.setattr(Change, "run", run)
    upgrade_it, failing = ["upgrade", "-i", str(inventory), "--yes"], "site.yml"
    error = CliRunner().invoke(app, upgrade_it).exception
    assert isinstance(error, FarandoleError) and f"stack {lock['id']} is not on all nodes, and no system" in str(error)
    assert [playbook for playbook, *_ in ran] == [PLAYBOOK, "site.yml"]
    ran.clear()
    failing = "playbooks/validate.yml"
    done = CliRunner().invoke(app, upgrade_it)
    assert f"stack {lock['id']} on node-2: before all else" in done.stdout
    assert "in this order: node-3\n" in done.stdout and "its validation is red" in str(done.exception)
    told = ("site.yml", "--limit", "node-1", "--tags", "fabric,slurm,monitoring")
    assert ran[1:] == [
        ("site.yml",),
        told,
        (PLAYBOOK, "--limit", "node-3", "--extra-vars", ran[3][4]),
        ("site.yml", "--limit", "node-3", "--skip-tags", "slurm", "in"),
        ("playbooks/validate.yml", "--tags", "quick", "--extra-vars", ran[5][4]),
        told,
    ]
    assert excluded.read(tmp_path)["node-3"].code == excluded.UPGRADE
    # It may have been down.
    failing = ""
    assert "upgraded: node-2, node-3\n" in CliRunner().invoke(app, upgrade_it).stdout
    assert ran[-1] == ("site.yml", "--limit", "node-3,node-1", *proven(["node-3"])[:2], "in")
    with excluded.changing(tmp_path) as entries:
        entries["node-3"] = replace(excluded.by_person("carol", "it is being upgraded"), code=excluded.UPGRADE)
    # Also if only the one that was left out is named: jobs begin with the stack of the head.
    answering(monkeypatch, dict.fromkeys(["node-1", "node-3"], lacks))
    due = CliRunner().invoke(app, ["upgrade", "-i", str(inventory), "--check", "--hosts", "node-3"]).stdout
    assert f"stack {lock['id']} on node-1: before all else" in due and ran[-1][3] == "node-3,node-1"
    assert due.splitlines()[1].split()[0] == "node-3"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts", "node-2"], "node-2 is revoked, so it is not upgraded"),
        (["--canary", "node-3"], "--canary: node-3 is excluded since .* by carol: its fan is loud"),
        (["--canary", "node-1"], "--canary: all nodes depend on node-1"),
        # What continues it means the same nodes, the same person, and no other reboots.
        (
            ["--hosts=node-4", "--canary=node-4", "--wait=30", "--wave=2", "--reboot=never", "--user=admin", "--yes"],
            r"to continue: farandole upgrade -i \S+ --user admin --hosts node-4 --wave 2 --canary node-4 "
            "--reboot never --wait 30$",
        ),
        # What has been rebooted is not to be once more.
        (["--reboot=always", "--yes"], r"to continue: farandole upgrade -i \S+ --hosts node-4 --reboot always$"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_what_was_meant_is_continued(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = inventory_of(tmp_path)
    groups = {"cluster": ["node-1", "node-2", "node-3", "node-4"], "head": ["node-1"]}
    cluster = describe(groups, tmp_path, revoked=["node-2"])
    monkeypatch.setattr(upgrade, "cluster_of", lambda *_, **__: cluster)
    monkeypatch.setattr(Change, "run", lambda _change, _playbook, *arguments: "--check" in arguments)
    with excluded.changing(tmp_path) as entries:
        entries["node-3"] = excluded.by_person("carol", "its fan is loud")
    answering(monkeypatch, {"node-4": ANSWER | {"packages": [["curl", "7", "8"]]}})
    error = CliRunner().invoke(app, ["upgrade", "-i", str(inventory), *options]).exception
    assert isinstance(error, FarandoleError) and re.search(said, str(error)), error


def test_what_a_person_says_while_the_head_is_told_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory, late = inventory_of(tmp_path), excluded.by_person("dave", "smoke")
    with excluded.changing(tmp_path) as entries:
        entries["node-3"] = excluded.Entry(excluded.now(), "check", "", "clock-skewed", "late", "preflight")

    def run(*_: object) -> bool:
        with excluded.changing(tmp_path) as entries:
            entries["node-3"] = late
        return True

    monkeypatch.setattr(Change, "run", run)
    error = CliRunner().invoke(app, ["node", "include", "node-3", "--prove", "-i", str(inventory)]).exception
    assert "somebody has said something else of it meanwhile" in str(error)
    assert excluded.read(tmp_path) == {"node-3": late}


def test_a_second_operator_is_refused(tmp_path: Path) -> None:
    with (
        alone(tmp_path),
        pytest.raises(FarandoleError, match="another upgrade of this cluster is running"),
        alone(tmp_path),
    ):
        pass
    with alone(tmp_path):
        pass
