"""What jobs of a validation report, and how that is judged, for tests."""

from typing import Any

from farandole.validation.judge import ENOUGH, Bars, Check, judge
from farandole.validation.plan import jobs

BARS = Bars(accuracy=0.95, parity=0.01, mpi_bandwidth=0.4, mpi_latency=0.4, efficiency=0.8, yardstick=0.9)
NODES = ("node-1", "node-2")
PLANNED = {job["id"]: job for job in jobs(NODES, ["tensorflow", "pytorch"], 120, BARS, quick=False, keras_3=True)}


def rank(number: int, **changes: Any) -> dict[str, Any]:
    own = {"rank": number, "size": 2, "host": f"node-{number + 1}", "machine": f"m{number}"}
    return {**own, "stack": "aaaa", "python": "/python", "weights": "cafe", "rate": 1000.0, **changes}


def ran(name: str, **changes: Any) -> dict[str, Any]:
    """The result of a successful job, with changes."""
    job = PLANNED[name]
    ranks = [rank(number, size=len(job["nodes"])) for number in range(len(job["nodes"]))]
    good = {"code": 0, "seconds": 5.0, "left": {"node-1": [], "node-2": []}, "said": [], "ranks": ranks, "wrong": []}
    return {"job": job, **good, "accuracy": 0.97, "loss": 0.1, "data": "MNIST", "rounds": rounds(), **changes}


def wrong(code: str, seen: str = "x", host: str = "node-1") -> dict[str, str]:
    """What a rank of a job found wrong."""
    return {"code": code, "host": host, "seen": seen}


def rounds(*ratios: float, busy: int = 0, alone: float = 1000.0, ddp: float = 1000.0) -> list[dict[str, Any]]:
    """A quiet round for each ratio, or enough of them, followed by busy ones."""
    quiet = [{"horovod": ratio * 1000, "quiet": True, "others": 0.0, "where": ""} for ratio in ratios or [1.0] * ENOUGH]
    loud = [{"horovod": 100.0, "quiet": False, "others": 1.4, "where": "node-2"}] * busy
    return [{**measured, "alone": alone, "ddp": ddp} for measured in (*quiet, *loud)]


def judged(*results: dict[str, Any]) -> dict[str, Check]:
    return {check.id: check for check in judge({result["job"]["id"]: result for result in results}, BARS)}
