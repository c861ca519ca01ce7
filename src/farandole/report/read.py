"""Read a result.json, of which every part may be missing, wrong or hostile."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from farandole.core.errors import FarandoleError
from farandole.core.schema import (
    MANY,
    Check,
    UnfitError,
    few,
    fields,
    load,
    many,
    named,
    optional,
    shown,
    text,
    whole,
    words,
    yes_or_no,
)

FORMATS = (2, 3)
LONGEST = 1 << 26
NAME, WORDS, LINE = text(200), text(2000), text(400)
AGAIN = "run  farandole validate  again"


def real(value: Any) -> float:
    """A number of at most 1e15, and not NaN."""
    if type(value) not in (int, float) or not abs(value) <= 1e15:
        raise UnfitError(f"is {shown(value)}")
    return float(value)


def last(check: Check) -> Check:
    """A list, of which only the last MANY values are kept."""

    def checked(value: Any) -> list[Any]:
        return cast(list[Any], many(check)(value[-MANY:] if isinstance(value, list) else value))

    return checked


def pair(value: Any) -> list[Any]:
    """Source, target, MB/s, bar."""
    if not isinstance(value, list) or len(value) != 4:
        raise UnfitError(f"is {shown(value)}")
    return [*map(NAME, value[:2]), *map(optional(real), value[2:])]


def filled(needed: Mapping[str, Check], more: Mapping[str, tuple[Check, Any]]) -> Check:
    """An object with all needed fields, and with more, each of which has a value in case it is missing."""
    check = fields(needed, {name: own for name, (own, _) in more.items()})
    missing = {name: value for name, (_, value) in more.items()}
    return lambda value: {**missing, **check(value)}


def named_so(*names: str, check: Check, missing: Any) -> dict[str, tuple[Check, Any]]:
    """Several fields of one kind."""
    return dict.fromkeys(names, (check, missing))


CHECK = filled(
    {"id": NAME, "status": words("green|slow|red|not measured"), "words": WORDS},
    {
        **named_so("value", "bar", check=optional(real), missing=None),
        **named_so("code", "cause", "cure", check=WORDS, missing=""),
        "spread": (optional(few(2, 2, real)), None),
        "hosts": (many(NAME), []),
        "seconds": (real, 0.0),
        "log": (last(LINE), []),
    },
)
JOB = filled(
    {"id": NAME, "title": WORDS, "nodes": many(NAME), "begin": real, "seconds": real},
    {
        "ranks": (many(fields({"host": NAME, "rate": optional(real), "step_ms": optional(real)}, {})), []),
        "loss": (many(few(2, 2, real)), []),
        "rounds": (
            many(fields({**dict.fromkeys(("alone", "horovod", "ddp", "others"), real), "quiet": yes_or_no}, {})),
            [],
        ),
        "sizes": (many(few(2, 3, real)), []),
        "steps_ms": (fields({}, dict.fromkeys(("alone", "together"), many(real))), {}),
    },
)
HOST = filled(
    {},
    {
        **named_so("system", "kernel", "driver", "interface", check=NAME, missing=""),
        **named_so("memory_mb", "mbit", "mtu", check=optional(real), missing=None),
    },
)
FINDING = fields({"host": NAME, "code": NAME, "cause": WORDS, "cure": WORDS, "severity": words("stop|warn|note")}, {})
PREFLIGHT = filled(
    {},
    {
        **named_so("time", "network", check=NAME, missing=""),
        "findings": (many(FINDING), []),
        "hosts": (named(NAME, HOST), {}),
        "nodes": (named(NAME, fields({}, dict.fromkeys(("delay_us", "mb_per_s"), optional(real)))), {}),
        "usual_mb_per_s": (optional(real), None),
        "rates_measured": (optional(NAME), None),
        "pairs": (many(pair), []),
    },
)
SCALING = filled(
    {"id": NAME, "gradients_mb": real, "step_ms": real, "workers": whole(1 << 20), "measured": optional(real)},
    {"predicted": (many(few(2, 2, real)), [])},
)
RESULT = filled(
    {"format": whole(1 << 20), "verdict": words("green|slow|red"), "time": NAME, "checks": many(CHECK)},
    {
        **named_so("cluster", "inventory", "stack", "started", check=NAME, missing=""),
        **named_so("hosts", "data", check=many(NAME), missing=[]),
        "quick": (yes_or_no, False),
        "versions": (named(NAME, NAME), {}),
        "bars": (named(NAME, real), {}),
        "seconds": (real, 0.0),
        "phases": (many(fields({"name": NAME, "begin": real, "seconds": real}, {})), []),
        "jobs": (many(JOB), []),
        "scaling": (many(SCALING), []),
        "preflight": (optional(PREFLIGHT), None),
    },
)


def checked(content: Mapping[str, Any]) -> dict[str, Any]:
    """A result with every part that a report may use, each of the expected type."""
    form = content.get("format")
    if form not in FORMATS:
        if "verdict" in content and "checks" in content:
            raise UnfitError(
                f"it is of format {shown(form)}, and this Farandole reads 2 and 3: use the one that wrote it"
            )
        raise UnfitError("it is not the result of a validation")
    result: dict[str, Any] = RESULT(content)
    return result


def file_of(place: Path) -> Path:
    """The result.json that is meant by a report's folder, the folder of all reports, or the file itself."""
    for path in (place / "result.json", place / "latest" / "result.json"):
        if path.is_file():
            return path
    if place.is_dir():
        raise FarandoleError(f"there is no result.json in {place}; {AGAIN}, or name the folder of another report")
    if not place.is_file():
        raise FarandoleError(f"there is no report {place}")
    return place


def read(place: Path) -> dict[str, Any]:
    """The result of a validation."""
    path = file_of(place)
    try:
        if path.stat().st_size > LONGEST:
            raise UnfitError(f"it has {path.stat().st_size >> 20} MiB, and results have at most {LONGEST >> 20}")
        content = path.read_text(errors="replace")
    except OSError as error:
        raise FarandoleError(f"{path} cannot be read: {error.strerror}") from None
    except UnfitError as error:
        raise FarandoleError(f"{path} cannot be used: {error}") from None
    if not content.strip():
        raise FarandoleError(f"{path} is empty, so the run that was to write it was ended; {AGAIN}")
    try:
        return checked(load(content, LONGEST))
    except UnfitError as error:
        half = f"; if it was cut off, {AGAIN}" if "not JSON" in str(error) else ""
        raise FarandoleError(f"{path} cannot be used: {str(error).strip()}{half}") from None
