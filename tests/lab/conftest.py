"""A lab per test module, in the state that a test starts from, so that each test runs alone."""

import os
from collections.abc import Iterator

import pytest
from clusters import Cluster

KEEP = "FARANDOLE_KEEP" in os.environ


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A lab with the number of nodes that the module sets in NODES: bare ones, if no lab was kept."""
    name = request.module.__name__.replace("_", "-")
    lab = Cluster(name)
    if not (KEEP and lab.running() >= request.module.NODES):
        lab.reset(request.module.NODES)
    yield lab
    if not KEEP:
        lab.farandole("down")


@pytest.fixture
def bare(cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """The same with bare nodes."""
    if not cluster.bare:
        cluster.reset(request.module.NODES)
    return cluster


@pytest.fixture
def site(cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """The same after site.yml with the arguments that the module sets in SITE."""
    cluster.ensure(*request.module.SITE)
    return cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long each fault took to be named, as rows of the table in docs/faults.md."""
    for report in terminalreporter.getreports("passed"):
        for name, row in report.user_properties if report.when == "call" else ():
            if name == "named":
                terminalreporter.write_line(f"| {row} |")
