"""What Prometheus is told and asked, without one."""

import fcntl
import json
import re
import subprocess
import time
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli import monitor
from farandole.cli.app import app
from farandole.core.causes import causes, parse
from farandole.core.errors import FarandoleError
from farandole.monitor import settings
from farandole.node import metrics
from farandole.node.head import status
from farandole.preflight.inventory import judge_monitoring

VARIABLES = {"node-1": {"ansible_host": "192.0.2.1"}, "node-2": {"cluster_ip": "2001:db8::2", "ansible_host": "x"}}


def test_nodes_are_read_at_the_address_of_the_cluster() -> None:
    made = yaml.safe_load(settings.scrape(["node-1", "node-2"], VARIABLES, "node-1", 9100, 30))
    job = made["scrape_configs"][0]
    assert [(one["targets"], one["labels"]["instance"]) for one in job["static_configs"]] == [
        (["127.0.0.1:908"], "node-1"),
        (["[2001:db8::2]:9100"], "node-2"),
    ]
    assert "honor_labels" not in job and 9_000 < job["sample_limit"] <= 10_000


def test_a_node_cannot_give_its_samples_labels_of_alerts() -> None:
    job = yaml.safe_load(settings.scrape(["node-1"], VARIABLES, "node-1", 9100, 30))["scrape_configs"][0]
    dropped = [one["regex"] for one in job["metric_relabel_configs"] if one.get("action") == "labeldrop"]
    of_alerts = {"alertname", *(name for rule in rules_of_alerts() for name in rule["labels"])}
    assert all(any(re.fullmatch(regex, label) for regex in dropped) for label in of_alerts)
    # Nor are two alerts of a node that differ by another label, or more than a few that differ by that one.
    one, few = r"max by \(instance\) \(", r"topk by \(instance\) \(50, max by \(instance, \w+\) \("
    assert all(re.match(f"{one}|{few}", rule["expr"]) for rule in rules_of_alerts())


def rules_of_alerts() -> list[dict[str, Any]]:
    made = yaml.safe_load(settings.rules())["groups"][0]["rules"]
    return [rule for rule in made if "alert" in rule]


def test_each_alert_has_a_text_about_its_node() -> None:
    made = rules_of_alerts()
    assert [rule["alert"] for rule in made] == [code for code in causes() if code.startswith("alert-")]
    for rule in made:
        what = rule["annotations"]["what"]
        assert ("$labels." in what or "$value" in what) == ("{seen}" in causes()[rule["alert"]].what)
    with pytest.raises(ValueError, match="needs an alert"):
        parse("- {code: x, seen: monitor, what: x, cure: x}")


def test_what_does_not_speak_against_a_node_is_not_counted_against_it() -> None:
    selected = re.findall(r'\bALERTS{alertstate="firing",alertname!~"(.*?)"}', settings.page())
    assert len(selected) == settings.page().count("ALERTS{") == 1 and settings.page().count("(${fired}[30d") == 2
    left = {rule["alert"] for rule in rules_of_alerts() if re.fullmatch(selected[0], rule["alert"])}
    assert left == {"alert-left-out", "alert-verdict"}


def test_what_this_machine_knows(tmp_path: Path) -> None:
    cluster = {"state": str(tmp_path), "trusted": ["node-1", "node-2"], "excluded": {"node-2": "bad"}}
    cluster["members"] = ["node-1"]
    left_out = ['farandole_head_left_out{node="node-1"} 0', 'farandole_head_left_out{node="node-2"} 1']
    assert settings.known(cluster).splitlines() == left_out
    report = tmp_path / "reports/latest"
    report.mkdir(parents=True)
    (report / "result.json").write_text(json.dumps({"verdict": "red", "time": "2026-01-02T03:04:05Z"}))
    verdict = ["farandole_head_verdict 2", "farandole_head_verdict_time_seconds 1767323045"]
    assert settings.known(cluster).splitlines() == [*left_out, *verdict]


def known_verdict(state: Path, day: int, verdict: str, *hosts: str, quick: bool = False) -> list[str]:
    """What the head is told after a further validation."""
    about = {"time": f"2026-01-0{day}T00:00:00Z", "verdict": verdict, "hosts": hosts, "quick": quick}
    folder = state / f"reports/2026010{day}T000000Z"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(about))
    (state / "reports/latest").unlink(missing_ok=True)
    (state / "reports/latest").symlink_to(folder.name)
    cluster = {"state": str(state), "trusted": [], "excluded": {}, "members": ["node-1", "node-2", "node-3"]}
    return [line.split()[1] for line in settings.known(cluster).splitlines() if "verdict " in line]


def test_a_validation_of_some_nodes_says_nothing_about_the_others(tmp_path: Path) -> None:
    verdict_after = partial(known_verdict, tmp_path)
    assert verdict_after(1, "red", "node-1", "node-2", "node-3") == ["2"]
    assert verdict_after(2, "green", "node-1", "node-2") == ["2"]
    assert verdict_after(3, "slow", "node-2", "node-3") == ["1"]
    assert verdict_after(4, "red", "node-1") == ["2"]
    assert verdict_after(5, "green", "node-1", "node-2", "node-3") == ["0"]


def test_a_quick_validation_counts_but_does_not_hide_the_last_whole_one(tmp_path: Path) -> None:
    verdict_after, every = partial(known_verdict, tmp_path), ("node-1", "node-2", "node-3")
    assert verdict_after(1, "red", *every) == ["2"]
    assert verdict_after(2, "green", *every, quick=True) == ["2"]
    assert verdict_after(3, "slow", *every) == ["1"]
    assert verdict_after(4, "red", "node-1", "node-2", quick=True) == ["2"]
    # The same checks again.
    assert verdict_after(5, "green", *every, quick=True) == ["1"]
    assert verdict_after(6, "green", *every) == ["0"]


def test_no_word_of_a_node_ends_a_line_or_a_label() -> None:
    lines = metrics.exposed(iter([("x", {"what": 'a "b" \\ c\nup 0\x1b[2Jü'}, 1), ("x", {}, 2)]))
    assert lines == 'x{what="a \\"b\\" \\\\ c?up 0?[2J?"} 1\nx{} 2\n'


def test_a_gpu_that_does_not_count_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "nvidia-smi": ["0, 97, 1024, 61, [N/A]"],
        "ssh-keygen": ["        Valid: from 2026-01-01T00:00:00 to forever"],
    }
    monkeypatch.setattr(metrics, "said", lambda *command: said.get(command[0], []))
    monkeypatch.setattr(metrics, "faults", lambda _: ["/ is full"])
    told = {name: (labels, value) for name, labels, value in metrics.of_node(0)}
    assert told.pop("farandole_reboot_required")[0] == {}
    assert told == {
        "farandole_fault": ({"what": "/ is full"}, 1),
        "farandole_gpu_busy_percent": ({"gpu": "0"}, 97),
        "farandole_gpu_memory_used_mib": ({"gpu": "0"}, 1024),
        "farandole_gpu_celsius": ({"gpu": "0"}, 61),
    }


def test_a_command_that_cannot_be_killed_keeps_nothing_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LIMIT", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    begun = time.monotonic()
    assert (metrics.said("sleep", "1"), metrics.said("false"), metrics.said("true")) == (None, None, [])
    assert time.monotonic() - begun < 0.9


def test_how_long_each_certificate_of_a_node_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ssh-keygen": ["        Valid: from 2026-01-01T00:00:00 to 2026-01-31T00:00:00"]}
    monkeypatch.setattr(metrics, "said", lambda *command: said.get(command[0], []))
    monkeypatch.setattr(metrics, "faults", lambda _: [])
    monkeypatch.setattr(metrics, "KEYS", tmp_path)
    (tmp_path / "id_jobs").mkdir()
    keys = [tmp_path / name for name in ("id_job", "id_jobs/alice", "id_files")]
    for path in (*keys, *(path.with_name(f"{path.name}.pub") for path in keys), tmp_path / "id_jobs/.alice.new"):
        path.touch()
    told = [sample for sample in metrics.of_node(datetime(2026, 1, 21).timestamp()) if "certificate" in sample[0]]
    # The alert names it.
    files = [{causes()["alert-certificate"].shows: f"{key}-cert.pub"} for key in (metrics.HOST_KEY, *keys)]
    numbers = {"farandole_certificate_days": 10, "farandole_certificate_lifetime_days": 30}
    assert told == [(name, labels, value) for labels in files for name, value in numbers.items()]


def test_a_node_that_cannot_learn_of_its_units_or_certificate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "faults", lambda _: [])
    for silent, word in {"systemctl": "which units", "ssh-keygen": "cert.pub"}.items():
        monkeypatch.setattr(metrics, "said", lambda *command, silent=silent: None if command[0] == silent else [])
        told = [labels["what"] for name, labels, _ in metrics.of_node(0) if name == "farandole_fault"]
        assert [word in what for what in told] == [True], told


def test_a_key_without_its_certificate_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "KEYS", tmp_path)
    monkeypatch.setattr(metrics, "HOST_KEY", tmp_path / "id_job")
    monkeypatch.setattr(metrics, "faults", lambda _: [])
    ca, key, lost = (tmp_path / name for name in ("ca", "id_job", "id_files"))
    for path in (ca, key, lost):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    signed = ("-I", "x", "-n", "trainer", "-V", "-1d:+10d", f"{key}.pub")
    subprocess.run(["ssh-keygen", "-q", "-s", ca, *signed], check=True)
    told = list(metrics.of_node(time.time()))
    days = {labels["file"]: round(value) for name, labels, value in told if name == "farandole_certificate_days"}
    wrong = [labels["what"] for name, labels, _ in told if name == "farandole_fault" and "cert" in labels["what"]]
    assert (days, wrong) == ({f"{key}-cert.pub": 10}, [f"{lost}-cert.pub cannot be read; run site.yml"])


LOST = "node-2|0/0/1/1|down|Not responding\nnode-3|0/0/1/1|drained|its fan"


def test_the_head_tells_of_slots_jobs_its_queue_and_its_depot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostfile").write_text("node-1 slots=2\nnode-2 slots=4\n")
    for name in ("slots", "depot"):
        (tmp_path / name).mkdir()
    (tmp_path / "depot/archive").write_bytes(b"0" * 1000)
    (tmp_path / "depot/link").symlink_to(tmp_path / "hostfile")
    monkeypatch.setattr(status, "HOSTFILE", tmp_path / "hostfile")
    monkeypatch.setattr(status, "SLOTS_IN_USE", tmp_path / "slots")
    monkeypatch.setattr(status, "QUEUE", tmp_path / "hostfile")
    # Of the queue: a job that waits, two that run, and processors in use.
    for name, rows in (("squeue", "RUNNING\nPENDING\nRUNNING"), ("sinfo", "node-1|1/1/0/2|mixed|none\n" + LOST)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{rows}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with (tmp_path / "slots/1-7-run").open("w") as held:
        held.write('{"node-2": 3}')
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sorted(metrics.exposed(metrics.of_head(tmp_path / "depot")).splitlines()) == [
            "farandole_head_depot_bytes{} 1000",
            'farandole_head_jobs{state="pending"} 1',
            'farandole_head_jobs{state="running"} 2',
            'farandole_head_slots_used{node="node-1"} 1',
            'farandole_head_slots_used{node="node-2"} 3',
            'farandole_head_slots{node="node-1"} 2',
            'farandole_head_slots{node="node-2"} 4',
            'farandole_head_unproven{node="node-2"} 1',
        ]


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ({}, ""),
        ({"firewall_enabled": "yes"}, ""),
        ({"firewall_enabled": False}, "monitoring-open"),
        ({"monitoring_interval": "120"}, ""),
        ({"monitoring_interval": 121}, "monitoring-rare"),
        ({"monitoring_node_port": "1024"}, ""),
        ({"monitoring_node_port": 1023}, "monitoring-port"),
        ({"monitoring_port": 1023}, ""),
        ({"monitoring_port": "9090"}, "monitoring-port"),
        ({"monitoring_port": "908"}, "monitoring-port"),
        ({"depot_port": "1023"}, "depot-open"),
        ({"depot_port": 1024}, ""),
        ({"depot_port": 80, "firewall_enabled": False, "monitoring_enabled": False}, ""),
    ],
)
def test_nobody_is_watched_in_the_open_or_too_rarely(own: dict[str, Any], code: str) -> None:
    watched = {"monitoring_enabled": True, "firewall_enabled": True, **own}
    found = judge_monitoring({"node-1": watched, "node-2": {}})
    assert [(one.host, one.code) for one in found] == ([("node-1", code)] if code else [])


def alert(name: str, instance: str, what: str, state: str = "firing") -> dict[str, Any]:
    labels = {"alertname": name, "instance": instance, "severity": "note"}
    return {
        "labels": labels,
        "annotations": {"what": what, "cure": "rm -rf /"},
        "state": state,
        "activeAt": "2026-01-01",
    }


def test_the_head_says_what_it_saw_and_not_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        alert("alert-left-out", "node-2", "\x1b[2Jout"),
        alert("alert-clock", "node-10", "its clock is off"),
        alert("alert-clock", "node-9", "its clock is off"),
        alert("alert-clock", "node-9", "its clock is off", "pending"),
        alert("alert-clock", "nobody", "x"),
        alert("of-its-own", "node-2", "x"),
    ]
    monkeypatch.setattr(monitor, "asked", lambda *_: json.dumps({"data": {"alerts": said}}))
    found, since = monitor.alerts("http://127.0.0.1:1", {"node-2", "node-9", "node-10"})
    assert [(one.host, one.code, one.severity) for one in found] == [
        ("node-2", "alert-left-out", "note"),
        ("node-9", "alert-clock", "stop"),
        ("node-10", "alert-clock", "stop"),
    ]
    assert "\x1b" not in found[0].cause and all("rm" not in one.cure for one in found)
    assert "farandole node include node-2" in found[0].cure and since[found[0]] == "2026-01-01"
    monkeypatch.setattr(monitor, "asked", lambda *_: "<html>")
    with pytest.raises(FarandoleError, match="answers something else"):
        monitor.alerts("http://127.0.0.1:1", set())


BOTH = ["node-1", "node-2"]
FAILS = {"name": "alert-disk", "health": "err", "lastError": "same labelset\x1b[2J"}


@pytest.mark.parametrize(
    ("measured", "failing", "words"),
    [
        (BOTH, [], []),
        (["node-1", "node-9"], [], ["of node-2 from", "farandole apply -i", "systemctl status"]),
        ([], [], ["of node-1, node-2 from", "systemctl status", "farandole apply -i"]),
        (BOTH, [FAILS, {**FAILS, "name": "alert-x"}], ["alert-disk, alert-x", "same labelset", "systemctl status"]),
        (BOTH, [{"name": "alert-disk", "health": "unknown"}], ["alert-disk", "ask again"]),
    ],
)
def test_nothing_is_green_that_is_not_measured_or_computed(
    measured: list[str], failing: list[Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"base_state_dir": str(tmp_path), "ssh_trust_revoked": ["node-3"]}
    nodes = {"hosts": dict.fromkeys(["node-1", "node-2", "node-3"]), "vars": own}
    inventory = tmp_path / "mine/hosts.yml"
    inventory.parent.mkdir()
    inventory.write_text(yaml.safe_dump({"cluster": nodes, "head": {"hosts": {"node-1": None}}}))
    (tmp_path / monitor.RECORD).touch()
    said = {
        monitor.MEASURED: {"result": [{"metric": {"instance": name}, "value": [0, "1"]} for name in measured]},
        "api/v1/rules": {"groups": [{"rules": [{"name": "alert-clock", "health": "ok"}, *failing]}]},
        "api/v1/alerts": {"alerts": []},
    }
    monkeypatch.setattr(monitor, "asked", lambda _base, path, _head: json.dumps({"data": said[path]}))
    monkeypatch.setattr(monitor, "opened", lambda *_: nullcontext(("http://127.0.0.1:1", None)))
    done = CliRunner().invoke(app, ["monitor", "--text", "-i", str(inventory)])
    error = str(done.exception or "")
    assert isinstance(done.exception, FarandoleError) is bool(words), done.output
    assert [error.index(word) for word in words] == sorted(error.index(word) for word in words)
    assert ("no finding" in done.output) is (not words) and "\x1b" not in error
