"""Settle the versions of a cluster's stack: the lock that there is, or a new one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from farandole.errors import FarandoleError
from farandole.stack import lock as locks
from farandole.stack import nodes
from farandole.stack.cache import default_root
from farandole.stack.wish import wish

SPEC = {
    "inventory_dir": {"type": "path", "required": True},
    "frameworks": {"type": "list", "elements": "str"},
    "pins": {"type": "list", "elements": "str", "default": []},
    "accelerator": {"type": "str", "choices": ["auto", "cpu", "cuda"], "default": "auto"},
    "configure": {"type": "list", "elements": "str", "default": []},
    "cache": {"type": "path", "default": ""},
    "collect": {"type": "bool", "default": False},
}


def probes(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the nodes said that were asked in this run."""
    answers = {name: variables["hostvars"][name].get("_preflight_probe") for name in variables["groups"]["cluster"]}
    return {name: answer["probe"] for name, answer in answers.items() if answer and "probe" in answer}


class ActionModule(ActionBase):  # type: ignore[misc]
    """Reads, solves and collects on this machine alone."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=SPEC)
        path = locks.path_of(Path(arguments["inventory_dir"]))
        cache = Path(arguments["cache"]) if arguments["cache"] else default_root()
        try:
            lock, changed = self._settle(path, arguments, task_vars or {})
            if arguments["collect"] and not self._task.check_mode:
                changed = self._collect(lock, cache) or changed
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from error
        return {**result, "changed": changed, "lock": lock, "cache": str(cache), "lock_path": str(path)}

    def _settle(
        self, path: Path, arguments: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        if arguments["frameworks"] is None:
            return locks.read(path), False
        found = nodes.read(probes(variables))
        inventory = arguments["inventory_dir"]
        wanted = wish(arguments["frameworks"], arguments["pins"], arguments["accelerator"], inventory=inventory)
        configure = arguments["configure"]
        if path.exists():
            lock = locks.read(path)
            locks.check(path, lock, found, wanted, configure)
            return lock, False
        lock = locks.make(found, wanted, configure)
        if not self._task.check_mode:
            locks.write(path, lock)
        return lock, True

    @staticmethod
    def _collect(lock: Mapping[str, Any], cache: Path) -> bool:
        # Imported here, as a run that builds nothing has no use for it.
        from farandole.stack.collect import collect

        return collect(lock, cache, Display().display)
