"""The connections between all nodes as a matrix whose colours are anchored to the bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape

from farandole.links.judge import slow_nodes

# Less than this share of the bar is bad, not only slow.
BAD = 0.6
# More nodes than these have no numbers in their cells, and not all of their names beside them.
NUMBERED, NAMED = 10, 32
SIGNS = {"good": "good", "slow": "below the bar", "bad": "far below the bar", "closed": "nothing gets through"}


@dataclass(frozen=True)
class Matrix:
    """The picture, and the same in words."""

    svg: Markup
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
    grades = {(one[0], one[1]): grade(one[2], one[3]) for one in pairs}
    rates = {(one[0], one[1]): one[2] for one in pairs}
    poor = {way for way, found in grades.items() if found != "good"}
    pairs_of = {tuple(sorted(way)) for way in grades}
    bad = [*slow_nodes({tuple(sorted(way)) for way in poor}, pairs_of, names)]
    single = [one for one in pairs if (one[0], one[1]) in poor and not {one[0], one[1]} & {*bad}]
    bars = sorted({one[3] for one in pairs if one[3] is not None})
    return Matrix(
        _svg(grades, rates, names, bad),
        [_node(name, pairs, poor) for name in bad],
        [_cell(one) for one in single],
        len(grades),
        len(names) * (len(names) - 1),
        " and ".join(f"{one:,.0f}" for one in bars[:3]),
    )


def _node(name: str, pairs: Sequence[Sequence[Any]], poor: set[tuple[str, str]]) -> str:
    mine = [one for one in pairs if name in one[:2]]
    below = [one for one in mine if (one[0], one[1]) in poor]
    fastest = max((one[2] for one in below if one[2] is not None), default=None)
    seen = "nothing gets through" if fastest is None else f"at most {fastest:,.0f} MB/s"
    return f"{name}: {len(below)} of {len(mine)} connections measured are below the bar, {seen}"


def _cell(pair: Sequence[Any]) -> str:
    way = f"{pair[0]} → {pair[1]}"
    return f"{way}: nothing gets through" if pair[2] is None else f"{way}: {pair[2]:,.0f} MB/s, bar {pair[3] or 0:,.0f}"


def _svg(grades: Any, rates: Any, names: Sequence[str], bad: Sequence[str]) -> Markup:
    size = 34 if len(names) <= NUMBERED else 20 if len(names) <= NAMED else 12
    # Names of 20 characters fit; longer ones are cut, and whole in the titles.
    left = 26 + 7.5 * min(18, max(map(len, names), default=0))
    top, side = left, size * len(names)
    wide, high = left + side + 4, top + side + 4
    parts = [
        f'<svg class="matrix" viewBox="0 0 {wide} {high}" role="img" style="max-width:{wide}px" '
        'aria-label="connections from each node (row) to each other (column)">'
    ]
    for place, name in enumerate(names):
        if len(names) <= NAMED or name in bad or place % 8 == 0:
            parts += _heads(name, place, left, top, size, name in bad)
        row = [(_grade(name, other, grades), other) for other in names]
        for found, run in groupby(enumerate(row), key=lambda one: one[1][0]):
            parts += _cells(
                found,
                [(at, other) for at, (_, other) in run],
                name,
                place,
                rates,
                left,
                top,
                size,
                len(names) <= NUMBERED,
            )
    for name in bad:
        place = names.index(name) * size
        parts.append(f'<rect class="ring" x="{left}" y="{top + place}" width="{side}" height="{size}"/>')
        parts.append(f'<rect class="ring" x="{left + place}" y="{top}" width="{size}" height="{side}"/>')
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704, its parts are escaped


def _grade(name: str, other: str, grades: Any) -> str:
    return "self" if name == other else grades.get((name, other), "none")


def _heads(name: str, place: int, left: float, top: float, size: int, bad: bool) -> list[str]:
    """The name beside the row and, turned, above the column; a bad node's has a mark and a colour."""
    words = escape(("✕ " if bad else "") + (name if len(name) <= 18 else f"{name[:17]}…"))
    style, middle = "head bad-head" if bad else "head", place * size + size / 2
    return [
        f'<text class="{style}" x="{left - 5}" y="{top + middle + 4}" text-anchor="end">{words}</text>',
        f'<text class="{style}" transform="translate({left + middle + 4} {top - 5}) rotate(-90)">{words}</text>',
    ]


def _cells(
    grade: str, run: Sequence[tuple[int, str]], name: str, place: int, rates: Any, left: float, top: float, size: int,
    numbered: bool,
) -> list[str]:  # fmt: skip
    """Cells of the same kind beside each other; single ones where each has a number or a sign of its own."""
    if grade in ("good", "none", "self") and not numbered:
        across, wide = left + run[0][0] * size, len(run) * size
        return [
            f'<rect class="cell {grade}" x="{across}" y="{top + place * size}" width="{wide - 1}" height="{size - 1}"/>'
        ]
    parts = []
    for at, other in run:
        x, y = left + at * size, top + place * size
        rate = rates.get((name, other))
        seen = "not measured" if grade == "none" else "" if grade == "self" else SIGNS[grade]
        title = f"{name} → {other}: {'' if rate is None else f'{rate:,.0f} MB/s, '}{seen}"
        hint = "" if grade == "self" else f"<title>{escape(title)}</title>"
        parts.append(f'<rect class="cell {grade}" x="{x}" y="{y}" width="{size - 1}" height="{size - 1}">{hint}</rect>')
        if numbered and rate is not None:
            words = f"{rate:.0f}" if rate < 9999.5 else f"{rate / 1000:.0f}k"
            parts.append(f'<text class="rate {grade}" x="{x + size / 2 - 0.5}" y="{y + size / 2 + 3.5}">{words}</text>')
        elif grade in ("bad", "closed"):
            low, far = 0.3 * size, 0.4 * size - 1
            path = f"M{x + low:.1f} {y + low:.1f}l{far:.1f} {far:.1f}m{-far:.1f} 0l{far:.1f} {-far:.1f}"
            parts.append(f'<path class="sign {grade}" d="{path}"/>')
        elif grade == "slow":
            parts.append(
                f'<path class="sign slow" d="M{x + 0.3 * size:.1f} {y + size / 2 - 0.5:.1f}h{0.4 * size - 1:.1f}"/>'
            )
    return parts
