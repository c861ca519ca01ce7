"""What the ranks of a training have said, and whether they trained together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from farandole.node.caffe.options import plain
from farandole.node.caffe.plan import Plan
from farandole.node.caffe.probe import LIBRARY_CURE
from farandole.node.caffe.solver import Solver

LINE = re.compile(r"\[(\d+)\] ?(.*)")
PLACE = re.compile(r"rank of caffe\.sh on (\S+) machine (\S+)")
BEGUN = "Starting Multi-node Optimization in MLSL environment"
DONE = "Optimization Done."
TELLING = re.compile(
    r"Check failed|srun: error|error while loading|Segmentation fault|Killed|No space left|out of memory"
)
# How the launcher names a rank that has ended too early.
LOST = re.compile(r"PID \d+ RUNNING AT (\S+)")
CURES = {
    "SerializeToOstream": "the snapshot could not be written: look at the folder of snapshot_prefix and its disk",
    "No space left": "the disk is full: free some space there",
    "cannot open shared object": LIBRARY_CURE,
    "Killed": "look at its memory: `journalctl -k` there says whether the kernel ended it",
    "": "the lines above it say more",
}


class Log:
    """The lines of a log that count."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.seen: dict[str, Counter[int | None]] = {BEGUN: Counter(), DONE: Counter()}
        self.machines: dict[int | None, tuple[str, str]] = {}
        self.tested: dict[str, str] = {}
        self.telling: list[str] = []
        self.lost, self.failed = "", False

    def read(self, line: str) -> None:
        found = LINE.match(line)
        rank, text = (int(found[1]), found[2]) if found else (None, line)
        if place := PLACE.search(text):
            self.machines[rank] = (plain(place[1], 80), plain(place[2], 40))
        elif size := re.search(r"group size: (\d+)", text):
            self.sizes.add(int(size[1]))
        elif mark := next((line for line in self.seen if line in text), ""):
            self.seen[mark][rank] += 1
        elif output := re.search(r"Test net output #\d+: (\S+) = (\S+)", text):
            self.tested[plain(output[1], 40)] = plain(output[2], 40)
        elif lost := LOST.search(text):
            self.lost = plain(lost[1], 80)
        elif TELLING.search(text):
            self.failed = self.failed or "Check failed" in text
            cure = next(cure for part, cure in CURES.items() if part in text)
            who = "the launcher" if rank is None else self.where(rank)
            self.telling.append(f"{who} said: {plain(text)}. Cure: {cure}")

    def where(self, rank: int) -> str:
        return f"rank {rank} on {self.machines[rank][0]}" if rank in self.machines else f"rank {rank}"


def judge(log: Log, plan: Plan, solver: Solver, model: bool, ended: list[str]) -> list[str]:
    """Why a training has failed; empty if it succeeded. `ended` says why its launcher or we ended it, if so."""
    missing = [*wrong_machines(log, plan), *wrong_lines(log, plan, solver)]
    if not missing and not model:
        missing = [f"{plan.nodes[0]}: the model {solver.model} was not written by this training"]
    if not (ended or missing):
        # Then a line that looks bad was not.
        return []
    lost = (
        f"{log.lost}: a rank ended before the training was over. Cure: its last lines in the log say why, or "
        "`journalctl -k` there, if the kernel ended it"
    )
    return [*ended, *log.telling[:5], *([lost] if log.lost else []), *missing]


def wrong_lines(log: Log, plan: Plan, solver: Solver) -> Iterator[str]:
    """The lines that are missing; those that come later only if nothing before them is."""
    if not log.sizes:
        yield f"there is no line `group size: {plan.ranks}`: the training did not begin"
        return
    if log.sizes != {plan.ranks}:
        seen = ", ".join(map(str, sorted(log.sizes)))
        yield (
            f"group size: {plan.ranks} is wanted, the log has {seen}. Each rank has trained alone, or only with some "
            f"others: {plan.launcher} does not belong to the MPI of caffe, or the ranks could not find each other"
        )
    for text, count in log.seen.items():
        silent = [log.where(rank) for rank in range(plan.ranks) if not count[rank]]
        if silent or sum(count.values()) != plan.ranks:
            where = f": not from {', '.join(silent[:5])}" if silent else ""
            yield f"`{text}` is there {sum(count.values())} times, wanted {plan.ranks}{where}"
            return
    numbers = [value for value in log.tested.values() if re.fullmatch(r"-?[0-9.]+(e[+-]?\d+)?", value)]
    if solver.tests and (not numbers or len(numbers) < len(log.tested)):
        shown = ", ".join(f"{name} = {value}" for name, value in log.tested.items()) or "none"
        yield f"the solver tests the net, but not every `Test net output` is a number: {shown}"


def wrong_machines(log: Log, plan: Plan) -> Iterator[str]:
    """Whether every rank has run, and on as many machines as there are nodes."""
    machines = {machine for _, machine in log.machines.values()}
    if len(log.machines) != plan.ranks:
        lost = [str(rank) for rank in range(plan.ranks) if rank not in log.machines]
        yield f"{len(log.machines)} ranks were started, wanted {plan.ranks}: not {', '.join(lost[:5])}"
    elif len(machines) != len(plan.nodes):
        seen = ", ".join(sorted({host for host, _ in log.machines.values()}))
        yield f"the ranks ran on {len(machines)} machines ({seen}), wanted {len(plan.nodes)}: {', '.join(plan.nodes)}"
