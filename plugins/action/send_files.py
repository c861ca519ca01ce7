"""Send files from the control machine to a node in one transfer, each checked by its sha256."""

from __future__ import annotations

import re
import secrets
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.utils.display import Display

from farandole.action import Action
from farandole.errors import FarandoleError
from farandole.stack.cache import sha256
from farandole.words import one_line

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
    description: Number of files to keep in the folder of a file that was sent, the newest ones; 0 for all.
    type: int
    default: 0
author: Farandole
"""

EXAMPLES = """
- name: Upload the archive to the depot
  send_files:
    directory: /srv/farandole
    files:
      - path: /root/.cache/farandole/stacks/0123456789ab.tar.zst
        name: stacks/0123456789ab.tar.zst
        sha256: 3b1f...
"""

RETURN = """
sent: {description: Names of the files that were sent., type: list, returned: always}
"""

# Not /tmp, which is in memory on many machines: a stack is large.
LANDING = "/var/tmp/farandole-landing"  # noqa: S108, a random suffix is added
# Removes folders that killed runs left behind and that nothing was written to for an hour; ignores symlinks.
CLEAN_UP = (
    f'for old in {LANDING}[-.]*; do [ -d "$old" ] && [ ! -L "$old" ] && [ -O "$old" ] && '
    '[ -z "$(find "$old" -mmin -60)" ] && rm -rf "$old"; done'
)


def check(file: dict[str, str]) -> None:
    """Refuse to send a file whose sha256 is not the expected one."""
    path = Path(file["path"])
    if not path.is_file():
        raise FarandoleError(f"{path} does not exist on the control machine")
    if (got := sha256(path)) != file["sha256"]:
        raise FarandoleError(
            f"{path} on the control machine is damaged: its sha256 is {got}, expected {file['sha256']}; "
            "delete it and run again"
        )


def bundle(files: Iterable[dict[str, str]], archive: Path) -> None:
    """Put all files into one tar, without compression because they are compressed already."""
    with tarfile.open(archive, "w", dereference=True) as tar:
        for file in files:
            tar.add(file["path"], arcname=file["name"])


class ActionModule(Action):
    """Asks the node what it lacks and sends only that."""

    TRANSFERS_FILES = True

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Sends what the node lacks."""
        wanted = {file["name"]: file["sha256"] for file in arguments["files"]}
        call = {"directory": arguments["directory"], "wanted": wanted}
        answer = self._module(call, variables)
        lacking = [file for file in arguments["files"] if file["name"] in answer.get("missing", [])]
        result = {"sent": [file["name"] for file in lacking], "changed": bool(lacking)}
        if answer.get("failed") or not lacking or self._task.check_mode:
            return {**result, **{key: answer[key] for key in ("failed", "msg") if key in answer}}
        for file in lacking:
            check(file)
        size = sum(Path(file["path"]).stat().st_size for file in lacking)
        host = self._delegate() or variables.get("inventory_hostname", "the node")
        with self._landing(host, size) as landing:
            Display().display(f"sending {len(lacking)} file(s), {size / 1e6:.0f} MB, to {host}")
            with tempfile.NamedTemporaryFile(dir=Path(lacking[0]["path"]).parent, prefix=".bundle.") as archive:
                bundle(lacking, Path(archive.name))
                self._connection.put_file(archive.name, f"{landing}/bundle.tar")
            expected = {file["name"]: file["sha256"] for file in lacking}
            call.update(wanted=expected, bundle=f"{landing}/bundle.tar", keep=arguments["keep"])
            answer = self._module(call, variables)
        return {**result, **{key: answer[key] for key in ("failed", "msg") if key in answer}}

    def _delegate(self) -> str | None:
        delegate: str | None = self._task.delegate_to
        return delegate

    def _module(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module("send_files", module_args=arguments, task_vars=variables)
        return answer

    @contextmanager
    def _landing(self, host: str, size: int) -> Iterator[str]:
        """A temporary folder that only the login user can enter, on a disk with enough space."""
        folder = f"{LANDING}.{secrets.token_hex(8)}"
        answer = self._shell(f"{CLEAN_UP}; mkdir -m 0700 {folder} && df --output=avail -B1 {folder}")
        free = re.findall(r"\d{1,18}$", answer["stdout"].strip())
        if answer["rc"] or not free:
            reason = one_line(answer["stderr"] or answer["stdout"])[-300:] or f"exit status {answer['rc']}"
            raise FarandoleError(
                f"no files can be sent to {host}, because {folder} cannot be created there: {reason}. The login user "
                "must be able to write to /var/tmp: chmod 1777 /var/tmp, and make sure that the disk is not full or "
                "read-only"
            )
        try:
            if int(free[0]) < 2 * size:
                raise FarandoleError(
                    f"{host} has {int(free[0]) >> 20} MiB free in /var/tmp, but sending the files needs "
                    f"{2 * size >> 20} MiB: free some space"
                )
            yield folder
        finally:
            # If the node is unreachable, the next transfer removes it.
            with suppress(AnsibleError):
                self._shell(f"rm -rf {folder}")

    def _shell(self, script: str) -> dict[str, Any]:
        """Run a script as the login user, who also copies the files."""
        answer: dict[str, Any] = self._low_level_execute_command(script, sudoable=False)
        return answer
