"""A lab per test module."""

from collections.abc import Iterator

import pytest
from clusters import Cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A lab of as many bare nodes as the module's NODES says."""
    name = request.module.__name__.replace("_", "-")
    lab = Cluster(name)
    lab.reset(request.module.NODES)
    yield lab
    lab.farandole("down")
