"""The connections between all nodes as a matrix whose colours are anchored to the bar."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from farandole.links.judge import slow_nodes

# Less than this share of the bar is bad, not only slow.
BAD = 0.6
# More nodes than these have no numbers in their cells, and not all of their names beside them.
NUMBERED, NAMED = 10, 32
MARKS = {"slow": "▲", "bad": "✕", "closed": "✕"}
SIGNS = {"good": "good", "slow": "below the bar", "bad": "far below the bar", "closed": "nothing gets through"}


@dataclass(frozen=True)
class Cell:
    """One connection, or several beside each other that are alike."""

    kind: str
    span: int
    text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Row:
    """The connections from a node, whose label is empty where not all fit."""

    label: str
    bad: bool
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Matrix:
    """The table, and the same in words."""

    rows: Sequence[Row]
    nodes: Sequence[str]
    cells: Sequence[str]
    measured: int
    possible: int
    bar: str


def grade(rate: float | None, bar: float | None) -> str:
    """How a connection compares with its bar."""
    if rate is None:
        return "closed"
    if bar is None or rate >= bar:
        return "good"
    return "slow" if rate >= BAD * bar else "bad"


def matrix(pairs: Sequence[Sequence[Any]], names: Sequence[str]) -> Matrix:
    """Draw what was measured between nodes, and name who is below the bar."""
    grades = {(pair[0], pair[1]): grade(pair[2], pair[3]) for pair in pairs}
    rates = {(pair[0], pair[1]): pair[2] for pair in pairs}
    poor = {way for way, level in grades.items() if level != "good"}
    pairs_of = {tuple(sorted(way)) for way in grades}
    bad = [*slow_nodes({tuple(sorted(way)) for way in poor}, pairs_of, names)]
    single = [pair for pair in pairs if (pair[0], pair[1]) in poor and not {pair[0], pair[1]} & {*bad}]
    bars = sorted({pair[3] for pair in pairs if pair[3] is not None})
    return Matrix(
        [
            Row(
                name if len(names) <= NAMED or name in bad or place % 8 == 0 else "",
                name in bad,
                _cells(name, names, rates, grades),
            )
            for place, name in enumerate(names)
        ],
        [_node(name, pairs, poor) for name in bad],
        [_cell(pair) for pair in single],
        len(grades),
        len(names) * (len(names) - 1),
        " and ".join(f"{bar:,.0f}" for bar in bars[:3]),
    )


def _node(name: str, pairs: Sequence[Sequence[Any]], poor: set[tuple[str, str]]) -> str:
    mine = [pair for pair in pairs if name in pair[:2]]
    below = [pair for pair in mine if (pair[0], pair[1]) in poor]
    fastest = max((pair[2] for pair in below if pair[2] is not None), default=None)
    seen = "nothing gets through" if fastest is None else f"at most {fastest:,.0f} MB/s"
    return f"{name}: {len(below)} of {len(mine)} connections measured are below the bar, {seen}"


def _cell(pair: Sequence[Any]) -> str:
    way = f"{pair[0]} → {pair[1]}"
    return f"{way}: nothing gets through" if pair[2] is None else f"{way}: {pair[2]:,.0f} MB/s, bar {pair[3] or 0:,.0f}"


def _cells(name: str, names: Sequence[str], rates: Any, grades: Any) -> list[Cell]:
    """A row; cells of the same kind beside each other are one where none has a number or a sign of its own."""
    cells, numbered = [], len(names) <= NUMBERED
    kinds = ("self" if name == other else grades.get((name, other), "none") for other in names)
    for kind, run in groupby(zip(kinds, names, strict=True), key=lambda cell: cell[0]):
        others = [other for _, other in run]
        if kind in ("good", "none", "self") and not numbered:
            cells.append(Cell(kind, len(others)))
            continue
        for other in others:
            rate = rates.get((name, other))
            number = "" if rate is None or not numbered else f"{rate:.0f}" if rate < 9999.5 else f"{rate / 1000:.0f}k"
            seen = f"{name} → {other}: {'' if rate is None else f'{rate:,.0f} MB/s, '}{SIGNS.get(kind, 'not measured')}"
            cells.append(Cell(kind, 1, number or MARKS.get(kind, ""), "" if kind == "self" else seen))
    return cells
