"""Validate what nodes report about jobs, connections and stacks."""

from collections.abc import Collection, Mapping
from typing import Any

from farandole.core.causes import Place, causes
from farandole.core.schema import (
    Check,
    UnfitError,
    few,
    fields,
    load,
    many,
    named,
    number,
    optional,
    shown,
    text,
    whole,
    words,
    yes_or_no,
)
from farandole.core.text import one_line
from farandole.validation.plan import MODULES

LONGEST = 1 << 24
LINE = text(400)
NAME = text(100)


def code(place: Place, *others: str) -> Check:
    """The code of a cause that is seen at a place."""

    def check(value: Any) -> str:
        cause = causes().get(value) if isinstance(value, str) else None
        if value not in others and (cause is None or cause.seen != place):
            raise UnfitError(f"is {shown(value)}")
        return str(value)

    return check


RANK = fields(
    {"rank": whole(1 << 20), "size": whole(1 << 20), "host": NAME, "machine": NAME},
    {
        **dict.fromkeys(("stack", "python", "weights"), text(200)),
        **dict.fromkeys(
            ("rate", "step_ms", "bandwidth_mbs", "tcp_mbs", "latency_us", "tcp_latency_us", "batch", "gradients_mb"),
            optional(number),
        ),
        **dict.fromkeys(("quiet", "rounds"), whole(1 << 20)),
        "sizes": many(few(2, 3)),
        "crowded": yes_or_no,
        "rdma": fields(
            {
                **dict.fromkeys(("without", "toolless"), many(whole(1 << 20))),
                "most": whole(1 << 20),
                "fewer": many(few(2, 2)),
                "pairs": whole(1 << 20),
                "slowest": number,
                "failed": many(fields({"ranks": few(2, 2), "seen": LINE})),
            }
        ),
    },
)
ROUND = fields(
    {**dict.fromkeys(("alone", "horovod", "ddp", "others"), number), "quiet": yes_or_no, "where": text(100)}, {}
)
JOB = fields(
    {
        "code": optional(whole(255, -255)),
        "seconds": number,
        "left": named(NAME, optional(many(NAME))),
        "ranks": many(RANK),
        "wrong": many(fields({"code": code("probe"), "host": NAME, "seen": LINE}, {})),
        "said": many(LINE),
    },
    {
        **dict.fromkeys(("accuracy", "loss", "alone_ms", "together_ms", "gradients_mb"), number),
        "data": NAME,
        "rounds": many(ROUND),
        "losses": many(few(2, 2)),
        "steps_ms": fields(dict.fromkeys(("alone", "together"), few(0, 100)), {}),
    },
)
CONNECTIONS = fields(
    {
        "connections": many(
            fields(
                {
                    "host": NAME,
                    "target": NAME,
                    "seconds": number,
                    "machine": NAME,
                    "code": code("trust", ""),
                    "seen": text(1000),
                }
            )
        )
    }
)
STACK = fields({"stack": words("|[0-9a-f]{12}"), "proven": optional(yes_or_no), "wrong": LINE}, {})
MANIFEST = fields(
    {
        "id": words("[0-9a-f]{12}"),
        "wanted": fields({"frameworks": many(words("|".join(MODULES))), "accelerator": words("cpu|cuda")}, {}),
        "versions": named(words(r"[\w.-]{1,64}"), words(r"[\w.+!~-]{0,64}")),
    },
    {},
)


def job(result: Mapping[str, Any]) -> dict[str, Any]:
    """Read job.py's report from a task's result; a report that is missing or malformed is a failed job."""
    try:
        report: dict[str, Any] = JOB(load(str(result.get("stdout") or ""), LONGEST))
    except UnfitError as error:
        output = [*lines(result.get("stderr")), *lines(result.get("msg"))]
        return {"code": 1, "seconds": 0.0, "left": {}, "ranks": [], "wrong": [], "said": output, "unusable": str(error)}
    nodes = result["item"]["nodes"]
    return {**report, "left": {node: names for node, names in report["left"].items() if node in nodes}}


def job_result(item: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a job, together with the job as planned."""
    return {**job(item), "job": item["item"], "begun": item.get("begun")}


def connections(result: Mapping[str, Any], hosts: Collection[str]) -> list[dict[str, Any]]:
    """Read trust.py's report about the connections from one node, which must be exactly two to each host."""
    tried: list[dict[str, Any]] = CONNECTIONS(load(str(result.get("stdout") or ""), LONGEST))["connections"]
    if sorted(connection["host"] for connection in tried) != sorted([*hosts, *hosts]):
        raise UnfitError("its connections are not two to each node")
    return tried


def stack(result: Mapping[str, Any]) -> dict[str, Any]:
    """Read the answer of module stack_proof."""
    answer: dict[str, Any] = STACK(result)
    if (answer["proven"] is False) != bool(answer["wrong"]):
        raise UnfitError("it contradicts itself")
    return answer


def lines(output: object, most: int = 1000) -> list[str]:
    """The last lines of a node's output, made safe to show."""
    return [line for raw in str(output or "").splitlines()[-most:] if (line := one_line(raw, 400))]


def manifest(content: str) -> dict[str, Any]:
    """The part of a stack's manifest that the validation uses."""
    part: dict[str, Any] = MANIFEST(load(content, LONGEST))
    return part
