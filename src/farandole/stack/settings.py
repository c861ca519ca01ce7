"""What an inventory says about the stack."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.parsing.convert_bool import boolean

from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT
from farandole.inventory import state as states
from farandole.inventory.facts import of_inventory
from farandole.inventory.variables import folder_of, host_variables
from farandole.stack import own
from farandole.stack.cache import Builds, default_root, lab_builds

REQUEST = (
    "stack_frameworks", "stack_pins", "stack_packages", "stack_requirements", "stack_build_wheels", "stack_accelerator",
    "openmpi_configure", "samples_data",
)  # fmt: skip


def inventory_variables(inventory: Path) -> dict[str, Any]:
    """What the inventory says about the stack and the data, the same for the whole cluster, and its hosts."""
    values = host_variables(inventory.absolute())
    variables: dict[str, Any] = {"hosts": list(values)}
    for name, default in defaults().items():
        kinds = {json.dumps(own.get(name, default)): host for host, own in values.items()}
        if len(kinds) > 1:
            raise FarandoleError(
                f"{inventory}: {name} differs between {' and '.join(kinds.values())}: set it for all of group cluster"
            )
        variables[name] = json.loads(next(iter(kinds)))
    own, cluster = next(iter(values.values())), of_inventory(inventory)
    variables["folder"] = folder_of(inventory)
    variables["state"] = cluster.state
    variables["hosts"] = [*cluster.members]
    variables["stack_cache"] = str(own.get("stack_cache") or "")
    variables["stack_builds"] = str(own.get("stack_builds") or variables["state"] / "builds")
    return variables


def builds_of(inventory: Path | None) -> list[Builds]:
    """The packed stacks of a cluster; without an inventory, those in all default places on this machine."""
    if inventory:
        return [Builds(Path(plain(inventory_variables(inventory), "stack_builds", "path")).expanduser())]
    return [*map(Builds, sorted(states.states().glob("*/builds"))), Builds(lab_builds())]


def defaults() -> dict[str, Any]:
    """The roles' defaults for what the inventory leaves unset."""
    files = [ROOT / f"roles/{role}/defaults/main/main.yml" for role in ("stack", "openmpi", "samples")]
    known = {name: value for file in files for name, value in yaml.safe_load(file.read_text()).items()}
    return {name: known[name] for name in REQUEST}


def own_packages(variables: Mapping[str, Any]) -> tuple[own.Wish, ...]:
    """The user's own packages."""
    return own.read(plain_list(variables, "stack_packages"), str(variables["stack_requirements"]), variables["folder"])


def cache_of(variables: Mapping[str, Any]) -> Path:
    """The cluster's download cache."""
    return Path(plain(variables, "stack_cache", "path") or default_root()).expanduser()


def sources_of(variables: Mapping[str, Any]) -> Path | None:
    """Where sources are kept, if packages without a wheel may be built."""
    try:
        build = boolean(variables["stack_build_wheels"])
    except TypeError:
        raise _not_plain("true or false", "stack_build_wheels", variables["stack_build_wheels"]) from None
    return cache_of(variables) / "sources" if build else None


def plain(variables: Mapping[str, Any], name: str, kind: str = "value") -> str:
    value = str(variables[name])
    if "{{" in value:
        raise _not_plain(kind, name, value)
    return value


def plain_list(variables: Mapping[str, Any], name: str) -> list[str]:
    value = variables[name]
    if not isinstance(value, list) or any("{{" in str(item) for item in value):
        raise _not_plain("list", name, value)
    return [str(item) for item in value]


def _not_plain(kind: str, name: str, value: Any) -> FarandoleError:
    return FarandoleError(
        f"{name} must be a plain {kind} here, but is {value!r}; only site.yml can evaluate a template"
    )
