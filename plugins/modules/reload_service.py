#!/usr/bin/python
DOCUMENTATION = """
module: reload_service
short_description: Reload a service that has not read its files since they changed
description:
  - Compares the times of the files with the service's last start or reload, not with what this run changed. Unlike a
    handler, this is not lost if a run is killed first.
  - Returns once the service accepts connections again.
options:
  name: {description: Name of the service., type: str, required: true}
  files: {description: Files that it reads when it is started or reloaded., type: list, elements: path, required: true}
  port: {description: "TCP port, if it has one, that must accept connections afterwards, at any address.", type: int}
  start: {description: Also enable and start it; its unit must then be one of O(files)., type: bool, default: false}
  restart: {description: "Restart it, as it reads these files only when it starts.", type: bool, default: false}
"""

import socket
import time
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.services import unread

TIMEOUT_S = 15
# Until a daemon has handled the signal, it still answers with its old configuration.
SETTLE_S = 0.3


def answers(module: AnsibleModule, port: int) -> bool:
    """Whether the port accepts connections before the timeout, at any address of this machine."""
    _, own, _ = module.run_command(["hostname", "--all-ip-addresses"])
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for address in ("localhost", *own.split()):
            with suppress(OSError), socket.create_connection((address, port), timeout=1):
                return True
        time.sleep(0.1)
    return False


def is_stopped(module: AnsibleModule, name: str) -> bool:
    """Whether the service is not running or not enabled."""
    return any(module.run_command(["systemctl", "--quiet", verb, name])[0] for verb in ("is-active", "is-enabled"))


def reload(module: AnsibleModule, name: str, newer: list[Path]) -> tuple[int, str]:
    """Make the service read its files; return the exit status and stderr."""
    restart = module.params["restart"] or any(file.suffix == ".service" for file in newer)
    verb = "restart" if restart else "reload-or-restart"
    commands = [[verb, name]]
    if module.params["start"]:
        commands = [["daemon-reload"], ["enable", "--quiet", name], [verb, name]]
    for command in commands:
        code, _, err = module.run_command(["systemctl", *command])
        if code:
            return code, err
    return 0, ""


def main() -> None:
    """Reload the service if necessary."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "path", "required": True},
            "port": {"type": "int"},
            "start": {"type": "bool", "default": False},
            "restart": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    name, port = module.params["name"], module.params["port"]
    files = [Path(file) for file in module.params["files"]]
    newer = unread(module, name, files)
    due = bool(newer) or (module.params["start"] and is_stopped(module, name))
    if due and not module.check_mode:
        code, err = reload(module, name, newer)
        if code:
            module.fail_json(msg=f"{name} could not be reloaded: {err.strip()}; see `journalctl --unit {name}`")
        time.sleep(SETTLE_S)
        if port and not answers(module, port):
            module.fail_json(msg=f"{name} does not answer on port {port} {TIMEOUT_S} s after it was reloaded")
    module.exit_json(changed=due)


if __name__ == "__main__":
    main()
