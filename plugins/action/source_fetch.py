DOCUMENTATION = """
module: source_fetch
short_description: Provide a source archive in the control machine's cache
description:
  - Uses a file that the user names, the cache, or the first of O(sources) that has it. A source is a site, the package
    index of the control machine's pip, or a Debian release on the node's package mirror. A file with another sha256 is
    refused.
  - The node's package settings are not changed.
options:
  sources:
    description:
      - The sources, each with C(file), C(sha256) and either C(url), C(index) (a project's name), or C(apt) (the name of
        a source package) with C(release).
    type: list
    elements: dict
    required: true
  folder: {description: Target folder on the control machine., type: path, required: true}
  file: {description: A file on the control machine to use instead., type: str, default: ""}
  variable: {description: Name of the variable that sets O(file), for the error message., type: str, default: ""}
  scratch: {description: Working folder on the node., type: path, default: ""}
"""

from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.core.schema import within, words
from farandole.plays.action import Action
from farandole.stack.sources import Source, cached, of_user, provide


class ActionModule(Action):
    """Uses the node for what only its package mirror has."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Provides the archive, or reports why each source failed."""
        self._variables, self._scratch = variables, arguments["scratch"]
        path, changed = self._provide(arguments)
        about = {"path": str(path), "name": path.name, "sha256": sha256(path)} if path else {}
        return {"changed": changed, **about}

    def _provide(self, arguments: dict[str, Any]) -> tuple[Path | None, bool]:
        sources, folder, say = arguments["sources"], Path(arguments["folder"]), self.say(self._variables)
        if arguments["file"]:
            return of_user(Path(arguments["file"]).expanduser(), sources), False
        if self._task.check_mode:
            path = cached(sources, folder, say)
            return path, path is None
        return provide(sources, folder, say, apt=self._apt, variable=arguments["variable"])

    def _apt(self, source: Source, draft: Path) -> str:
        call = {"package": source["apt"], "release": source["release"], "file": source["file"]}
        call["scratch"] = self._scratch
        answer = self.ask(call, self._variables)
        if answer.get("failed"):
            raise ConnectionError(f"{source['apt']}: {answer.get('msg')}")
        self._connection.fetch_file(path_of(answer), str(draft))
        return f"{source['apt']} from the node's package mirror"


def path_of(answer: dict[str, Any]) -> str:
    """The validated path of the file on the node; it becomes part of an sftp command, which is one line."""
    try:
        return str(within("path", words(r"/[\w./+~-]{1,400}"), answer.get("path")))
    except FarandoleError as error:
        raise FarandoleError(f"the builder did not return a valid path: {error}; inspect that machine") from error
