"""The hosts of a scenario, by name."""

from pathlib import Path

import pytest
import testinfra
import yaml


@pytest.fixture(scope="session")
def inventory_path(request):
    return Path(request.config.getoption("--ansible-inventory"))


@pytest.fixture(scope="session")
def addresses(inventory_path):
    cluster = yaml.safe_load((inventory_path / "hosts.yml").read_text())["cluster"]
    return {name: variables["ansible_host"] for name, variables in cluster["hosts"].items()}


@pytest.fixture(scope="session")
def nodes(inventory_path, addresses):
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={inventory_path}") for name in addresses}


@pytest.fixture(scope="session")
def head(nodes):
    return nodes["node-1"]


@pytest.fixture(scope="session")
def worker(nodes):
    return nodes["node-2"]
