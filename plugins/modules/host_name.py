#!/usr/bin/python
DOCUMENTATION = """
module: host_name
short_description: Set the host name, now and for the next boot
description:
  - Takes an eighth of the time of M(ansible.builtin.hostname), which loads Ansible's code for facts to find out what
    system this is.
options:
  name: {description: The name., type: str, required: true}
"""

import socket
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

FILE = Path("/etc/hostname")


def main() -> None:
    """Set the name unless it is set."""
    module = AnsibleModule(argument_spec={"name": {"type": "str", "required": True}}, supports_check_mode=True)
    name = module.params["name"]
    present = {"current": socket.gethostname(), "at boot": FILE.read_text().strip() if FILE.exists() else ""}
    changed = set(present.values()) != {name}
    if changed and not module.check_mode:
        module.run_command(["hostnamectl", "set-hostname", name], check_rc=True)
    diff = {"before": f"{present}\n", "after": f"{dict.fromkeys(present, name)}\n"}
    module.exit_json(changed=changed, diff=diff)


if __name__ == "__main__":
    main()
