"""Validators for answers of nodes. A checked answer is rebuilt from its parts; one invalid part refuses all of it."""

import json
import math
import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line

Check = Callable[[Any], Any]
MANY = 4096


class UnfitError(FarandoleError):
    """A value is not of the expected form; says which value, and where."""


def load(text: str, longest: int) -> Mapping[str, Any]:
    """Parse a JSON object from an untrusted source."""
    if len(text) > longest:
        raise UnfitError(f"it has {len(text) >> 10} KiB")
    try:
        content = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnfitError(f"it is not JSON: {one_line(error, 100)}") from None
    if not isinstance(content, dict):
        raise UnfitError(f"it is {shown(content)}")
    return content


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def words(pattern: str) -> Check:
    """A string that fully matches a pattern."""
    form = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise UnfitError(f"is {shown(value)}")
        return value

    return check


def text(limit: int) -> Check:
    """Any string, shortened to one printable line."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise UnfitError(f"is {shown(value)}")
        return one_line(value, limit)

    return check


def whole(most: int, least: int = 0) -> Check:
    """An integer in a range."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise UnfitError(f"is {shown(value)}")
        return value

    return check


def number(value: Any) -> float:
    """A finite number from 0 to 1e15."""
    if type(value) not in (int, float) or not 0 <= value < 1e15 or not math.isfinite(value):
        raise UnfitError(f"is {shown(value)}")
    return float(value)


def yes_or_no(value: Any) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise UnfitError(f"is {shown(value)}")
    return value


def address(value: Any) -> str:
    """An IPv4 or IPv6 address without a zone, which could be any text."""
    try:
        if isinstance(value, str) and "%" not in value:
            return str(ip_address(value))
    except ValueError:
        pass
    raise UnfitError(f"is {shown(value)}, not an address")


def optional(check: Check) -> Check:
    """A value or null."""
    return lambda value: None if value is None else check(value)


def many(check: Check) -> Check:
    """A list of at most MANY values."""

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > MANY:
            more = f" of {len(value):,}, and {MANY:,} are the most" if isinstance(value, list) else ""
            raise UnfitError(f"is {shown(value)}{more}")
        return [within(f"[{place}]", check, item) for place, item in enumerate(value)]

    return checked


def few(least: int, most: int, check: Check = number) -> Check:
    """A list of so many values."""

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise UnfitError(f"is {shown(value)}")
        return [check(element) for element in value]

    return checked


def row(*checks: Check) -> Check:
    """A list with exactly these values."""

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(checks):
            raise UnfitError(f"is {shown(value)}, not {len(checks)} values")
        return [within(f"[{at}]", check, item) for at, (check, item) in enumerate(zip(checks, value, strict=True))]

    return checked


def fields(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """An object with all needed fields. With `more`, those are optional and unknown fields are dropped."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UnfitError(f"is {shown(value)}")
        wrong = needed.keys() - value.keys() if more is not None else needed.keys() ^ value.keys()
        if wrong:
            raise UnfitError(f"has missing or unknown fields: {one_line(', '.join(sorted(wrong)), 100)}")
        known = {**needed, **(more or {})}
        return {name: within(f".{name}", known[name], value[name]) for name in known if name in value}

    return checked


def named(name: Check, check: Check) -> Check:
    """A mapping with checked names and checked values."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MANY:
            raise UnfitError(f"is {shown(value)}")
        return {within(" name", name, key): within(f".{key}", check, item) for key, item in value.items()}

    return checked


def within(place: str, check: Check, value: Any) -> Any:
    """Check a value; an error says where it was found."""
    try:
        return check(value)
    except UnfitError as error:
        raise UnfitError(f"{place}{'' if str(error)[0] in '.[ ' else ' '}{error}") from None


def shown(value: Any) -> str:
    """Enough of a value to recognise it."""
    if isinstance(value, str | int | float | None):
        return one_line(repr(value[:300] if isinstance(value, str) else value), 60)
    return f"a {type(value).__name__}"
