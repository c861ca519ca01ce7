"""A lab per test module."""

from collections.abc import Iterator

import pytest
from clusters import Cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A lab with the number of bare nodes that the module sets in NODES."""
    name = request.module.__name__.replace("_", "-")
    lab = Cluster(name)
    lab.reset(request.module.NODES)
    yield lab
    lab.farandole("down")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long each fault took to be named, as rows of the table in docs/faults.md."""
    for report in terminalreporter.getreports("passed"):
        for name, row in report.user_properties if report.when == "call" else ():
            if name == "named":
                terminalreporter.write_line(f"| {row} |")
