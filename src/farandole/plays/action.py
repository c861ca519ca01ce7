"""The base class of all action plugins: documented and validated arguments, and failures without a traceback."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.module_utils.common.yaml import yaml_load
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import action_loader

from farandole.core.errors import FarandoleError
from farandole.core.findings import FindingsError
from farandole.core.project import COLLECTION
from farandole.explain.failures import Failure, failure
from farandole.watch.events import add, tell
from farandole.watch.events import text as message

Spec = dict[str, dict[str, Any]]
# Seconds between two looks at how far a transfer is.
LOOK = 2.0
CHECKED = ("type", "elements", "required", "default", "choices", "no_log")


def argument_spec(options: Mapping[str, Mapping[str, Any]]) -> Spec:
    """Turns the options of a plugin's documentation into an argument spec for Ansible's validator."""
    spec = {name: {key: option[key] for key in CHECKED if key in option} for name, option in options.items()}
    nested = {name: option["suboptions"] for name, option in options.items() if "suboptions" in option}
    return spec | {name: spec[name] | {"options": argument_spec(inner)} for name, inner in nested.items()}


class Refusal(AnsibleActionFail):  # type: ignore[misc]
    """A failure in our own words, which Ansible prints once because it has no exception to show beside it."""

    omit_exception_key = True


class Action(ActionBase):  # type: ignore[misc]
    """An action plugin whose file documents its arguments and whose decisions are made in this package."""

    # Rules between arguments in the form of Ansible's validator; a plugin's documentation cannot express them.
    required_if: tuple[tuple[str, Any, tuple[str, ...]], ...] = ()

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Validates the arguments, acts, and turns an error that is meant for the user into a failure."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(self.spec(), required_if=self.required_if)
        try:
            done = self.act(arguments, task_vars or {})
        except FindingsError as error:
            details = {"findings": [finding.data() for finding in error.findings], "heading": error.heading}
            raise Refusal(str(error), result=details) from None
        except FarandoleError as error:
            raise Refusal(str(error)) from None
        # An action may pass on what a node answered, which finds nothing in our name.
        return {**result, **{name: value for name, value in done.items() if name not in ("findings", "heading")}}

    @classmethod
    def spec(cls) -> Spec:
        """The argument spec described by DOCUMENTATION in the plugin's file."""
        # A strategy may have derived a class of its own, as mitogen's does.
        sources = (vars(sys.modules[base.__module__]).get("DOCUMENTATION") for base in cls.__mro__)
        documentation = yaml_load(next(filter(None, sources)))
        return argument_spec(documentation.get("options") or {})

    def ask(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Calls the module of the same name on the node and returns its answer."""
        answer: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=variables)
        return answer

    def tell(self, variables: Mapping[str, Any], text: str) -> None:
        """Tells those who watch the run what this task is doing."""
        if not self._task.no_log:
            tell(str(variables.get("inventory_hostname", "")), text)

    @contextmanager
    def telling(self, variables: Mapping[str, Any], progress: Callable[[], str]) -> Iterator[None]:
        """Tells again and again how far something is, as long as it goes on; no words if that cannot be known."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(LOOK):
                with suppress(OSError):
                    if text := progress():
                        self.tell(variables, text)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def say(self, variables: Mapping[str, Any]) -> Callable[[str], None]:
        """Returns a function that prints a line and tells it."""

        def said(text: str) -> None:
            self._display.display(text)
            self.tell(variables, text)

        return said

    def shown(self, text: str) -> dict[str, Any]:
        """Shows a report to those who watch the run; what is returned makes Ansible print it without -v, too."""
        add("message", text=message(text))
        return {"changed": False, "msg": text, "_ansible_verbose_always": True}

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Does the plugin's work and returns what to add to the result."""
        raise NotImplementedError


class LocalAction(Action):
    """An action that runs on the control machine alone."""

    _requires_connection = False


def failure_of(result: Any, *, lost: bool = False) -> Failure | None:
    """What a task's result says of its failure; nothing if it is secret."""
    task, blamed = result.task, result.host.get_name()
    plugin = action_loader.get(task.action, class_only=True)
    # Any other result is in the words of a node, which finds nothing in our name.
    ours = isinstance(plugin, type) and issubclass(plugin, Action)
    host = str(task.delegate_to or blamed)
    return failure(
        host, blamed, task.get_name().removeprefix(COLLECTION), task.action, result.result, lost=lost, ours=ours
    )
