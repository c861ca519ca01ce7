"""Judge what was run and write the report; on the control machine alone."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from farandole.errors import FarandoleError
from farandole.state import claim
from farandole.validation.answer import job, lines
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, Bars, Check, judge
from farandole.validation.report import text, verdict, write
from farandole.words import one_line


class ActionModule(ActionBase):  # type: ignore[misc]
    """What is red is for the play to act on."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, told = self.validate_argument_spec(
            argument_spec={
                "folder": {"type": "path", "required": True},
                "trust": {"type": "dict", "required": True},
                "stacks": {"type": "dict", "default": {}},
                "inventory": {"type": "path", "default": "inventory"},
                "jobs": {"type": "list", "elements": "dict", "required": True},
                "bars": {"type": "dict", "options": {bar.name: {"type": "float"} for bar in fields(Bars)}},
                "about": {"type": "dict", "required": True},
                "begun": {"type": "float", "required": True},
                "unmeasured": {"type": "dict", "default": {}},
            }
        )
        folder = Path(told["folder"])
        try:
            claim(folder.parent, Path((task_vars or {})["inventory_dir"]))
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from None
        results = {item["item"]["id"]: ran(item) for item in told["jobs"]}
        bars = Bars(**{name: value for name, value in (told["bars"] or {}).items() if value is not None})
        checks = [*trusted(told["trust"]), *whole(told["stacks"], told["inventory"]), *judge(results, bars)]
        checks += [Check(name, NOT_MEASURED, why) for name, why in told["unmeasured"].items()]
        data = sorted({one["data"] for one in results.values() if "data" in one})
        seconds = round(time.time() - told["begun"], 1)
        about = {**told["about"], "data": data, "seconds": seconds, "bars": asdict(bars)}
        target = write(folder, about, checks)
        answer = {"msg": text(checks, target, seconds), "verdict": verdict(checks), "report": str(target)}
        return {**result, "changed": False, "_ansible_verbose_always": True, **answer}


def ran(item: dict[str, Any]) -> dict[str, Any]:
    """What came of a job, with the job as it was planned."""
    return {**job(item), "job": item["item"]}


def trusted(trust: dict[str, Any]) -> list[Check]:
    """A check for each node from which jobs are launched."""
    checks = []
    for host, answer in trust.items():
        said = lines(answer.get("stdout") or answer.get("stderr") or answer.get("msg"))
        if answer.get("rc") == 0 and said:
            checks.append(Check(f"trust.{host}", GREEN, said[-1], hosts=[host]))
            continue
        cause = "not every node is reached by name and by address as the job user"
        cure = "start or reconnect what does not answer; for all else site.yml"
        if answer.get("unreachable"):
            cause, cure = "it does not answer to ssh", f"start or reconnect {host}; playbooks/preflight.yml says more"
        elif "rc" not in answer:
            cause, said = f"nothing could be run there: {said[-1] if said else 'it does not say why'}", []
            cure = (
                "give the password of sudo with --ask-become-pass, if it wants one; playbooks/preflight.yml says more"
            )
        # The ways that work end with their seconds.
        bad = [line for line in said if not re.search(r"\d\.\d\d s$", line)]
        checks.append(Check(f"trust.{host}", RED, f"from {host}", hosts=[host], cause=cause, cure=cure, log=bad))
    return checks


def whole(stacks: dict[str, Any], inventory: str) -> list[Check]:
    """A check for each node: whether its stack is what was built."""
    checks = []
    for host, answer in stacks.items():
        name, proven = f"stack.{host}", answer.get("proven", False)
        if proven is True:
            checks.append(Check(name, GREEN, "every file is what was built", hosts=[host]))
        elif proven is None:
            words = "it was made before lists of contents were; without manifest.json, site.yml installs it with one"
            checks.append(Check(name, NOT_MEASURED, words, hosts=[host]))
        else:
            cause = one_line(answer.get("wrong") or answer.get("msg") or "it gave no answer")
            cure = f"start or reconnect {host}" if answer.get("unreachable") else anew(host, inventory)
            words = "the stack is not known to be what was built"
            checks.append(Check(name, RED, words, hosts=[host], cause=cause, cure=cure))
    return checks


def anew(host: str, inventory: str) -> str:
    """The commands by which a node gets its stack again."""
    mark = "path=/opt/farandole/current/manifest.json state=absent"
    one, where = shlex.quote(host), shlex.quote(inventory)
    return f"ansible {one} -i {where} --become -m file -a '{mark}', then ansible-playbook -i {where} site.yml"
