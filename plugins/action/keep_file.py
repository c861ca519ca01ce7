"""Keep a file of a node on the control machine, checked by its sha256."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farandole.action import Action
from farandole.stack.cache import Built, draft_folder, keep, recall_whole, record

DOCUMENTATION = """
module: keep_file
short_description: Keep a file of a node on the control machine
description:
  - The file is checked by its sha256 and put in place only when it is whole. The user that logs in has to be able to
    read it.
options:
  path: {description: The file on the node., type: path, required: true}
  sha256: {description: Its sha256., type: str, required: true}
  to: {description: Where it goes on the control machine., type: path, required: true}
  about: {description: What is recorded beside it., type: dict, default: {}}
author: Farandole
"""

EXAMPLES = """
- name: Keep the packed stack
  keep_file:
    path: /opt/farandole/build/out/stack.tar.zst
    sha256: 3b1f...
    to: /root/.cache/farandole/stacks/stack.tar.zst
"""

RETURN = """
file:
  description: The file that arrived, with C(path), C(name), C(sha256), C(size) and all of O(about).
  type: dict
  returned: not in check mode
"""


class ActionModule(Action):
    """Straight over the connection: the fetch action would send a large file as base64."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Fetches the file if it is not here yet."""
        target, wanted = Path(arguments["to"]), arguments["sha256"]
        if (there := recall_whole(target)) and there.sha256 == wanted:
            return {"changed": False, "file": there.describe()}
        if self._task.check_mode:
            return {"changed": True}
        host = variables.get("inventory_hostname", "")
        with draft_folder(target.parent) as drafts:
            draft = drafts / target.name
            self._connection.fetch_file(arguments["path"], str(draft))
            keep(draft, target, wanted, f"{arguments['path']} of {host}")
        built = Built(target, wanted, arguments["about"])
        record(built)
        return {"changed": True, "file": built.describe()}
