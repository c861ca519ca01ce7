"""What has changed between two results, and whether it is more than their noise."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.report.figures import MAXIMA, number, signed
from farandole.report.matrix import grade

Result = Mapping[str, Any]
Row = tuple[str, str, str]
UNKNOWN = "noise not known"
UNSEEN, NOTHING = "not known", "none"


@dataclass(frozen=True)
class Figure:
    """A number in both results."""

    id: str
    old: float
    new: float
    share: float | None
    judgement: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """What differs: words, old, new for the stack, check, old, new for the verdicts; what is known to be the same."""

    old_time: str
    old_verdict: str
    new_verdict: str
    stack: Sequence[Row]
    verdicts: Sequence[Row]
    figures: Sequence[Figure]
    same: Sequence[str]

    def tables(self) -> list[tuple[tuple[str, ...], Sequence[Sequence[str]]]]:
        """Heads and rows, for those who show them as text."""
        figures = [(row.id, number(row.old), number(row.new), signed(row.share), row.judgement) for row in self.figures]
        return [
            (("what", "was", "is"), [*self.verdicts, *self.stack]),
            (("figure", "was", "is", "change", "more than noise?"), figures),
        ]


def compare(old: Result, new: Result) -> Comparison:
    before, after = ({check["id"]: check for check in result["checks"]} for result in (old, new))
    names = list(dict.fromkeys([*after, *before]))
    parts = [*_parts(old, new)]
    status = [
        (name, *(str(checks[name]["status"]) if name in checks else "absent" for checks in (before, after)))
        for name in names
    ]
    return Comparison(
        old["time"],
        old["verdict"],
        new["verdict"],
        [row for row in (*parts[:1], *_versions(old, new), *parts[1:], *_bars(old, new)) if row[1] != row[2]],
        [row for row in status if row[1] != row[2]],
        [_figure(before[name], after[name]) for name in names if _both(before, after, name)],
        [name for name, was, now in parts if was == now and now not in (NOTHING, UNSEEN)]
        + (["bars"] if old["bars"] and old["bars"] == new["bars"] else []),
    )


def _both(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
    return all(name in checks and checks[name]["value"] is not None for checks in (before, after))


def _figure(old: Mapping[str, Any], new: Mapping[str, Any]) -> Figure:
    """A change is more than noise if the middle halves of the rounds of both runs do not touch."""
    was, now = old["value"], new["value"]
    # The difference of two losses is next to nothing in any case.
    share = (now - was) / abs(was) if was and not new["id"].startswith(MAXIMA) else None
    if "not measured" in (old["status"], new["status"]):
        return Figure(
            new["id"], was, now, share, UNKNOWN, "one of the two measurements was disturbed, and counts as missing"
        )
    if was == now:
        return Figure(new["id"], was, now, share, "the same", "")
    if not old["spread"] or not new["spread"]:
        return Figure(new["id"], was, now, share, UNKNOWN, "measured once in each run")
    apart = old["spread"][1] < new["spread"][0] or new["spread"][1] < old["spread"][0]
    ranges = " and ".join(f"{low:.3f} to {high:.3f}" for low, high in (old["spread"], new["spread"]))
    return Figure(new["id"], was, now, share, "more than noise" if apart else "within noise", f"rounds: {ranges}")


def _parts(old: Result, new: Result) -> Iterator[Row]:
    yield "stack", old["stack"] or NOTHING, new["stack"] or NOTHING
    yield "nodes", ", ".join(old["hosts"]) or NOTHING, ", ".join(new["hosts"]) or NOTHING
    yield "data", "; ".join(old["data"]) or NOTHING, "; ".join(new["data"]) or NOTHING
    yield "kernel", _kernels(old), _kernels(new)
    yield "connections below their bar", _slow(old), _slow(new)


def _versions(old: Result, new: Result) -> Iterator[Row]:
    for name in sorted({*old["versions"], *new["versions"]}):
        yield name, old["versions"].get(name, "absent"), new["versions"].get(name, "absent")


def _bars(old: Result, new: Result) -> Iterator[Row]:
    for name in sorted({*old["bars"], *new["bars"]}):
        was, now = (f"{result['bars'][name]:g}" if name in result["bars"] else NOTHING for result in (old, new))
        yield f"bar of {name}", was, now


def _kernels(result: Result) -> str:
    hosts = (result["preflight"] or {}).get("hosts", {})
    return ", ".join(sorted({host.get("kernel", "") for host in hosts.values()} - {""})) or UNSEEN


def _slow(result: Result) -> str:
    pairs = (result["preflight"] or {}).get("pairs", [])
    return f"{sum(grade(*pair[2:]) != 'good' for pair in pairs)} of {len(pairs)}" if pairs else UNSEEN
