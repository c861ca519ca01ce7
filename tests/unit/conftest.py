"""Fixtures for several modules."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.core.project import CONFIG
from farandole.node.head import runs, status

from .packages import pip_settings, write_all
from .stack import served

# As Ansible's own programs do before anything else: what some tests import first would find other settings.
with pytest.MonkeyPatch.context() as patched:
    patched.setenv("ANSIBLE_CONFIG", str(CONFIG))
    importlib.import_module("ansible.plugins.loader").init_plugin_loader()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `--numprocesses auto`: more than two even on two cores, as many tests wait."""
    return max(3, len(os.sched_getaffinity(0)))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Leave the environment as it was: a command sets there what Ansible reads, for a process that ends with it."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def bare_pip(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pip without settings, which asks this machine without a proxy."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "NETRC": os.devnull}
    for name, value in {**settings, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head with three nodes, and no runs."""
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=2\nnode-3\n")
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots/.lock").touch()
    monkeypatch.setattr(status, "HOSTFILE", tmp_path / "hostfile")
    monkeypatch.setattr(status, "SLOTS_IN_USE", tmp_path / "slots")
    monkeypatch.setattr(status, "UPGRADING", tmp_path / "upgrading")
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    return tmp_path


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small package index."""
    folder = tmp_path_factory.mktemp("wheels")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def small_index(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make that index the only one of this machine's pip."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pip_settings(wheels).items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield wheels


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[str]:
    """The URL of a depot with the files of a folder."""
    (tmp_path / "depot").mkdir()
    with served(tmp_path / "depot") as url:
        yield url


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where stacks are installed."""
    return tmp_path / "opt"
