DOCUMENTATION = """
module: send_files
short_description: Send files from the control machine to a node
description:
  - Sends in one transfer the files that are missing or different on the node. Each is checked by its sha256 on both
    sides and put in place only when it is complete.
options:
  directory: {description: Target folder on the node., type: path, required: true}
  files:
    description: The files, each with its C(path) on the control machine, C(name) below O(directory) and C(sha256).
    type: list
    elements: dict
    required: true
  keep:
    description: Number of files to keep in the folders of these files whenever one is sent, the newest ones and all of
      these; 0 for all.
    type: int
    default: 0
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError

from farandole.plays.action import Action
from farandole.plays.sending import Landing, bundle, check, sent


class ActionModule(Action):
    """Asks the node what it lacks and sends only that."""

    TRANSFERS_FILES = True

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Sends what the node lacks."""
        wanted = {file["name"]: file["sha256"] for file in arguments["files"]}
        call = {"directory": arguments["directory"], "wanted": wanted}
        answer = self.ask(call, variables)
        lacking = [file for file in arguments["files"] if file["name"] in answer.get("missing", [])]
        result = {"sent": [file["name"] for file in lacking], "changed": bool(lacking)}
        if answer.get("failed") or not lacking or self._task.check_mode:
            return {**result, **{key: answer[key] for key in ("failed", "msg") if key in answer}}
        for file in lacking:
            check(file)
        size = sum(Path(file["path"]).stat().st_size for file in lacking)
        host = self._delegate() or variables.get("inventory_hostname", "the node")
        with self._landing(host, size) as landing:
            self.say(variables)(f"sending {len(lacking)} file(s), {size / 1e6:.0f} MB, to {host}")
            with tempfile.NamedTemporaryFile(dir=Path(lacking[0]["path"]).parent, prefix=".bundle.") as archive:
                bundle(lacking, Path(archive.name))
                with self.telling(variables, lambda: sent(Path(archive.name), size)):
                    self._connection.put_file(archive.name, f"{landing}/bundle.tar")
            expected = {file["name"]: file["sha256"] for file in lacking}
            call.update(wanted=expected, bundle=f"{landing}/bundle.tar", keep=arguments["keep"], asked=[*wanted])
            answer = self.ask(call, variables)
        return {**result, **{key: answer[key] for key in ("failed", "msg") if key in answer}}

    def _delegate(self) -> str | None:
        delegate: str | None = self._task.delegate_to
        return delegate

    @contextmanager
    def _landing(self, host: str, size: int) -> Iterator[str]:
        """A folder on the node for the bundle."""
        landing = Landing(host)
        answer = self._shell(landing.create)
        try:
            landing.check(answer, size)
            yield landing.folder
        finally:
            # If the node is unreachable, the next transfer removes it.
            with suppress(AnsibleError):
                self._shell(f"rm -rf {landing.folder}")

    def _shell(self, script: str) -> dict[str, Any]:
        """Run a script as the login user, who also copies the files."""
        answer: dict[str, Any] = self._low_level_execute_command(script, sudoable=False)
        return answer
