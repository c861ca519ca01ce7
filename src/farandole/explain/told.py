"""How causes are told to a person: consequences first, the root cause last, or what is most telling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.core.causes import CURE_FIELDS, Cause
from farandole.core.findings import Line as Shown
from farandole.core.findings import joined, some
from farandole.core.text import one_line
from farandole.explain.diagnosis import SHOWN, Hit, Verdict

CONSEQUENCE = "consequence"
PARTIAL = "These are consequences of a failure that this log does not show: see the logs of the other nodes."
# Nothing that a log says becomes part of a command.
UNKNOWN: Mapping[str, str] = {
    **dict.fromkeys(CURE_FIELDS, "…"),
    "host": "that node", "inventory": "inventory/NAME", "user": "USER", "target": "USER@NODE", "port_option": "",
    "ssh": "ssh USER@NODE", "verbose_ssh": "ssh -v USER@NODE", "forget": "ssh-keygen -R NODE",
    "fingerprint": "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """A cause for the user: its role, what happened where, the line that shows it, its cure and its discussion."""

    role: str
    code: str
    what: str
    place: str
    line: str
    cure: str
    see: str = ""

    def lines(self) -> list[Shown]:
        """The cause in lines."""
        style = "warn" if self.role == CONSEQUENCE else "stop"
        head = Shown(f"{self.role} [{self.code}]", style, f": {self.what}")
        rest = [Shown(f"  {self.place}: {self.line}"), Shown("  cure:", "cure", f" {self.cure}")]
        return [Shown(""), head, *rest, *([Shown(f"  see: {self.see}")] if self.see else [])]


def report(verdict: Verdict, *, several: bool = False) -> str:
    """Say it to a person, the most important last, as logs are read from their end."""
    causes = told(verdict, several=several)
    lines = listed(causes)
    if not verdict.codes and not verdict.telling:
        lines.append(Shown("It contains no known failure, and nothing that looks like one."))
    if not causes or causes[-1].role == CONSEQUENCE:
        last = [(line.place(several=several), line.text) for line in verdict.telling[-SHOWN:]]
        lines += telling(last, bool(causes))
    return joined(lines).strip()


def listed(causes: Sequence[Told]) -> list[Shown]:
    """Causes in lines, each after an empty one."""
    partial = [Shown(""), Shown(PARTIAL)] if causes and causes[-1].role == CONSEQUENCE else []
    return [line for cause in causes for line in cause.lines()] + partial


def telling(lines: Sequence[tuple[str, str]], known: bool) -> list[Shown]:
    """Lines of which each is from somewhere, as most that a failure tells."""
    head = "The most telling lines:" if known else "This failure is not known. The most telling lines:"
    shown = [Shown(f"  {place}: {one_line(text, 200)}") for place, text in lines]
    return [Shown(""), Shown(head), *shown] if shown else []


def told(verdict: Verdict, *, several: bool = False) -> list[Told]:
    """The causes, the most important last."""
    roots = [verdict.lead] if verdict.lead else verdict.roots
    before = [_told(hit, CONSEQUENCE, several=several) for hit in verdict.cascades if hit not in roots]
    return before + [_told(hit, "root cause", several=several) for hit in reversed(roots)]


def _told(hit: Hit, role: str, *, several: bool) -> Told:
    """A cause with its line, its cure and the discussion upstream."""
    cause = hit.cause
    # A host that is known for certain is one of the inventory.
    sure = some(hit.places) if hit.line.host and hit.rank is None else hit.line.host
    names = {"host": hit.fields.get("host") or sure or hit.host}
    description = hit.fields.get("said") or cause.description({**UNKNOWN, **hit.fields, **names})
    place = some(hit.places) if hit.rank is not None or hit.line.host or "host" not in hit.fields else ""
    if not hit.line.host:
        place = ", ".join(filter(None, [place, hit.line.place(several=several)]))
        place += f", and {hit.count - 1} more" if hit.count > 1 else ""
    cure = cause.remedy({**UNKNOWN, **({"host": sure} if sure else {})})
    return Told(role, cause.code, description, place, around(hit), cure, thread(cause) if cause.upstream else "")


def around(hit: Hit) -> str:
    """The part of a line that shows the cause, from the beginning of a word on."""
    text = hit.line.text
    at = text.find(hit.fields["seen"][:40])
    at = text.find(" ", at - 100, at) + 1 if at > 100 else 0
    return one_line(text[at : at + 240], 240)


def thread(cause: Cause) -> str:
    """Where upstream discusses a cause."""
    project, _, number = cause.upstream.partition("#")
    return f"github.com/{project}/issues/{number}"
