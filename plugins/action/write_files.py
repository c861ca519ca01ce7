DOCUMENTATION = """
module: write_files
short_description: Write a group of small files in one task
description:
  - Writes files in the given order. Each is validated first and replaced atomically.
  - One task instead of one per file, because with many hosts the time of a run depends on the number of tasks.
  - Templates are rendered here, as the template lookup would copy all variables of the host for each of them.
options:
  files:
    description: The files, each with either a text or a template.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: "Path of the file.", type: path, required: true}
      content: {description: "Its text.", type: str}
      template: {description: "Template of its text, in the role's folder of templates.", type: str}
      variables: {description: "Further variables for this template.", type: dict, default: {}}
      mode: {description: "Its permissions.", type: str, default: "0644"}
      owner: {description: "Its owner, whose primary group it gets.", type: str, default: root}
      group: {description: "A group other than that.", type: str}
      validate: {description: "Command that must accept the file; C(%s) is replaced with its path.", type: str}
      own: {description: "Regular expression of the lines to replace; all others in the file are kept.", type: str}
  sweep:
    description: Folders from which all other files are removed, except those in C(__pycache__).
    type: list
    elements: path
    default: []
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.template import trust_as_template

from farandole.plays.action import Action
from farandole.plays.ahead.action import AsksAhead


class ActionModule(AsksAhead, Action):
    """Renders the templates and lets the node write."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Writes the files."""
        files = [self._rendered(file, variables) for file in arguments["files"]]
        return self.ask({"files": files, "sweep": arguments["sweep"]}, variables)

    def _rendered(self, file: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        wanted = {
            key: value for key, value in file.items() if key not in ("template", "variables") and value is not None
        }
        if file["template"] is None:
            return wanted
        source = Path(self._find_needle("templates", file["template"]))
        templar = self._templar.copy_with_new_env(available_variables={**variables, **file["variables"]})
        text = templar.template(
            trust_as_template(source.read_text()), escape_backslashes=False, overrides={"trim_blocks": True}
        )
        return {**wanted, "content": text}
