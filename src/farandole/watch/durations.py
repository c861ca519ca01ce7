"""How long each task took when it last ran to its end, in one small file for all runs of an inventory."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.schema import number

# More tasks than all playbooks have.
MOST = 10_000


def load(path: Path) -> dict[str, float]:
    """The seconds of each task; none if there is no such file, or it is damaged."""
    with suppress(OSError, ValueError, AttributeError, FarandoleError):
        return {str(task): number(seconds) for task, seconds in json.loads(path.read_text()).items()}
    return {}


def save(path: Path, begun: Sequence[tuple[str, float]], end: float) -> None:
    """Keep how long each task took, from when each began; of one that ran several times, the longest counts."""
    took: dict[str, float] = {}
    ends = [*(time for _, time in begun[1:]), end]
    for (task, time), stop in zip(begun, ends, strict=True):
        took[task] = max(took.get(task, 0.0), round(stop - time, 1))
    others = {task: seconds for task, seconds in load(path).items() if task not in took}
    with suppress(OSError):
        write_private(path, json.dumps(dict([*(others | took).items()][-MOST:])))
