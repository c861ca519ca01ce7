"""The cluster's certificate authority, for the role that brings certificates to the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from farandole.authority import Authority, serve
from farandole.errors import FarandoleError
from farandole.state import claim


class ActionModule(ActionBase):  # type: ignore[misc]
    """Signs what has to be signed, for all hosts at once."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "folder": {"type": "path", "required": True},
                "nodes": {"type": "list", "elements": "dict", "required": True},
                "launchers": {"type": "list", "elements": "str", "required": True},
                "user": {"type": "str", "required": True},
                "host_days": {"type": "int", "required": True},
                "user_days": {"type": "int", "required": True},
                "passphrase": {"type": "str", "default": "", "no_log": True},
                "revoked": {"type": "list", "elements": "str", "default": []},
                "rotate": {"type": "bool", "default": False},
            }
        )
        check_mode, folder = self._task.check_mode, Path(arguments["folder"])
        try:
            claim(folder.parent, Path((task_vars or {})["inventory_dir"]), write=not check_mode)
            authority = Authority(folder, arguments["passphrase"], check_mode=check_mode)
            signed, notice = serve(authority, arguments, (task_vars or {})["groups"]["cluster"])
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from error
        if notice:
            self._display.warning(notice)
        return {**result, "changed": authority.changed, **signed}
