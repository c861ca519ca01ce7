"""Load plugins by path, as Ansible does, because they are in no package."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.programs import LIBRARY, program_files

ROOT = Path(__file__).parents[2]
COLLECTIONS = ROOT / "collections"
PLUGINS = COLLECTIONS / "ansible_collections/farandole/cluster/plugins"
# Where Ansible, too, finds what plugins import from their collection.
sys.path.append(str(COLLECTIONS))


def install(folder: Path, program: str, replace: Mapping[str, str] = MappingProxyType({}), **commands: str) -> None:
    """Write a program as nodes get it, but below this folder, with commands that start its modules."""
    starts = {f"{LIBRARY}/{name.replace('_', '-')}": f"{program}.{module}" for name, module in commands.items()}
    for file in program_files(program, starts):
        path = folder / Path(file["path"]).relative_to(LIBRARY)
        text = file["content"].replace(LIBRARY, str(folder))
        for old, new in replace.items():
            text = text.replace(old, new)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(int(file["mode"], 8))


def load_probe(name: str) -> ModuleType:
    return importlib.import_module(f"farandole.node.probes.{name}")


def load(kind: str, name: str) -> ModuleType:
    path = PLUGINS / kind / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{kind}_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks up the module that a class is defined in.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def act(
    name: str,
    arguments: dict[str, Any],
    variables: dict[str, Any] | None = None,
    *,
    check_mode: bool = False,
    connection: Any = None,
) -> dict[str, Any]:
    """What an action returns, or of what it refuses."""
    action = object.__new__(load("action", name).ActionModule)
    action._task = SimpleNamespace(check_mode=check_mode, no_log=False)
    action._display, action._connection = SimpleNamespace(display=print), connection
    defaults = {option: about.get("default") for option, about in action.spec().items()}
    return acted(action, {**defaults, **arguments}, variables or {})


def acted(action: Any, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
    """What an action returns, or of what it refuses."""
    try:
        return {"failed": False, **action.act(arguments, variables)}
    except FarandoleError as error:
        return {"failed": True, "msg": str(error)}
