"""What all action plugins share: documented arguments, checked, and failures that read like sentences."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from farandole.errors import FarandoleError

Spec = dict[str, dict[str, Any]]
CHECKED = ("type", "elements", "required", "default", "choices", "no_log")


def argument_spec(options: Mapping[str, Mapping[str, Any]]) -> Spec:
    """Turns the options of a documentation into an argument spec as Ansible validates it."""
    spec = {name: {key: option[key] for key in CHECKED if key in option} for name, option in options.items()}
    nested = {name: option["suboptions"] for name, option in options.items() if "suboptions" in option}
    return spec | {name: spec[name] | {"options": argument_spec(inner)} for name, inner in nested.items()}


class Action(ActionBase):  # type: ignore[misc]
    """An action plugin whose file documents its arguments and whose decisions are made in this package."""

    # Rules between arguments, as Ansible's validator takes them; a documentation cannot express them.
    required_if: tuple[tuple[str, Any, tuple[str, ...]], ...] = ()

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Validates the arguments, acts, and turns an error that is meant for a person into a failure."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(self.spec(), required_if=self.required_if)
        try:
            return {**result, **self.act(arguments, task_vars or {})}
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from None

    @classmethod
    def spec(cls) -> Spec:
        """The argument spec that DOCUMENTATION in the plugin's own file describes."""
        documentation = yaml.safe_load(vars(sys.modules[cls.__module__])["DOCUMENTATION"])
        return argument_spec(documentation.get("options") or {})

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Does the work of the plugin; what it returns is added to the result."""
        raise NotImplementedError
