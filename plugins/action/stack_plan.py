"""Say what this run has to do, so that a run with nothing to do asks no node anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from farandole.errors import FarandoleError
from farandole.stack.cache import Builds
from farandole.stack.plan import choose, free_of, plan, refuse_elsewhere, refuse_without_room, stacks_of, system_of


class ActionModule(ActionBase):  # type: ignore[misc]
    """Looks at the lock, at what is built, and at what the probe brought."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "lock": {"type": "dict", "default": {}},
                "back_to": {"type": "str"},
                "builds": {"type": "path", "required": True},
                "nodes": {"type": "list", "elements": "str", "required": True},
                "builder": {"type": "str", "required": True},
            }
        )
        builds, builder = Builds(Path(arguments["builds"])), arguments["builder"]
        known = {name: (task_vars or {})["hostvars"][name] for name in arguments["nodes"]}
        nodes = {name: stacks_of(variables) for name, variables in known.items()}
        lock = arguments["lock"]
        try:
            if arguments["back_to"] is not None:
                systems = {name: system_of(variables) for name, variables in known.items()}
                lock = choose(arguments["back_to"], nodes, systems.values(), builds)
                refuse_elsewhere(lock, systems)
            made = plan(lock, builds, nodes, builder)
            refuse_without_room(made, {name: free_of(variables) for name, variables in known.items()}, builder)
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from error
        return {**result, "changed": False, "lock": lock, "plan": made}
