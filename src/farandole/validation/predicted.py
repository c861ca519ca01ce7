"""Put a prediction beside each efficiency that a validation measured, so that the prediction is judged, too."""

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farandole.links.predict import Measured, TrainingJob, measured, predict
from farandole.validation.judge import GREEN, NOT_MEASURED, Check, Result
from farandole.validation.kept import scaling_points


def predictions(
    results: Mapping[str, Result], checks: Sequence[Check], links: Mapping[str, Any], inventory: str
) -> Iterator[Check]:
    """A check for each measured efficiency, from the links that preflight measured; it is never red or slow."""
    for check in checks:
        name, _, kind = check.id.partition(".")
        if kind == "efficiency" and (job := _job(results[name])):
            yield _compared(check, job, measured(links, check.hosts), inventory)


def scaling(
    results: Mapping[str, Result], checks: Sequence[Check], links: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The efficiency that was measured, and what is predicted of the same job for other numbers of workers."""
    for check in checks:
        name, _, kind = check.id.partition(".")
        if kind == "efficiency" and (job := _job(results[name])):
            measurement, workers = measured(links, check.hosts), len(check.hosts)
            known = measurement if measurement and not measurement.missing else None
            yield {
                "id": name,
                "gradients_mb": job.gradients_mb,
                "step_ms": round(job.step_ms, 2),
                "workers": workers,
                "measured": None if check.status == NOT_MEASURED else check.value,
                "predicted": [
                    [number, round(predict(job, known.network, number).efficiency, 4)]
                    for number in sorted({workers, *scaling_points(workers)})
                    if known
                ],
            }


def _job(result: Result) -> TrainingJob | None:
    """The job whose efficiency was measured, as far as its ranks described it."""
    if result["job"]["group"] == "network":
        return TrainingJob(result["gradients_mb"], result["alone_ms"])
    first, rates = result["ranks"][0], [turn["alone"] for turn in result["rounds"] if turn["alone"]]
    if not first.get("batch") or not first.get("gradients_mb") or not rates:
        return None
    # The images of all workers in a second, each by itself.
    step_ms = 1000 * len(result["ranks"]) * first["batch"] / statistics.median(rates)
    return TrainingJob(first["gradients_mb"], step_ms, mpi=True, overlaps=False)


def _compared(check: Check, job: TrainingJob, known: Measured | None, inventory: str) -> Check:
    name, hosts = check.id.replace("efficiency", "predicted"), check.hosts
    if known is None or known.missing:
        why = "the connections of all these nodes were not measured"
        return Check(name, NOT_MEASURED, f"{why}; run  farandole preflight -i {shlex.quote(inventory)}", hosts=hosts)
    expected = predict(job, known.network, len(hosts)).efficiency
    network = f"{known.network.mb_per_s:.4g} MB/s, {known.network.round_trip_us:.0f} µs"
    load = f"{job.gradients_mb:.2g} MB of gradients every {job.step_ms:.0f} ms"
    summary = f"the network ({network}) carries {load} at about {100 * expected:.0f} % of {len(hosts)} workers"
    status = check.status if check.status == NOT_MEASURED else GREEN
    seen = "was not measured" if check.status == NOT_MEASURED else f"is {100 * (check.value or 0):.0f} %"
    return Check(name, status, f"{summary}; the efficiency {seen}", round(expected, 4), hosts=hosts)
