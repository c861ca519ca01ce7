#!/usr/bin/python
DOCUMENTATION = """
module: logind_ipc
short_description: Make logind read that it has to keep IPC objects
description:
  - Compares with what logind has read, not with what this run has written, as a handler would be lost if the run is
    killed.
options:
  without:
    description:
      - Make it read its settings as they are without this file, which is or will be removed, instead of having it keep
        the objects.
    type: path
"""

import re

from ansible.module_utils.basic import AnsibleModule

READ = [
    "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
    "RemoveIPC",
]  # fmt: skip


def without(module: AnsibleModule, file: str) -> bool:
    """Whether logind removes them according to all of its settings but those of a file."""
    text = module.run_command(["systemd-analyze", "cat-config", "systemd/logind.conf"], check_rc=True)[1]
    # Each file begins with its path.
    parts = re.split(r"^# (/\S+)$", text, flags=re.MULTILINE)
    others = "".join(part for name, part in zip(parts[1::2], parts[2::2], strict=True) if name != file)
    values = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)\s*$", others, re.MULTILINE)
    return not values or values[-1].lower() in ("1", "yes", "y", "true", "t", "on")


def main() -> None:
    """Reload logind if it has other settings."""
    module = AnsibleModule(argument_spec={"without": {"type": "path"}}, supports_check_mode=True)
    file = module.params["without"]
    wanted = without(module, file) if file else False
    # It is not running in some containers, and has then nothing to forget.
    due = module.run_command(READ)[1].strip() == f"b {str(not wanted).lower()}"
    if due and not module.check_mode:
        # Debian 12 has no reload for it.
        module.run_command(["systemctl", "kill", "--signal=HUP", "systemd-logind"], check_rc=True)
    module.exit_json(changed=due)


if __name__ == "__main__":
    main()
