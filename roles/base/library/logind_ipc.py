#!/usr/bin/python
"""Make logind keep the IPC objects of users that have logged out."""

from __future__ import annotations

DOCUMENTATION = """
module: logind_ipc
short_description: Make logind read that it has to keep IPC objects
description:
  - Compares with what logind has read, not with what this run has written, as a handler would be lost if the run is
    killed.
author: Farandole
"""

EXAMPLES = """
- name: Make logind keep the job user's IPC objects after the last logout
  logind_ipc:
"""

RETURN = ""

from ansible.module_utils.basic import AnsibleModule

READ = [
    "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
    "RemoveIPC",
]  # fmt: skip


def main() -> None:
    """Reload logind if it would remove them."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    due = module.run_command(READ)[1].strip() == "b true"
    if due and not module.check_mode:
        # Debian 12 has no reload for it.
        module.run_command(["systemctl", "kill", "--signal=HUP", "systemd-logind"], check_rc=True)
    module.exit_json(changed=due)


if __name__ == "__main__":
    main()
