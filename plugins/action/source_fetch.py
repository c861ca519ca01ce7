"""Bring a source archive into the control machine's cache from the first place that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.utils.display import Display

from farandole.action import Action
from farandole.errors import FarandoleError
from farandole.form import within, words
from farandole.stack.cache import sha256
from farandole.stack.sources import Source, bring, cached, of_user

DOCUMENTATION = """
module: source_fetch
short_description: Provide a source archive in the control machine's cache
description:
  - Takes it from a file of the user, from the cache, or from the first of O(sources) that has it; a site, the package
    index of the control machine's pip, or a Debian release by the node's own package mirror. A file with another sha256
    is refused.
  - The node's own package settings stay as they are.
options:
  sources:
    description:
      - Where it may come from, each with C(file), C(sha256) and one of C(url), C(index) (a project's name), and C(apt)
        (a source package's name) with C(release).
    type: list
    elements: dict
    required: true
  folder: {description: Where it goes on the control machine., type: path, required: true}
  file: {description: A file of the user on the control machine., type: str, default: ""}
  variable: {description: "The variable by which the user can name one, for the message.", type: str, default: ""}
  scratch: {description: Where the node may work., type: path, default: ""}
author: Farandole
"""

EXAMPLES = """
- name: Fetch the source
  source_fetch:
    folder: /root/.cache/farandole/sources
    sources:
      - {url: "https://example.org/thing-1.0.tar.gz", file: thing-1.0.tar.gz, sha256: 3b1f...}
"""

RETURN = """
path: {description: The file on the control machine., type: str, returned: always}
name: {description: The name of that file., type: str, returned: always}
sha256: {description: Its sha256., type: str, returned: always}
"""


class ActionModule(Action):
    """Has the node fetch what only its own package source has."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Provides the archive, or says why no place has it."""
        self._variables, self._scratch = variables, arguments["scratch"]
        path, changed = self._bring(arguments)
        about = {"path": str(path), "name": path.name, "sha256": sha256(path)} if path else {}
        return {"changed": changed, **about}

    def _bring(self, arguments: dict[str, Any]) -> tuple[Path | None, bool]:
        sources, folder, say = arguments["sources"], Path(arguments["folder"]), Display().display
        if arguments["file"]:
            return of_user(Path(arguments["file"]).expanduser(), sources), False
        if self._task.check_mode:
            path = cached(sources, folder, say)
            return path, path is None
        return bring(sources, folder, say, apt=self._apt, variable=arguments["variable"])

    def _apt(self, source: Source, draft: Path) -> str:
        call = {"package": source["apt"], "release": source["release"], "file": source["file"]}
        call["scratch"] = self._scratch
        answer = self._execute_module("source_fetch", module_args=call, task_vars=self._variables)
        if answer.get("failed"):
            raise ConnectionError(f"{source['apt']}: {answer.get('msg')}")
        self._connection.fetch_file(path_of(answer), str(draft))
        return f"{source['apt']} of the node's package source"


def path_of(answer: dict[str, Any]) -> str:
    """The path of the file on the node. It goes into an sftp command, which is one line."""
    try:
        return str(within("path", words(r"/[\w./+~-]{1,400}"), answer.get("path")))
    except FarandoleError as error:
        raise FarandoleError(f"the builder has no source to fetch: {error}; look at that machine") from error
