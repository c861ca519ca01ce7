"""Bring a source archive into the control machine's cache from the first place that has it."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from farandole import fetching
from farandole.action import Action
from farandole.errors import FarandoleError
from farandole.form import within, words
from farandole.stack.cache import sha256
from farandole.words import one_line, without_passwords

DOCUMENTATION = """
module: source_fetch
short_description: Provide a source archive in the control machine's cache
description:
  - Takes it from the cache, from a file of the user, from a site, or from the source package of a Debian release by the
    node's own package mirror, whichever comes first in the list. A file with another sha256 is refused.
  - The node's own package settings stay as they are.
options:
  sources:
    description: Where it may come from, each with C(file), C(sha256) and either C(url) or C(apt) and C(release).
    type: list
    elements: dict
    required: true
  folder: {description: Where it goes on the control machine., type: path, required: true}
  file: {description: A file of the user on the control machine., type: str, default: ""}
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

Source = dict[str, str]
TIMEOUT = 20
# No source that a catalogue names is a tenth of it.
LIMIT = 256 << 20


def cached(folder: Path, sources: list[Source]) -> Path | None:
    """The file as it was brought before."""
    files = (folder / source["file"] for source in sources)
    good = {source["sha256"] for source in sources}
    return next((path for path in files if path.is_file() and sha256(path) in good), None)


def of_file(file: Path, sources: list[Source]) -> Path:
    """A file that the user has, when it is one of those in the lock."""
    if not file.is_file():
        raise FarandoleError(f"{file} is not there on the control machine")
    wanted = [source["sha256"] for source in sources]
    if (got := sha256(file)) not in wanted:
        raise FarandoleError(
            f"{file} is not the source that the lock names: its sha256 is {got}, wanted is {' or '.join(wanted)}"
        )
    return file


def download(url: str, target: Path, wanted: str) -> None:
    """From a site; nothing appears under its name before it is checked."""
    draft = target.with_name(f".{target.name}.part")
    try:
        # The lock says where from, and by its sha256 what.
        fetching.download(lambda: urllib.request.urlopen(url, timeout=TIMEOUT), draft, LIMIT)  # noqa: S310
        keep(draft, target, wanted, url)
    finally:
        draft.unlink(missing_ok=True)


def keep(draft: Path, target: Path, wanted: str, origin: str) -> None:
    """Put a file that has arrived in its place, or refuse it."""
    if (got := sha256(draft)) != wanted:
        origin = without_passwords(origin)
        raise FarandoleError(f"{origin} is not what the catalogue names: its sha256 is {got}, wanted is {wanted}")
    draft.replace(target)


class ActionModule(Action):
    """Tries the cache, the user's own file, the sites, and the node's package source, in this order."""

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Provides the archive, or says why no place has it."""
        sources, folder = arguments["sources"], Path(arguments["folder"])
        if arguments["file"]:
            return {"changed": False, **found(of_file(Path(arguments["file"]).expanduser(), sources))}
        if path := cached(folder, sources):
            return {"changed": False, **found(path)}
        if self._task.check_mode:
            return {"changed": True}
        folder.mkdir(parents=True, exist_ok=True)
        tried = []
        for source in sources:
            try:
                self._bring(source, folder / source["file"], variables)
            except (OSError, HTTPException) as error:
                why = f"{source.get('url') or source.get('apt')}: {getattr(error, 'reason', error)}"
                tried.append(without_passwords(one_line(why)))
            else:
                return {"changed": True, **found(folder / source["file"])}
        raise FarandoleError(
            f"no source of {sources[0]['file']} can be reached: {'; '.join(tried)}. Bring one of these files to the "
            f"control machine and name it (openmpi_tarball), or put it into {folder}"
        )

    def _bring(self, source: Source, target: Path, variables: dict[str, Any]) -> None:
        if "url" in source:
            return download(source["url"], target, source["sha256"])
        call = {"package": source["apt"], "release": source["release"], "file": source["file"]}
        answer = self._execute_module("source_fetch", module_args=call, task_vars=variables)
        if answer.get("failed"):
            raise OSError(answer.get("msg"))
        draft = target.with_name(f".{target.name}.part")
        try:
            self._connection.fetch_file(path_of(answer), str(draft))
            keep(draft, target, source["sha256"], f"{source['apt']} of the node's package source")
        finally:
            draft.unlink(missing_ok=True)
        return None


def path_of(answer: dict[str, Any]) -> str:
    """Where the node has put it; the path goes into an order to sftp, which takes a line for each."""
    try:
        return str(within("path", words(r"/[\w./+~-]{1,400}"), answer.get("path")))
    except FarandoleError as error:
        raise FarandoleError(f"the builder has no source to fetch: {error}; look at that machine") from error


def found(path: Path) -> dict[str, str]:
    """For the tasks that follow."""
    return {"path": str(path), "name": path.name, "sha256": sha256(path)}
