"""`farandole predict`."""

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.node import cluster_of
from farandole.cli.options import OneInventory
from farandole.core.errors import FarandoleError
from farandole.core.findings import some
from farandole.core.table import table
from farandole.inventory.reading import only
from farandole.links.examine import links_in
from farandole.links.predict import PAYLOAD, Measured, Network, Prediction, TrainingJob, measured, predict

MOST_NODES = 100_000
# A node below this share of what is usual slows the others down.
SLOWER = 0.85


def numbers(text: str) -> list[int]:
    """Numbers of nodes, as in 2,4,8."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 and 2 <= int(part) <= MOST_NODES for part in parts):
        raise FarandoleError(f"--nodes {text!r} is not a list of numbers from 2 to {MOST_NODES}, such as 2,4,8")
    return sorted({int(part) for part in parts})


def positive(option: str, value: float) -> float:
    if not 0 < value < 1e12:
        raise FarandoleError(f"{option} is {value:g}, and has to be more than 0")
    return value


def span(values: Sequence[float], decimals: int) -> str:
    """From the first to the last value."""
    return "-".join(dict.fromkeys(f"{value:.{decimals}f}" for value in values))


def percent(shares: Sequence[float]) -> str:
    return f"{span([100 * share for share in shares], int(max(shares) < 0.1))} %"


def answer(predictions: Sequence[Sequence[Prediction]]) -> str:
    """A table, and its last row in words. Of two predictions for each number of workers, the slower is first."""
    rows = [["workers", "ms for gradients", "ms for a step", "efficiency", "as fast as"]]
    for both in predictions:
        workers, shares = both[0].workers, [prediction.efficiency for prediction in both]
        rows.append(
            [
                str(workers),
                f"{both[0].exchange_ms:.0f}",
                span([prediction.step_ms for prediction in reversed(both)], 0),
                percent(shares),
                f"{span([share * workers for share in shares], 1)} workers",
            ]
        )
    sentences = [f"This network carries your job at about {percent(shares)} of {workers} workers."]
    if "-" in percent(shares):
        sentences.append(
            "The lower value is for gradients that are sent when all are computed, the higher for gradients that are "
            "sent while others are computed, as Horovod does with PyTorch."
        )
    if max(shares) * workers < 1:
        sentences.append("One worker by itself is faster.")
    return f"{table(rows)}\n\n{' '.join(sentences)}"


def limit(prediction: Prediction, network: Network, measurement: Measured | None) -> str:
    """What takes most of the time, and which node that is about."""
    share = f"{prediction.exchange_ms:.0f} ms that {prediction.workers} workers need for their gradients"
    if prediction.exchange_ms < prediction.alone_ms / 100:
        return "The network costs almost nothing."
    if prediction.latency_ms > prediction.bandwidth_ms:
        node = (
            f" of {measurement.farthest}"
            if measurement and measurement.network.round_trip_us == network.round_trip_us
            else ""
        )
        why = f"Latency costs most, {prediction.latency_ms:.0f} of the {share}"
        return f"{why}: {network.round_trip_us:.0f} µs for a message{node} there and back."
    why = f"Bandwidth costs most, {prediction.bandwidth_ms:.0f} of the {share}: {network.mb_per_s:.1f} MB/s"
    if not measurement or measurement.network.mb_per_s != network.mb_per_s:
        return f"{why}."
    if network.mb_per_s < SLOWER * measurement.usual_mb_per_s:
        return f"{why} on {measurement.slowest}, the slowest node, where {measurement.usual_mb_per_s:.1f} are usual."
    return f"{why} on the slowest node, {measurement.slowest}."


def basis(measurement: Measured | None, most: int, *, assumed: Collection[str]) -> str:
    parts = [f"{' and '.join(assumed)}: as given."] if assumed else []
    if measurement and len(assumed) < 2:
        parts.append(f"Measured between {some(measurement.names)} on {measurement.when or 'an unknown date'}.")
        if measurement.missing:
            parts.append(f"Not measured: {some(measurement.missing)}.")
        if most > len(measurement.names):
            parts.append(f"More than {len(measurement.names)} nodes: as if the others were no worse.")
    return " ".join(parts)


def _measured(inventory: Path) -> Measured | None:
    """What preflight measured between the nodes that take part."""
    known = cluster_of(inventory, write=False)
    return measured(links_in(known.state / "preflight.json"), known.members)


def predict_command(
    model_mb: Annotated[float, typer.Option(help="Size of the gradients: 4 bytes times the parameters.")],
    step_ms: Annotated[float, typer.Option(help="Time of a step on one worker, without Horovod.")],
    inventory: OneInventory = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, separated by commas.")] = "2,4,8,16",
    *,
    mpi: Annotated[
        bool, typer.Option("--mpi", help="Gradients are sent over MPI, which may send in one direction at a time.")
    ] = False,
    mbit: Annotated[
        float | None, typer.Option(help="Rate of the links in Mbit/s, instead of the measured one.")
    ] = None,
    delay_us: Annotated[
        float | None, typer.Option(help="Time of a message there and back in µs, instead of the measured one.")
    ] = None,
) -> None:
    """Predict how fast a training job will be on several nodes, from what preflight measured between them.

    One worker on each node. No node is contacted. With --mbit and --delay-us for a network that you only plan.
    """
    job = TrainingJob(positive("--model-mb", model_mb), positive("--step-ms", step_ms), mpi)
    chosen = numbers(nodes)
    options = {"--mbit": mbit, "--delay-us": delay_us}
    assumed = [f"{name} {positive(name, value):g}" for name, value in options.items() if value is not None]
    if not inventory and len(assumed) < 2:
        inventory = only()
    measurement = _measured(inventory) if inventory else None
    if not measurement and len(assumed) < 2:
        measure = f"farandole preflight -i {shlex.quote(str(inventory))}"
        why = "no connections between its nodes have been measured"
        raise FarandoleError(f"{why}: run  {measure}  or give --mbit and --delay-us")
    network = measurement.network if measurement else Network(math.inf, 0)
    if mbit is not None:
        network = replace(network, mb_per_s=mbit / 8 * PAYLOAD)
    if delay_us is not None:
        network = replace(network, round_trip_us=delay_us)
    ways = [replace(job, overlaps=False, turns=mpi), job]
    predictions = [[predict(way, network, number) for way in ways] for number in chosen]
    typer.echo(answer(predictions))
    typer.echo(f"{limit(predictions[-1][0], network, measurement)}\n{basis(measurement, chosen[-1], assumed=assumed)}")
