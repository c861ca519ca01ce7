"""Ask all nodes of a cluster at once how they are."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.core import bounds
from farandole.core.causes import recognize
from farandole.core.errors import FarandoleError
from farandole.core.schema import Check, fields, load, many, named, number, row, text, whole, words, yes_or_no
from farandole.core.text import one_line
from farandole.jobs.login import Head
from farandole.node.head import status as program
from farandole.preflight.answer import reason

# Seconds that ssh has to connect, and that a node has in all.
CONNECT_S, ANSWER_S = 5, 8
AT_ONCE = 64
LONGEST = 1 << 18
# A new connection proves that one can log in; a kept one to a dead node would not answer for longer.
STRICT = (
    "-T", "-o", "ControlPath=none", "-o", "ControlMaster=no", "-o", "StrictHostKeyChecking=yes",
    "-o", f"ConnectTimeout={CONNECT_S}",
)  # fmt: skip
# The program that runs there comes from here, so a node with an older one, or none, answers as well.
PROGRAM = Path(program.__file__)
COMMAND = "/usr/bin/python3 -I -"
OF_SSH = 255
NODE, PERSON = words(r"[a-z0-9][a-z0-9-]{0,62}"), words(r"[\w.-]{1,32}\$?")
SLOTS = named(NODE, whole(1 << 16))


RUN = {"number": whole(10**9), "owner": PERSON, "since": number, "slots": SLOTS}
JOB = {
    "id": words(r"[\w\[\]+,%:.-]{1,120}"), "owner": PERSON, "state": words(r"[A-Z_]{1,30}"),
    "time": words(r"[\d:-]{1,20}|INVALID"), "nodes": words(r"\d{1,6}"),
}  # fmt: skip


def record(forms: Mapping[str, Check]) -> Check:
    """A list of values of these forms, which then have names."""
    return lambda value: dict(zip(forms, row(*forms.values())(value), strict=True))


def queue(value: Any) -> list[dict[str, str]] | str | None:
    """The queue's jobs, why it does not say, or nothing."""
    if value is None:
        return None
    answer: list[dict[str, str]] | str = text(200)(value) if isinstance(value, str) else many(record(JOB))(value)
    return answer


def used(value: Any) -> dict[str, int] | None:
    """The slots that are used, or nothing if the queue does not say."""
    return None if value is None else dict(SLOTS(value))


ANSWER = fields(
    {"stack": words("|[0-9a-f]{12}"), "slots": SLOTS, "uses": many(record(RUN))},
    {
        "queue": queue,
        "unlisted": whole(1 << 32),
        "used": used,
        "no_jobs": named(NODE, text(200)),
        "lost": many(NODE),
        "upgrading": yes_or_no,
    },
)


@dataclass(frozen=True)
class Answer:
    """What a node says of itself, or why it does not: the code of a cause, and words."""

    up: bool
    stack: str = ""
    slots: Mapping[str, int] = field(default_factory=dict)
    uses: tuple[dict[str, Any], ...] = ()
    queue: list[dict[str, str]] | str | None = None
    # Jobs that are not in this list, which would be too long.
    unlisted: int = 0
    used: Mapping[str, int] | None = None
    # Why the queue gives these nodes no jobs.
    no_jobs: Mapping[str, str] = field(default_factory=dict)
    # Those of them that get some once they are proven.
    lost: Sequence[str] = ()
    # Whether the head starts no run because it or the builder is being upgraded.
    upgrading: bool = False
    code: str = ""
    why: str = ""


def ask_all(nodes: Mapping[str, Head]) -> dict[str, Answer]:
    """Ask these nodes."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(nodes, pool.map(ask, nodes.values()), strict=True))


def ask(node: Head) -> Answer:
    """Ask a node, which has limited time and space for its answer."""
    command = ["ssh", *STRICT, *node.ssh[1:], node.target, COMMAND]
    with PROGRAM.open("rb") as source:
        output, status = bounds.answer(command, ANSWER_S, LONGEST, source)
    return answer_of(output, status, f"ssh {node.target}")


def answer_of(output: str, status: int, ssh: str) -> Answer:
    """What was said, in a strict form."""
    if len(output) > LONGEST:
        why = f"its status could not be read ({ssh}: more than {LONGEST >> 10} KiB)"
        return Answer(up=False, code="answer-malformed", why=why)
    if status < 0:
        return Answer(up=False, code="node-silent", why=f"no answer ({ssh}: nothing within {ANSWER_S} s)")
    if status == OF_SSH:
        message = reason(output) or "no reason given"
        match = recognize("login", message)
        code, seen = (match.cause.code, match.seen) if match else ("login-failed", message)
        return Answer(up=False, code=code, why=f"no answer ({ssh}: {one_line(seen)})")
    if status:
        return Answer(up=False, code="answer-malformed", why=f"its status could not be read ({ssh}: {reason(output)})")
    try:
        # A login may print something before it.
        content = ANSWER(load(next(line for line in output.splitlines() if line.startswith("{")), LONGEST))
    except (StopIteration, FarandoleError) as error:
        seen = str(error) or "there is no answer in its output"
        return Answer(up=False, code="answer-malformed", why=f"its status could not be read ({ssh}: {seen})")
    return Answer(up=True, **{**content, "uses": tuple(content["uses"])})
