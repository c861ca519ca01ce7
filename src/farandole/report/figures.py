"""What a page shows as numbers and charts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from farandole.links.predict import PAYLOAD
from farandole.report.charts import Axis, Line, chart, decades, nice

# Checks whose value has to be below the bar.
MAXIMA = ("parity",)
# Checks whose value may be above 1: MPI may be faster than TCP, and Horovod than torch.distributed.
UNLIMITED = ("mpi.bandwidth", "mpi.latency", "speed.yardstick")
SIZES = {
    8: "8 B", 512: "512 B", 4096: "4 KiB", 16384: "16 KiB", 65536: "64 KiB", 262144: "256 KiB", 1 << 20: "1 MiB",
    4 << 20: "4 MiB",
}  # fmt: skip
TICKS = (8, 512, 16384, 1 << 20)


def number(value: float | None) -> str:
    """A number in few digits; a hyphen if there is none."""
    if value is None:
        return "-"
    if value and abs(value) < 0.001:
        return f"{value:.1g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3f}"


def signed(share: float | None) -> str:
    """A change in percent."""
    return "" if share is None else f"{100 * share:+.1f} %"


def figures(checks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every number beside its bar and its limit, with its place on a scale in percent."""
    values = {check["id"]: check["value"] for check in checks}
    return [_figure(check, values) for check in checks if check["value"] is not None]


def _figure(check: Mapping[str, Any], values: Mapping[str, float | None]) -> dict[str, Any]:
    most = check["id"].split(".")[0] in MAXIMA
    predicted = values.get(check["id"].replace("efficiency", "predicted")) if "efficiency" in check["id"] else None
    ideal = None if check["id"] in UNLIMITED else 0.0 if most else 1.0
    limit = ideal if predicted is None else predicted
    bar = check["bar"]
    top = max([check["value"], bar or 0, limit or 0, *(check["spread"] or ())]) * 1.05 or 1
    scale = {name: _share(value, top) for name, value in (("value", check["value"]), ("bar", bar))}
    return {
        **check,
        "limit": limit,
        "limit_is": "equal" if most else "predicted" if predicted is not None else "",
        "sense": "at most" if most else "at least",
        "at": scale,
        "range": [_share(value, top) for value in check["spread"]] if check["spread"] else None,
    }


def _share(value: float | None, top: float) -> float | None:
    return None if value is None else round(min(100.0, max(0.0, 100 * value / top)), 1)


def bandwidth(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Bandwidth and latency by size of messages, with the limit of the wire."""
    job = next((job for job in result["jobs"] if job["sizes"]), None)
    rows = [row for row in job["sizes"] if row[0] > 0 and all(value > 0 for value in row[1:])] if job else []
    if not job or not rows:
        return None
    ends = (job["nodes"] + ["", ""])[:2]
    limit, source = wire(result, ends)
    names = [("MPI", "a"), ("TCP", "b")][: min(map(len, rows)) - 1]
    delays = [Line(name, style, [(row[0], row[at]) for row in rows]) for at, (name, style) in enumerate(names, 1)]
    carried = [replace(line, points=[(size, size / delay) for size, delay in line.points]) for line in delays]
    times, rates = ([value for line in lines for _, value in line.points] for lines in (delays, carried))
    ticks = [(size, SIZES[size]) for size in TICKS if rows[0][0] <= size <= rows[-1][0]]
    x = Axis("size of a message", rows[0][0], max(rows[-1][0], rows[0][0] * 2), ticks, log=True)
    drawn = (limit, f"the wire: {limit:,.0f} MB/s") if limit else None
    title = f"bandwidth by size of messages; at most {max(rates):,.0f} MB/s"
    return {
        "ends": ends,
        "names": names,
        "rows": [
            (SIZES.get(int(size), f"{size:,.0f} B"), [(delay, size / delay) for delay in row[: len(names)]])
            for size, *row in rows
        ],
        "carried": chart(carried, x, decades([*rates, *([limit] if limit else [])]), title, drawn),
        "delays": chart(delays, x, decades(times), "latency by size of messages"),
        "limit": source,
        "beyond": bool(limit and max(rates) > limit),
    }


def wire(result: Mapping[str, Any], ends: Sequence[str]) -> tuple[float | None, str]:
    """What the interfaces of two nodes say that they carry, in MB/s, or else what is usual here; and in words."""
    preflight = result["preflight"] or {}
    speeds = [(preflight.get("hosts", {}).get(name) or {}).get("mbit") for name in ends]
    if all(speeds):
        mbit = min(float(speed) for speed in speeds if speed)
        return mbit / 8 * PAYLOAD, f"the interfaces say {mbit:,.0f} Mbit/s, of which {100 * PAYLOAD:.0f} % are payload"
    if usual := preflight.get("usual_mb_per_s"):
        return float(usual), "the interfaces do not say; this is what TCP usually carried in preflight"
    return None, "not known: preflight did not see the speed of these interfaces"


def losses(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The loss by step: one and all workers over each other, then each sample that was trained."""
    jobs = {job["id"]: job for job in result["jobs"] if len(job["loss"]) > 1}
    curves = []
    for name in [name for name in jobs if name.startswith("parity.") and name.endswith(".one")]:
        alone, together = jobs[name], jobs.get(f"{name.removesuffix('.one')}.all")
        if together:
            lines = [
                Line("1 worker", "a wide", alone["loss"]),
                Line(f"{len(together['nodes'])} workers", "b", together["loss"]),
            ]
            curves.append(_loss(f"{name.split('.')[1]}, the same images", "parity", lines))
    curves += [
        _loss(name.removeprefix("training."), "training", [Line(f"{len(job['nodes'])} workers", "a", job["loss"])])
        for name, job in jobs.items()
        if name.startswith("training.")
    ]
    return curves


def _loss(name: str, kind: str, lines: Sequence[Line]) -> dict[str, Any]:
    steps, losses = zip(*(point for line in lines for point in line.points), strict=True)
    x, y = nice(max(steps)), nice(max(losses))
    x = Axis("step", x.low, max(steps), [tick for tick in x.ticks if tick[0] <= max(steps)])
    last = ", ".join(f"{line.name} {line.points[-1][1]:.4f}" for line in lines)
    svg = chart(lines, x, y, f"loss of {name} by step; at the end {last}")
    return {"name": name, "kind": kind, "lines": lines, "last": last, "svg": svg}


def scaling(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The measured efficiency beside the predicted one for more workers."""
    for job in result["scaling"]:
        points = [(row[0], 100 * row[1]) for row in job["predicted"] if row[0] >= 1]
        if not points and job["measured"] is None:
            continue
        most = max([job["workers"], *(point[0] for point in points)])
        ticks = [(float(2**power), str(2**power)) for power in range(11) if 2**power <= most]
        lines = [Line("predicted", "a", points)] if points else []
        if job["measured"] is not None:
            lines.append(Line("measured", "measured", [(job["workers"], 100 * job["measured"])], dots=True))
        bar = result["bars"].get("efficiency") if job["id"] == "speed" else None
        top = max(100.0, *(point[1] for line in lines for point in line.points))
        y = Axis("", 0, top, [(value, f"{value} %") for value in (0, 25, 50, 75, 100)])
        expected = next((row[1] for row in job["predicted"] if row[0] == job["workers"]), None)
        limit = (100 * bar, f"bar: {100 * bar:.0f} %") if bar else None
        x = Axis("workers", 1, max(2, most), ticks, log=True)
        svg = chart(lines, x, y, f"efficiency of {job['id']} by number of workers", limit)
        yield {**job, "lines": lines, "expected": expected, "svg": svg}


def pace(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """What each node reached in each job, with those marked that are far from the median."""
    jobs = [job for job in result["jobs"] if len(job["ranks"]) > 1]
    nodes = list(dict.fromkeys(rank["host"] for job in jobs for rank in job["ranks"]))
    columns = []
    for job in jobs:
        steps = {rank["host"]: rank["step_ms"] for rank in job["ranks"] if rank["step_ms"]}
        rates = {rank["host"]: rank["rate"] for rank in job["ranks"] if rank["rate"]}
        if steps:
            columns.append((job["id"].replace("horovod.", ""), "ms a step alone", steps, False))
        if rates:
            columns.append((job["id"].replace("training.", ""), "images/s", rates, True))
    if not columns:
        return None
    bar = result["bars"].get("pace", 0.5)
    rows = [(node, [_cell(node, values, bar, more=more) for _, _, values, more in columns]) for node in nodes]
    return {"columns": [column[:2] for column in columns], "rows": rows, "bar": bar}


def _cell(node: str, values: Mapping[str, float], bar: float, *, more: bool) -> tuple[float | None, bool]:
    """A value, and whether the node is slower than the bar allows, compared with the median of the others."""
    others = sorted(value for name, value in values.items() if name != node)
    if node not in values or not others:
        return values.get(node), False
    middle, own = others[len(others) // 2], values[node]
    return own, (own / middle if more else middle / own) < bar
