"""What result.json keeps besides the verdicts: every job with its series, the phases, and what preflight found."""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from farandole.core.schema import UnfitError, fields, many, named, number, optional, text, words
from farandole.validation.judge import Result

# Nobody looks at more rounds of a job.
ROUNDS = 200
WORDS, NAME = text(400), text(100)
FINDING = fields(
    {"host": NAME, "code": NAME, "cause": text(1000), "cure": text(1000), "severity": words("stop|warn|note")}, {}
)
HOST = fields(
    {"os_id": NAME, "os_version": NAME, "arch": NAME},
    {
        "nvidia_driver": optional(NAME),
        "machine": fields(
            {},
            {
                "kernel": NAME,
                "memory_mb": number,
                "links": named(NAME, fields({}, {"speed": optional(number), "mtu": optional(number)})),
            },
        ),
    },
)
PREFLIGHT = fields(
    {"findings": many(FINDING), "hosts": named(NAME, HOST)},
    {"fabric": fields({}, {"network": NAME, "interfaces": named(NAME, NAME)})},
)


def jobs(results: Mapping[str, Result], started: float) -> list[dict[str, Any]]:
    """Every job: when it ran, and what it measured over steps, rounds, ranks and sizes."""
    return [_job(result, started) for result in results.values()]


def _job(result: Result, started: float) -> dict[str, Any]:
    """A rank is known by the node where it was started, whatever name it reports."""
    job, nodes = result["job"], list(result["job"]["nodes"])
    ranks = [
        {"host": nodes[rank["rank"]], "rate": rank.get("rate"), "step_ms": rank.get("step_ms")}
        for rank in result["ranks"]
        if rank["rank"] < len(nodes) and (rank.get("rate") or rank.get("step_ms"))
    ]
    begun = result.get("begun") or started
    return {
        **{field: job[field] for field in ("id", "title")},
        "nodes": nodes,
        "begin": round(max(0.0, begun - started), 1),
        "seconds": result["seconds"],
        "ranks": ranks[: len(nodes)],
        "loss": result.get("losses", []),
        "rounds": result.get("rounds", [])[:ROUNDS],
        "sizes": next((rank["sizes"] for rank in result["ranks"] if rank.get("sizes")), []),
        "steps_ms": result.get("steps_ms", {}),
    }


def phases(begins: Mapping[str, float], started: float, ended: float) -> list[dict[str, Any]]:
    """The parts of the run, each until the next one begins."""
    known = sorted((float(begin), name) for name, begin in begins.items())
    return [
        {"name": name, "begin": round(max(0.0, begin - started), 1), "seconds": round(end - begin, 1)}
        for (begin, name), (end, _) in pairwise([*known, (ended, "")])
    ]


def preflight(path: Path, nodes: Collection[str], links: Mapping[str, Any]) -> dict[str, Any] | None:
    """What preflight found, and measured of these nodes; nothing if there is no record of this version."""
    try:
        record = PREFLIGHT(json.loads(path.read_text()))
        when = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, ValueError, UnfitError):
        return None
    fabric = record.get("fabric") or {}
    interfaces = fabric.get("interfaces", {})
    return {
        "time": f"{when:%Y-%m-%dT%H:%M:%SZ}",
        "findings": record["findings"],
        "network": fabric.get("network", ""),
        "hosts": {name: _host(own, interfaces.get(name, "")) for name, own in record["hosts"].items() if name in nodes},
        "nodes": {name: rates for name, rates in links.get("nodes", {}).items() if name in nodes},
        "usual_mb_per_s": links.get("usual_mb_per_s"),
        "rates_measured": links.get("rates_measured"),
        "pairs": [pair for pair in links.get("pairs", []) if pair[0] in nodes and pair[1] in nodes],
    }


def _host(known: Mapping[str, Any], interface: str) -> dict[str, Any]:
    machine = known.get("machine", {})
    link = machine.get("links", {}).get(interface, {})
    return {
        "system": f"{known['os_id'].capitalize()} {known['os_version']}, {known['arch']}",
        "kernel": machine.get("kernel", ""),
        "memory_mb": machine.get("memory_mb"),
        "driver": known.get("nvidia_driver") or "",
        "interface": interface,
        "mbit": link.get("speed") or None,
        "mtu": link.get("mtu") or None,
    }


def scaling_points(most: int) -> Sequence[int]:
    """The numbers of workers for which the efficiency is predicted."""
    return [1 << power for power in range(max(4, (2 * most - 1).bit_length()) + 1)]
