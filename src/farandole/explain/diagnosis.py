"""Find the causes of a failure in its log: consequences first, the root cause last, or what is most telling."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from farandole.core.causes import READ, Cause, Place, causes
from farandole.core.errors import FarandoleError
from farandole.core.text import one_line
from farandole.explain.logs import lines, parts

SHOWN = 5
# Ranks and hosts that are remembered for a cause.
MOST_PLACES = 1000
# What is read of a job that Farandole starts itself: not what ssh prints when this machine logs in to a node.
JOB: tuple[Place, ...] = ("job", "log")
# Which worker or host a line is from: the marks of mpirun, horovodrun, torchrun, `farandole run`, OpenMPI and Ansible.
RANK = re.compile(
    r"^\s*\[(?:(?:\d+,)?(?P<rank>\d{1,6})\]<std(?:err|out)>:?|"
    r"(?:default|rank)(?P<other>\d{1,6})\]:?|(?P<run>\d{1,6})\]) ?"
)
HOST = re.compile(
    r"^(?:fatal|failed|changed|ok): \[(?P<task>[\w.-]{1,63})(?: -> [^\]]*)?\]|"
    r"^(?P<adhoc>[\w.-]{1,63}) \| (?:UNREACH|FAIL)|"
    r"^\[(?P<daemon>[A-Za-z][\w.-]{0,62}):\d+\]|^\s*(?:Local host|Node|Host):\s+(?P<told>[\w.-]{1,63})\s*$|"
    r"^Process name: (?P<first>\d{1,6})$"
)
# From here on Slurm ends the others.
CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT ")
# What most programs write into a line that says why they fail, and lines that have such a word but tell of no failure.
TELLING = re.compile(
    r"error|fatal|fail|cannot|can't|could not|couldn't|unable|not found|no such|denied|refused|abort|killed|exception|"
    r"traceback|panic|segfault|segmentation|timed? ?out|unreachable|corrupt|undefined|mismatch|(?-i:\bE[A-Z]{4,}\b)",
    re.IGNORECASE,
)
HARMLESS = re.compile(
    r"\berror rate|round(?:-off|ing) errors?|\b(?:0|no|zero|without) (?:errors?|failures?|failed)|"
    r"(?:failed|errors?|unreachable)\W{0,3}[=:]\W{0,3}(?:0\b|none|false)|"
    r"^\s*(?:-- |checking |adding |inflating |copying |creating |get:|selecting |unpacking |setting up )|"
    r"-Werror|-error|error[-_.]\w|[\w/]errors?\.|ignored|"
    r"warning|\bW\d{4}\b|retry|default(?:s|ed|ing)? to|perror|strerror",
    re.IGNORECASE,
)
# What programs say although they can go on. A line may be the whole output of a task, with its line ends as \n.
ORDINARY = re.compile(
    r"(?:\bNCCL INFO |[a-z]Warning: |\bCould not load dynamic library '[^']+'; dlerror: |"
    r"\bunable to open mca_\w+: (?=.*\(ignored\))|-- Could NOT find |^.* thrown while requesting [A-Z]+ ).*?(?=\\n|$)"
)
# A program's own exception. Its launcher's says nothing of why.
RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b(?!: Horovod detected| in thread )")
# A finding of our own ends with its code.
OWN = re.compile(r"^[\d. ]*(?P<said>.{1,1200}) \[(?P<code>[a-z]+(?:-[a-z0-9]+)*)\]$")
# Messages of ssh that have another cure if Ansible logs in from the control machine than if one node does to another.
FROM_ANSIBLE = re.compile(r"UNREACHABLE!|unreachable|over ssh: |via ssh: ")


@dataclass(frozen=True)
class Line:
    """A line of a log, and where it is; a host if it is known for certain, whatever the line says."""

    log: str
    number: int
    text: str
    host: str = ""

    def place(self, *, several: bool) -> str:
        """Where the line is, in words."""
        if self.host:
            return self.host
        return f"line {self.number} of {one_line(self.log, 100)}" if several else f"line {self.number}"


@dataclass
class Hit:
    """A cause, the first line that shows it, the ranks and hosts that show it, and in how many lines."""

    cause: Cause
    line: Line
    fields: Mapping[str, str]
    places: list[str]
    count: int = 1

    @property
    def rank(self) -> int | None:
        """The worker whose line shows it first."""
        return int(self.places[0].split()[1]) if self.places[:1] and self.places[0].startswith("rank ") else None

    @property
    def host(self) -> str:
        """The host that the message names, or else the one from which it is."""
        return self.fields.get("host") or next(
            (place for place in self.places if not place.startswith("rank ")), "a node"
        )


@dataclass
class Verdict:
    """What a log tells: root causes in the order of their lines, consequences with the most specific one last."""

    roots: list[Hit] = field(default_factory=list)
    cascades: list[Hit] = field(default_factory=list)
    telling: list[Line] = field(default_factory=list)
    # The first exception that is in no cause.
    raised: str = ""

    @property
    def lead(self) -> Hit | None:
        """The consequence from which the others follow, if nothing tells why it came to that."""
        last = None if self.roots or self.raised or not self.cascades else self.cascades[-1]
        return last if last and last.cause.leads else None

    @property
    def codes(self) -> list[str]:
        """The codes of the root causes; if there is none, that of the consequence that says most."""
        return [hit.cause.code for hit in self.roots or self.cascades[-1:]]


def explain(read: Iterable[Line], places: tuple[Place, ...] = READ) -> Verdict:
    """Find all causes in one pass, in memory that does not depend on the length of the log."""
    hits: dict[str, Hit] = {}
    telling: dict[str, Line] = {}
    node = raised = ""
    cancelled = False
    for line in read:
        text = line.text
        if told := HOST.match(text):
            node = f"rank {told['first']}" if told["first"] else told[told.lastgroup or 0]
        cancelled = cancelled or bool(CANCELLED.search(text))
        known = False
        for cause, fields in _causes(text, places):
            known = True
            if cancelled and cause.leads:
                continue
            where = _where(text, line.host or node)
            if cause.code not in hits:
                hits[cause.code] = Hit(cause, line, fields, where)
                continue
            hit = hits[cause.code]
            hit.count += 1
            if len(hit.places) < MOST_PLACES:
                hit.places += [place for place in where if place not in hit.places]
        if not known and not raised and is_raised(text):
            raised = text
        rest = ORDINARY.sub("", text)
        if not known and TELLING.search(rest) and not HARMLESS.search(rest):
            _remember(telling, line)
    return _verdict(list(hits.values()), list(telling.values()), raised)


def _remember(telling: dict[str, Line], line: Line) -> None:
    """Keep the first telling lines and the last ones, each once."""
    key = re.sub(r"\d+", "#", line.text)[-300:]
    telling.setdefault(key, line)
    if len(telling) > 2 * SHOWN:
        del telling[list(telling)[SHOWN]]


def of_job(lines: Iterable[str]) -> Verdict:
    """Explain the output of a job that Farandole started."""
    return explain((Line("", number, text) for number, line in enumerate(lines, 1) for text in parts(line)), JOB)


def _causes(text: str, read: tuple[Place, ...]) -> list[tuple[Cause, Mapping[str, str]]]:
    """The causes that a line shows, and the words that their patterns found."""
    candidates: list[tuple[Cause, Mapping[str, str]]] = []
    if (own := OWN.match(text)) and own["code"] in causes():
        cause = causes()[own["code"]]
        message = one_line(own["said"], 1200)
        return [(cause, {"seen": message, "said": message})] if cause.severity == "stop" else []
    bare = ORDINARY.sub("", RANK.sub("", text, count=1))
    for cause, needles, pattern in _searches():
        if cause.seen not in read:
            continue
        if any(needle in bare for needle in needles) and (match := pattern.search(bare)):
            fields = {name: one_line(word, 200) for name, word in match.groupdict().items() if word is not None}
            candidates.append((cause, {"seen": one_line(match[0], 200), **fields}))
    if len(candidates) > 1:
        # The same words of ssh mean something else to Ansible, to a worker and between two nodes.
        first = ("login",) if FROM_ANSIBLE.search(text) else ("job",) if RANK.match(text) else ("peer", "login", "job")
        places = {cause.seen for cause, _ in candidates}
        place = next((place for place in (*first, "peer", "login", "job") if place in places), "log")
        candidates = [(cause, fields) for cause, fields in candidates if cause.seen in (place, "log")]
    clear = any(not (cause.vague or cause.cascade) for cause, _ in candidates)
    return [candidate for candidate in candidates if not (clear and candidate[0].vague)]


@cache
def _searches() -> list[tuple[Cause, tuple[str, ...], re.Pattern[str]]]:
    """The causes that are read, each with words of which a line needs one, because that is quick to see."""
    read = [cause for cause in causes().values() if cause.seen in READ]
    return [(cause, needles(cause.pattern), re.compile(cause.pattern)) for cause in read]


def is_raised(line: str) -> bool:
    """Whether a line is a program's own exception, whatever rank it is from."""
    # PyTorch writes the rank as well.
    return bool(RAISED.match(RANK.sub("", RANK.sub("", line))))


def needles(pattern: str) -> tuple[str, ...]:
    """Words of which every text that a pattern fits has one."""
    words, _ = _needles(re.findall(r"\\.|\[\^?\]?[^]]*\]|\(\?(?:P<\w+>|:)|\{[\d,]+\}|.", pattern, re.DOTALL), 0)
    return words


def _needles(tokens: list[str], at: int) -> tuple[tuple[str, ...], int]:
    """The words of a pattern up to the end of its group, and where that is."""
    ways: list[tuple[str, ...]] = []
    parts: list[tuple[str, ...]] = [("",)]

    def add_way() -> None:
        ways.append(max(parts, key=lambda way: min(map(len, way))))

    while at < len(tokens) and tokens[at] != ")":
        token = tokens[at]
        words: tuple[str, ...] = ("",)
        if token == "|":  # noqa: S105
            add_way()
            parts, at = [("",)], at + 1
            continue
        if token.startswith("("):
            words, at = _needles(tokens, at + 1)
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        optional = following in {"?", "*"} or following.startswith("{")
        letter = token[1] if re.fullmatch(r"\\\W", token) else token
        if token.startswith("("):
            parts += [("",) if optional else words, ("",)]
        elif optional or (len(token) > 1 and letter == token) or token in set(".^$*+?"):
            parts.append(("",))
        elif len(parts[-1]) == 1:
            parts[-1] = (parts[-1][0] + letter,)
        if following.startswith("{"):
            at += 1
        at += 1
    add_way()
    return tuple(dict.fromkeys(word for way in ways for word in way)), at


def _where(text: str, node: str) -> list[str]:
    """Which worker a line is from, or else the host that was named last."""
    if rank := RANK.match(text):
        return [f"rank {rank[rank.lastgroup or 0]}"]
    return [node] if node else []


def _verdict(hits: list[Hit], telling: list[Line], raised: str) -> Verdict:
    """Tell root causes from consequences, and drop general messages where others say more."""
    roots = [hit for hit in hits if not hit.cause.cascade]
    special = [hit for hit in roots if not hit.cause.general]
    order = list(causes())
    cascades = sorted((hit for hit in hits if hit.cause.cascade), key=lambda hit: -order.index(hit.cause.code))
    return Verdict(special or roots, cascades, telling, raised)


def read(logs: Sequence[str]) -> Iterator[Line]:
    """All lines of some logs; `-` is the standard input."""
    for name in logs:
        try:
            with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as stream:
                yield from (Line(name, number, text) for number, text in lines(stream, name))
        except OSError as error:
            known = "" if Path(name).exists() else "; if it is meant to be a cause: farandole explain --list"
            raise FarandoleError(f"{name} cannot be read: {error.strerror}{known}") from None
