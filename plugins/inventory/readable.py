DOCUMENTATION = """
name: readable
short_description: Say where an inventory is not YAML
description:
  - Reads nothing. It refuses a file that is not YAML, with the line and what YAML expected there, before the plugin
    C(yaml) does so without.
"""

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin

try:
    from farandole.inventory.reading import fault
except ModuleNotFoundError:

    def fault(path: Path, *, groups: bool) -> str:  # noqa: ARG001
        """Nothing: the first play says that the package is missing."""
        return ""


class InventoryModule(BaseInventoryPlugin):  # type: ignore[misc]
    """Takes only what is malformed."""

    NAME = "farandole.cluster.readable"

    def verify_file(self, path: str) -> bool:
        """Whether there is something to refuse."""
        return super().verify_file(path) and Path(path).is_file() and bool(fault(Path(path), groups=True))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Refuses."""
        super().parse(inventory, loader, path, cache)
        raise AnsibleParserError(fault(Path(path), groups=True))
