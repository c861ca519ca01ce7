"""Call a module that has no action plugin of its own; takes the place of Ansible's plugin of this name."""

from typing import Any

from ansible import constants

from farandole.plays.ahead.action import AsksAhead


class ActionModule(AsksAhead):
    """Differs from Ansible's in the base class only, which cannot be inherited from, as this file hides it."""

    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Calls the module, in the background if the task says so."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        background = bool(self._task.async_val) and not self._connection.has_native_async
        result |= self._execute_module(task_vars=task_vars, wrap_async=background)
        if self._task.action in constants._ACTION_SETUP:
            result["_ansible_verbose_override"] = True
        if not background:
            self._remove_tmp_path(self._connection._shell.tmpdir)
        return result
