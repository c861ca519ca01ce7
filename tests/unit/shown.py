"""A result of a validation with everything that its page shows, for tests."""

from typing import Any

EVIL = '"><img src=http://127.0.0.1:9/x onerror=document.title=1><script>document.title=2</script>'
NODES = ["node-1", "node-10"]


def check(name: str, status: str = "green", **changes: Any) -> dict[str, Any]:
    bad = {"code": "node-silent", "cause": "it is off", "cure": "start it"} if status == "red" else {}
    return {"id": name, "status": status, "words": "seen", "hosts": NODES, **bad, **changes}


def job(name: str, nodes: list[str] = NODES, **measured: Any) -> dict[str, Any]:
    return {"id": name, "nodes": nodes, "begin": 1.0, "seconds": 2.0, "title": "a job", **measured}


def ranks(nodes: list[str], rate: float = 5.0) -> list[dict[str, Any]]:
    return [{"host": name, "rate": rate, "step_ms": None} for name in nodes]


def result(**changes: Any) -> dict[str, Any]:
    loss = [[1, 2.0], [2, 1.0]]
    speed = {"gradients_mb": 1.0, "step_ms": 9.0, "workers": 2, "measured": 0.9, "predicted": [[1, 1.0], [2, 0.95]]}
    return {
        "format": 3, "time": "2026-01-02T03:04:05Z", "verdict": "red", "hosts": NODES, "cluster": "mine",
        "seconds": 9.0, "stack": "0123456789ab", "versions": {"torch": "2.13.0"}, "bars": {"efficiency": 0.8},
        "phases": [{"name": "jobs", "begin": 0.0, "seconds": 9.0}],
        "jobs": [
            job("mpi", sizes=[[8, 5.0, 6.0], [4 << 20, 4000.0, 3900.0]]), job("parity.x.one", loss=loss),
            job("parity.x.all", loss=loss), job("training.x", ranks=ranks(NODES)),
        ],
        "scaling": [{"id": "speed", **speed}],
        "checks": [
            check("horovod.x", "red", log=[f"line {number} {EVIL}" for number in range(300)]),
            check("speed.efficiency", value=0.9, bar=0.8, spread=[0.88, 0.92]),
            check("rdma", "not measured", hosts=[]),
        ],
        "preflight": {
            "hosts": {"node-1": {"system": "Debian 12, x86_64", "memory_mb": 2048, "mbit": 10_000}},
            "nodes": {"node-1": {"delay_us": 9.0, "mb_per_s": None}}, "pairs": [[*NODES, 500.0, 800.0]],
            "findings": [{"host": "node-1", "code": "x", "cause": "a", "cure": "b", "severity": "note"}],
        },
        **changes,
    }  # fmt: skip


def seen(number: int, code: str, cause: str, severity: str) -> dict[str, str]:
    """What preflight found on a node."""
    return {"host": f"node-{number}", "code": code, "cause": cause, "cure": code, "severity": severity}
