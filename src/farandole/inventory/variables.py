"""The hosts of an inventory and their variables, as Ansible reads them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.findings import several
from farandole.core.project import ROOT, environment
from farandole.inventory.reading import EXAMPLE, existing

# Without a host in each of them there is no cluster.
NEEDED = ("cluster", "head")


def host_variables(inventory: Path, group: str = "cluster") -> dict[str, dict[str, Any]]:
    """The variables of each host in a group."""
    return dict(_variables(inventory, group))


def of_first_host(inventory: Path) -> dict[str, Any]:
    """The variables of one host of the cluster, for what all of them have in common."""
    return next(_variables(inventory, "cluster"))[1]


def _variables(inventory: Path, group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    loader, read = _opened(inventory)
    from ansible.errors import AnsibleError
    from ansible.template import Templar
    from ansible.vars.manager import VariableManager

    try:
        manager = VariableManager(loader, read)
        for name in _groups(inventory, read, group).get(group, ()):
            variables = manager.get_vars(host=read.get_host(name), include_hostvars=False)
            yield name, _with_login(variables, Templar(loader, variables))
    except AnsibleError as error:
        raise FarandoleError(f"{inventory} cannot be read: {error}") from None


def folder_of(inventory: Path) -> Path:
    """The folder of an inventory, which may be given as one of its files."""
    return inventory.absolute() if inventory.is_dir() else inventory.absolute().parent


def groups_of(inventory: Path) -> dict[str, list[str]]:
    """The hosts of each group."""
    return _groups(inventory, _opened(inventory)[1], *NEEDED)


def _groups(inventory: Path, read: Any, *needed: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = read.get_groups_dict()
    for name in needed:
        if name in NEEDED and not groups.get(name):
            raise FarandoleError(f"{inventory}: group {name} is missing or empty; {EXAMPLE} is an example")
    return groups


def _with_login(variables: dict[str, Any], templar: Any) -> dict[str, Any]:
    """Evaluate what says how to log in, and who does."""
    login = {
        name: value
        for name, value in variables.items()
        if re.match(r"ansible_(ssh_|private_key_file$|host$|user$|port$)|base_user$|cluster_users$", name)
    }
    return {**variables, **{name: templar.template(value) for name, value in login.items()}}


def refuse_unknown(inventory: Path, option: str, pattern: str) -> None:
    """Refuse names of hosts or groups that the inventory does not have; of a pattern Ansible itself makes sense."""
    if not pattern:
        return
    _, read = _opened(inventory)
    terms = (term.strip().lstrip("!&") for term in pattern.split(","))
    unknown = [term for term in terms if re.fullmatch(r"[\w.-]+", term) and term not in {*read.hosts, *read.groups}]
    if unknown:
        known = several([*read.hosts])
        raise FarandoleError(f"{option}: {inventory} has no host {', '.join(unknown)}; the hosts are {known}")


def _opened(inventory: Path) -> tuple[Any, Any]:
    """Ansible's loader and its view of an inventory, read in this process, which is twice as fast."""
    os.environ.update(environment())
    from ansible.errors import AnsibleError

    try:
        # Ansible reads its configuration when it is imported.
        from ansible.inventory.manager import InventoryManager
        from ansible.parsing.dataloader import DataLoader
        from ansible.plugins.loader import init_plugin_loader
        from ansible.utils.collection_loader import AnsibleCollectionConfig

        if not AnsibleCollectionConfig.collection_finder:
            init_plugin_loader()
        existing(inventory)
        loader = DataLoader()
        # Whose group_vars say how to log in, from wherever this is called.
        loader.set_basedir(str(ROOT))
        return loader, InventoryManager(loader, [str(inventory)])
    except AnsibleError as error:
        raise FarandoleError(f"{inventory} cannot be read: {error}") from None
