"""Predict how fast a training job is on several workers, from what the network between them carries."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Horovod's defaults: the most that it sends in one piece, and how often it looks for gradients.
PIECE_MB, CYCLE_MS = 134.2, 1.0
# The share of a step in which gradients are computed, as it takes twice the operations of the forward pass. Until then
# there is nothing to send.
BACKWARD = 2 / 3
# What is left of a link's rate after the headers of Ethernet, IP and TCP.
PAYLOAD = 0.94


@dataclass(frozen=True)
class TrainingJob:
    """A training job: the size of its gradients, how long a step takes on one worker, and how gradients are sent."""

    gradients_mb: float
    step_ms: float
    mpi: bool = False
    # Whether gradients are sent while others are computed.
    overlaps: bool = True
    # Whether two workers that exchange gradients send in turns, as Open MPI may do with large ones over TCP.
    turns: bool = False


@dataclass(frozen=True)
class Network:
    """What counts of a network: the rate of its slowest node, and the longest way of a message there and back."""

    mb_per_s: float
    round_trip_us: float


@dataclass(frozen=True)
class Measured:
    """What preflight measured of some nodes: their network, and which of them is to blame for it."""

    network: Network
    slowest: str
    farthest: str
    usual_mb_per_s: float
    names: Sequence[str]
    missing: Sequence[str]
    when: str


def measured(links: Mapping[str, Any], nodes: Collection[str]) -> Measured | None:
    """The network between some nodes, from a checked preflight.json; none if fewer than two of them were measured."""
    known = {name: node for name, node in links.get("nodes", {}).items() if name in nodes and all(node.values())}
    if len(known) < 2:
        return None
    slowest = min(known, key=lambda name: float(known[name]["mb_per_s"]))
    farthest = max(known, key=lambda name: float(known[name]["delay_us"]))
    return Measured(
        Network(known[slowest]["mb_per_s"], known[farthest]["delay_us"]),
        slowest,
        farthest,
        links["usual_mb_per_s"] or 0.0,
        list(known),
        [name for name in nodes if name not in known],
        links.get("rates_measured") or "",
    )


@dataclass(frozen=True)
class Prediction:
    """How long a step takes on so many workers, and what of that its gradients take."""

    workers: int
    alone_ms: float
    step_ms: float
    bandwidth_ms: float
    latency_ms: float

    @property
    def exchange_ms(self) -> float:
        """How long it takes to average the gradients."""
        return self.bandwidth_ms + self.latency_ms

    @property
    def efficiency(self) -> float:
        """The speed of each worker, compared with one alone."""
        return self.alone_ms / self.step_ms


def predict(job: TrainingJob, network: Network, workers: int) -> Prediction:
    """Predict a step on so many workers, one on each node."""
    volume, messages = mpi_amounts(workers, turns=job.turns) if job.mpi else amounts(workers)
    pieces = math.ceil(job.gradients_mb / PIECE_MB) if workers > 1 else 0
    bandwidth_ms = 1000 * volume * job.gradients_mb / network.mb_per_s
    # A message takes half as long as one there and back.
    latency_ms = pieces * (messages * network.round_trip_us / 2000 + CYCLE_MS)
    exchange_ms = bandwidth_ms + latency_ms
    # Nothing can be sent before the backward pass, and the last gradients only after it.
    hidden_ms = BACKWARD * job.step_ms if job.overlaps else 0.0
    step_ms = job.step_ms + max(exchange_ms - hidden_ms, latency_ms)
    return Prediction(workers, job.step_ms, step_ms, bandwidth_ms, latency_ms)


def amounts(workers: int) -> tuple[float, int]:
    """What a worker sends, as a multiple of the gradients, and how many messages follow each other.

    Gloo and NCCL send pieces around a ring.
    """
    return 2 * (workers - 1) / workers, 2 * (workers - 1)


def mpi_amounts(workers: int, *, turns: bool = False) -> tuple[float, int]:
    """The same for Open MPI, which halves and then doubles what two workers exchange.

    This is as good for 2, 4, 8 … workers. Of more, each first exchanges half of its gradients with a neighbour, gets
    the other half, and in the end sends it the result.
    """
    steps = workers.bit_length() - 1
    more = workers > 1 << steps
    exchanged = 2 * (1 - 0.5**steps) + 0.5 * more
    return exchanged * (1 + turns) + 1.5 * more, 2 * steps + 3 * more
