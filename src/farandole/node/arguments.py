"""Values of options of commands on nodes."""

import re
from argparse import ArgumentTypeError

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> int:
    """Seconds, of a text such as 2h."""
    time = re.fullmatch(r"(\d{1,7})([smhd]?)", text)
    if not time or not int(time[1]):
        raise ArgumentTypeError(f"{text!r} is not a duration: write 90s, 30m, 2h or 1d")
    return int(time[1]) * UNITS[time[2]]


def positive(text: str) -> int:
    """A number of ranks or threads."""
    if not re.fullmatch(r"0*[1-9]\d{0,4}", text):
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
