"""Load plugins by path, as Ansible does, because they are in no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils

from farandole.core.errors import FarandoleError

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
# Ansible does the same for the folders that ansible.cfg names.
ansible.module_utils.__path__.append(str(PLUGINS / "module_utils"))


def load_probe(name: str) -> ModuleType:
    folder = str(ROOT / "files/probes")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def load(kind: str, name: str) -> ModuleType:
    path = PLUGINS / kind / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{kind}_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks up the module that a class is defined in.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def acted(action: Any, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
    """What an action returns, or of what it refuses."""
    try:
        return {"failed": False, **action.act(arguments, variables)}
    except FarandoleError as error:
        return {"failed": True, "msg": str(error)}
