"""What the jobs said, held against the bars."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.causes import Cause, causes, recognize

GREEN, SLOW, RED, NOT_MEASURED = "green", "slow", "red", "not measured"
Result = Mapping[str, Any]
Told = tuple[str, str, str]  # code, cause, cure

# Fewer quiet rounds than this say nothing about speed.
ENOUGH = 5
# Without this there is nothing to judge, by group.
TELLS: Mapping[str, tuple[str, ...]] = {"training": ("accuracy",), "parity": ("loss",), "speed": ("rounds",)}
MEASURED = {"bandwidth_mbs", "tcp_mbs", "latency_us", "tcp_latency_us"}
# How launchers mark the lines of a worker: its rank, then its words.
WORKER = re.compile(r"\[(?:\d+,)?(\d+)\]<stderr>: *(.*\S)")


@dataclass(frozen=True)
class Bars:
    """From what on a measured value is good; meta/argument_specs.yml of role validation says what each is."""

    accuracy: float = 0.95
    parity: float = 0.01
    mpi_bandwidth: float = 0.4
    mpi_latency: float = 0.4
    efficiency: float = 0.8
    yardstick: float = 0.9


@dataclass
class Check:
    """One line of the report."""

    id: str
    status: str
    words: str
    value: float | None = None
    bar: float | None = None
    hosts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    code: str = ""
    cause: str = ""
    cure: str = ""
    log: list[str] = field(default_factory=list)


def judge(results: Mapping[str, Result], bars: Bars) -> list[Check]:
    """Every job by itself, then what needs several of them."""
    checks = [check for result in results.values() for check in _of_job(result, bars)]
    return [*checks, *_parity(results, bars)]


def explain(result: Result) -> Told:
    """Code, cause and cure: what a rank found or the log names; else who is silent, hangs or fell; else a cascade."""
    nodes = result["job"]["nodes"]
    for one in complaints(result):
        if (cause := causes().get(one["code"])) and cause.seen == "probe":
            return _told(cause, nodes, seen=one["seen"])
    return (
        _recognized(result, cascade=False)
        or _silent(result)
        or _hanging(result)
        or _fallen(result)
        or _recognized(result, cascade=True)
        or _told(causes()["job-failed"], nodes)
    )


def _told(cause: Cause, nodes: Sequence[str], **words: str) -> Told:
    """A cure names nodes of the inventory alone, whatever stands in a log."""
    host = words.get("host", "")
    return cause.code, cause.told(words), cause.mended({"host": shlex.quote(host) if host in nodes else "that node"})


def _recognized(result: Result, *, cascade: bool) -> Told | None:
    nodes = result["job"]["nodes"]
    if sight := recognize("job", result["said"], cascade=cascade):
        rank = WORKER.match(sight.line)
        at = int(rank[1]) if rank else len(nodes)
        host = nodes[at] if at < len(nodes) else "a node"
        return _told(sight.cause, nodes, **{"host": host, **sight.words})
    return None


def _silent(result: Result) -> Told | None:
    nodes = result["job"]["nodes"]
    silent = [host for host, names in result["left"].items() if names == ["no answer"] and host in nodes]
    if not silent:
        return None
    cause, names = causes()["node-silent"], ", ".join(silent)
    return cause.code, cause.told({"seen": names}), cause.mended({"host": ", ".join(map(shlex.quote, silent))})


def _hanging(result: Result) -> Told | None:
    """Also what is wrong with a job that ended well by itself."""
    nodes = result["job"]["nodes"]
    code, words = _fault(result)
    if code == "job-hangs":
        left = {host: names for host, names in result["left"].items() if names}
        words = "".join(f"; {', '.join(names)} still ran on {host}, and was ended" for host, names in left.items())
    return _told(causes()[code], nodes, seen=words) if code != "job-failed" else None


def _fallen(result: Result) -> Told | None:
    """The first worker that ended for a reason of its own, and its last words; the others only miss it."""
    nodes = result["job"]["nodes"]
    words: dict[int, str] = {}
    missing = set()
    for line in result["said"]:
        if found := WORKER.match(line):
            rank = int(found[1])
            if re.search(r"HorovodInternalError|Horovod has been shut down", line):
                missing.add(rank)
            elif "btl_tcp" not in line:
                words[rank] = found[2][:200]
    fallen = next((rank for rank in sorted(words) if rank not in missing), None)
    if fallen is None:
        return None
    host = nodes[fallen] if fallen < len(nodes) else "a node"
    return _told(causes()["worker-failed"], nodes, rank=str(fallen), host=host, seen=words[fallen])


def complaints(result: Result) -> list[Mapping[str, str]]:
    """What its ranks found wrong by themselves."""
    return [one for rank in result["ranks"] for one in rank.get("wrong", ())]


def failure(result: Result) -> str:
    """Why a job does not count; empty when it does."""
    return _fault(result)[1]


def _fault(result: Result) -> tuple[str, str]:
    """Why a job does not count, as a code and in words; empty when it does."""
    job = result["job"]
    ranks, wanted = result["ranks"], len(job["nodes"])
    if result["code"] is None:
        return "job-hangs", f"was ended after {job['seconds']} s"
    if wrong := complaints(result):
        return "job-failed", "; ".join(dict.fromkeys(one["seen"] for one in wrong))
    if result["code"]:
        return "job-failed", f"ended with status {result['code']}"
    if len(ranks) != wanted:
        return "ranks-missing", f"{len(ranks)} of {wanted} workers reported"
    if any(rank["size"] != wanted for rank in ranks):
        return "ranks-missing", f"was not one job of {wanted} workers but several"
    if (machines := len({rank["machine"] for rank in ranks})) != wanted:
        return "machines-missing", f"ran on {machines} of {wanted} machines"
    return _contradiction(result) or _remains(result) or ("", "")


def _contradiction(result: Result) -> tuple[str, str] | None:
    """What is not the same on all ranks."""
    ranks = result["ranks"]
    for what in ("stack", "python", "weights"):
        if len({rank.get(what) for rank in ranks}) > 1:
            code = "wrong-values" if what == "weights" else "nodes-differ"
            return code, f"not the same {what} on {' and '.join(rank['host'] for rank in ranks)}"
    return None


def _remains(result: Result) -> tuple[str, str] | None:
    """What is left of a job that ended well, and what it should have left and did not."""
    if left := {host: names for host, names in result["left"].items() if names}:
        return "processes-left", f"left processes behind: {left}"
    missing = [what for what in TELLS.get(result["job"]["group"], ()) if what not in result]
    return ("result-missing", f"did not report its {' and '.join(missing)}") if missing else None


def _of_job(result: Result, bars: Bars) -> Iterator[Check]:
    job, ranks = result["job"], result["ranks"]
    common: dict[str, Any] = {"hosts": list(job["nodes"]), "seconds": result["seconds"]}
    if why := failure(result):
        code, cause, cure = explain(result)
        words = f"{job['title']}: {why}"
        yield Check(job["id"], RED, words, **common, code=code, cause=cause, cure=cure, log=result["said"])
        return
    first = ranks[0]
    if job["group"] == "training":
        yield _bar(f"{job['id']}.accuracy", result["accuracy"], bars.accuracy, f"{job['title']}: accuracy", common)
    else:
        yield Check(job["id"], GREEN, f"{job['title']}: a rank on each of {', '.join(job['nodes'])}", **common)
    if job["group"] == "mpi" and first.keys() >= MEASURED and all(first[what] for what in MEASURED):
        yield from _messages(first, bars, common)
    if job["group"] == "speed":
        yield from _training_speed(result["rounds"], bars, common)


def _bar(name: str, value: float, bar: float, words: str, common: Mapping[str, Any]) -> Check:
    check = Check(name, GREEN, words, round(value, 4), bar, **common)
    if value < bar:
        told = _told(causes()["below-threshold"], [], seen=f"{value:.3f} is below {bar}")
        check.status, (check.code, check.cause, check.cure) = RED, told
    return check


def _messages(first: Result, bars: Bars, common: Mapping[str, Any]) -> Iterator[Check]:
    """How fast messages are over MPI, compared with plain TCP."""
    quiet, rounds = first.get("quiet", 0), first.get("rounds", 0)
    busy = f"processors were busy with other programs in {rounds - quiet} of {rounds} rounds" * (quiet < ENOUGH)
    mine, theirs = first["bandwidth_mbs"], first["tcp_mbs"]
    words = f"MPI {mine:.0f} MB/s, TCP {theirs:.0f} MB/s: ratio"
    yield _pace("mpi.bandwidth", [mine / theirs], bars.mpi_bandwidth, words, busy, common)
    mine, theirs = first["latency_us"], first["tcp_latency_us"]
    words = f"TCP {theirs:.0f} µs, MPI {mine:.0f} µs: ratio"
    yield _pace("mpi.latency", [theirs / mine], bars.mpi_latency, words, busy, common)


def _training_speed(rounds: Sequence[Result], bars: Bars, common: Mapping[str, Any]) -> Iterator[Check]:
    """How fast all workers train together, compared with each by itself, and with torch.distributed."""
    quiet = [one for one in rounds if one["quiet"]]
    busy = ""
    if len(quiet) < ENOUGH and rounds:
        worst = max(rounds, key=lambda one: float(one["others"]))
        busy = (
            f"processors were busy with other programs in {len(rounds) - len(quiet)} of {len(rounds)} rounds, "
            f"up to {worst['others']:.1f} of them on {worst['where']}"
        )
    for check, other, bar, what in (
        ("efficiency", "alone", bars.efficiency, "of each by itself"),
        ("yardstick", "ddp", bars.yardstick, "with torch.distributed"),
    ):
        usable = [one for one in quiet or rounds if one[other]]
        if usable:
            mine, theirs = (statistics.median(one[way] for one in usable) for way in ("horovod", other))
            words = f"{mine:.0f} images/s of all workers with Horovod, {theirs:.0f} {what}: ratio"
            yield _pace(f"speed.{check}", [one["horovod"] / one[other] for one in usable], bar, words, busy, common)


def _pace(name: str, ratios: Sequence[float], bar: float, words: str, busy: str, common: Mapping[str, Any]) -> Check:
    """Counts only where the nodes had nothing else to do, and is slow only where the rounds agree on it."""
    ordered = sorted(ratios)
    value, second_best = statistics.median(ordered), ordered[-2:][0]
    check = Check(name, GREEN, words, round(value, 4), bar, **common)
    if busy or value < bar <= second_best:
        why = busy or f"the rounds differ too much, from {ordered[0]:.2f} to {ordered[-1]:.2f}"
        check.status, check.words = NOT_MEASURED, f"{why}; {words}"
    elif value < bar:
        check.status, (check.code, check.cause, check.cure) = (
            SLOW,
            _told(causes()["too-slow"], [], seen=f"{value:.3f}, and {bar} is expected"),
        )
    return check


def _pair(results: Mapping[str, Result], one: str, other: str) -> tuple[Result, Result] | None:
    found = [results[name] for name in (one, other) if name in results and not failure(results[name])]
    return (found[0], found[1]) if len(found) == 2 else None


def _parity(results: Mapping[str, Result], bars: Bars) -> Iterator[Check]:
    for name in sorted({name.split(".")[1] for name in results if name.startswith("parity.")}):
        if pair := _pair(results, f"parity.{name}.one", f"parity.{name}.all"):
            one, other = (float(result["loss"]) for result in pair)
            apart = abs(one - other) / max(abs(one), 1e-9)
            words = f"{name}: loss of 1 worker {one:.4f}, of {len(pair[1]['ranks'])} {other:.4f}, apart"
            nodes = list(pair[1]["job"]["nodes"])
            check = Check(f"parity.{name}", GREEN, words, round(apart, 6), bars.parity, nodes)
            if apart > bars.parity:
                check.status = RED
                check.code, check.cause, check.cure = _told(causes()["parity-missed"], nodes)
            yield check
