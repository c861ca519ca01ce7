"""What action plugins need to take a module's answer from those that the node has already given."""

import base64
import hashlib
import inspect
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.executor.module_common import _get_shebang
from ansible.module_utils.common.json import Direction, get_module_decoder, get_module_encoder
from ansible.module_utils.json_utils import _filter_non_json_lines
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import module_loader, module_utils_loader
from ansible.release import __version__
from ansible.vars.clean import remove_internal_keys

from farandole.core.files import write_private
from farandole.plays.ahead import node
from farandole.plays.ahead.calls import Answer, Call, HostCalls, RunCalls

# The modules in an archive as base64, and the full name and the profile of each.
Packed = tuple[str, dict[str, tuple[str, str]]]
BUILT = re.compile(rb"^module_fqn='(?P<module>[\w.]+)',$.*^zip_data='(?P<zip>[\w+/=]+)',$", re.MULTILINE | re.DOTALL)
# Ansible adds to these when it receives them from a node.
SPECIAL = {"exception", "results", "stderr", "stdout"}
# Each of a node's tasks reads all that the node has said.
LONGEST = 1 << 20
FOLDER = Path(constants.DEFAULT_LOCAL_TMP) / "ask-ahead"
OVERRIDES = Path(__file__).parent / "plugins"


def decode(answer: Answer) -> dict[str, Any]:
    """The result that a module has printed; a failure if there is none."""
    with suppress(ValueError):
        text, _ = _filter_non_json_lines(answer.output, objects_only=True)
        result = json.loads(text, cls=get_module_decoder(answer.profile, Direction.MODULE_TO_CONTROLLER))
        if isinstance(result, dict):
            return result
    return {"failed": True}


def encode(value: Mapping[str, Any], profile: str = "legacy") -> str:
    """Arguments of a module as JSON."""
    return json.dumps(value, cls=get_module_encoder(profile, Direction.CONTROLLER_TO_MODULE), sort_keys=True)


def question(call: Call, module: str, profile: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """A call in the form that the program on the node expects."""
    arguments = {**json.loads(call.arguments), **common, "_ansible_module_name": call.module}
    return {
        "module": module,
        "profile": profile,
        "arguments": encode({"ANSIBLE_MODULE_ARGS": arguments}, profile),
        "environment": json.loads(call.environment),
    }


def told(printed: str, asked: Sequence[tuple[str, str]]) -> dict[str, Answer]:
    """The answers by the keys of the calls, which are given with their profiles; none if any is missing or too long."""
    outputs = decode(Answer(printed, "legacy")).get("outputs") if len(printed) <= LONGEST else None
    if not isinstance(outputs, list) or len(outputs) != len(asked):
        return {}
    return {key: Answer(str(output), profile) for (key, profile), output in zip(asked, outputs, strict=True)}


class AsksAhead(ActionBase):  # type: ignore[misc]
    """Calls modules as every action plugin does, except where the node has already given the same answer."""

    def _execute_module(
        self, module_name: Any = None, module_args: Any = None, tmp: Any = None, task_vars: Any = None, **options: Any
    ) -> dict[str, Any]:
        run = RunCalls.current(FOLDER)
        if run is None or any(options.values()) or not self._askable(task_vars):
            return dict(super()._execute_module(module_name, module_args, tmp, task_vars, **options))
        name = module_name or self._task.action
        arguments = dict(self._task.args if module_args is None else module_args)
        host, call = run.host(task_vars["inventory_hostname"]), self._call(name, arguments)
        result = self._answer(run, host, call, task_vars)
        if result is None:
            result = dict(super()._execute_module(name, arguments, tmp, task_vars))
            if result.get("changed", True) and not self._task.check_mode:
                host.forget()
        if not (result.get("failed") or result.get("skipped")):
            host.add(call)
        return result

    def _askable(self, task_vars: Mapping[str, Any]) -> bool:
        """Whether the module runs over ssh on the task's own host, once, at any time, and without secrets."""
        task = self._task
        elsewhere = self._connection.transport not in ("ssh", "ansible.builtin.ssh") or task.delegate_to
        if elsewhere or task.no_log or task.async_val or task.until or not task_vars.get("ask_ahead", True):
            return False
        return bool(self._is_pipelining_enabled("new"))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Call:
        environment: dict[str, Any] = {}
        self._compute_environment_string(environment)
        user = self.get_become_option("become_user") if self._connection.become else ""
        return Call(name, encode(arguments), json.dumps(environment), str(user))

    def _answer(
        self, run: RunCalls, host: HostCalls, call: Call, task_vars: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The result of a call if the node has given it already; None if the module has to be called."""
        answers = host.answers()
        if answers is None and (calls := host.due(call)):
            answers = self._ask(run, calls, task_vars)
            host.store(answers)
        result = self._decoded((answers or {}).get(call.key, Answer("", "legacy")))
        # In check mode every answer is the one that the task would get.
        different = not self._task.check_mode and (result.get("changed", True) or result.get("skipped"))
        if different or result.get("failed") or SPECIAL & result.keys():
            return None
        remove_internal_keys(result)
        return {**result, "_ansible_parsed": True}

    def _decoded(self, answer: Answer) -> dict[str, Any]:
        return decode(answer)

    def _ask(self, run: RunCalls, calls: Sequence[Call], task_vars: Mapping[str, Any]) -> dict[str, Answer]:
        """Make all calls on the node, in check mode."""
        packed, modules = self._packed(run, sorted({call.module for call in calls}), task_vars)
        # What Ansible adds to the arguments of every module.
        common: dict[str, Any] = {}
        self._update_module_args("", common, task_vars)
        common["_ansible_check_mode"] = True
        # The task's own call comes last, because a probe reports the time.
        known = [call for call in (*calls[1:], calls[0]) if call.module in modules]
        questions = [question(call, *modules[call.module], common) for call in known]
        program = f"{inspect.getsource(node)}\n\nmain({packed!r}, {questions!r})\n"
        shebang, _ = _get_shebang("/usr/bin/python", task_vars, self._templar)
        command = self._connection._shell.build_module_command("", shebang, "")
        printed = self._low_level_execute_command(command, in_data=program.encode())["stdout"]
        return told(printed, [(call.key, modules[call.module][1]) for call in known])

    def _packed(self, run: RunCalls, names: Sequence[str], task_vars: Mapping[str, Any]) -> Packed:
        """These modules in one archive, which is made again only if one of its sources changes: that takes seconds."""
        path = run.packed / self._version(names)
        with run.alone():
            if not path.exists():
                write_private(path, json.dumps(self._pack(names, task_vars)))
        packed, modules = json.loads(path.read_text())
        return packed, {name: (module, profile) for name, (module, profile) in modules.items()}

    @staticmethod
    def _version(names: Sequence[str]) -> str:
        """What identifies the sources of modules, their settings, and Ansible's own ones."""
        paths = [Path(place) for name in names if (place := module_loader.find_plugin(name, ".py"))]
        paths += sorted(module_utils_loader.all(path_only=True))
        sources = [(str(path), hashlib.sha256(Path(path).read_bytes()).hexdigest()) for path in paths]
        return hashlib.sha256(json.dumps([__version__, constants.__file__, names, sources]).encode()).hexdigest()

    def _pack(self, names: Sequence[str], task_vars: Mapping[str, Any]) -> Packed:
        """Join the archives that Ansible makes of each module and what it imports."""
        files: dict[str, bytes] = {}
        modules: dict[str, tuple[str, str]] = {}
        for name in names:
            # A module that no longer exists is not asked for.
            with suppress(AnsibleError):
                made, _ = self._configure_module(name, {}, task_vars)
                if match := BUILT.search(made.b_module_data):
                    with zipfile.ZipFile(io.BytesIO(base64.b64decode(match["zip"]))) as archive:
                        files |= {file: archive.read(file) for file in archive.namelist()}
                    modules[name] = match["module"].decode(), made.serialization_profile
        joined = io.BytesIO()
        with zipfile.ZipFile(joined, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, content in files.items():
                archive.writestr(file, content)
        return base64.b64encode(joined.getvalue()).decode(), modules
