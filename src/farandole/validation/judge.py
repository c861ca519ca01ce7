"""What the jobs said, held against the bars."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GREEN, SLOW, RED, NOT_MEASURED = "green", "slow", "red", "not measured"
Result = Mapping[str, Any]

# Fewer quiet rounds than this say nothing about speed.
ENOUGH = 5
# Without this there is nothing to judge, by group.
TELLS: Mapping[str, tuple[str, ...]] = {"training": ("accuracy",), "parity": ("loss",), "speed": ("rounds",)}
MEASURED = {"bandwidth_mbs", "tcp_mbs", "latency_us", "tcp_latency_us"}

# What a probe finds by itself, by its code, and what mends it; what it saw are a node's words, and enter no command.
FOUND: Mapping[str, str] = {
    "ranks-missing": "launch it with /usr/local/bin/horovodrun or /usr/local/bin/mpirun, and give -np",
    "machines-missing": "correct -H; playbooks/preflight.yml tells what mends two hosts with one /etc/machine-id",
    "nodes-differ": "run site.yml for all nodes",
    "wrong-values": "run site.yml for all nodes; if it stays, test memory and network of the host that is named",
    "network-unset": "launch it with /usr/local/bin/mpirun",
    "network-unfit": "run site.yml for all nodes",
    "port-unreachable": "let the nodes' firewall pass all ports between them",
}
# What a job's last words mean for sure, and what mends it; the first that fits counts.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not resolve hostname (\S+?):",
        "no node is called {0}",
        "correct the name; /etc/farandole/hostfile lists the nodes",
    ),
    (
        r"ssh not successful for host (\S+?):?$",
        "{0} does not answer to ssh",
        "start or reconnect {0}; playbooks/preflight.yml says more",
    ),
    (
        r"([\w.-]+): (\S+) (?:is damaged|is not there|is no IDX file)",
        "the data {1} on {0} is damaged or missing",
        "site.yml brings it again",
    ),
    (
        r"([\w.-]+): (\S+) cannot be written, 0 MiB are free",
        "the disk of {0} is full: {1} cannot be written",
        "make room there; the checkpoints before it are whole",
    ),
    (
        r"No space left on device",
        "a disk is full",
        "make room on the node that says so",
    ),
    (
        r"not enough slots|Requested more processes|more processes \(\d+\) than",
        "more workers are asked for than there are slots",
        "lower -np, or name more hosts",
    ),
)
# What is worth saying where nothing better is known.
SIGNS: tuple[tuple[str, str, str], ...] = (
    (
        r"terminated with signal (\d+)|exited on signal (\d+)",
        "a worker was ended by signal {0}",
        "look for what ended it, for instance: journalctl -k | grep -i oom",
    ),
    (r"Missing ranks|stalled", "a worker does not take part any more", "look at that worker's node"),
    (
        r"ORTE has lost communication|Connection reset by peer|Connection closed by|socket closed",
        "a node was lost in the middle",
        "start or reconnect it, and run again",
    ),
)


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
    cause: str = ""
    cure: str = ""
    log: list[str] = field(default_factory=list)


def judge(results: Mapping[str, Result], bars: Bars) -> list[Check]:
    """Every job by itself, then what needs several of them."""
    checks = [check for result in results.values() for check in _of_job(result, bars)]
    return [*checks, *_parity(results, bars)]


def explain(result: Result) -> tuple[str, str]:
    """Cause and cure of a failure: what a rank found, the job said for sure, else who is silent, hangs, fell."""
    said, nodes = result["said"], result["job"]["nodes"]
    for one in complaints(result):
        if cure := FOUND.get(one["code"]):
            return one["seen"], cure
    if told := _told(said, CAUSES, nodes):
        return told
    left = {host: names for host, names in result["left"].items() if names}
    if silent := ", ".join(host for host, names in left.items() if names == ["no answer"]):
        return f"{silent} does not answer any more", f"start or reconnect {silent}, and run again"
    if result["code"] is None:
        where = "".join(f"; {', '.join(names)} still ran on {host}, and was ended" for host, names in left.items())
        cure = "HOROVOD_STALL_CHECK_TIME_SECONDS=10 before the command makes Horovod say who is missing"
        return f"a worker hangs, or waits for one that does{where}", cure
    if fallen := _fallen(said):
        rank, words = fallen
        host = nodes[rank] if rank < len(nodes) else "a node"
        return f"worker {rank} on {host} ended: {words}", "mend what it says; if it is the stack's fault, site.yml does"
    return _told(said, SIGNS, nodes) or (
        "the job says above why",
        "run it by hand as the job user; if it is the stack's fault, site.yml mends it",
    )


def _told(lines: Sequence[str], known: Sequence[tuple[str, str, str]], nodes: Sequence[str]) -> tuple[str, str] | None:
    """What a line of the log means; what to do names nodes of the inventory alone, whatever stands in the log."""
    for pattern, cause, cure in known:
        for line in lines:
            if found := re.search(pattern, line):
                told = [text or "" for text in found.groups()]
                return cause.format(*told), cure.format(*(word if word in nodes else "that node" for word in told))
    return None


def _fallen(lines: Sequence[str]) -> tuple[int, str] | None:
    """The first worker that ended for a reason of its own, and its last words; the others only miss it."""
    words: dict[int, str] = {}
    missing = set()
    for line in lines:
        if found := re.match(r"\[(?:\d+,)?(\d+)\]<stderr>: *(.*\S)", line):
            rank = int(found[1])
            if re.search(r"HorovodInternalError|Horovod has been shut down", line):
                missing.add(rank)
            elif "btl_tcp" not in line:
                words[rank] = found[2][:200]
    return next(((rank, words[rank]) for rank in sorted(words) if rank not in missing), None)


def complaints(result: Result) -> list[Mapping[str, str]]:
    """What its ranks found wrong by themselves."""
    return [one for rank in result["ranks"] for one in rank.get("wrong", ())]


def failure(result: Result) -> str:
    """Why a job does not count; empty when it does."""
    job = result["job"]
    ranks, wanted = result["ranks"], len(job["nodes"])
    if result["code"] is None:
        return f"was ended after {job['seconds']} s"
    if wrong := complaints(result):
        return "; ".join(dict.fromkeys(one["seen"] for one in wrong))
    if result["code"]:
        return f"ended with status {result['code']}"
    if len(ranks) != wanted:
        return f"{len(ranks)} of {wanted} workers reported"
    if any(rank["size"] != wanted for rank in ranks):
        return f"was not one job of {wanted} workers but several"
    if (machines := len({rank["machine"] for rank in ranks})) != wanted:
        return f"ran on {machines} of {wanted} machines"
    for what in ("stack", "python", "weights"):
        if len({rank.get(what) for rank in ranks}) > 1:
            return f"not the same {what} on {' and '.join(rank['host'] for rank in ranks)}"
    if left := {host: names for host, names in result["left"].items() if names}:
        return f"left processes behind: {left}"
    untold = [what for what in TELLS.get(job["group"], ()) if what not in result]
    return f"did not tell its {' and '.join(untold)}" if untold else ""


def _of_job(result: Result, bars: Bars) -> Iterator[Check]:
    job, ranks = result["job"], result["ranks"]
    common: dict[str, Any] = {"hosts": list(job["nodes"]), "seconds": result["seconds"]}
    if why := failure(result):
        cause, cure = explain(result)
        yield Check(job["id"], RED, f"{job['title']}: {why}", **common, cause=cause, cure=cure, log=result["said"])
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
        check.status, check.cause = RED, f"{value:.3f} is below {bar}"
        check.cure = "run it again; then compare with the report of a good run"
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
        check.status, check.cause = SLOW, f"{value:.3f} is below {bar}, although no other program disturbed the nodes"
        check.cure = "run site.yml for all nodes, which restores what was changed; then check the network between them"
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
                check.status, check.cause = RED, "the workers together do not compute the steps that one computes"
                check.cure = "compare what the nodes run: farandole stack list -i INVENTORY"
            yield check
