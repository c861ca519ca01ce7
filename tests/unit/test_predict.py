"""What a network makes of a job; docs/prediction.md compares it with jobs that ran."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.links.predict import CYCLE_MS, PIECE_MB, Network, TrainingJob, amounts, mpi_amounts, predict

JOB = TrainingJob(gradients_mb=100, step_ms=250)
AFTERWARDS = TrainingJob(gradients_mb=100, step_ms=250, overlaps=False)
NETWORK = Network(mb_per_s=25, round_trip_us=100)


@pytest.mark.parametrize(
    ("workers", "ring", "mpi"),
    [
        # How much, and how many messages follow each other.
        (1, (0, 0), (0, 0)),
        (2, (1, 2), (1, 2)),
        (3, (4 / 3, 4), (3, 5)),
        (4, (1.5, 6), (1.5, 4)),
        (5, (1.6, 8), (3.5, 7)),
        (8, (1.75, 14), (1.75, 6)),
        (16, (1.875, 30), (1.875, 8)),
    ],
)
def test_what_a_worker_sends(workers: int, ring: tuple[float, int], mpi: tuple[float, int]) -> None:
    assert amounts(workers) == pytest.approx(ring)
    assert mpi_amounts(workers) == pytest.approx(mpi)


def test_workers_that_send_in_turns_need_up_to_twice_as_long() -> None:
    assert [mpi_amounts(workers, turns=True)[0] for workers in (1, 2, 3, 4)] == [0, 2, 4.5, 3]
    job = TrainingJob(gradients_mb=100, step_ms=250, mpi=True, turns=True)
    assert predict(job, NETWORK, 2).bandwidth_ms == 2 * predict(JOB, NETWORK, 2).bandwidth_ms


def test_a_step_takes_what_the_slowest_link_needs() -> None:
    prediction = predict(AFTERWARDS, NETWORK, 4)
    assert prediction.bandwidth_ms == pytest.approx(1.5 * 100 / 25 * 1000)
    assert prediction.latency_ms == pytest.approx(6 * 0.05 + CYCLE_MS)
    assert prediction.step_ms == pytest.approx(250 + prediction.exchange_ms)
    assert prediction.efficiency == pytest.approx(250 / prediction.step_ms)
    # The backward pass hides what is sent meanwhile.
    prediction = predict(JOB, NETWORK, 4)
    assert prediction.step_ms == pytest.approx(250 / 3 + prediction.exchange_ms)
    assert predict(JOB, Network(1000, 100), 2).step_ms == pytest.approx(250 + 2 * 0.05 + CYCLE_MS)
    # Large gradients are sent in several pieces.
    first, second = (
        predict(TrainingJob(megabytes, 100), NETWORK, 2).latency_ms for megabytes in (PIECE_MB, PIECE_MB + 1)
    )
    assert second == pytest.approx(2 * first)


def test_no_step_is_shorter_than_on_one_worker() -> None:
    for job in (JOB, AFTERWARDS):
        for network in (NETWORK, Network(1e9, 0)):
            assert all(0 < predict(job, network, workers).efficiency <= 1 for workers in (2, 3, 64))
        assert (predict(job, NETWORK, 1).efficiency, predict(job, NETWORK, 1).exchange_ms) == (1, 0)


# The command


NODES = ("node-1", "node-2", "node-3")


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    hosts = {name: {"ansible_host": f"192.0.2.{number}"} for number, name in enumerate(NODES, 1)}
    groups = {"cluster": {"hosts": hosts, "vars": {"base_state_dir": str(tmp_path / "state")}}}
    (folder / "hosts.yml").write_text(json.dumps({**groups, "head": {"hosts": {"node-1": None}}}))
    return folder


def link(rate: float | None, delay: float | None = 100.0) -> dict[str, float | None]:
    return {"mb_per_s": rate, "delay_us": delay}


def preflight(inventory: Path, links: object) -> None:
    """Write what preflight does."""
    (inventory.parent / "state").mkdir(exist_ok=True)
    (inventory.parent / "state/preflight.json").write_text(json.dumps({"links": links}))


def links(*rates: float | None, **more: Any) -> dict[str, Any]:
    nodes = {name: link(rate) for name, rate in zip(NODES, rates, strict=False)}
    return {"nodes": nodes, "usual_mb_per_s": 100.0, "rates_measured": "2026-11-24T08:00:00Z", **more}


def said(*arguments: object) -> str:
    """What `farandole predict` says, or refuses."""
    done = CliRunner().invoke(app, ["predict", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, FarandoleError | SystemExit), done.output
    return str(done.exception) if isinstance(done.exception, FarandoleError) else done.output


def asked(inventory: Path, *more: object) -> str:
    return said("-i", inventory, "--model-mb", 100, "--step-ms", 250, *more)


def test_the_slowest_node_counts_and_is_named(inventory: Path) -> None:
    preflight(inventory, links(100, 25, 110))
    answer = asked(inventory, "--nodes", "4,2")
    rows = [line.split() for line in answer.splitlines()[:3]]
    assert [row[0] for row in rows] == ["workers", "2", "4"]
    assert rows[1][1:3] == ["4001", "4084-4251"]
    assert "about 4.0-4.1 % of 4 workers" in answer
    assert "25.0 MB/s on node-2, the slowest node, where 100.0 are usual" in answer
    assert "between node-1, node-2, node-3 on 2026-11-24T08:00:00Z" in answer
    assert "More than 3 nodes" in answer
    assert "More than" not in asked(inventory, "--nodes", "2,3")
    # As an earlier version has measured it.
    old = links(25, 25, 25)
    del old["rates_measured"]
    preflight(inventory, old)
    assert "on an unknown date" in asked(inventory)


def test_nodes_that_take_no_part_do_not_count(inventory: Path) -> None:
    preflight(inventory, links(100, 25, None))
    (inventory.parent / "state/excluded.yml").write_text(
        "node-2: {since: '2026-11-24T08:00:00Z', by: person, person: x, code: '', why: x, measurement: ''}\n"
    )
    assert "no connections between its nodes have been measured" in asked(inventory)
    preflight(inventory, links(100, 25, 90, nodes={name: link(90) for name in ("node-1", "node-3", "gone")}))
    assert "between node-1, node-3 on" in asked(inventory)
    (inventory.parent / "state/excluded.yml").unlink()
    assert "Not measured: node-2." in asked(inventory)


def test_latency_is_named_where_it_costs_more(inventory: Path) -> None:
    nodes = {"node-1": link(1000, 900), "node-2": link(1000, 2000)}
    preflight(inventory, links(nodes=nodes))
    answer = said("-i", inventory, "--model-mb", 0.1, "--step-ms", 10)
    assert "Latency costs most" in answer
    assert "2000 µs for a message of node-2 there and back" in answer


def test_a_planned_network_needs_no_inventory(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inventory)
    planned = ("--mbit", 10_000, "--delay-us", 50)
    answer = said("--model-mb", 100, "--step-ms", 250, *planned)
    assert "1175.0 MB/s" in answer
    assert "--mbit 10000 and --delay-us 50: as given" in answer
    assert "costs almost nothing" in said("--model-mb", 1, "--step-ms", 1000, *planned)
    assert "which inventory?" in said("--model-mb", 100, "--step-ms", 250, "--mbit", 1000)
    preflight(inventory, links(25, 25, 25))
    assert "1175.0 MB/s.\n" in asked(inventory, "--mbit", 10_000)


@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"links": null}', '{"links": {"nodes": {"node-1": {"mb_per_s": "fast"}}}}', "\x00"]
)
def test_what_was_not_measured_can_be(inventory: Path, content: str) -> None:
    assert f"run  farandole preflight -i {inventory} " in asked(inventory)
    preflight(inventory, None)
    (inventory.parent / "state/preflight.json").write_text(content)
    assert f"run  farandole preflight -i {inventory} " in asked(inventory)


@pytest.mark.parametrize("nodes", ["", "1", "0", "-2", "2,,4", "2;4", "x", "٢", "1e3", "9" * 400, "2," * 9])
def test_nonsense_numbers_of_nodes_are_refused(inventory: Path, nodes: str) -> None:
    preflight(inventory, links(100, 100))
    assert "is not a list of numbers from 2 to" in asked(inventory, f"--nodes={nodes}")


@pytest.mark.parametrize("option", ["--model-mb", "--step-ms", "--mbit", "--delay-us"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300"])
def test_nonsense_numbers_are_refused(inventory: Path, option: str, value: str) -> None:
    preflight(inventory, links(100, 100))
    assert f"{option} is " in asked(inventory, option, value)
