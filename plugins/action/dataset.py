"""Bring the data of the sample scripts into the control machine's cache, and say which nodes lack it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from farandole.dataset import bring, lacking
from farandole.errors import FarandoleError
from farandole.stack.cache import default_root

SPEC = {
    "data": {"type": "str", "choices": ["auto", "mnist", "digits"], "default": "auto"},
    "cache": {"type": "path", "default": ""},
    "nodes": {"type": "list", "elements": "str", "default": []},
}


class ActionModule(ActionBase):  # type: ignore[misc]
    """Works on this machine alone."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=SPEC)
        cache = Path(arguments["cache"]) if arguments["cache"] else default_root()
        try:
            built = bring(arguments["data"], cache, Display().display)
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from error
        name = built.path.stem
        return {
            **result,
            # The cache is filled in check mode too, and is no part of the cluster.
            "changed": False,
            "name": name,
            "source": built.about["source"],
            "path": str(built.path),
            "file": f"{name}.{built.sha256[:12]}.tar",
            "sha256": built.sha256,
            "size": built.path.stat().st_size,
            "files": built.about["files"],
            "lacking": lacking(built, arguments["nodes"], (task_vars or {}).get("hostvars") or {}),
        }
