"""Rounds of pairs in which every node takes part once, by the circle method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Thing = TypeVar("Thing")


def pairs_of(things: Sequence[Thing], number: int) -> list[tuple[Thing, Thing]]:
    """One round. Among as many rounds as there are other things, every two meet once; an odd one out rests."""
    places: list[Thing | None] = [*things, *([None] if len(things) % 2 else [])]
    *circle, fixed = places
    turns = len(circle)
    met = [(fixed, circle[number % turns])]
    met += [(circle[(number + k) % turns], circle[(number - k) % turns]) for k in range(1, (turns + 1) // 2)]
    return [(one, other) for one, other in met if one is not None and other is not None]


def chosen_rounds(number: int) -> list[int]:
    """The rounds that tell a bad node from a bad link: three at distances 1, 2, 4, or all if there are fewer."""
    rounds = number - 1 if number % 2 == 0 else number
    return list(dict.fromkeys([*(distance % rounds for distance in (1, 2, 4)), *range(rounds)]))[:3]
