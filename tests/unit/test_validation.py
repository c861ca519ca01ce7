"""Which jobs a validation runs, how answers are read, and what its report says; test_judge has how jobs are judged."""

import base64
import json
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from ansible.cli.playbook import PlaybookCLI
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.causes import causes
from farandole.core.errors import FarandoleError
from farandole.core.schema import UnfitError
from farandole.inventory.cluster import KEY_VARIABLES, USER_VARIABLES
from farandole.plays.playbook import Login
from farandole.validation import answer, nodes, report, trial
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, SLOW, Bars, Check
from farandole.validation.nodes import stack_checks, trust_checks
from farandole.validation.plan import jobs

from .loading import ROOT
from .results import BARS, NODES, PLANNED, judged, ran, rank, rounds, wrong
from .stack import LOCK

CPU = {"wanted": {"frameworks": ["pytorch"], "accelerator": "cpu"}, "versions": {}}


def planned(frameworks: Sequence[str], **more: Any) -> dict[str, Any]:
    return {job["id"]: job["argv"] for job in jobs(NODES, frameworks, 120, BARS, **more)}


def test_jobs_follow_what_is_installed_and_how_much_is_wanted() -> None:
    quick = planned(["tensorflow", "pytorch"], quick=True)
    assert [*quick] == ["mpi", "horovod.torch.gloo", "horovod.tensorflow.gloo"]
    assert {*quick} < {*PLANNED}
    assert all(job["nodes"] and job["seconds"] == 120 for job in PLANNED.values())
    for name, other in (("tensorflow", "torch"), ("pytorch", "tensorflow")):
        assert not [job for job in planned([name], quick=False) if f".{other}" in job]
    gpu = planned(["pytorch"], quick=True, gpu=True)
    assert [*gpu] == ["mpi", "horovod.torch.gloo", "horovod.torch.nccl"]
    assert [name for name, argv in gpu.items() if "--gpu" in argv] == ["horovod.torch.nccl"]


@pytest.mark.parametrize(
    ("frameworks", "versions", "trains"),
    [
        (["tensorflow"], {"keras": "3.15.1"}, True),
        (["tensorflow"], {"keras": "2.15.0"}, False),
        (["tensorflow"], {}, False),
        (["pytorch"], {"keras": "3.15.1"}, False),
    ],
)
def test_the_sample_of_keras_3_needs_keras_3_and_tensorflow(
    frameworks: list[str], versions: dict[str, str], trains: bool
) -> None:
    manifest = {"wanted": {"frameworks": frameworks, "accelerator": "cpu"}, "versions": versions}
    jobs = {job["id"] for job in nodes.jobs([*NODES], manifest, 120, quick=False)}
    assert ("training.keras_3" in jobs) == trains


def test_only_a_check_of_the_same_run_takes_nodes_out_of_a_validation() -> None:
    cluster = {"excluded": {"node-2": "it is off", "node-3": "it is loud"}, "set_aside": ["node-3"]}
    assert nodes.chosen("node-1,node-2,node-3", cluster, checked=True) == ["node-1", "node-3"]
    assert nodes.chosen("node-1,node-2,node-3", cluster, checked=False) == ["node-1", "node-2", "node-3"]


def test_probes_and_samples_exist() -> None:
    for job in PLANNED.values():
        assert not job["probe"] or nodes.program(job["probe"])
        for word in job["argv"]:
            if word.startswith("/opt/farandole/samples/"):
                assert (ROOT / "files/samples" / Path(word).name).is_file()


def test_parity_shows_the_same_images_in_each_step() -> None:
    def value(name: str, option: str) -> float:
        argv = PLANNED[name]["argv"]
        return float(argv[argv.index(option) + 1])

    for sample in ("pytorch_mnist", "tensorflow_tape"):
        alone, together = f"parity.{sample}.one", f"parity.{sample}.all"
        assert value(alone, "--batch-size") == 2 * value(together, "--batch-size")
        assert value(alone, "--lr") == 2 * value(together, "--lr")
        assert value(alone, "--images") == value(together, "--images")


def test_the_probe_is_told_the_bars_of_the_inventory() -> None:
    *_, speed = nodes.jobs(list(NODES), CPU, 120, {"efficiency": 0.7, "yardstick": None}, quick=False)
    assert speed["argv"][-4:] == ("--efficiency", "0.7", "--yardstick", str(Bars.yardstick))


@pytest.mark.parametrize("count", [2, 16, 200, 400])
def test_many_workers_train_for_about_as_many_steps_as_two(count: int) -> None:
    nodes = [f"node-{number}" for number in range(count)]
    planned = {job["id"]: job["argv"] for job in jobs(nodes, ["pytorch"], 120, BARS, quick=False)}

    def value(name: str, option: str) -> int:
        return int(planned[name][planned[name].index(option) + 1])

    # Two workers take 12 epochs of 1497 // 128 steps.
    step = value("training.pytorch_mnist", "--batch-size") * count
    steps = value("training.pytorch_mnist", "--epochs") * (1497 // step)
    assert steps >= 12 * (1497 // 128) * 0.75


def test_ranks_wait_longer_for_others_where_jobs_may_take_longer() -> None:
    def longer(seconds: int) -> set[tuple[str, str]]:
        argvs = [job["argv"] for job in jobs(NODES, ["pytorch"], seconds, BARS, quick=False, queue=NODES)]
        assert not any("--mpi" in argv and "--gloo-timeout-seconds" in argv for argv in argvs)
        by_gloo = [argv[argv.index("--gloo") :] for argv in argvs if "--gloo" in argv]
        return {argv[1:3] for argv in by_gloo}

    # Horovod's own 30 s.
    assert "--gloo-timeout-seconds" not in str(longer(120))
    assert longer(900) == {("--gloo-timeout-seconds", "225")}


CHECKS = [
    Check("a", GREEN, "good", 1.0, 0.5, ["node-1"], 2.0),
    Check("b", RED, "bad", hosts=["node-2"], code="disk-full", cause="the cause", cure="the cure", log=["last words"]),
    Check("c", NOT_MEASURED, "no GPU"),
    Check("d", SLOW, "not fast", code="too-slow", cause="the loss", cure="the network"),
]
UNLISTED = Check("e", NOT_MEASURED, "old", code="stack-unlisted", cause="no list", cure="make one")


def test_the_report(tmp_path: Path) -> None:
    target = report.write(tmp_path, {"cluster": "mine", "data": ["MNIST"], "seconds": 3.0}, CHECKS)
    result = json.loads((tmp_path / "latest" / "result.json").read_text())
    jsonschema.validate(result, json.loads((ROOT / "src/farandole/validation/result.schema.json").read_text()))
    assert (result["format"], result["verdict"], result["data"]) == (report.FORMAT, RED, ["MNIST"])
    suite = ET.parse(target / "junit.xml").getroot()  # noqa: S314, it was written here
    assert [check["code"] for check in result["checks"]] == ["", "disk-full", "", "too-slow"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    assert [failure.get("type") for failure in suite.iter("failure")] == ["red.disk-full", "slow.too-slow"]
    assert "the cure" in str(suite[1][0].text)
    assert "make one" in report.junit([UNLISTED]).decode()
    shown = report.text(CHECKS, target, 3)
    assert [shown.index(part) for part in ("b is red: bad", "the cause [disk-full]", "the cure", "last words")]
    assert f"red: 1 green, 1 slow, 1 red, 1 not measured; 3 s; report: {target}" in shown
    # What has one cause is explained once.
    shown = report.text([replace(UNLISTED, id=name, log=[f"{name} said"]) for name in ("e", "f")], target, 3)
    assert (shown.count("is not measured: old"), shown.count("no list [stack-unlisted]")) == (2, 1)


def gathered(**changes: Any) -> dict[str, Any]:
    """What a validation measured."""
    measured = {
        "trust": {},
        "stacks": {"node-1": {"stack": "0123456789ab", "proven": True, "wrong": ""}},
        "files": {},
        "inventory": "inventory/mine",
        "jobs": [],
        "bars": {"accuracy": 0.6, "parity": None},
        "about": {"cluster": "mine", "hosts": list(NODES)},
        "started": time.time() - 60,
        "unmeasured": {"gpu": "no node has one"},
    }
    return {**measured, **changes}


def test_a_validation_whose_head_ran_no_job_is_red(tmp_path: Path) -> None:
    made = report.make(tmp_path, gathered())
    assert (made["verdict"], "jobs is red: the head ran no job" in made["msg"]) == (RED, True)
    # If something else is red, that is why.
    trust = {"node-1": {"unreachable": True, "msg": "no route to host"}}
    assert "jobs is red" not in report.make(tmp_path, gathered(trust=trust))["msg"]


def test_a_node_that_was_not_asked_is_not_measured(tmp_path: Path) -> None:
    def stacks(**changes: Any) -> dict[str, str]:
        report.make(tmp_path, gathered(**changes))
        result = json.loads((tmp_path / "latest" / "result.json").read_text())
        return {check["id"]: check["status"] for check in result["checks"] if check["id"].startswith("stack.")}

    assert stacks() == {"stack.node-1": GREEN, "stack.node-2": NOT_MEASURED}
    job = {"item": PLANNED["mpi"], "stdout": json.dumps(HONEST | {"ranks": [rank(0), rank(1)]})}
    assert stacks(stacks={}, jobs=[job]) == dict.fromkeys(("stack.node-1", "stack.node-2"), NOT_MEASURED)
    # All are waiting for the first one.
    assert stacks(stacks={}, trust={"node-1": {"unreachable": True, "msg": "no route to host"}}) == {}


def test_everything_that_was_measured_is_in_the_report(tmp_path: Path) -> None:
    output = json.dumps(HONEST | {"accuracy": 0.7, "data": "MNIST", "ranks": [rank(0), rank(1)]})
    (tmp_path / "20200101T000000Z").mkdir()
    measured = gathered(
        trust={"node-1": {"unreachable": True, "msg": "no route to host"}},
        jobs=[{"item": PLANNED["training.pytorch_mnist"], "stdout": output}],
    )
    made = report.make(tmp_path, measured)
    result = json.loads((tmp_path / "latest" / "result.json").read_text())
    assert made["report"] == str((tmp_path / "latest").resolve())
    # Earlier ones are kept.
    assert len([path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]) == 2
    assert made["verdict"] == result["verdict"] == RED
    assert "trust.node-1 is red" in made["msg"]
    status = {check["id"]: check["status"] for check in result["checks"]}
    assert (status["trust.node-1"], status["stack.node-1"], status["gpu"]) == (RED, GREEN, NOT_MEASURED)
    assert {check["id"]: check["bar"] for check in result["checks"]}["training.pytorch_mnist.accuracy"] == 0.6
    assert (result["cluster"], result["data"], result["bars"]["parity"]) == ("mine", ["MNIST"], Bars.parity)
    assert 60 <= result["seconds"] < 120


@pytest.mark.parametrize(
    ("checks", "word"),
    [(CHECKS[:1], GREEN), (CHECKS[1:2], RED), (CHECKS[2:3], RED), ([], RED), (CHECKS[3:], SLOW), (CHECKS, RED)],
)
def test_nothing_measured_is_not_green(checks: list[Check], word: str) -> None:
    assert report.verdict(checks) == word


def test_junit_and_json_accept_any_character_of_a_log(tmp_path: Path) -> None:
    nasty = "a\x1b[31m\x00\x0b\ud800\ufffeb <x> & ]]>"
    checks = [Check(nasty, status, nasty, cause=nasty, cure=nasty, log=[nasty]) for status in (RED, NOT_MEASURED)]
    target = report.write(tmp_path, {}, checks)
    suite = ET.parse(target / "junit.xml").getroot()  # noqa: S314, it was written here
    assert r"a\x1b[31m\x00\x0b\ud800\ufffeb <x> & ]]>" in str(suite[0][0].text)
    assert json.loads((target / "result.json").read_text())["checks"][0]["log"] == [nasty]
    assert "\x1b" not in report.text(checks, target, 3)


HONEST = {
    "code": 0, "seconds": 5.0, "left": {"node-1": []}, "ranks": [rank(0)], "wrong": [], "said": ["well"], "more": [1],
}  # fmt: skip
MANIFEST = {
    "id": "0123456789ab",
    "wanted": {"frameworks": ["pytorch"], "pins": [], "accelerator": "cpu"},
    "versions": {"torch": "2.13.0+cpu", "cuda": "none"},
    "wheels": [],
}


def reported(report: Any) -> dict[str, Any]:
    return answer.job({"item": PLANNED["mpi"], "stdout": report if isinstance(report, str) else json.dumps(report)})


def test_the_report_of_job_py_is_read() -> None:
    job = reported(HONEST | {"accuracy": 0.97, "loss": 0.5, "data": "MNIST", "rounds": rounds()})
    assert job["rounds"] == rounds()
    assert (job["code"], job["ranks"], job["accuracy"], job["data"]) == (0, [rank(0)], 0.97, "MNIST")
    assert "more" not in job


KINDS: list[Any] = ["x", [[]], {"a": 1}]
LIES: list[dict[str, Any]] = [
    *({name: value} for name in ("code", "seconds", "left", "ranks", "wrong", "said") for value in KINDS),
    *({name: None} for name in ("seconds", "left", "ranks", "wrong", "said")),
    {"accuracy": "1"},
    {"loss": float("nan")},
    {"ranks": [{"rank": 0}]},
    {"ranks": [rank(0, rate="fast")]},
    {"rounds": [{}]},
    {"rounds": [{**rounds()[0], "others": -1}]},
    {"wrong": ["run rm -rf /"]},
    {"wrong": [{"code": "wrong-values", "seen": "x"}]},
    {"wrong": [{**wrong("wrong-values"), "host": 5}]},
    # Codes that are unknown, or that no rank of a job sends.
    *({"wrong": [wrong(code)]} for code in ("$(id)", "", "reboot-now", "login-denied", "peer-silent", "disk-full")),
    *({"wrong": [wrong("wrong-values"), wrong(code)]} for code in ("job-failed", "stack-altered")),
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_malformed_report_is_a_red_job_without_a_traceback(lie: dict[str, Any]) -> None:
    job = reported(HONEST | lie) | {"job": PLANNED["mpi"]}
    (check,) = judged(job).values()
    assert (check.status, check.code) == (RED, "report-unusable")


@pytest.mark.parametrize("output", ["", "[" * 100_000, "x" * 20_000_000, "null"], ids=["", "deep", "long", "null"])
def test_a_missing_report_is_a_red_job(output: str) -> None:
    (check,) = judged(reported(output) | {"job": PLANNED["mpi"]}).values()
    assert (check.status, check.code) == (RED, "report-unusable")


def test_missing_and_zero_figures_are_handled() -> None:
    untold = {"ranks": [rank(0, tcp_mbs=None, tcp_latency_us=None), rank(1)], "wrong": [wrong("network-unset")]}
    (check,) = judged(reported(HONEST | {"code": 1} | untold) | {"job": PLANNED["mpi"]}).values()
    assert check.code == "network-unset"
    job = PLANNED["training.pytorch_mnist"]
    (check,) = judged(reported(HONEST | {"ranks": [rank(0), rank(1)]}) | {"job": job}).values()
    assert (check.status, "did not report its accuracy" in check.words) == (RED, True)
    none = {"bandwidth_mbs": 0.0, "tcp_mbs": 0.0, "latency_us": 0.0, "tcp_latency_us": 0.0}
    assert list(judged(ran("mpi", ranks=[rank(0, **none), rank(1)]))) == ["mpi"]
    assert list(judged(ran("speed", rounds=rounds(ddp=0)))) == ["speed", "speed.efficiency"]
    assert list(judged(ran("speed", rounds=[]))) == ["speed"]
    assert reported(HONEST | {"left": {"$(id)": None}})["left"] == {}


def test_what_a_rank_found_is_the_cause_and_its_code_decides_the_cure() -> None:
    seen = "not the same stack on all ranks: 0a on node-1; 1b on node-2; $(reboot)"
    for code in (cause.code for cause in causes().values() if cause.seen == "probe"):
        report = HONEST | {"code": 1, "wrong": [wrong(code, seen, "node-2"), wrong("wrong-values", "a result")]}
        (check,) = judged(reported(report) | {"job": PLANNED["mpi"]}).values()
        assert (check.status, check.code) == (RED, code)
        assert seen in check.words
        assert "reboot" not in check.cure


def test_only_the_known_fields_of_a_manifest_are_read() -> None:
    assert answer.manifest(json.dumps(MANIFEST)) == {
        "id": "0123456789ab",
        "wanted": {"frameworks": ["pytorch"], "accelerator": "cpu"},
        "versions": {"torch": "2.13.0+cpu", "cuda": "none"},
    }
    lies: list[dict[str, Any]] = [{"id": "../x"}, {"wanted": []}, {"versions": {"a": "{{ x }}"}}, {"id": None}]
    for lie in lies:
        with pytest.raises(UnfitError):
            answer.manifest(json.dumps(MANIFEST | lie))


def test_a_missing_inventory_is_named() -> None:
    done = CliRunner().invoke(app, ["validate", "-i", "inventory/nowhere"])
    assert done.exit_code == 1
    assert "there is no inventory inventory/nowhere" in str(done.exception)


def test_the_manifest_of_the_head_is_read() -> None:
    content = {"content": base64.b64encode(json.dumps(MANIFEST).encode()).decode()}
    assert nodes.read_manifest(content)["id"] == MANIFEST["id"]
    assert nodes.read_manifest({"skipped": True}) == {}
    assert nodes.jobs(["node-1"], {}, 120, quick=True) == []
    assert nodes.unmeasured(["node-1"], {}, quick=True) == {}
    for lie in (["x"], "e30=", "%%%", "/w=="):
        with pytest.raises(FarandoleError, match="Farandole did not write"):
            nodes.read_manifest({"content": lie})


def test_what_cannot_be_measured_is_reported() -> None:
    def missing(hosts: list[str], *frameworks: str, quick: bool = False, accelerator: str = "cpu") -> list[str]:
        wanted = {"frameworks": list(frameworks), "accelerator": accelerator}
        return list(nodes.unmeasured(hosts, {"wanted": wanted}, quick=quick))

    both = ["node-1", "node-2"]
    assert missing(both, "pytorch") == missing(both, "tensorflow", quick=True) == ["nccl"]
    assert missing(both, "tensorflow") == missing(both[:1], "pytorch", quick=True) == ["speed", "nccl"]
    assert missing(both, "pytorch", accelerator="gpu") == []


def test_each_nodes_stack_is_a_check_whose_cure_quotes_nothing_from_the_node() -> None:
    evil, stack = "$(reboot)", "0123456789ab"
    answers: dict[str, tuple[dict[str, Any], str, str]] = {
        "whole": ({"proven": True, "stack": stack, "wrong": "", "changed": False}, GREEN, ""),
        "old": ({"proven": None, "stack": stack, "wrong": ""}, NOT_MEASURED, "stack-unlisted"),
        "altered": ({"proven": False, "stack": stack, "wrong": f"bin/orted is missing {evil}"}, RED, "stack-altered"),
        "bare": ({"proven": False, "stack": "", "wrong": evil}, RED, "stack-missing"),
        "off": ({"unreachable": True, "msg": f"No route to host {evil}"}, RED, "node-unreachable"),
        "crashed": ({"failed": True, "msg": "no JSON", "module_stdout": f"{evil} died\n"}, RED, "node-unusable"),
        "silent": ({"failed": True}, RED, "node-unusable"),
        "no stack's name": ({"proven": True, "stack": evil, "wrong": ""}, RED, "answer-malformed"),
        "no answer": ({"proven": "yes", "stack": stack, "wrong": ""}, RED, "answer-malformed"),
        "wrong and right": ({"proven": True, "stack": stack, "wrong": evil}, RED, "answer-malformed"),
        "neither": ({"proven": False, "stack": stack, "wrong": ""}, RED, "answer-malformed"),
    }
    checks = stack_checks({name: answer for name, (answer, _, _) in answers.items()}, "/my clusters/mine", answers)
    assert [(check.status, check.code) for check in checks] == [(status, code) for _, status, code in answers.values()]
    causes_of = {check.code: check.cause for check in checks}
    assert "bin/orted" in causes_of["stack-altered"] and "No route to host" in causes_of["node-unreachable"]
    assert any("died" in check.cause for check in checks)
    assert not any("reboot" in check.cure for check in checks)
    commands = {check.code: shlex.split(check.cure) for check in checks if check.code.startswith("stack-")}
    assert all("/my clusters/mine" in command for command in commands.values())
    assert "altered" in commands["stack-altered"] and "old" in commands["stack-unlisted"]


def test_a_node_whose_current_stack_is_another_one_is_red_though_jobs_do_not_use_it() -> None:
    whole = {"proven": True, "wrong": ""}
    answers = {name: {**whole, "stack": stack} for name, stack in (("a", "aaaa00000000"), ("b", "aaaa00000000"))}
    assert {check.status for check in stack_checks(answers, "mine", answers)} == {GREEN}
    answers["c"] = {**whole, "stack": "bbbb00000000"}
    *others, check = stack_checks(answers, "mine", answers)
    assert ({other.status for other in others}, check.status, check.code) == ({GREEN}, RED, "nodes-differ")
    assert check.cause == "bbbb00000000 is current there, and aaaa00000000 on the others"


def test_a_head_that_can_run_nothing_is_red_with_the_reason_and_skipped_nodes_have_no_check() -> None:
    answers: tuple[dict[str, Any], ...] = (
        {"failed": True, "msg": "Missing sudo password"}, {"skipped": True}, {"unreachable": True, "msg": "no route"},
    )  # fmt: skip
    hostvars = {f"node-{number}": {"_validation_trust": answer} for number, answer in enumerate(answers, 1)}
    first, second = trust_checks(nodes.answers(hostvars, hostvars, "_validation_trust"), NODES)
    assert (first.id, first.status, first.code) == ("trust.node-1", RED, "node-unusable")
    assert "Missing sudo password" in first.cause
    assert (second.status, second.code) == (RED, "node-unreachable")
    proven = {"node-1": {"stack_proven": {"proven": True}}, "node-2": {"stack_proven": {"skipped": True}}}
    assert nodes.answers(proven, ["node-1", "node-2", "node-3"], "stack_proven") == {"node-1": {"proven": True}}


def connection(host: str, target: str, **changes: Any) -> dict[str, Any]:
    return {"host": host, "target": target, "seconds": 0.1, "machine": f"m-{host}", "code": "", "seen": "", **changes}


CLEAN = [connection(host, target) for host in NODES for target in (host, f"of-{host}")]


def trust_of(tried: Any, rc: int = 1) -> Check:
    (check,) = trust_checks({"node-1": {"rc": rc, "stdout": json.dumps({"connections": tried})}}, NODES)
    return check


def test_failed_connections_between_nodes_are_explained() -> None:
    assert trust_of(CLEAN, rc=0).status == GREEN
    evil = "$(reboot) connect to host a port 22: Connection refused $(reboot)\x1b[2J"
    for seen, target, code in (
        ("trainer@node-2: Permission denied (publickey).", "node-2", "peer-certificate-refused"),
        (evil, "$(reboot)", "peer-refused"),
    ):
        failed = connection("node-2", target, code="peer-failed", seen=seen, machine="")
        check = trust_of([*CLEAN[:2], failed, CLEAN[3]])
        assert (check.status, check.code, check.log) == (RED, code, [check.cause])
        assert "reboot" not in check.cure and "node-2" in check.cure
        assert "\x1b" not in check.cause
    twins = [connection(way["host"], way["target"], machine="same") for way in CLEAN]
    assert trust_of(twins).code == "machines-shared"


LYING: dict[str, tuple[Any, int]] = {
    "none": ([], 0),
    "too few": (CLEAN[:3], 0),
    "too many": ([*CLEAN, connection("node-9", "node-9")], 0),
    "code": ([*CLEAN[:3], connection("node-2", "x", code="reboot-now")], 1),
    "code of a job": ([*CLEAN[:3], connection("node-2", "x", code="wrong-values")], 1),
    "code of a log": ([*CLEAN[:3], connection("node-2", "x", code="peer-refused")], 1),
    "seconds": ([*CLEAN[:3], connection("node-2", "x", seconds="1")], 1),
    "more": ([*CLEAN[:3], connection("node-2", "x", more=1)], 0),
    "clean but 1": (CLEAN, 1),
    "unclean but 0": ([*CLEAN[:3], connection("node-2", "x", code="peer-silent")], 0),
    "no list": ("x", 0),
}


@pytest.mark.parametrize(("tried", "rc"), LYING.values(), ids=LYING)
def test_a_head_that_lies_about_its_connections_is_red(tried: Any, rc: int) -> None:
    check = trust_of(tried, rc)
    assert (check.status, check.code) == (RED, "answer-malformed")


def test_what_is_typed_of_a_login_overrides_the_inventory(tmp_path: Path) -> None:
    assert Login().arguments() == []
    asked = Login(ask_pass=True, ask_become_pass=True).arguments()
    playbook = PlaybookCLI(["ansible-playbook"])
    playbook.init_parser()
    typed = playbook.parser.parse_args([*asked, "site.yml"])
    assert (typed.ask_pass, typed.become_ask_pass) == (True, True)
    user, inventory, key = "it's {{ 7 * 7 }}\" }", tmp_path / "hosts.yml", tmp_path / "a {{ 1 }} key"
    theirs = dict.fromkeys((*USER_VARIABLES, *KEY_VARIABLES), "theirs")
    inventory.write_text(json.dumps({"cluster": {"hosts": {"node-1": {}}, "vars": theirs}}))
    shown = ["ansible", "-i", str(inventory), "cluster", "-m", "debug", "-a"]
    options = [f"msg={{{{ [{', '.join(theirs)}] | to_json | b64encode }}}}"]
    done = subprocess.run([*shown, *options, *Login(user, key).arguments()], check=True, capture_output=True, text=True)
    message = re.search(r'"?msg"?: "?([\w+/=]+)', done.stdout)
    assert message
    assert json.loads(base64.b64decode(message[1])) == [user, user, str(key), str(key)]


def test_the_queue_gives_no_jobs_to_nodes_that_are_drained_or_new_to_it() -> None:
    shown = "NodeName=node-1 Arch=x86_64 State=IDLE Reason=x\nNodeName=node-2 State=MIXED+DRAIN Reason=its fan\n"
    shown += "NodeName=node-4 State=DOWN Reason=Not responding\nNodeName=node-5 State=DOWN+NOT_RESPONDING Reason=x\n"
    shown += "NodeName=node-6 State=ALLOCATED Reason=x\nNodeName=node-7 State=MIXED Reason=x\n"
    # The fifth one does not answer, so the check through the queue is red.
    asked = [f"node-{number}" for number in range(1, 8)]
    assert nodes.queued(asked, {"rc": 0, "stdout": shown}) == ["node-1", "node-5", "node-7"]
    # Then the check through the queue is red.
    assert nodes.queued(["node-1", "node-2"], {"rc": 1, "stdout": ""}) == ["node-1", "node-2"]


def test_a_queue_gets_a_job_on_the_nodes_that_it_has() -> None:
    def argv(hosts: list[str], **more: Any) -> dict[str, Any]:
        return {job["id"]: job["argv"] for job in nodes.jobs(hosts, CPU, 120, **more)}

    quick = argv([*NODES], quick=True, queue=["node-2", "node-3"])
    assert "--nodelist=node-2" in quick["queue"] and "-H" not in quick["queue"]
    assert "queue.limits" not in quick
    assert argv([*NODES], quick=False, queue=["node-2", "node-3"])["queue.limits"][-1] == "node-2"
    assert "queue" not in argv(["node-1"], quick=True)


# A stack that is not current yet


def tried(lock: dict[str, Any], *, stack: str = "", **changes: Any) -> list[dict[str, Any]]:
    """The answers of the jobs with a stack on two nodes; the last one is changed."""
    good = {**HONEST, "ranks": [rank(at, stack=stack or lock["id"]) for at in range(2)]}
    planned = trial.jobs(NODES, lock, 120)
    answers = [{**good, **(changes if job is planned[-1] else {})} for job in planned]
    return [{"item": job, "stdout": json.dumps(answer)} for job, answer in zip(planned, answers, strict=True)]


def test_a_stack_is_tried_by_the_jobs_of_a_quick_validation_with_it() -> None:
    jobs = trial.jobs(NODES, LOCK, 120)
    assert [job["id"] for job in jobs] == ["mpi", "horovod.torch.gloo", "horovod.tensorflow.gloo"]
    assert {job["argv"][:2] for job in jobs} == {("env", f"FARANDOLE_STACK=/opt/farandole/stacks/{LOCK['id']}")}
    # After a rollback no more than its id may be known.
    assert trial.jobs([], {"id": LOCK["id"]}, 120) == []
    assert {job["seconds"] for job in trial.jobs(NODES, LOCK, 900)} == {120}
    assert trial.refusal(tried(LOCK), LOCK, "mine") == trial.refusal([], LOCK, "mine") == ""


def test_nobody_switches_to_a_stack_with_which_a_job_fails_or_did_not_run() -> None:
    said = ["[1]<stderr>:ImportError: libbad.so: cannot open shared object file: No such file or directory"]
    why = trial.refusal(tried(LOCK, code=1, said=said), LOCK, "my clusters/mine")
    begins = f"no node has switched to stack {LOCK['id']}, as a job with it failed on node-1 and node-2: "
    assert why.startswith(f"{begins}tensorflow over gloo: ended with status 1: on node-2: ")
    assert "`farandole validate --quick -i 'my clusters/mine'` fails, too" in why
    assert trial.refusal(tried(LOCK, stack="bbbb00000000"), LOCK, "mine").startswith(
        f"{begins}ring, sums, latency and bandwidth over MPI: ran with stack bbbb00000000. If"
    )
    on_gpus = {**LOCK, "wanted": {**LOCK["wanted"], "accelerator": "cuda"}}
    assert "Another job on their GPUs may be why. If" in trial.refusal(tried(on_gpus, code=1), on_gpus, "mine")
    assert "GPUs" not in why
