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
