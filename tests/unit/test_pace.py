"""Nodes that compute more slowly than the others. playbooks/validate.yml measures it for real."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from farandole.validation.judge import GREEN, NOT_MEASURED, RED, SLOW, Bars, Check, judge
from farandole.validation.plan import jobs

from .loading import load_probe

allreduce = load_probe("allreduce")


def ranks(*took: float | None) -> list[dict[str, Any]]:
    return [
        {"rank": number, "size": len(took), "host": "liar", "machine": f"m{number}", "step_ms": step}
        for number, step in enumerate(took)
    ]


def paced(*took: float | None, inventory: str = "inventory/mine", **changes: Any) -> list[Check]:
    """The checks of a job whose ranks need so many milliseconds for a step of their own."""
    names = [f"node-{number}" for number in range(1, len(took) + 1)]
    job = {"id": "horovod.torch.gloo", "group": "horovod", "title": "torch over gloo", "nodes": names}
    left: dict[str, list[str]] = {name: [] for name in names}
    result = {"job": job, "code": 0, "seconds": 5.0, "left": left, "said": [], "wrong": []}
    result |= {"ranks": ranks(*took), **changes}
    return judge({"horovod.torch.gloo": result}, Bars(), inventory)


@pytest.mark.parametrize(
    ("took", "slow", "value"),
    [
        ([10.0, 10.0], [], 1.0),
        ([10.0, 19.0], [], 0.5263),
        ([10.0, 21.0], ["node-2"], 0.4762),
        ([10.0, 11.0, 12.0, 19.0], [], 0.5789),
        ([10.0, 50.0, 12.0, 11.0], ["node-2"], 0.22),
        # The median ignores what a few slow ones need.
        ([50.0, 10.0, 60.0, 10.0, 10.0], ["node-1", "node-3"], 0.1667),
    ],
)
def test_a_node_that_needs_twice_as_long_is_named(took: list[float], slow: list[str], value: float) -> None:
    job, check = paced(*took)
    assert (job.status, check.id, check.value, check.bar) == (GREEN, "horovod.torch.gloo.pace", value, 0.5)
    assert (check.status, check.code) == ((SLOW, "worker-slow") if slow else (GREEN, ""))
    if slow:
        assert check.hosts == slow
        assert all(name in check.cause for name in slow)
        assert "node exclude node-" in check.cure and "-i inventory/mine" in check.cure


def test_a_busy_machine_is_no_slow_node() -> None:
    first, second = ranks(10.0, 50.0)
    check = paced(10.0, 50.0, ranks=[first, {**second, "crowded": True}])[1]
    assert (check.status, check.code, check.value) == (NOT_MEASURED, "", 0.2)
    assert "busy on node-2" in check.words
    # That another one was disturbed makes this one no faster.
    assert paced(10.0, 50.0, ranks=[{**first, "crowded": True}, second])[1].status == SLOW


def test_a_busy_machine_hides_no_slow_node() -> None:
    took = (10.0, 90.0, 50.0, 10.0, 10.0)
    busy = [{**rank, "crowded": rank["rank"] == 1} for rank in ranks(*took)]
    check = paced(*took, ranks=busy)[1]
    assert (check.status, check.code, check.hosts, check.value) == (SLOW, "worker-slow", ["node-3"], 0.2)
    assert "50 ms on node-3" in check.words and "node exclude node-3" in check.cure


def test_the_inventory_is_quoted() -> None:
    assert "-i '$(id)'" in paced(10.0, 50.0, inventory="$(id)")[1].cure


@pytest.mark.parametrize("took", [[10.0], [10.0, None], [10.0, 0.0]])
def test_what_cannot_be_compared_is_not(took: Sequence[float | None]) -> None:
    assert [check.id for check in paced(*took)] == ["horovod.torch.gloo"]


def test_a_failed_job_says_nothing_about_speed() -> None:
    assert [check.status for check in paced(10.0, 50.0, code=1)] == [RED]
    twice = [{**rank, "rank": 0} for rank in ranks(1.0, 9.0)]
    assert [check.id for check in paced(10.0, 10.0, ranks=twice)] == ["horovod.torch.gloo"]


@pytest.mark.parametrize(
    ("frameworks", "gpu", "measured"),
    [
        (["tensorflow", "pytorch"], False, ["horovod.torch.gloo"]),
        (["tensorflow"], False, ["horovod.tensorflow.gloo"]),
        (["pytorch"], True, ["horovod.torch.gloo", "horovod.torch.nccl"]),
    ],
)
@pytest.mark.parametrize("quick", [True, False])
def test_each_kind_of_processor_is_measured_once(
    frameworks: list[str], gpu: bool, measured: list[str], quick: bool
) -> None:
    planned = jobs(["node-1", "node-2"], frameworks, 120, Bars(), quick=quick, gpu=gpu)
    assert [job["id"] for job in planned if "--pace" in job["argv"]] == measured


class Matrix:
    """A product takes a while, and longer while others disturb."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __matmul__(self, other: "Matrix") -> list[list[float]]:
        time.sleep(self.seconds.pop(0))
        return [[1.0]]


class Horovod:
    """Everybody is there at once."""

    rounds = 0

    def allgather_object(self, value: int, *, name: str) -> list[int]:
        assert name == f"pace.{value}"
        self.rounds += 1
        return [value]


@pytest.mark.parametrize(("idle", "crowded"), [(0.1, True), (1.0, False)])
def test_the_fastest_round_counts(monkeypatch: pytest.MonkeyPatch, idle: float, crowded: bool) -> None:
    monkeypatch.setattr(allreduce, "ROUNDS", 3)
    monkeypatch.setattr(allreduce, "STEPS", 2)
    horovod, seconds = Horovod(), [0.2, 0.0, 0.02, 0.02, 0.0, 0.3]

    def tensor(size: tuple[int, int], value: int, kind: str) -> Matrix:
        assert (size, value, kind) == ((8, 8), 1, "float32")
        return Matrix(seconds)

    # Seconds of busy and of idle processors, and of its own, before and after each round.
    known = iter([(0, 0, 0), (2, idle, 1), (9, 9, 9), (9, 9, 9), (9, 9, 9), (9, 9, 9)])
    monkeypatch.setattr(allreduce, "processors", lambda: next(known))
    paces = allreduce.pace(horovod, tensor, 8)
    assert 20 <= paces["step_ms"] < 90
    assert paces["crowded"] == crowded
    assert (horovod.rounds, seconds) == (3, [])


def test_the_kernel_says_how_busy_the_machine_is() -> None:
    busy, idle, own = (after - before for before, after in zip(allreduce.processors(), burn(), strict=True))
    assert own > 0.2
    assert busy + idle > 0.2


def burn() -> tuple[float, float, float]:
    until = time.process_time() + 0.25
    while time.process_time() < until:
        pass
    times: tuple[float, float, float] = allreduce.processors()
    return times
