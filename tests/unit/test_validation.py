"""How the results of a validation are judged. The jobs themselves run in Molecule and on the labs."""

from __future__ import annotations

import ast
import base64
import json
import math
import re
import shlex
import statistics
import subprocess
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.causes import causes
from farandole.core.errors import FarandoleError
from farandole.core.schema import UnfitError
from farandole.inventory.cluster import KEY_VARIABLES, USER_VARIABLES
from farandole.plays.playbook import Login
from farandole.validation import answer, nodes, report
from farandole.validation.judge import ENOUGH, GREEN, NOT_MEASURED, RED, SLOW, Bars, Check, explain, failure, judge
from farandole.validation.nodes import stack_checks, trust_answers, trust_checks
from farandole.validation.plan import jobs
from farandole.validation.predicted import predictions

ROOT = Path(__file__).parents[2]
BARS = Bars(accuracy=0.95, parity=0.01, mpi_bandwidth=0.4, mpi_latency=0.4, efficiency=0.8, yardstick=0.9)
NODES = ("node-1", "node-2")
PLANNED = {job["id"]: job for job in jobs(NODES, ["tensorflow", "pytorch"], 120, BARS, quick=False)}


def rank(number: int, **changes: Any) -> dict[str, Any]:
    own = {"rank": number, "size": 2, "host": f"node-{number + 1}", "machine": f"m{number}"}
    return {**own, "stack": "aaaa", "python": "/python", "weights": "cafe", "rate": 1000.0, **changes}


def ran(name: str, **changes: Any) -> dict[str, Any]:
    """The result of a successful job, with changes."""
    job = PLANNED[name]
    ranks = [rank(number, size=len(job["nodes"])) for number in range(len(job["nodes"]))]
    good = {"code": 0, "seconds": 5.0, "left": {"node-1": [], "node-2": []}, "said": [], "ranks": ranks, "wrong": []}
    return {"job": job, **good, "accuracy": 0.97, "loss": 0.1, "data": "MNIST", "rounds": rounds(), **changes}


def found(code: str, seen: str = "x", host: str = "node-1") -> dict[str, str]:
    """What a rank of a job found wrong."""
    return {"code": code, "host": host, "seen": seen}


def rounds(*ratios: float, busy: int = 0, alone: float = 1000.0, ddp: float = 1000.0) -> list[dict[str, Any]]:
    """A quiet round for each ratio, or enough of them, followed by busy ones."""
    quiet = [{"horovod": one * 1000, "quiet": True, "others": 0.0, "where": ""} for one in ratios or [1.0] * ENOUGH]
    loud = [{"horovod": 100.0, "quiet": False, "others": 1.4, "where": "node-2"}] * busy
    return [{**one, "alone": alone, "ddp": ddp} for one in (*quiet, *loud)]


def judged(*results: dict[str, Any]) -> dict[str, Check]:
    return {check.id: check for check in judge({one["job"]["id"]: one for one in results}, BARS)}


def test_quick_runs_a_subset_of_the_jobs() -> None:
    quick = [job["id"] for job in jobs(NODES, ["tensorflow", "pytorch"], 120, BARS, quick=True)]
    assert quick == ["mpi", "horovod.torch.gloo", "horovod.tensorflow.gloo"]
    assert set(quick) < set(PLANNED)
    assert all(job["nodes"] and job["seconds"] == 120 for job in PLANNED.values())


def test_a_framework_that_is_not_installed_has_no_jobs() -> None:
    for name, other in (("tensorflow", "torch"), ("pytorch", "tensorflow")):
        assert not [job["id"] for job in jobs(NODES, [name], 120, BARS, quick=False) if f".{other}" in job["id"]]


def test_gpus_are_used_if_there_are_any() -> None:
    found = {job["id"]: job["argv"] for job in jobs(NODES, ["pytorch"], 120, BARS, quick=True, gpu=True)}
    assert list(found) == ["mpi", "horovod.torch.gloo", "horovod.torch.nccl"]
    assert [name for name, argv in found.items() if "--gpu" in argv] == ["horovod.torch.nccl"]


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
        one, both = f"parity.{sample}.one", f"parity.{sample}.all"
        assert value(one, "--batch-size") == 2 * value(both, "--batch-size")
        assert value(one, "--lr") == 2 * value(both, "--lr")
        assert value(one, "--images") == value(both, "--images")


@pytest.mark.parametrize(
    ("changes", "words"),
    {
        "late": ({"code": None}, "was killed after 120 s"),
        "crashed": ({"code": 3}, "ended with status 3"),
        "one worker is silent": ({"ranks": [rank(0)]}, "1 of 2 workers reported"),
        "two jobs of one": ({"ranks": [rank(0, size=1), rank(0, size=1)]}, "was not one job of 2 workers"),
        "one machine": ({"ranks": [rank(0), rank(1, machine="m0")]}, "ran on 1 of 2 machines"),
        "two stacks": ({"ranks": [rank(0), rank(1, stack="b")]}, "not the same stack on node-1 and node-2"),
        "two Pythons": ({"ranks": [rank(0), rank(1, python="b")]}, "not the same python"),
        "other weights": ({"ranks": [rank(0), rank(1, weights="b")]}, "not the same weights"),
        "a wrong sum": ({"code": 1, "wrong": [found("wrong-values", "the sum is 4")]}, "the sum is 4"),
        "a node that no longer answers": ({"left": {"node-1": [], "node-2": None}}, "node-2"),
        "left behind": (
            {"left": {"node-1": [], "node-2": ["python"]}},
            "left processes behind: {'node-2': ['python']}",
        ),
    }.values(),
)
def test_what_makes_a_job_red(changes: dict[str, Any], words: str) -> None:
    for name in ("horovod.torch.gloo", "training.pytorch_mnist"):
        assert words in failure(ran(name, **changes))
        (check,) = judged(ran(name, **changes)).values()
        assert (check.status, check.hosts) == (RED, list(NODES))
        assert words in check.words
        assert check.code in causes()
        assert check.cause
        assert check.cure
    assert failure(ran("mpi")) == ""


@pytest.mark.parametrize(("accuracy", "status"), [(0.95, GREEN), (0.949, RED)])
def test_accuracy_has_a_threshold(accuracy: float, status: str) -> None:
    (check,) = judged(ran("training.pytorch_mnist", accuracy=accuracy)).values()
    assert (check.id, check.status, check.bar) == ("training.pytorch_mnist.accuracy", status, 0.95)
    assert check.code == ("below-threshold" if status == RED else "")


def test_mpi_is_compared_with_tcp() -> None:
    def checks(mpi: float, latency: float, quiet: int = ENOUGH) -> list[str]:
        measured = {"bandwidth_mbs": mpi, "tcp_mbs": 1000, "latency_us": latency, "tcp_latency_us": 20}
        found = judged(ran("mpi", ranks=[rank(0, **measured, quiet=quiet, rounds=20), rank(1)]))
        return [found[name].status for name in ("mpi", "mpi.bandwidth", "mpi.latency")]

    assert checks(400, 50) == [GREEN, GREEN, GREEN]
    assert checks(399, 51) == [GREEN, SLOW, SLOW]
    assert checks(399, 50, quiet=ENOUGH - 1) == [GREEN, NOT_MEASURED, NOT_MEASURED]


@pytest.mark.parametrize(("other", "status"), [(0.1009, GREEN), (0.0989, RED), (0.102, RED)])
def test_parity_allows_a_small_difference_either_way(other: float, status: str) -> None:
    found = judged(ran("parity.pytorch_mnist.one"), ran("parity.pytorch_mnist.all", loss=other))
    assert found["parity.pytorch_mnist"].status == status


@pytest.mark.parametrize(
    ("measured", "status"),
    {
        "fast": (rounds(0.8, 0.8, 0.9, 0.95, 0.8), GREEN),
        "slow": (rounds(0.7, 0.72, 0.75, 0.7, 0.79), SLOW),
        "one good round does not hide it": (rounds(0.7, 0.72, 0.75, 0.7, 1.2), SLOW),
        "one bad round does not matter": (rounds(0.2, 0.8, 0.9, 0.9, 0.9), GREEN),
        "rounds that disagree": (rounds(0.7, 0.7, 0.7, 0.9, 1.1), NOT_MEASURED),
        "busy now and then": (rounds(0.5, 0.5, 0.5, 0.5, 0.5, busy=20), SLOW),
        "always busy": (rounds(0.5, 0.5, busy=20), NOT_MEASURED),
        "always busy, and fast at times": (rounds(1.1, 1.1, busy=20), NOT_MEASURED),
    }.values(),
)
def test_slow_training_is_distinguished_from_a_busy_machine(measured: list[dict[str, Any]], status: str) -> None:
    found = judged(ran("speed", rounds=measured))
    assert (found["speed"].status, found["speed.efficiency"].status) == (GREEN, status)
    assert ("node-2" in found["speed.efficiency"].words) == (status == NOT_MEASURED and not measured[-1]["quiet"])
    assert bool(found["speed.efficiency"].cause and found["speed.efficiency"].cure) == (status == SLOW)


@pytest.mark.parametrize(
    ("ratios", "enough", "status"),
    {
        "one misses": ((0.5, 0.82, 0.9, 1.1, 1.2, 1.5, 0.85), True, GREEN),
        "two of seven miss": ((0.5, 0.6, 0.9, 1.1, 1.2, 1.5, 0.85), False, GREEN),
        "two of twelve miss": ((0.5, 0.6, *[0.85, 1.5] * 5), True, GREEN),
        "all miss": ((0.4, 0.5, 0.6, 0.7, 0.75, 0.77, 0.79), False, SLOW),
        "all but two agree": ((0.5, 0.74, 0.74, 0.75, 0.76, 0.77, 0.79), True, SLOW),
    }.values(),
)
def test_speed_is_measured_until_rounds_agree_or_nearly_all_reach_the_bar(
    ratios: tuple[float, ...], *, enough: bool, status: str
) -> None:
    job = ran("speed", rounds=rounds(*ratios))
    assert judged(job)["speed.efficiency"].status == status
    # The probe imports PyTorch, which is installed on nodes only.
    source = ast.parse((ROOT / "src/farandole/node/probes/speed.py").read_text())
    wanted = ("def settled", "(ENOUGH, AGREE", "ENOUGH, AGREE")
    source.body = [one for one in source.body if ast.unparse(one).startswith(wanted)]
    probe: dict[str, Any] = {"statistics": statistics}
    exec(compile(source, "speed.py", "exec"), probe)  # noqa: S102
    assert probe["settled"](job["rounds"], "alone", BARS.efficiency) == enough
    assert not probe["settled"](rounds(0.7, 0.7, 0.7, 0.9, 0.9, 0.9), "alone", math.nan)


def test_the_probe_is_told_the_bars_of_the_inventory() -> None:
    manifest = {"wanted": {"frameworks": ["pytorch"], "accelerator": "cpu"}}
    changes = {"efficiency": 0.7, "yardstick": None}
    *_, speed = nodes.jobs(list(NODES), manifest, 120, changes, quick=False)
    assert speed["argv"][-4:] == ("--efficiency", "0.7", "--yardstick", str(Bars.yardstick))


def test_speed_is_compared_with_each_worker_alone_and_with_torch() -> None:
    found = judged(ran("speed", rounds=rounds(alone=1300, ddp=1000)))
    assert [found[f"speed.{name}"].status for name in ("efficiency", "yardstick")] == [SLOW, GREEN]
    found = judged(ran("speed", rounds=rounds(alone=1000, ddp=1200)))
    assert [found[f"speed.{name}"].status for name in ("efficiency", "yardstick")] == [GREEN, SLOW]


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


LINKS = {
    "nodes": {name: {"mb_per_s": 25.0, "delay_us": 100.0} for name in NODES},
    "usual_mb_per_s": 25.0,
    "rates_measured": None,
}
NETWORK = {"alone_ms": 100.0, "together_ms": 1100.0, "gradients_mb": 25.0}


def predicted(job: dict[str, Any], links: dict[str, Any] = LINKS, **bars: float) -> list[Check]:
    results = {job["job"]["id"]: job}
    return list(predictions(results, judge(results, Bars(**bars)), links, "inventory/mine"))


def test_the_network_is_predicted_beside_what_was_measured() -> None:
    (check,) = predicted(ran("network", **NETWORK))
    # 25 MB at 25 MB/s take a second, of which the backward pass hides two thirds of 100 ms.
    assert (check.id, check.status) == ("network.predicted", GREEN)
    assert check.value == pytest.approx(0.0966, abs=0.0002)
    assert "25 MB/s, 100 µs" in check.words
    assert "at about 10 % of 2 workers; the efficiency is 9 %" in check.words


def test_training_is_predicted_beside_what_was_measured() -> None:
    ranks = [rank(number, batch=512, gradients_mb=0.25) for number in (0, 1)]
    # Two workers do 10240 images in a second, so that a step takes 100 ms; 0.25 MB take 10 ms.
    job = ran("speed", ranks=ranks, rounds=rounds(9.0, 9.0, 9.0, 9.0, 9.0, alone=10_240))
    (check,) = predicted(job)
    assert (check.id, check.status) == ("speed.predicted", GREEN)
    assert check.value == pytest.approx(100 / (100 + 10 + 1 + 0.1), abs=0.0001)
    assert check.words.endswith("; the efficiency is 88 %")
    (check,) = predicted(job | {"rounds": rounds(busy=20, alone=10_240)[ENOUGH:]})
    assert (check.status, check.words.endswith("; the efficiency was not measured")) == (NOT_MEASURED, True)


@pytest.mark.parametrize(
    "links",
    {
        "nothing": {},
        "one node": {**LINKS, "nodes": {"node-1": {"mb_per_s": 25.0, "delay_us": 100.0}}},
        "no rate": {**LINKS, "nodes": {name: {"mb_per_s": None, "delay_us": 100.0} for name in NODES}},
    }.values(),
)
def test_without_measured_links_nothing_is_predicted(links: dict[str, Any]) -> None:
    (check,) = predicted(ran("network", **NETWORK), links)
    assert (check.status, check.value) == (NOT_MEASURED, None)
    assert "farandole preflight -i inventory/mine" in check.words


def test_a_prediction_is_neither_red_nor_slow() -> None:
    (check,) = predicted(ran("network", **{**NETWORK, "together_ms": 100_000.0}))
    assert (check.status, check.cause) == (GREEN, "")
    assert predicted(ran("network", code=1, **NETWORK)) == []
    assert all(predicted(ran("network", **{**NETWORK, what: 0.0})) == [] for what in NETWORK)
    # Ranks that do not say what they trained.
    assert predicted(ran("speed")) == []
    assert predicted(ran("speed", ranks=[rank(0, batch=0, gradients_mb=0.25), rank(1)])) == []


def test_failed_jobs_are_not_compared() -> None:
    found = judged(ran("parity.pytorch_mnist.one", code=1), ran("parity.pytorch_mnist.all"), ran("speed", code=1))
    statuses = {name: check.status for name, check in found.items()}
    assert statuses == {"parity.pytorch_mnist.one": RED, "parity.pytorch_mnist.all": GREEN, "speed": RED}


@pytest.mark.parametrize(
    ("line", "code", "names"),
    [
        ("ssh not successful for host node-2:", "job-node-unreachable", ["node-2"]),
        ("ssh: Could not resolve hostname nod-2: Name or service not known", "job-name-unknown", ["nod-2"]),
        (
            "[0]<stderr>:ValueError: rank 1 on host node-2 cannot be reached: [a/pair.cc:9] connect [::1]:5: timed out",
            "rank-unreachable",
            ["reach node-2: connect"],
        ),
        ("[1]<stderr>:OSError: [Errno 28] No space left on device", "disk-full", ["node-2"]),
        ("OSError: [Errno 28] No space left on device", "disk-full", ["a node"]),
        (
            "[0]<stderr>:node-1: /home/a.pt cannot be written, 0 MiB are free: full",
            "checkpoint-unwritable",
            ["node-1", "/home/a.pt"],
        ),
        ("node-2: /opt/farandole/data/mnist/a.gz is damaged (CRC)", "data-damaged", ["mnist/a.gz", "node-2"]),
        ("There are not enough slots available in the system", "slots-too-few", []),
        ("something else", "job-failed", []),
    ],
)
def test_the_cause_is_found_in_the_log(line: str, code: str, names: list[str]) -> None:
    found, cause, _ = explain(ran("mpi", code=1, said=["noise", line]))
    assert found == code
    assert all(name in cause for name in names)


LOST = "[0]<stderr>:horovod.common.exceptions.HorovodInternalError: Connection reset by peer"
LOOP = (
    "[0]<stderr>:[2026: E operations.cc:697] [0]: Horovod background loop uncaught exception: Connection closed by peer"
)
BROKEN = "[1,0]<stderr>:[a][[1,1],0][btl_tcp_frag.c:135:mca_btl_tcp_frag_send] writev failed: Broken pipe (32)"


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"code": 1, "left": {"node-2": None}, "said": [LOST]}, "node-silent", ["node-2"]),
        ({"code": 0, "left": {"node-1": [], "node-2": None}}, "node-silent", ["node-2"]),
        ({"code": None, "left": {"node-1": [], "node-2": ["python"]}}, "mpi-hangs", ["python", "node-2"]),
        ({"code": 1, "said": [LOST, "[1]<stderr>:out of luck"]}, "worker-failed", ["worker 1", "node-2", "luck"]),
        ({"code": 1, "said": ["[1,1]<stderr>:KeyError: 'x'"]}, "worker-failed", ["worker 1", "node-2", "KeyError"]),
        ({"code": 1, "said": [LOST]}, "connection-lost", []),
        ({"code": 1, "said": [LOOP, "[1]<stderr>:Killed"]}, "worker-failed", ["worker 1"]),
        ({"code": 1, "said": [BROKEN, "[1,1]<stderr>:KeyError: 'x'"]}, "worker-failed", ["worker 1"]),
        ({"code": 1, "said": ["[1,0]<stderr>:KeyError: 'x'", BROKEN]}, "worker-failed", ["worker 0", "KeyError"]),
        ({"code": 0, "ranks": [rank(0)]}, "ranks-missing", ["1 of 2"]),
        ({"code": 0, "ranks": [rank(0), rank(1, machine="m0")]}, "machines-missing", ["1 of 2"]),
        ({"code": 0, "ranks": [rank(0), rank(1, stack="b")]}, "nodes-differ", ["stack", "node-1", "node-2"]),
        ({"code": 0, "ranks": [rank(0), rank(1, weights="b")]}, "wrong-values", ["weights", "node-1", "node-2"]),
        ({"code": 0, "left": {"node-2": ["python"]}}, "processes-left", ["python", "node-2"]),
    ],
    ids=[
        "silent", "silent afterwards", "hang", "crash over Gloo", "crash over MPI", "lost", "killed",
        "broken by the other", "broken later", "one worker", "one machine",
        "two stacks", "other weights", "left behind",
    ],
)  # fmt: skip
def test_the_worker_or_the_node_is_named(changes: dict[str, Any], code: str, names: list[str]) -> None:
    found, cause, _ = explain(ran("mpi", **changes))
    assert found == code
    assert all(name in cause for name in names)


def test_a_job_is_explained_by_the_whole_catalogue() -> None:
    said = [
        "[0]<stderr>:noise",
        "[1]<stderr>:python: can't open file '/home/trainer/a.py': [Errno 2] No such file",
        LOST,
    ]
    code, cause, cure = explain(ran("mpi", code=2, said=said))
    assert code == "script-missing"
    assert cause.startswith("on node-2: ")
    assert "farandole run" in cure
    # Of several root causes, the first one.
    assert explain(ran("mpi", code=2, said=["OSError: Too many open files", *said]))[0] == "files-too-many"


def test_a_job_without_horovod_gets_no_cure_for_horovod() -> None:
    assert "HOROVOD" in explain(ran("horovod.torch.gloo", code=None))[2]
    assert "orovod" not in explain(ran("mpi", code=None))[2]


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
    assert "e is not measured: old\n  cause: no list [stack-unlisted]" in report.text([UNLISTED], target, 3)
    both = [replace(UNLISTED, id=name, log=[f"{name} said"]) for name in ("e", "f")]
    shown = report.text(both, target, 3)
    assert "e is not measured: old\nf is not measured: old\n  cause: no list [stack-unlisted]" in shown
    shown = report.text(CHECKS, target, 3)
    assert "b is red: bad\n  cause: the cause [disk-full]\n  cure: the cure\n  | last words" in shown
    assert shown.splitlines()[-1] == f"red: 1 green, 1 slow, 1 red, 1 not measured; 3 s; report: {target}"


def test_everything_that_was_measured_is_in_the_report(tmp_path: Path) -> None:
    said = json.dumps(HONEST | {"accuracy": 0.7, "data": "MNIST", "ranks": [rank(0), rank(1)]})
    measured = {
        "trust": {"node-1": {"unreachable": True, "msg": "no route to host"}},
        "stacks": {"node-1": {"stack": "0123456789ab", "proven": True, "wrong": ""}},
        "files": {},
        "inventory": "inventory/mine",
        "jobs": [{"item": PLANNED["training.pytorch_mnist"], "stdout": said}],
        "bars": {"accuracy": 0.6, "parity": None},
        "about": {"cluster": "mine", "hosts": list(NODES)},
        "started": time.time() - 60,
        "unmeasured": {"gpu": "no node has one"},
    }
    made = report.make(tmp_path, measured)
    result = json.loads((tmp_path / "latest" / "result.json").read_text())
    assert made["report"] == str((tmp_path / "latest").resolve())
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


def test_earlier_reports_are_kept_and_latest_is_the_newest(tmp_path: Path) -> None:
    (tmp_path / "20200101T000000Z").mkdir()
    target = report.write(tmp_path, {}, CHECKS[:1])
    assert (tmp_path / "latest").resolve() == target
    assert len([path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]) == 2


def test_junit_and_json_accept_any_character_of_a_log(tmp_path: Path) -> None:
    nasty = "a\x1b[31m\x00\x0b\ud800\ufffeb <x> & ]]>"
    checks = [Check(nasty, status, nasty, cause=nasty, cure=nasty, log=[nasty]) for status in (RED, NOT_MEASURED)]
    target = report.write(tmp_path, {}, checks)
    suite = ET.parse(target / "junit.xml").getroot()  # noqa: S314, it was written here
    assert r"a\x1b[31m\x00\x0b\ud800\ufffeb <x> & ]]>" in str(suite[0][0].text)
    assert json.loads((target / "result.json").read_text())["checks"][0]["log"] == [nasty]
    assert "\x1b" not in report.text(checks, target, 3)


HONEST = {
    "code": 0,
    "seconds": 5.0,
    "left": {"node-1": []},
    "ranks": [rank(0)],
    "wrong": [],
    "said": ["well"],
    "more": [1],
}
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
    *({what: value} for what in ("code", "seconds", "left", "ranks", "wrong", "said") for value in KINDS),
    *({what: None} for what in ("seconds", "left", "ranks", "wrong", "said")),
    {"accuracy": "1"},
    {"loss": float("nan")},
    {"ranks": [{"rank": 0}]},
    {"ranks": [rank(0, rate="fast")]},
    {"rounds": [{}]},
    {"rounds": [{**rounds()[0], "others": -1}]},
    {"wrong": ["run rm -rf /"]},
    {"wrong": [{"code": "wrong-values", "seen": "x"}]},
    {"wrong": [{**found("wrong-values"), "host": 5}]},
    # Codes that are unknown, or that no rank of a job sends.
    *({"wrong": [found(code)]} for code in ("$(id)", "", "reboot-now", "login-denied", "peer-silent", "disk-full")),
    *({"wrong": [found("wrong-values"), found(code)]} for code in ("job-failed", "stack-altered")),
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
    untold = {"ranks": [rank(0, tcp_mbs=None, tcp_latency_us=None), rank(1)], "wrong": [found("network-unset")]}
    (check,) = judged(reported(HONEST | {"code": 1} | untold) | {"job": PLANNED["mpi"]}).values()
    assert check.code == "network-unset"
    job = PLANNED["training.pytorch_mnist"]
    (check,) = judged(reported(HONEST | {"ranks": [rank(0), rank(1)]}) | {"job": job}).values()
    assert (check.status, "did not report its accuracy" in check.words) == (RED, True)
    none = {"bandwidth_mbs": 0.0, "tcp_mbs": 0.0, "latency_us": 0.0, "tcp_latency_us": 0.0}
    assert list(judged(ran("mpi", ranks=[rank(0, **none), rank(1)]))) == ["mpi"]
    assert list(judged(ran("speed", rounds=rounds(ddp=0)))) == ["speed", "speed.efficiency"]
    assert list(judged(ran("speed", rounds=[]))) == ["speed"]


def test_what_a_rank_found_is_the_cause_and_its_code_decides_the_cure() -> None:
    seen = "not the same stack on all ranks: 0a on node-1; 1b on node-2; $(reboot)"
    for code in (cause.code for cause in causes().values() if cause.seen == "probe"):
        report = HONEST | {"code": 1, "wrong": [found(code, seen, "node-2"), found("wrong-values", "a result")]}
        (check,) = judged(reported(report) | {"job": PLANNED["mpi"]}).values()
        assert (check.status, check.code) == (RED, code)
        assert seen in check.words
        assert "reboot" not in check.cure


@pytest.mark.parametrize(("host", "named"), [("node-2", "node-2"), ("$(reboot)", "that node")])
def test_a_rank_names_only_nodes_of_the_job_in_a_cure(host: str, named: str) -> None:
    code, _, cure = explain(ran("mpi", code=1, wrong=[found("ddp-not-met", "x", host)]))
    assert (code, named in cure, "reboot" in cure) == ("ddp-not-met", True, False)


def test_nothing_from_a_log_enters_a_cure() -> None:
    log = ["ssh not successful for host $(touch${IFS}/tmp/x):"]
    code, cause, cure = explain(ran("mpi", code=1, said=log))
    assert code == "job-node-unreachable"
    assert "$(touch" in cause
    assert "that node" in cure
    assert "touch" not in cure
    left = answer.job({"item": PLANNED["mpi"], "stdout": json.dumps(HONEST | {"left": {"$(id)": None}})})
    assert left["left"] == {}


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
    content = {"content": b64encode(json.dumps(MANIFEST).encode()).decode()}
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
    assert missing(both, "pytorch") == missing(both, "tensorflow", quick=True) == ["nccl", "rdma"]
    assert missing(both, "tensorflow") == missing(both[:1], "pytorch", quick=True) == ["speed", "nccl", "rdma"]
    assert missing(both, "pytorch", accelerator="gpu") == ["rdma"]


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
    checks = stack_checks({name: answer for name, (answer, _, _) in answers.items()}, "/my clusters/mine")
    assert [(check.status, check.code) for check in checks] == [(status, code) for _, status, code in answers.values()]
    causes_of = {check.code: check.cause for check in checks}
    assert "bin/orted" in causes_of["stack-altered"] and "No route to host" in causes_of["node-unreachable"]
    assert any("died" in check.cause for check in checks)
    assert not any("reboot" in check.cure for check in checks)
    commands = {check.code: shlex.split(check.cure) for check in checks if check.code.startswith("stack-")}
    assert all("/my clusters/mine" in words for words in commands.values())
    assert "altered" in commands["stack-altered"] and "old" in commands["stack-unlisted"]


def test_a_head_that_can_run_nothing_is_red_with_the_reason() -> None:
    hostvars: dict[str, Any] = {
        "node-1": {"_validation_trust": {"failed": True, "msg": "Missing sudo password"}},
        "node-2": {"_validation_trust": {"skipped": True}},
        "node-3": {"_validation_trust": {"unreachable": True, "msg": "no route"}},
    }
    first, second = trust_checks(trust_answers(hostvars, list(hostvars)), NODES)
    assert (first.id, first.status, first.code) == ("trust.node-1", RED, "node-unusable")
    assert "Missing sudo password" in first.cause
    assert (second.status, second.code) == (RED, "node-unreachable")


def connection(host: str, target: str, **changes: Any) -> dict[str, Any]:
    return {"host": host, "target": target, "seconds": 0.1, "machine": f"m-{host}", "code": "", "seen": "", **changes}


CLEAN = [connection(host, target) for host in NODES for target in (host, f"of-{host}")]


def trust_of(tried: Any, rc: int = 1) -> Check:
    (check,) = trust_checks({"node-1": {"rc": rc, "stdout": json.dumps({"connections": tried})}}, NODES)
    return check


def test_failed_connections_between_nodes_are_explained() -> None:
    assert trust_of(CLEAN, rc=0).status == GREEN
    denied = {"code": "peer-failed", "seen": "trainer@node-2: Permission denied (publickey).", "machine": ""}
    check = trust_of([*CLEAN[:2], connection("node-2", "node-2", **denied), CLEAN[3]])
    assert (check.status, check.code) == (RED, "peer-certificate-refused")
    assert check.log == [check.cause]
    evil = {
        "code": "peer-failed",
        "seen": "$(reboot) connect to host a port 22: Connection refused $(reboot)\x1b[2J",
        "machine": "",
    }
    check = trust_of([*CLEAN[:2], connection("node-2", "$(reboot)", **evil), CLEAN[3]])
    assert check.code == "peer-refused"
    assert "reboot" not in check.cure and "node-2" in check.cure
    assert "\x1b" not in check.cause
    twins = [connection(one["host"], one["target"], machine="same") for one in CLEAN]
    assert trust_of(twins).code == "machines-shared"


@pytest.mark.parametrize(
    ("tried", "rc"),
    [
        ([], 0),
        (CLEAN[:3], 0),
        ([*CLEAN, connection("node-9", "node-9")], 0),
        ([*CLEAN[:3], connection("node-2", "x", code="reboot-now")], 1),
        ([*CLEAN[:3], connection("node-2", "x", code="wrong-values")], 1),
        ([*CLEAN[:3], connection("node-2", "x", code="peer-refused")], 1),
        ([*CLEAN[:3], connection("node-2", "x", seconds="1")], 1),
        ([*CLEAN[:3], connection("node-2", "x", more=1)], 0),
        (CLEAN, 1),
        ([*CLEAN[:3], connection("node-2", "x", code="peer-silent")], 0),
        ("x", 0),
    ],
    ids=[
        "none",
        "too few",
        "too many",
        "code",
        "code of a job",
        "code of a log",
        "seconds",
        "more",
        "clean but 1",
        "unclean but 0",
        "no list",
    ],
)
def test_a_head_that_lies_about_its_connections_is_red(tried: Any, rc: int) -> None:
    check = trust_of(tried, rc)
    assert (check.status, check.code) == (RED, "answer-malformed")


def test_the_options_of_a_login_are_those_of_ansible_playbook() -> None:
    assert Login().arguments() == []
    given = Login(ask_pass=True, ask_become_pass=True).arguments()
    assert given == ["--ask-pass", "--ask-become-pass"]
    known = subprocess.run(["ansible-playbook", "--help"], check=True, capture_output=True, text=True).stdout
    assert all(option in known for option in given)


@pytest.mark.parametrize("user", ["admin", "it's {{ 7 * 7 }}\" }"])
def test_the_user_and_the_key_that_are_typed_override_the_inventory(tmp_path: Path, user: str) -> None:
    inventory, key = tmp_path / "hosts.yml", tmp_path / "a {{ 1 }} key"
    theirs = dict.fromkeys((*USER_VARIABLES, *KEY_VARIABLES), "theirs")
    inventory.write_text(json.dumps({"cluster": {"hosts": {"node-1": {}}, "vars": theirs}}))
    shown = ["ansible", "-i", str(inventory), "cluster", "-m", "debug", "-a"]
    words = [f"msg={{{{ [{', '.join(theirs)}] | to_json | b64encode }}}}"]
    done = subprocess.run([*shown, *words, *Login(user, key).arguments()], check=True, capture_output=True, text=True)
    message = re.search(r'"?msg"?: "?([\w+/=]+)', done.stdout)
    assert message
    assert json.loads(base64.b64decode(message[1])) == [user, user, str(key), str(key)]


def test_skipped_nodes_have_no_check() -> None:
    result = {"proven": True, "changed": False}
    hostvars: dict[str, Any] = {
        "node-1": {"stack_proven": result},
        "node-2": {"stack_proven": {"skipped": True}},
        "node-3": {},
    }
    assert nodes.stack_answers(hostvars, ["node-1", "node-2", "node-3", "node-4"]) == {"node-1": result}


def test_a_queue_gets_a_job_on_the_nodes_that_it_has() -> None:
    manifest = {"wanted": {"frameworks": ["pytorch"], "accelerator": "cpu"}}
    found = {
        job["id"]: job
        for job in nodes.jobs(["node-1", "node-2"], manifest, 120, quick=True, queue=["node-2", "node-3"])
    }
    assert found["queue"]["nodes"] == ("node-2",)
    assert "--nodelist=node-2" in found["queue"]["argv"]
    assert "-H" not in found["queue"]["argv"]
    assert "queue.limits" not in found
    full = nodes.jobs(["node-1", "node-2"], manifest, 120, quick=False, queue=["node-2", "node-3"])
    assert [job["argv"][-1] for job in full if job["id"] == "queue.limits"] == ["node-2"]
    assert "queue" not in {job["id"] for job in nodes.jobs(["node-1"], manifest, 120, quick=True)}
