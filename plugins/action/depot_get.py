"""Bring a file of a node to the control machine, checked by its sha256."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from farandole.stack.cache import Built, recall_whole, record, sha256


class ActionModule(ActionBase):  # type: ignore[misc]
    """Straight over the connection: the fetch action would send a large file as base64."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "path": {"type": "path", "required": True},
                "sha256": {"type": "str", "required": True},
                "to": {"type": "path", "required": True},
                "about": {"type": "dict", "default": {}},
            }
        )
        target, wanted = Path(arguments["to"]), arguments["sha256"]
        if (there := recall_whole(target)) and there.sha256 == wanted:
            return {**result, "changed": False, "file": there.told()}
        result["changed"] = True
        if self._task.check_mode:
            return result
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.part")
        try:
            self._connection.fetch_file(arguments["path"], str(draft))
            if (got := sha256(draft)) != wanted:
                host = (task_vars or {}).get("inventory_hostname", "")
                raise AnsibleActionFail(
                    f"{arguments['path']} of {host} arrived with sha256 {got}, and it left with {wanted}: run again"
                )
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        built = Built(target, wanted, arguments["about"])
        record(built)
        return {**result, "file": built.told()}
