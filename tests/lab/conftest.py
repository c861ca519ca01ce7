"""A lab in the state that a test starts from, so that each test runs alone."""

import os
from collections.abc import Iterator

import pytest
from clusters import Cluster
from labs import labs

KEEP = "FARANDOLE_KEEP" in os.environ


@pytest.fixture(scope="session")
def up() -> Iterator[list[Cluster]]:
    """The lab that is up, if any."""
    clusters: list[Cluster] = []
    yield clusters
    take_down(clusters)


def take_down(up: list[Cluster]) -> None:
    while up:
        cluster = up.pop()
        if not KEEP:
            cluster.lab("down")


def kind(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options with which the module wants its nodes, in KIND."""
    return getattr(request.module, "KIND", ())


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, up: list[Cluster]) -> Cluster:
    """The module's lab. If it was not up, it has as many nodes as the module sets in NODES, and they are bare."""
    name = next(name for name, modules in labs().items() if request.path in modules)
    lab = Cluster(f"test-{name.replace('_', '-')}")
    if lab.name not in [other.name for other in up]:
        take_down(up)
        if not (KEEP and lab.running() >= request.module.NODES):
            lab.reset(request.module.NODES, *kind(request))
        up.append(lab)
    return up[0]


@pytest.fixture
def bare(cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """The same with bare nodes."""
    if not cluster.bare:
        cluster.reset(request.module.NODES, *kind(request))
    return cluster


@pytest.fixture
def site(cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """The same after site.yml with the arguments that the module sets in SITE, on NODES nodes at least."""
    if cluster.running() < request.module.NODES:
        cluster.lab("up", "--nodes", str(request.module.NODES), *kind(request))
        cluster.applied = None
    cluster.ensure(*request.module.SITE)
    return cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long each fault took to be named, as rows of the table in docs/faults.md."""
    for report in terminalreporter.getreports("passed"):
        for name, row in report.user_properties if report.when == "call" else ():
            if name == "named":
                terminalreporter.write_line(f"| {row} |")
