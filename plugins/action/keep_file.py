DOCUMENTATION = """
module: keep_file
short_description: Copy a file from a node to the control machine
description:
  - The file is put in place only after its sha256 has been checked. The login user must be able to read it.
options:
  path: {description: Path of the file on the node., type: path, required: true}
  sha256: {description: Expected sha256 of the file., type: str, required: true}
  to: {description: Path of the copy on the control machine., type: path, required: true}
  about: {description: Data to record next to the copy., type: dict, default: {}}
"""

from pathlib import Path
from typing import Any

from farandole.plays.action import Action
from farandole.stack.cache import Built, draft_folder, keep, recall_whole, record


class ActionModule(Action):
    """Uses the connection directly, because the fetch action may send a large file as base64."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Copies the file unless an identical copy exists."""
        target, wanted = Path(arguments["to"]), arguments["sha256"]
        if (present := recall_whole(target)) and present.sha256 == wanted:
            return {"changed": False, "file": present.describe()}
        if self._task.check_mode:
            return {"changed": True}
        host = variables.get("inventory_hostname", "")
        with draft_folder(target.parent) as drafts:
            draft = drafts / target.name
            with self.telling(variables, lambda: f"received {draft.stat().st_size / 1e6:.0f} MB"):
                self._connection.fetch_file(arguments["path"], str(draft))
            keep(draft, target, wanted, f"{arguments['path']} of {host}")
        built = Built(target, wanted, arguments["about"])
        record(built)
        return {"changed": True, "file": built.describe()}
