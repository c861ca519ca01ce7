"""Fixtures for several modules."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.core.project import CONFIG

from .packages import pip_settings, write_all

# As Ansible's own programs do before anything else: what some tests import first would find other settings.
with pytest.MonkeyPatch.context() as patched:
    patched.setenv("ANSIBLE_CONFIG", str(CONFIG))
    importlib.import_module("ansible.plugins.loader").init_plugin_loader()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Leave the environment as it was: a command sets there what Ansible reads, for a process that ends with it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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
