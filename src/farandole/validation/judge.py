"""Judge the results of the jobs against the thresholds."""

import math
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from farandole.core.causes import causes, excused
from farandole.core.findings import some
from farandole.explain.diagnosis import of_job

GREEN, SLOW, RED, NOT_MEASURED = "green", "slow", "red", "not measured"
Result = Mapping[str, Any]
Explanation = tuple[str, str, str]  # code, cause, cure

# With fewer quiet rounds than this, speed is not judged.
ENOUGH = 5
# What a job of a group has to report.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "training": ("accuracy",),
    "parity": ("loss",),
    "network": ("alone_ms", "together_ms", "gradients_mb"),
    "speed": ("rounds",),
}
MEASURED = {"bandwidth_mbs", "tcp_mbs", "latency_us", "tcp_latency_us"}
# How launchers mark a worker's output: its rank, then the line.
WORKER = re.compile(r"\[(?:\d+,)?(\d+)\]<stderr>: *(.*\S)")
# What the shell of a worker says that its launcher has ended, because another one had failed.
ENDED = "Terminated"


@dataclass(frozen=True)
class Bars:
    """Pass thresholds for measured values, described in meta/argument_specs.yml of role validation."""

    accuracy: float = 0.95
    parity: float = 0.01
    mpi_bandwidth: float = 0.4
    mpi_latency: float = 0.4
    efficiency: float = 0.8
    yardstick: float = 0.9
    pace: float = 0.5

    @classmethod
    def changed(cls, changes: Mapping[str, float | None] | None) -> Self:
        """The thresholds of an inventory, which sets only those that differ."""
        return cls(**{name: float(value) for name, value in (changes or {}).items() if value is not None})


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
    # Where the middle half of the rounds lies.
    spread: list[float] | None = None

    def explain(self, why: Explanation) -> Self:
        """Give it its cause and its cure."""
        self.code, self.cause, self.cure = why
        return self


def judge(results: Mapping[str, Result], bars: Bars, inventory: str = "inventory") -> list[Check]:
    """Judge every job by itself, then compare those that belong together."""
    checks = [check for result in results.values() for check in _of_job(result, bars)]
    for result in results.values():
        if not failure(result):
            checks += _pace(result, bars.pace, inventory)
    return [*checks, *_parity(results, bars)]


def explain(result: Result) -> Explanation:
    """Explain a failed job.

    In this order: what a rank found wrong itself, a root cause in the log, a node that stopped responding, a job that
    hangs, the first worker that failed, a cascade in the log.
    """
    nodes = result["job"]["nodes"]
    if why := result.get("unusable"):
        return explanation("report-unusable", nodes, seen=why)
    if result["wrong"]:
        first = result["wrong"][0]
        return explanation(first["code"], nodes, host=first["host"], seen=first["seen"])
    return (
        _recognized(result, cascade=False)
        or _unresponsive(result)
        or _hanging(result)
        or _first_failure(result)
        or _recognized(result, cascade=True)
        or explanation("job-failed", nodes)
    )


def explanation(code: str, nodes: Sequence[str], inventory: str = "", **fields: str) -> Explanation:
    """A cure names only nodes of the inventory, whatever a log contains."""
    cause, host = causes()[code], fields.get("host", "")
    there = {"host": shlex.quote(host) if host in nodes else "that node", "inventory": shlex.quote(inventory)}
    return code, cause.description(fields), cause.remedy(there)


def _recognized(result: Result, *, cascade: bool) -> Explanation | None:
    nodes, verdict = result["job"]["nodes"], of_job(result["said"])
    for hit in verdict.cascades[-1:] if cascade else verdict.roots[:1]:
        host = nodes[hit.rank] if hit.rank is not None and hit.rank < len(nodes) else hit.host
        code, message, cure = explanation(hit.cause.code, nodes, **{"host": host, **hit.fields})
        return code, f"on {host}: {message}" if hit.cause.seen == "log" and host in nodes else message, cure
    return None


def _unresponsive(result: Result) -> Explanation | None:
    silent = [host for host in _silent(result) if host in result["job"]["nodes"]]
    cause = causes()["node-silent"]
    cure = cause.remedy({"host": ", ".join(map(shlex.quote, silent))})
    return (cause.code, cause.description({"seen": ", ".join(silent)}), cure) if silent else None


def _silent(result: Result) -> list[str]:
    """The nodes that no longer answered after the job."""
    return [host for host, names in result["left"].items() if names is None]


def _hanging(result: Result) -> Explanation | None:
    """Also explains what is wrong with a job that exited with 0."""
    nodes = result["job"]["nodes"]
    code, seen = _fault(result)
    if code == "job-hangs":
        left = {host: names for host, names in result["left"].items() if names}
        seen = "".join(f"; {', '.join(names)} still ran on {host} and was killed" for host, names in left.items())
        code = "mpi-hangs" if result["job"]["group"] == "mpi" else code
    return explanation(code, nodes, seen=seen) if code != "job-failed" else None


def _first_failure(result: Result) -> Explanation | None:
    """The first worker that failed for a reason of its own, with its last line; the others only lost contact."""
    nodes = result["job"]["nodes"]
    last_lines: dict[int, str] = {}
    victims, ended = set(), set()
    for line in result["said"]:
        if match := WORKER.match(line):
            rank = int(match[1])
            if excused("worker", line):
                victims.add(rank)
            elif match[2] == ENDED:
                ended.add(rank)
                last_lines.setdefault(rank, ENDED)
            elif not excused("line", line):
                last_lines[rank] = match[2] if len(match[2]) <= 200 else f"{match[2][:199]}…"
    # The launcher ends those that have not failed, and some that have.
    failed = min(last_lines.keys() - victims, key=lambda rank: (rank in ended, rank), default=None)
    if failed is None:
        return None
    host = nodes[failed] if failed < len(nodes) else "a node"
    return explanation("worker-failed", nodes, rank=str(failed), host=host, seen=last_lines[failed])


def failure(result: Result) -> str:
    """Why a job counts as failed; empty if it does not."""
    return _fault(result)[1]


def _fault(result: Result) -> tuple[str, str]:
    """Why a job counts as failed, as a code and in words; both empty if it does not."""
    job = result["job"]
    ranks, wanted = result["ranks"], len(job["nodes"])
    if "unusable" in result:
        return "report-unusable", "gave no usable report"
    if result["code"] is None:
        return "job-hangs", f"was killed after {job['seconds']} s"
    if result["wrong"]:
        return "job-failed", "; ".join(dict.fromkeys(error["seen"] for error in result["wrong"]))
    if result["code"]:
        return "job-failed", f"ended with status {result['code']}"
    if len(ranks) != wanted:
        return "ranks-missing", f"{len(ranks)} of {wanted} workers reported"
    if any(rank["size"] != wanted for rank in ranks):
        return "ranks-missing", f"was not one job of {wanted} workers but several jobs"
    if (numbers := sorted(rank["rank"] for rank in ranks)) != [*range(wanted)]:
        return "ranks-missing", f"has workers {', '.join(map(str, numbers))} instead of 0 to {wanted - 1}"
    if (machines := len({rank["machine"] for rank in ranks})) != wanted:
        return "machines-missing", f"ran on {machines} of {wanted} machines"
    return _difference(result) or _incomplete(result) or ("", "")


def _difference(result: Result) -> tuple[str, str] | None:
    """What is not the same on all ranks."""
    ranks = result["ranks"]
    for key in ("stack", "python", "weights"):
        if len({rank.get(key) for rank in ranks}) > 1:
            code = "wrong-values" if key == "weights" else "nodes-differ"
            return code, f"not the same {key} on {' and '.join(rank['host'] for rank in ranks)}"
    return None


def _incomplete(result: Result) -> tuple[str, str] | None:
    """Processes that an otherwise successful job left or may have left behind, or results that it did not report."""
    if silent := _silent(result):
        return "node-silent", f"could not be checked for processes that it left behind on {' and '.join(silent)}"
    if left := {host: names for host, names in result["left"].items() if names}:
        return "processes-left", f"left processes behind: {left}"
    missing = [key for key in REQUIRED.get(result["job"]["group"], ()) if key not in result]
    return ("result-missing", f"did not report its {' and '.join(missing)}") if missing else None


def _of_job(result: Result, bars: Bars) -> Iterator[Check]:
    job, ranks = result["job"], result["ranks"]
    common: dict[str, Any] = {"hosts": list(job["nodes"]), "seconds": result["seconds"]}
    if why := failure(result):
        check = Check(job["id"], RED, f"{job['title']}: {why}", **common, log=result["said"])
        yield check.explain(explain(result))
        return
    first = ranks[0]
    if job["group"] == "training":
        yield _bar(f"{job['id']}.accuracy", result["accuracy"], bars.accuracy, f"{job['title']}: accuracy", common)
    else:
        yield Check(job["id"], GREEN, f"{job['title']}: a rank on each of {', '.join(job['nodes'])}", **common)
    if job["group"] == "mpi" and first.keys() >= MEASURED and all(first[key] for key in MEASURED):
        yield from _messages(first, bars, common)
    if "rdma" in first:
        yield _remote_memory(first["rdma"], job["nodes"], common)
    if job["group"] == "network" and all(result[key] for key in REQUIRED["network"]):
        alone, together = result["alone_ms"], result["together_ms"]
        summary = f"a step takes {alone:.0f} ms alone and {together:.0f} ms on all workers: ratio"
        took = [step for step in result.get("steps_ms", {}).get("together", []) if step]
        apart = spread([alone / step for step in took])
        yield Check("network.efficiency", GREEN, summary, round(alone / together, 4), spread=apart, **common)
    if job["group"] == "speed":
        yield from _training_speed(result["rounds"], bars, common)


def _pace(result: Result, bar: float, inventory: str) -> Iterator[Check]:
    """Compare how long each rank needed for a step of its own with the median of the others."""
    job, nodes = result["job"], result["job"]["nodes"]
    took = {rank["rank"]: rank["step_ms"] for rank in result["ranks"] if rank.get("step_ms")}
    if sorted(took) != [*range(len(nodes))] or len(nodes) < 2:
        return
    others = {rank: statistics.median(took[other] for other in took if other != rank) for rank in took}
    ratios = {rank: others[rank] / took[rank] for rank in sorted(took)}
    slow = [rank for rank, ratio in ratios.items() if ratio < bar]
    crowded = {rank["rank"] for rank in result["ranks"] if rank.get("crowded")}
    judged = [rank for rank in slow if rank not in crowded]
    slowest = min(judged or ratios, key=lambda rank: ratios[rank])
    summary = f"a step takes {took[slowest]:.3g} ms on {nodes[slowest]}, {others[slowest]:.3g} ms on the others: ratio"
    common: dict[str, Any] = {"hosts": list(nodes), "seconds": result["seconds"]}
    check = Check(f"{job['id']}.pace", GREEN, summary, round(ratios[slowest], 4), bar, **common)
    if judged:
        check.status, check.hosts = SLOW, [nodes[rank] for rank in judged]
        seen = "; ".join(
            f"{nodes[rank]} needs {took[rank]:.3g} ms for a step that takes {others[rank]:.3g} ms on the others"
            for rank in judged
        )
        check.explain(explanation("worker-slow", nodes, inventory, host=nodes[slowest], seen=seen))
    elif slow:
        check.status = NOT_MEASURED
        check.words = f"other programs keep all processors busy on {', '.join(nodes[r] for r in slow)}; {summary}"
    yield check


def _bar(name: str, value: float, bar: float, title: str, common: Mapping[str, Any]) -> Check:
    check = Check(name, GREEN, title, round(value, 4), bar, **common)
    if value < bar:
        check.status = RED
        check.explain(explanation("below-threshold", [], seen=f"{value:.3f} is below {bar}"))
    return check


def _messages(first: Result, bars: Bars, common: Mapping[str, Any]) -> Iterator[Check]:
    """Compare the speed of messages over MPI with plain TCP."""
    quiet, rounds = first.get("quiet", 0), first.get("rounds", 0)
    busy = f"other programs kept the processors busy in {rounds - quiet} of {rounds} rounds" * (quiet < ENOUGH)
    mine, theirs = first["bandwidth_mbs"], first["tcp_mbs"]
    summary = f"MPI {mine:.0f} MB/s, TCP {theirs:.0f} MB/s: ratio"
    yield _speed_check("mpi.bandwidth", [mine / theirs], bars.mpi_bandwidth, summary, busy, common)
    mine, theirs = first["latency_us"], first["tcp_latency_us"]
    summary = f"TCP {theirs:.0f} µs, MPI {mine:.0f} µs: ratio"
    yield _speed_check("mpi.latency", [theirs / mine], bars.mpi_latency, summary, busy, common)


def _remote_memory(seen: Result, nodes: Sequence[str], common: Mapping[str, Any]) -> Check:
    """Whether RDMA between every two nodes works, and how fast it is."""

    def named(ranks: Iterable[float]) -> str:
        return some([nodes[int(rank)] for rank in ranks if rank < len(nodes)])

    check = Check("rdma", NOT_MEASURED, "RDMA: there is only one node", **common)
    if seen["without"]:
        check.words = f"InfiniBand, RoCE: no port is active on {named(seen['without'])}"
    elif seen["toolless"]:
        needs = "base_extra_packages: [ibverbs-utils, ibverbs-providers]"
        check.words = f"InfiniBand, RoCE: ibv_rc_pingpong is missing on {named(seen['toolless'])}: {needs}"
    elif failed := seen["failed"]:
        check.status, check.words = RED, f"RDMA failed with {named(failed[0]['ranks'])}"
        # It takes part in most of what failed.
        ends = [int(rank) for one in failed for rank in one["ranks"]]
        host = nodes[statistics.mode(ends)] if max(ends) < len(nodes) else ""
        check.explain(explanation("rdma-fails", nodes, host=host, seen=failed[0]["seen"]))
    elif seen["fewer"]:
        counts = some([f"{int(count)} on {named([rank])}" for rank, count in seen["fewer"]])
        check.words = f"InfiniBand, RoCE: not every port has a partner: {counts}, {seen['most']} on the others"
    elif seen["pairs"]:
        met = f"{seen['pairs']} of {math.comb(len(nodes), 2)} pairs of nodes"
        check.status, check.words = GREEN, f"RDMA between {met}: {seen['slowest']:.0f} Mbit/s and more"
    return check


def _training_speed(rounds: Sequence[Result], bars: Bars, common: Mapping[str, Any]) -> Iterator[Check]:
    """Compare the speed of all workers together with that of each alone, and with torch.distributed."""
    quiet = [turn for turn in rounds if turn["quiet"]]
    busy = ""
    if len(quiet) < ENOUGH and rounds:
        worst = max(rounds, key=lambda turn: float(turn["others"]))
        busy = (
            f"other programs kept the processors busy in {len(rounds) - len(quiet)} of {len(rounds)} rounds, "
            f"up to {worst['others']:.1f} cores on {worst['where']}"
        )
    for check, other, bar, baseline in (
        ("efficiency", "alone", bars.efficiency, "with each alone"),
        ("yardstick", "ddp", bars.yardstick, "with torch.distributed"),
    ):
        usable = [turn for turn in quiet or rounds if turn[other]]
        if usable:
            mine, theirs = (statistics.median(turn[way] for turn in usable) for way in ("horovod", other))
            summary = f"{mine:.0f} images/s with Horovod on all workers, {theirs:.0f} {baseline}: ratio"
            yield _speed_check(
                f"speed.{check}", [turn["horovod"] / turn[other] for turn in usable], bar, summary, busy, common
            )


def spread(ratios: Sequence[float]) -> list[float] | None:
    """Where the middle half of some ratios lies; nothing if there are too few to say."""
    if len(ratios) < 4:
        return None
    low, _, high = statistics.quantiles(ratios, n=4)
    return [round(low, 4), round(high, 4)]


def _speed_check(
    name: str, ratios: Sequence[float], bar: float, seen: str, busy: str, common: Mapping[str, Any]
) -> Check:
    """Not measured unless the nodes were idle, and slow only if the rounds agree on it."""
    ordered = sorted(ratios)
    value, second_best = statistics.median(ordered), ordered[-2:][0]
    check = Check(name, GREEN, seen, round(value, 4), bar, **{"spread": spread(ratios), **common})
    if busy or value < bar <= second_best:
        why = busy or f"the rounds differ too much, from {ordered[0]:.2f} to {ordered[-1]:.2f}"
        check.status, check.words = NOT_MEASURED, f"{why}; {seen}"
    elif value < bar:
        check.status = SLOW
        check.explain(explanation("too-slow", [], seen=f"{value:.3f}, expected at least {bar}"))
    return check


def _parity(results: Mapping[str, Result], bars: Bars) -> Iterator[Check]:
    for name in sorted({name.split(".")[1] for name in results if name.startswith("parity.")}):
        alone, all_nodes = (results.get(f"parity.{name}.{which}") for which in ("one", "all"))
        if alone and all_nodes and not (failure(alone) or failure(all_nodes)):
            wanted, loss = float(alone["loss"]), float(all_nodes["loss"])
            difference = abs(wanted - loss) / max(abs(wanted), 1e-9)
            summary = f"{name}: loss with 1 worker {wanted:.4f}, with {len(all_nodes['ranks'])} {loss:.4f}, difference"
            nodes = list(all_nodes["job"]["nodes"])
            check = Check(f"parity.{name}", GREEN, summary, round(difference, 6), bars.parity, hosts=nodes)
            if difference > bars.parity:
                check.status = RED
                check.explain(explanation("parity-missed", nodes))
            yield check
