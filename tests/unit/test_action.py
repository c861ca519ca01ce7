"""The base class of the action plugins, and the documentation of each."""

import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from farandole.plays.action import argument_spec
from farandole.validation.judge import Bars

from .loading import PLUGINS, ROOT, load

ACTION = '''
from farandole.core.errors import FarandoleError
from farandole.plays.action import LocalAction

DOCUMENTATION = """
options:
  size: {type: int, default: 3, choices: [3, 4]}
  many: {type: list, elements: str, default: []}
  inner: {type: dict, suboptions: {value: {type: float}}}
"""


class ActionModule(LocalAction):
    required_if = (("size", 4, ("inner",)),)

    def act(self, arguments, variables):
        if "fail" in arguments["many"]:
            raise FarandoleError("the cable is unplugged: plug it in again")
        return {"told": f"{sorted(arguments.items())} on {variables['inventory_hostname']}"}
'''
ACTIONS = sorted(path.stem for path in PLUGINS.glob("action/*.py"))


def test_arguments_are_checked_and_a_refusal_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "action_plugins").mkdir()
    (tmp_path / "action_plugins/example.py").write_text(ACTION)
    expected = {
        "many: a, inner: {value: '0.5'}": "[('inner', {'value': 0.5}), ('many', ['a']), ('size', 3)] on localhost",
        "size: 5": "value of size must be one of: 3, 4, got: 5",
        "inner: {values: 1}": "inner.values. Supported parameters include: value",
        "size: 4": "size is 4 but all of the following are missing: inner",
        "many: fail": "the cable is unplugged: plug it in again",
    }
    # Most of these tasks must fail, and the ones after them must still run; the messages are compared below.
    tasks = ", ".join(f"{{example: {{{arguments}}}, ignore_errors: true}}" for arguments in expected)
    (tmp_path / "play.yml").write_text(f"[{{hosts: localhost, gather_facts: false, tasks: [{tasks}]}}]")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        ["ansible-playbook", "-v", "-i", "localhost,", "-c", "local", str(tmp_path / "play.yml")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = " ".join((done.stdout + done.stderr).split()).replace("''", "'")
    assert [text for text in expected.values() if text not in output] == [], output
    assert "ok=5 " in output
    assert "ignored=4" in output
    assert "Traceback" not in output
    assert "caused by" not in output


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_is_documented(name: str) -> None:
    action = load("action", name)
    documentation = yaml.safe_load(action.DOCUMENTATION)
    assert documentation["module"] == name
    assert documentation["short_description"]
    assert action.ActionModule.spec() == argument_spec(documentation["options"])


def test_the_thresholds_of_a_report_are_those_of_the_judge() -> None:
    bars = load("action", "validation_report").ActionModule.spec()["bars"]["options"]
    assert bars == {bar.name: {"type": "float"} for bar in fields(Bars)}
    specs = yaml.safe_load((ROOT / "roles/validation/meta/argument_specs.yml").read_text())["argument_specs"]
    described = " ".join(specs["main"]["options"]["validation_bars"]["description"])
    for bar in fields(Bars):
        assert re.search(rf"C\({bar.name}\)[^;]*, {bar.default}[;.]", described), bar.name
