"""The form that an answer must have. It is taken apart and made anew; what does not fit is refused as a whole."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any

from farandole.errors import FarandoleError
from farandole.words import one_line

Check = Callable[[Any], Any]
MANY = 4096


class UnfitError(FarandoleError):
    """What does not fit, and where it stands."""


def load(text: str, longest: int) -> Mapping[str, Any]:
    """An object out of JSON, whoever wrote it."""
    if len(text) > longest:
        raise UnfitError(f"it is of {len(text) >> 10} KiB")
    try:
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnfitError(f"it is no JSON: {one_line(error, 100)}") from None
    if not isinstance(found, dict):
        raise UnfitError(f"it is {shown(found)}")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def words(pattern: str) -> Check:
    """A text that is wholly of this form."""
    form = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise UnfitError(f"is {shown(value)}")
        return value

    return check


def text(limit: int) -> Check:
    """Any, as one line to be shown."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise UnfitError(f"is {shown(value)}")
        return one_line(value, limit)

    return check


def whole(most: int, least: int = 0) -> Check:
    """A number without a fraction."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise UnfitError(f"is {shown(value)}")
        return value

    return check


def number(value: Any) -> float:
    """From 0 on, and of a size that can be measured."""
    if type(value) not in (int, float) or not 0 <= value < 1e15 or not math.isfinite(value):
        raise UnfitError(f"is {shown(value)}")
    return float(value)


def yes_or_no(value: Any) -> bool:
    """As it says."""
    if not isinstance(value, bool):
        raise UnfitError(f"is {shown(value)}")
    return value


def address(value: Any) -> str:
    """Of IPv4 or IPv6; a zone after % could be any text."""
    try:
        if isinstance(value, str) and "%" not in value:
            return str(ip_address(value))
    except ValueError:
        pass
    raise UnfitError(f"is {shown(value)}, no address")


def optional(check: Check) -> Check:
    """Or nothing."""
    return lambda value: None if value is None else check(value)


def many(check: Check) -> Check:
    """A list, of no more than there can be."""

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > MANY:
            raise UnfitError(f"is {shown(value)}")
        return [within(f"[{place}]", check, one) for place, one in enumerate(value)]

    return checked


def fields(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """All that are needed and, if any more are told of, those of them that are there; without, just the needed ones."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UnfitError(f"is {shown(value)}")
        wrong = needed.keys() - value.keys() if more is not None else needed.keys() ^ value.keys()
        if wrong:
            raise UnfitError(f"has too much or too little: {one_line(', '.join(sorted(wrong)), 100)}")
        known = {**needed, **(more or {})}
        return {name: within(f".{name}", known[name], value[name]) for name in known if name in value}

    return checked


def named(name: Check, check: Check) -> Check:
    """As many as there are, by names of a form."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MANY:
            raise UnfitError(f"is {shown(value)}")
        return {within(" name", name, key): within(f".{key}", check, one) for key, one in value.items()}

    return checked


def within(place: str, check: Check, value: Any) -> Any:
    """The value checked; a complaint tells where it stood."""
    try:
        return check(value)
    except UnfitError as error:
        raise UnfitError(f"{place}{'' if str(error)[0] in '.[ ' else ' '}{error}") from None


def shown(value: Any) -> str:
    """Enough of a value to see what it is."""
    if isinstance(value, str | int | float | None):
        return one_line(repr(value[:300] if isinstance(value, str) else value), 60)
    return f"a {type(value).__name__}"
