"""What the head may say of a job, and of the stack that it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from farandole.form import UnfitError, fields, load, many, named, number, optional, text, whole, words, yes_or_no
from farandole.validation.plan import MODULES
from farandole.words import one_line

LONGEST = 1 << 24
SAID = text(400)
NAME = text(100)
RANK = fields(
    {"rank": whole(1 << 20), "size": whole(1 << 20), "host": NAME, "machine": NAME},
    {
        "wrong": many(fields({"code": words("[a-z-]{1,40}"), "seen": SAID}, {})),
        **dict.fromkeys(("stack", "python", "weights"), text(200)),
        **dict.fromkeys(("rate", "bandwidth_mbs", "tcp_mbs", "latency_us", "tcp_latency_us"), number),
        **dict.fromkeys(("quiet", "rounds"), whole(1 << 20)),
    },
)
ROUND = fields(
    {**dict.fromkeys(("alone", "horovod", "ddp", "others"), number), "quiet": yes_or_no, "where": text(100)}, {}
)
JOB = fields(
    {
        "code": optional(whole(255, -255)),
        "seconds": number,
        "left": named(NAME, many(NAME)),
        "ranks": many(RANK),
        "said": many(SAID),
    },
    {"accuracy": number, "loss": number, "data": NAME, "rounds": many(ROUND)},
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
                    "code": words("|peer-failed|peer-silent|peer-stranger"),
                    "seen": text(1000),
                }
            )
        )
    }
)
MANIFEST = fields(
    {
        "id": words("[0-9a-f]{12}"),
        "wanted": fields({"frameworks": many(words("|".join(MODULES))), "accelerator": words("cpu|cuda")}, {}),
        "versions": named(words(r"[\w.-]{1,64}"), words(r"[\w.+!~-]{0,64}")),
    },
    {},
)


def job(told: Mapping[str, Any]) -> dict[str, Any]:
    """What job.py said of one, by what Ansible brought; or that it could not even say that."""
    try:
        said: dict[str, Any] = JOB(load(str(told.get("stdout") or ""), LONGEST))
    except UnfitError as error:
        words_left = [
            *lines(told.get("stderr")),
            *lines(told.get("msg")),
            f"the head gave no report of the job: {error}",
        ]
        return {"code": 1, "seconds": 0.0, "left": {}, "ranks": [], "said": words_left}
    nodes = told["item"]["nodes"]
    return {**said, "left": {node: names for node, names in said["left"].items() if node in nodes}}


def ran(item: Mapping[str, Any]) -> dict[str, Any]:
    """What came of a job, with the job as it was planned."""
    return {**job(item), "job": item["item"]}


def connections(told: Mapping[str, Any], hosts: Collection[str]) -> list[dict[str, Any]]:
    """What trust.py said of the connections from one node, two to each host: nothing missing, nothing invented."""
    found: list[dict[str, Any]] = CONNECTIONS(load(str(told.get("stdout") or ""), LONGEST))["connections"]
    if sorted(one["host"] for one in found) != sorted([*hosts, *hosts]):
        raise UnfitError("its connections are not two to each node")
    return found


def lines(told: object, most: int = 1000) -> list[str]:
    """Text that came from a node, to be shown."""
    return [line for raw in str(told or "").splitlines()[-most:] if (line := one_line(raw, 400))]


def manifest(told: str) -> dict[str, Any]:
    """Of a stack's manifest just what is used here."""
    found: dict[str, Any] = MANIFEST(load(told, LONGEST))
    return found
