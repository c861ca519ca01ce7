"""Bring a source archive into the control machine's cache from the first place that has it."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from farandole import fetching
from farandole.errors import FarandoleError
from farandole.form import within, words
from farandole.stack.cache import sha256
from farandole.words import one_line, without_passwords

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
        raise AnsibleActionFail(f"{file} is not there on the control machine")
    wanted = [source["sha256"] for source in sources]
    if (got := sha256(file)) not in wanted:
        raise AnsibleActionFail(
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
        raise AnsibleActionFail(f"{origin} is not what the catalogue names: its sha256 is {got}, wanted is {wanted}")
    draft.replace(target)


class ActionModule(ActionBase):  # type: ignore[misc]
    """Tries the cache, the user's own file, the sites, and the node's package source, in this order."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "sources": {"type": "list", "elements": "dict", "required": True},
                "folder": {"type": "path", "required": True},
                "file": {"type": "str", "default": ""},
            }
        )
        sources, folder = arguments["sources"], Path(arguments["folder"])
        if arguments["file"]:
            return {**result, "changed": False, **found(of_file(Path(arguments["file"]).expanduser(), sources))}
        if path := cached(folder, sources):
            return {**result, "changed": False, **found(path)}
        if self._task.check_mode:
            return {**result, "changed": True}
        folder.mkdir(parents=True, exist_ok=True)
        tried = []
        for source in sources:
            try:
                self._bring(source, folder / source["file"], task_vars)
            except (OSError, HTTPException) as error:
                why = f"{source.get('url') or source.get('apt')}: {getattr(error, 'reason', error)}"
                tried.append(without_passwords(one_line(why)))
            else:
                return {**result, "changed": True, **found(folder / source["file"])}
        raise AnsibleActionFail(
            f"no source of {sources[0]['file']} can be reached: {'; '.join(tried)}. Bring one of these files to the "
            f"control machine and name it (openmpi_tarball), or put it into {folder}"
        )

    def _bring(self, source: Source, target: Path, task_vars: dict[str, Any] | None) -> None:
        if "url" in source:
            return download(source["url"], target, source["sha256"])
        call = {"package": source["apt"], "release": source["release"], "file": source["file"]}
        answer = self._execute_module("source_fetch", module_args=call, task_vars=task_vars)
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
        raise AnsibleActionFail(f"the builder has no source to fetch: {error}; look at that machine") from error


def found(path: Path) -> dict[str, str]:
    """For the tasks that follow."""
    return {"path": str(path), "name": path.name, "sha256": sha256(path)}
