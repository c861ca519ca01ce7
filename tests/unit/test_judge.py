"""How jobs of a validation are judged, explained and compared with what the network predicts."""

from __future__ import annotations

import ast
import math
import statistics
from typing import Any

import pytest

from farandole.validation.judge import ENOUGH, GREEN, NOT_MEASURED, RED, SLOW, Bars, Check, judge
from farandole.validation.predicted import predictions

from .loading import ROOT
from .results import BARS, NODES, judged, ran, rank, rounds, wrong

LOST = "[0]<stderr>:horovod.common.exceptions.HorovodInternalError: Connection reset by peer"
LOOP = (
    "[0]<stderr>:[2026: E operations.cc:697] [0]: Horovod background loop uncaught exception: Connection closed by peer"
)
BROKEN = "[1,0]<stderr>:[a][[1,1],0][btl_tcp_frag.c:135:mca_btl_tcp_frag_send] writev failed: Broken pipe (32)"
UNREACHED = "[0]<stderr>:ValueError: rank 1 on host node-2 cannot be reached: [a/pair.cc:9] connect [::1]:5: timed out"
FULL = "[0]<stderr>:node-1: /home/a.pt cannot be written, 0 MiB are free: full"
NO_SCRIPT = "[1]<stderr>:python: can't open file '/home/trainer/a.py': [Errno 2] No such file"
UNKNOWN = "ssh: Could not resolve hostname nod-2: Name or service not known"


def said(*lines: str) -> dict[str, Any]:
    return {"code": 1, "said": [*lines]}


FAILED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "late": ({"code": None}, "mpi-hangs", ["was killed after 120 s"]),
    "hang": ({"code": None, "left": {"node-1": [], "node-2": ["python"]}}, "mpi-hangs", ["python", "node-2"]),
    "crashed": ({"code": 3}, "job-failed", ["ended with status 3"]),
    "one worker": ({"ranks": [rank(0)]}, "ranks-missing", ["1 of 2 workers reported"]),
    "two jobs of one": ({"ranks": [rank(0, size=1)] * 2}, "ranks-missing", ["was not one job of 2 workers"]),
    "one worker twice": ({"ranks": [rank(1), rank(1, machine="m0")]}, "ranks-missing", ["1, 1 instead of 0 to 1"]),
    "one machine": ({"ranks": [rank(0), rank(1, machine="m0")]}, "machines-missing", ["ran on 1 of 2 machines"]),
    "two stacks": ({"ranks": [rank(0), rank(1, stack="b")]}, "nodes-differ", ["stack on node-1 and node-2"]),
    "two Pythons": ({"ranks": [rank(0), rank(1, python="b")]}, "nodes-differ", ["python on node-1 and node-2"]),
    "other weights": ({"ranks": [rank(0), rank(1, weights="b")]}, "wrong-values", ["weights on node-1 and node-2"]),
    "a wrong sum": ({"code": 1, "wrong": [wrong("wrong-values", "the sum is 4")]}, "wrong-values", ["the sum is 4"]),
    "silent": ({**said(LOST), "left": {"node-2": None}}, "node-silent", ["node-2"]),
    "silent afterwards": ({"left": {"node-1": [], "node-2": None}}, "node-silent", ["node-2"]),
    "left behind": ({"left": {"node-1": [], "node-2": ["python"]}}, "processes-left", ["python", "node-2"]),
    "crash over Gloo": (said(LOST, "[1]<stderr>:out of luck"), "worker-failed", ["worker 1", "node-2", "luck"]),
    "crash over MPI": (said("[1,1]<stderr>:KeyError: 'x'"), "worker-failed", ["worker 1", "node-2", "KeyError"]),
    "lost": (said(LOST), "connection-lost", []),
    "killed": (said(LOOP, "[1]<stderr>:Killed"), "worker-failed", ["worker 1"]),
    "ended for the other": (
        said("[0]<stderr>:W x", "[1]<stderr>:AssertionError: bad", "[0]<stderr>:Terminated"),
        "worker-failed", ["worker 1", "bad"],
    ),
    "ended after its own failure": (
        said("[0]<stderr>:KeyError: 'x'", "[1]<stderr>:Horovod has been shut down", "[0]<stderr>:Terminated"),
        "worker-failed", ["worker 0", "KeyError"],
    ),
    "broken by the other": (said(BROKEN, "[1,1]<stderr>:KeyError: 'x'"), "worker-failed", ["worker 1"]),
    "broken later": (said("[1,0]<stderr>:KeyError: 'x'", BROKEN), "worker-failed", ["worker 0", "KeyError"]),
    "ssh": (said("ssh not successful for host node-2:"), "job-node-unreachable", ["node-2"]),
    "name": (said("noise", UNKNOWN), "job-name-unknown", ["nod-2"]),
    "rank": (said("noise", UNREACHED), "rank-unreachable", ["reach node-2: connect"]),
    "disk": (said("[1]<stderr>:OSError: [Errno 28] No space left on device"), "disk-full", ["node-2"]),
    "a disk": (said("OSError: [Errno 28] No space left on device"), "disk-full", ["a node"]),
    "checkpoint": (said("noise", FULL), "checkpoint-unwritable", ["node-1", "/home/a.pt"]),
    "data": (
        said("node-2: /opt/farandole/data/mnist/a.gz is damaged (CRC)"), "data-damaged", ["mnist/a.gz", "node-2"]
    ),
    "slots": (said("There are not enough slots available in the system"), "slots-too-few", []),
    "anything": (said("something else"), "job-failed", []),
    "script": (said("[0]<stderr>:noise", NO_SCRIPT, LOST), "script-missing", ["on node-2: "]),
    "first of two": (said("OSError: Too many open files", NO_SCRIPT), "files-too-many", []),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "names"), FAILED.values(), ids=FAILED)
def test_a_failed_job_is_red_with_the_cause_and_the_worker_or_node(
    changes: dict[str, Any], code: str, names: list[str]
) -> None:
    (check,) = judged(ran("mpi", **changes)).values()
    assert (check.status, check.hosts, check.code, bool(check.cure)) == (RED, list(NODES), code, True)
    assert all(name in f"{check.words}\n{check.cause}" for name in names)


def test_a_job_without_horovod_gets_no_cure_for_horovod() -> None:
    cures = [judged(ran(name, code=None))[name].cure for name in ("horovod.torch.gloo", "mpi")]
    assert ["orovod" in cure.lower() for cure in cures] == [True, False]


@pytest.mark.parametrize(("host", "named"), [("node-2", "node-2"), ("$(reboot)", "that node")])
def test_a_cure_names_only_nodes_of_the_job(host: str, named: str) -> None:
    for changes, code in (
        ({"code": 1, "wrong": [wrong("ddp-not-met", "x", host)]}, "ddp-not-met"),
        (said(f"ssh not successful for host {host}:"), "job-node-unreachable"),
    ):
        (check,) = judged(ran("mpi", **changes)).values()
        assert (check.code, named in check.cure, "reboot" in check.cure) == (code, True, False)


@pytest.mark.parametrize(("accuracy", "status"), [(0.95, GREEN), (0.949, RED)])
def test_accuracy_has_a_threshold(accuracy: float, status: str) -> None:
    (check,) = judged(ran("training.pytorch_mnist", accuracy=accuracy)).values()
    assert (check.id, check.status, check.bar) == ("training.pytorch_mnist.accuracy", status, 0.95)
    assert check.code == ("below-threshold" if status == RED else "")


@pytest.mark.parametrize(
    ("bandwidth", "latency", "quiet", "status"),
    [(400, 50, ENOUGH, GREEN), (399, 51, ENOUGH, SLOW), (399, 50, ENOUGH - 1, NOT_MEASURED)],
)
def test_mpi_is_compared_with_tcp(bandwidth: float, latency: float, quiet: int, status: str) -> None:
    measured = {"bandwidth_mbs": bandwidth, "tcp_mbs": 1000, "latency_us": latency, "tcp_latency_us": 20}
    checks = judged(ran("mpi", ranks=[rank(0, **measured, quiet=quiet, rounds=20), rank(1)]))
    assert [checks[name].status for name in ("mpi", "mpi.bandwidth", "mpi.latency")] == [GREEN, status, status]


NOTHING: dict[str, Any] = {
    "without": [], "toolless": [], "most": 1, "fewer": [], "pairs": 0, "slowest": 0, "failed": [],
}  # fmt: skip
BROKEN_PAIR = {"ranks": [0, 1], "seen": "rxe0/1 with rxe0/1: nothing within 30 s"}


@pytest.mark.parametrize(
    ("seen", "status", "words"),
    [
        ({"without": [1]}, NOT_MEASURED, "no port is active on node-2"),
        ({"toolless": [0, 1]}, NOT_MEASURED, "missing on node-1, node-2: base_extra_packages"),
        ({"pairs": 1, "slowest": 21.4}, GREEN, "between 1 of 1 pairs of nodes: 21 Mbit/s and more"),
        ({"pairs": 1, "most": 2, "fewer": [[1, 1]]}, NOT_MEASURED, "1 on node-2, 2 on the others"),
        ({"failed": [BROKEN_PAIR], "fewer": [[1, 1]]}, RED, "failed with node-1, node-2"),
        ({"failed": [BROKEN_PAIR]}, RED, "failed with node-1, node-2"),
        ({"failed": [BROKEN_PAIR | {"ranks": [5, 9]}], "without": []}, RED, "failed with "),
        ({}, NOT_MEASURED, "only one node"),
    ],
)
def test_rdma_is_judged_by_what_each_pair_sent(seen: dict[str, Any], status: str, words: str) -> None:
    checks = judged(ran("mpi", ranks=[rank(0, rdma={**NOTHING, **seen}), rank(1)]))
    assert checks["mpi"].status == GREEN
    assert checks["rdma"].status == status
    assert words in checks["rdma"].words
    assert (checks["rdma"].code, "30 s" in checks["rdma"].cause) == (
        ("rdma-fails", True) if status == RED else ("", False)
    )


@pytest.mark.parametrize(("other", "status"), [(0.1009, GREEN), (0.0989, RED), (0.102, RED)])
def test_parity_allows_a_small_difference_either_way(other: float, status: str) -> None:
    checks = judged(ran("parity.pytorch_mnist.one"), ran("parity.pytorch_mnist.all", loss=other))
    assert checks["parity.pytorch_mnist"].status == status


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
    checks = judged(ran("speed", rounds=measured))
    efficiency = checks["speed.efficiency"]
    assert (checks["speed"].status, efficiency.status) == (GREEN, status)
    assert ("node-2" in efficiency.words) == (status == NOT_MEASURED and not measured[-1]["quiet"])
    assert bool(efficiency.cause and efficiency.cure) == (status == SLOW)


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
    source.body = [statement for statement in source.body if ast.unparse(statement).startswith(wanted)]
    probe: dict[str, Any] = {"statistics": statistics}
    exec(compile(source, "speed.py", "exec"), probe)  # noqa: S102
    assert probe["settled"](job["rounds"], "alone", BARS.efficiency) == enough
    assert not probe["settled"](rounds(0.7, 0.7, 0.7, 0.9, 0.9, 0.9), "alone", math.nan)


def test_speed_is_compared_with_each_worker_alone_and_with_torch() -> None:
    for alone, ddp, statuses in ((1300, 1000, [SLOW, GREEN]), (1000, 1200, [GREEN, SLOW])):
        checks = judged(ran("speed", rounds=rounds(alone=alone, ddp=ddp)))
        assert [checks[f"speed.{name}"].status for name in ("efficiency", "yardstick")] == statuses


def test_failed_jobs_are_not_compared() -> None:
    failed = [ran(name, code=1) for name in ("parity.pytorch_mnist.one", "speed", "training.pytorch_mnist")]
    statuses = {name: check.status for name, check in judged(*failed, ran("parity.pytorch_mnist.all")).items()}
    assert statuses == {"parity.pytorch_mnist.all": GREEN} | {job["job"]["id"]: RED for job in failed}


DELAY = {"delay_us": 100.0}
LINKS = {
    "nodes": {name: {"mb_per_s": 25.0, **DELAY} for name in NODES}, "usual_mb_per_s": 25.0, "rates_measured": None,
}  # fmt: skip
NETWORK = {"alone_ms": 100.0, "together_ms": 1100.0, "gradients_mb": 25.0}


def predicted(job: dict[str, Any], links: dict[str, Any] = LINKS) -> list[Check]:
    results = {job["job"]["id"]: job}
    return list(predictions(results, judge(results, Bars()), links, "inventory/mine"))


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
    [
        {},
        {**LINKS, "nodes": {"node-1": {"mb_per_s": 25.0, **DELAY}}},
        {**LINKS, "nodes": {name: {"mb_per_s": None, **DELAY} for name in NODES}},
    ],
    ids=["nothing", "one node", "no rate"],
)
def test_without_measured_links_nothing_is_predicted(links: dict[str, Any]) -> None:
    (check,) = predicted(ran("network", **NETWORK), links)
    assert (check.status, check.value) == (NOT_MEASURED, None)
    assert "farandole preflight -i inventory/mine" in check.words


def test_a_prediction_is_neither_red_nor_slow() -> None:
    (check,) = predicted(ran("network", **{**NETWORK, "together_ms": 100_000.0}))
    assert (check.status, check.cause) == (GREEN, "")
    assert predicted(ran("network", code=1, **NETWORK)) == []
    assert all(predicted(ran("network", **{**NETWORK, key: 0.0})) == [] for key in NETWORK)
    # Ranks that do not say what they trained.
    assert predicted(ran("speed")) == []
    assert predicted(ran("speed", ranks=[rank(0, batch=0, gradients_mb=0.25), rank(1)])) == []
