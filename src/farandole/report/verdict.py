"""The verdict of a cluster's last validation."""

import json
from collections.abc import Mapping
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.core.schema import fields, words

VERDICT = fields(
    {"verdict": words("green|slow|red"), "time": words(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")},
    {"stack": words("|[0-9a-f]{12}")},
)


def last_verdict(state: Path) -> Mapping[str, str] | None:
    """The last validation's; nothing if there is none that can be read."""
    try:
        result: Mapping[str, str] = VERDICT(json.loads((state / "reports/latest/result.json").read_text()))
    except (OSError, ValueError, RecursionError, FarandoleError):
        return None
    return result
