"""The queue: what its settings say, which nodes are drained, and what a node says of itself."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from farandole.core.errors import FarandoleError
from farandole.node import health
from farandole.node.head import status
from farandole.queue import plan

from .loading import ROOT, load
from .stack import run_module

ONE = {"sockets": 1, "cores": 4, "threads": 2, "memory": 16000, "gpus": 0, "cgroups": "v2", "version": "22.05"}
GPUS = {**ONE, "gpus": 4, "memory": 64000, "version": "24.11"}
TIMES = {"slurm_default_time": "1:00:00", "slurm_longest_time": "7-00:00:00"}
HOSTS: dict[str, dict[str, Any]] = {"a": {"ansible_host": "192.0.2.1"}, "b": {"ansible_host": "192.0.2.2"}}


def answered(**hardware: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {**HOSTS[name], "_slurm_probe": {"hardware": hardware[name]} if name in hardware else {}}
        for name in HOSTS
    }


def test_the_hardware_of_a_node_that_does_not_answer_is_remembered() -> None:
    record = json.dumps(plan.hardware(["a", "b"], answered(a=ONE, b=GPUS), ""))
    assert plan.hardware(["a", "b"], answered(a=GPUS), record) == {"a": GPUS, "b": GPUS}
    # One that has left the cluster is forgotten, and one that never answered is not there yet.
    assert plan.hardware(["a"], answered(), record) == {"a": ONE}
    assert plan.hardware(["a", "b"], answered(a=ONE), "") == {"a": ONE}


def test_another_boot_changes_no_setting_but_another_memory_module_does() -> None:
    record = json.dumps({"a": ONE})
    for memory, told in ((15990, 16000), (16100, 16000), (15800, 15800), (32000, 32000)):
        assert plan.hardware(["a"], answered(a={**ONE, "memory": memory}), record)["a"]["memory"] == told


@pytest.mark.parametrize(
    "answer",
    [
        {**ONE, "memory": "1\nNodeName=x"},
        {**ONE, "cgroups": "v2 x"},
        {**ONE, "cores": 0},
        {"cores": 1},
        {**ONE, "x": 1},
        [],
    ],
)
def test_a_node_cannot_write_into_the_settings(answer: Any) -> None:
    with pytest.raises(FarandoleError, match="a: Slurm cannot use what it says"):
        plan.hardware(["a"], answered(a=answer), "")
    with pytest.raises(FarandoleError, match="record of the nodes' hardware is damaged"):
        plan.hardware(["a"], answered(), '{"a": {"cores": "x"}}')


def test_settings_are_those_that_all_nodes_can_use() -> None:
    groups = {"gpus": ["b"], "cluster": ["a", "b"], "head": ["a"]}
    partitions = [{"name": "normal"}, {"name": "gpu", "group": "gpus", "limit": "1:00:00"}]
    settings = plan.settings({"a": {**ONE, "cgroups": "none"}, "b": GPUS}, HOSTS, partitions, groups, TIMES)
    assert [partition["nodes"] for partition in settings["partitions"]] == [["a", "b"], ["b"]]
    assert (settings["cgroups"], settings["version"], settings["gpus"]) == ("none", "22.05", True)
    for kind, all_can in (("v2", "v2"), ("v2-memory", "v2-memory"), ("v1", "none")):
        some = plan.settings({"a": {**ONE, "cgroups": kind}, "b": GPUS}, HOSTS, partitions, groups, TIMES)
        assert some["cgroups"] == all_can
    # A twentieth of the memory, and at least half a GiB, is the system's.
    assert [(node["address"], node["cpus"], node["memory"]) for node in settings["nodes"]] == [
        ("192.0.2.1", 8, 15200),
        ("192.0.2.2", 8, 60800),
    ]
    assert settings["memory_per_cpu"] == 15200 // 8
    assert plan.usable_mib(1000) == 488
    # Bare nodes have no partitions yet.
    assert plan.settings({}, HOSTS, [{"name": "x"}], {"head": ["a"]}, TIMES)["partitions"] == []


def test_a_partition_with_jobs_stays_until_they_have_ended() -> None:
    text = """
PartitionName=old Nodes=a,b Default=YES DefaultTime=1:00:00 MaxTime=7-00:00:00 State=UP
PartitionName=idle Nodes=a Default=NO DefaultTime=1:00:00 MaxTime=7-00:00:00 State=UP
PartitionName=older Nodes=gone Default=NO MaxTime=60 State=DRAIN
"""
    probe = load("modules", "slurm_probe")
    used = probe.partitions(text, {"old", "older", "new"})
    assert [partition["name"] for partition in probe.partitions(text, None)] == ["old", "idle", "older"]
    hosts = {**HOSTS, "a": {**HOSTS["a"], "_slurm_probe": {"partitions": used}}}

    def ending(*names: str) -> Any:
        partitions = [{"name": name} for name in names]
        return plan.settings({"a": ONE, "b": ONE}, hosts, partitions, {"head": ["a"]}, TIMES)["ending"]

    assert ending("new") == [{"name": "old", "nodes": ["a", "b"], "limit": "7-00:00:00"}]
    assert ending("new", "old") == []
    # What an earlier version or somebody else wrote stops no run, and is written nowhere.
    for limit in ("1 State=UP", "14d"):
        used[0]["limit"] = limit
        assert ending("new") == [{"name": "old", "nodes": ["a", "b"], "limit": "UNLIMITED"}]
    used[0]["name"] = "x State=UP"
    with pytest.raises(FarandoleError, match="a partition that is not Farandole's"):
        ending("new")


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"name": 'x"] = 1', "group": ""}, "is not a partition name"),
        ({"name": "x", "limit": "1h"}, "x has the limit '1h'; write 12:00:00"),
        ({"name": "x", "limit": 43200}, "x has the limit 43200; write 12:00:00 or 2-00:00:00, in quotes"),
        ({"name": "x", "group": "none"}, "x names the group none, which the inventory lacks"),
        ({"name": "x", "group": "empty"}, "x has no node; its group is empty"),
    ],
)
def test_partitions_without_nodes(partition: dict[str, Any], message: str) -> None:
    with pytest.raises(FarandoleError, match=message):
        plan.settings({"a": ONE}, HOSTS, [partition], {"empty": []}, TIMES)


@pytest.mark.parametrize("name", TIMES)
def test_a_time_is_what_slurm_takes(name: str) -> None:
    """Of which YAML makes no number."""
    partitions = [{"name": "x", "limit": ""}]

    def settings(time: Any) -> Any:
        return plan.settings({"a": ONE}, HOSTS, partitions, {"head": ["a"]}, {**TIMES, name: yaml.safe_load(time)})

    for good in ("'90'", "'90:00'", "'1440:00:00'", "14-0", "2-12:30", "7-00:00:00", "INFINITE", "unlimited"):
        assert settings(good)["partitions"] == [{**partitions[0], "nodes": ["a"]}]
    for bad in ("1:30:00", "90", "14d", "1:2", "null", "7-00:00:00 State=UP", "1.5"):
        with pytest.raises(FarandoleError, match=f"{name} is {re.escape(repr(yaml.safe_load(bad)))}; .* in quotes"):
            settings(bad)


PEOPLE = [{"name": "alice", "uid": 2101}, {"name": "bob", "uid": 2102}]


def test_who_may_use_which_account() -> None:
    more = {"caffe": {"users": ["alice"], "share": 3}, "all": None}
    accounts = plan.accounts(PEOPLE, "trainer", more)
    assert accounts["users"] == {"users": ["trainer", "alice", "bob"], "share": 1}
    assert accounts["caffe"] == {"users": ["alice"], "share": 3}
    assert accounts["all"]["users"] == ["trainer", "alice", "bob"]
    assert plan.people(PEOPLE, "trainer", 2000, more)[2102] == ["users", "all"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"a b": {}}, "'a b' is not an account name"),
        ({"x": {"users": ["zoe"]}}, "x names zoe, not in cluster_users: trainer, alice, bob"),
    ],
)
def test_accounts_that_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(FarandoleError, match=message):
        plan.accounts(PEOPLE, "trainer", more)


JOB = """JobId=7 JobName=train
   NumNodes=3 NumCPUs=6 NumTasks=6 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
     Nodes=node-[1-2] CPU_IDs=0-1 Mem=200 GRES=gpu:2(IDX:0-1)
     Nodes=node-3 CPU_IDs=0-1 Mem=200 GRES=gpu:1(IDX:0)
   TresPerJob=gres:gpu:5
"""
# What Slurm's commands say, and what a step is asked for and inherits.
ALLOCATION = """#!/bin/sh
case "$*" in
"show hostnames node-[1-3]") printf 'node-1\\nnode-2\\nnode-3\\n' ;;
"show hostnames node-[1-2]") printf 'node-1\\nnode-2\\n' ;;
"show hostnames node-3") echo node-3 ;;
"--details show job 7") cat "$0.job" ;;
*) exit 1 ;;
esac
"""
SRUN = "#!/bin/sh\necho \"$@\"; env | sed -n 's/^\\(SLURM_[A-Z_]*\\)=.*/\\1/p' | sort\n"


@pytest.mark.parametrize(
    ("host", "asked", "gres"),
    [
        ("node-2", {"SLURM_GPUS": "5"}, ["--gres=gpu:2"]),
        ("node-3", {"SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "gres:gpu:1"}, ["--gres=gpu:1"]),
        # Each step of these has the node's share by itself.
        ("node-3", {"SLURM_GPUS_PER_NODE": "1"}, []),
        ("node-3", {}, []),
    ],
)
def test_horovods_ssh_asks_for_no_more_gpus_than_the_job_has_on_the_node(
    tmp_path: Path, host: str, asked: dict[str, str], gres: list[str]
) -> None:
    template = Environment(autoescape=False).from_string((ROOT / "roles/slurm/templates/ssh.j2").read_text())  # noqa: S701
    for name, text in {"scontrol": ALLOCATION, "srun": SRUN, "ssh": template.render(_slurm_limits="v2")}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol.job").write_text(JOB)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-3]", "SLURM_JOB_GPUS": "0,1"}
    step = {"SLURM_NTASKS": "6", "SLURM_GPUS_ON_NODE": "2", "SLURM_GPU_BIND": "none", "SLURM_CPU_BIND_LIST": "1"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job, **step, **asked}
    command = [str(tmp_path / "ssh"), "-o", "BatchMode=yes", host, "hostname"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [option for option in said[0].split() if "gres" in option] == gres
    assert f"--nodelist={host}" in said[0].split()
    assert said[1:] == sorted(job)


QUEUE = """#!/bin/sh
cd "${0%/*}"
case "${0##*/}" in
scancel) echo "$*" >>cancelled && touch ending && if [ -e dying ]; then touch dead; fi ;;
# What is cancelled ends a little later.
squeue) if [ -e dead ]; then echo "no contact" >&2; exit 1; fi; cat jobs && if [ -e ending ]; then >jobs; fi ;;
esac
"""


def test_the_jobs_of_a_queue_have_ended_before_it_is_removed(tmp_path: Path) -> None:
    for name in ("squeue", "scancel"):
        (tmp_path / name).write_text(QUEUE)
        (tmp_path / name).chmod(0o755)

    def remove(wait: int) -> Any:
        (tmp_path / "jobs").write_text("2101\n2101\n2000\n")
        (tmp_path / "ending").unlink(missing_ok=True)
        arguments = {"uids": [], "running": True, "wait": wait}
        return run_module("former_jobs", arguments, PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert remove(30)["cancelled"] == [2000, 2101]
    assert (tmp_path / "jobs").read_text() == ""
    assert (tmp_path / "cancelled").read_text() == "--user=2000\n--user=2101\n"
    # A queue that is half removed.
    (tmp_path / "dead").touch()
    assert (remove(30)["changed"], remove(0)["failed"]) == (False, True)
    (tmp_path / "dead").unlink()
    # One that dies when it has cancelled them, so that nobody knows whether they have ended.
    (tmp_path / "dying").touch()
    assert "slurmctld does not say which are left: no contact" in remove(1)["msg"]
    (tmp_path / "dead").unlink()
    (tmp_path / "scancel").write_text("#!/bin/sh\n")
    assert "not all jobs have ended within 1 s: 3 are left" in remove(1)["msg"]


FULL, DRAIN = "farandole health: / is full", "IDLE+DRAIN"
DRAINED = """NodeName=node-2 Arch=x86_64
   State=IDLE+DRAIN ThreadsPerCore=1
   Reason=farandole health: / is full [root@2026-01-01T00:00:00]
"""


@pytest.mark.parametrize(
    ("faults", "flags", "reason", "wanted"),
    [
        ([], "IDLE", "", ("", "")),
        (["/ is full"], "IDLE", "", ("drain", FULL)),
        (["/ is full"], DRAIN, FULL, ("", "")),
        (["/ is full", "x"], DRAIN, FULL, ("drain", f"{FULL}; also: x")),
        ([], DRAIN, FULL, ("resume", "")),
        # Somebody else has drained it, as with farandole node exclude.
        ([], DRAIN, "fan", ("", "")),
        ([], DRAIN, "farandole: excluded: fan", ("", "")),
        (["/ is full"], DRAIN, "fan", ("", "")),
        # Somebody has taken it back although the fault is still there.
        (["/ is full"], "IDLE", FULL, ("drain", FULL)),
        ([], "IDLE", FULL, ("", "")),
        # It gets no jobs anyway, and none until it is proven, also if it was drained before.
        (["/ is full"], "DOWN", "Not responding", ("", "")),
        ([], "DOWN", "Not responding", ("", "")),
        # What somebody had to mend is proven, unless the queue asks for no proof.
        ([], DRAIN, f"{health.OURS}/ can only be read; look at dmesg", ("drain", health.MENDED)),
        ([], DRAIN, f"{FULL}; also: the stack is damaged; run site.yml", ("drain", health.MENDED)),
        ([], DRAIN, f"{FULL}; also: /dev/shm has less than 64 MiB free; remove it", ("resume", "")),
        ([], DRAIN, f"{health.OURS}{health.BOOTED}", ("resume", "")),
        ([], DRAIN, health.MENDED, ("", "")),
        (["/ is full"], DRAIN, health.MENDED, ("drain", FULL)),
        (["x"], "DOWN+DRAIN", FULL, ("drain", "farandole health: x")),
        ([], "DOWN+DRAIN", FULL, ("undrain", "farandole: it was down")),
        ([], "DOWN", FULL, ("", "")),
    ],
)
def test_when_a_node_drains_itself(faults: list[str], flags: str, reason: str, wanted: tuple[str, str]) -> None:
    assert health.decide(faults, flags, reason, proof=True) == wanted
    assert health.decide([], DRAIN, f"{health.OURS}x", proof=False) == ("resume", "")
    assert health.state(DRAINED) == (DRAIN, FULL)
    assert health.state("NodeName=node-2\n   State=IDLE\n") == ("IDLE", "")


# A queue that has one node, and can be told to set nothing.
SCONTROL = """#!/bin/bash
cd "$(dirname "$0")"
case "$1 $3" in
show*) cat node ;;
*) test ! -e busy || exit 1 ;;&
*drain) printf ' State=IDLE+DRAIN\\n %s [root@2026-01-01T00:00:00]\\n' "$4" >node ;;
*resume) echo ' State=IDLE' >node ;;
esac
"""


def test_a_queue_that_sets_nothing_once_keeps_no_node_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "node").write_text(" State=IDLE\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(health, "CHECKS", {"one": lambda: iter(found)})
    monkeypatch.setattr("sys.argv", ["health"])
    # A faulty node may have nowhere to write.
    monkeypatch.delattr(Path, "write_text")

    def reason(*faults: str) -> str:
        found[:] = faults
        health.main()
        return health.state((tmp_path / "node").read_text())[1]

    assert reason("/ is full") == FULL
    (tmp_path / "busy").touch()
    assert reason() == FULL
    assert reason("a GPU is lost") == FULL
    (tmp_path / "busy").unlink()
    assert reason() == ""


# One GPU, of which a part is another device.
LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-1b)\n  MIG 1g.18gb     Device  0: (UUID: MIG-2c)"


def test_a_fault_that_is_told_has_no_figure_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.statvfs("/")
    monkeypatch.setattr(health, "PLACES", ["/"])
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nrm one 2>/dev/null && echo '{LISTED}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for name in ("nvidia0", "nvidia1", "one"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(health, "DRIVER", tmp_path)
    monkeypatch.setattr(health, "DEVICES", tmp_path)
    told = []
    for free in (0, 1):
        few = os.statvfs_result([*facts[:3], free, free, facts[5], free, free, 0, facts[9]])
        monkeypatch.setattr(os, "statvfs", lambda _, few=few: few)
        told.append([fault for check in (health.disks, health.shared_memory, health.gpus) for fault in check()])
    assert told[0] == told[1] and len(told[0]) == 3, told


def test_a_check_that_hangs_or_fails_is_a_fault_and_hides_no_other(tmp_path: Path) -> None:
    def hangs() -> Iterator[str]:
        time.sleep(0.5)
        yield from ()

    def fails() -> Iterator[str]:
        os.statvfs(tmp_path / "none")
        yield ""

    faults = health.faults({"one": hangs, "two": fails, "three": lambda: iter(["it is broken"])}, limit=0.1)
    assert faults[0] == "the check of one does not end; restart the node"
    assert faults[1].startswith("the check of two failed: [Errno 2]")
    assert faults[2] == "it is broken"


def test_a_damaged_stack_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STACKS", tmp_path)
    assert list(health.stack()) == []
    (tmp_path / "current").symlink_to("gone")
    assert list(health.stack()) == ["the stack is damaged; run site.yml"]


SHOWN = """NodeName=a State=IDLE Partitions=normal
NodeName=b State=IDLE+DRAIN Partitions=normal Reason=farandole: excluded: fan [root@2026-01-01T00:00:00]
NodeName=c State=MIXED+DRAIN Partitions=normal Reason=fan [root@2026-01-01T00:00:00]
"""
# As a node's own check drains it, which would take it back by itself.
SICK = f"NodeName=d State=IDLE+DRAIN Partitions=normal Reason={health.OURS}/ is full [root@2026-01-01T00:00:00]\n"


@pytest.mark.parametrize(
    ("excluded", "wanted"),
    [
        ({"b": "excluded: fan"}, {}),
        ({}, {"b": ("resume", "")}),
        ({"a": 'no "one"\nknows', "b": "excluded: fan"}, {"a": ("drain", "farandole: no one knows")}),
        # A person's reason stays.
        ({"b": "excluded: fan", "c": "excluded: dust"}, {}),
        ({"b": "excluded: dust"}, {"b": ("drain", "farandole: excluded: dust")}),
        ({"b": "excluded: fan", "d": "excluded: dust"}, {"d": ("drain", "farandole: excluded: dust")}),
    ],
)
def test_excluded_nodes_are_drained(excluded: dict[str, str], wanted: dict[str, tuple[str, str]]) -> None:
    drains = load("modules", "slurm_drains")
    assert drains.changes(drains.nodes(SHOWN + SICK), excluded) == wanted


BOOTED = f"{health.OURS}{health.BOOTED}"


@pytest.mark.parametrize(
    ("flags", "reason", "before", "after"),
    [
        ("DOWN", "Not responding", (), ("resume", "")),
        ("DOWN+NOT_RESPONDING", "Node unexpectedly rebooted", (), ("resume", "")),
        ("IDLE+DRAIN", BOOTED, (), ("resume", "")),
        ("IDLE+DRAIN", health.MENDED, (), ("resume", "")),
        ("DOWN+DRAIN", BOOTED, (), ("resume", "")),
        ("DOWN", health.WAS_DOWN, (), ("resume", "")),
        # Whatever it has now, it was down.
        ("DOWN+DRAIN", "Low RealMemory (reported:1 < 2)", ("undrain", health.WAS_DOWN), ("resume", "")),
        ("IDLE+DRAIN", "Low RealMemory (reported:1 < 2)", ("resume", ""), ("resume", "")),
        # It is no longer left out.
        ("DOWN+DRAIN", "farandole: excluded: fan", ("undrain", health.WAS_DOWN), ("resume", "")),
        # A person has taken it out, or its check finds a fault.
        ("DOWN+DRAIN", "fan", (), ()),
        ("DOWN", "fan", (), ()),
        ("IDLE+DRAIN", FULL, (), ()),
    ],
)
def test_a_node_that_was_down_is_taken_back_once_it_is_proven(
    flags: str, reason: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    drains = load("modules", "slurm_drains")
    known = drains.nodes(f"NodeName=a State={flags} Partitions=normal Reason={reason} [slurm@2026-01-01T00:00:00]\n")
    assert drains.changes(known, {}).get("a", ()) == before
    assert drains.changes(known, {}, ["a"]).get("a", ()) == after
    # One that is left out is drained.
    assert drains.changes(known, {"a": "fan"}, ["a"]).get("a", ("drain",))[0] == "drain"
    # The head's status and this module name the same.
    assert drains.LOST.pattern == status.LOST.pattern
    told = status.no_jobs([["a", "0/0/1/1", "drained" if "DRAIN" in flags else "down*", reason]])
    assert status.lost(told) == ["a"] * bool(drains.LOST.match(reason))


@pytest.mark.parametrize(
    ("flags", "reason", "wanted"),
    [
        ("IDLE", "", ("drain", BOOTED)),
        ("IDLE+DRAIN", "farandole: it is being upgraded", ("drain", BOOTED)),
        ("IDLE+DRAIN", "Low RealMemory (reported:1 < 2)", ("drain", BOOTED)),
        ("IDLE+DRAIN", BOOTED, ()),
        ("IDLE+DRAIN", FULL, ()),
        ("IDLE+DRAIN", "fan", ()),
        ("DOWN", "Node unexpectedly rebooted", ()),
    ],
)
def test_a_node_that_has_booted_does_not_wait_for_its_own_check(
    flags: str, reason: str, wanted: tuple[str, ...]
) -> None:
    drains = load("modules", "slurm_drains")
    assert drains.changes({"a": (flags, reason)}, {}, (), ["a"]).get("a", ()) == wanted


def test_only_a_node_that_the_queue_never_had_is_new() -> None:
    assert plan.new(["a", "b"], '{"a": {}}') == ["b"]
    assert plan.new(["a", "b"], "") == ["a", "b"]
    # Nobody knows then.
    assert plan.new(["a"], "{") == []


def test_a_node_is_proven_until_it_boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = load("modules", "slurm_probe")
    assert (probe.PROVEN, probe.NOW, probe.ANY) == (health.PROVEN, health.NOW, health.ANY)
    for name in ("PROVEN", "NOW"):
        monkeypatch.setattr(health, name, tmp_path / name)
    health.NOW.write_text("b2\n")
    assert [*health.boot()] == []
    # One that is asked for the first time has passed, and so has one of a queue that has not asked.
    assert [probe.proven(known, "b2", here=False) for known in ("", "any")] == [{"boot": "b2", "booted": False}] * 2
    assert probe.proven("b1", "b2", here=False) == {"boot": "b1", "booted": True}
    assert probe.proven("b1", "b2", here=True) == {"boot": "b2", "booted": False}
    assert probe.proven("b2", "b2", here=False) == {"boot": "b2", "booted": False}
    for known, faults in (("b2\n", []), ("any\n", []), ("b1\n", [health.BOOTED]), ("", [health.BOOTED])):
        health.PROVEN.write_text(known)
        assert [*health.boot()] == faults
        assert health.asks() == ("any" not in known)


def test_what_slurmd_says_of_the_hardware(tmp_path: Path) -> None:
    probe = load("modules", "slurm_probe")
    printed = (
        "NodeName=a CPUs=8 Boards=1 SocketsPerBoard=2 CoresPerSocket=2 ThreadsPerCore=2 RealMemory=24105\nUpTime=1\n"
    )
    assert probe.hardware(printed) == {"sockets": 2, "cores": 2, "threads": 2, "memory": 24105}
    assert probe.cgroups(tmp_path) == "none"
    for name in ("memory", "cpuset", "freezer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tasks").touch()
    assert probe.cgroups(tmp_path) == "v1"
    (tmp_path / "cgroup.controllers").write_text("cpu io\n")
    assert probe.cgroups(tmp_path) == "none"
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    assert probe.cgroups(tmp_path) == "v2-memory"
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    assert probe.cgroups(tmp_path) == "v2"
