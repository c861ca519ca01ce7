"""Slurm's commands, which fail while a daemon starts."""

import time

from ansible.module_utils.basic import AnsibleModule


def patient(module: AnsibleModule, command: list[str], seconds: float) -> tuple[int, str, str]:
    """Run a command, again while it fails, for that long; a dry run tries once."""
    until = time.monotonic() + (0 if module.check_mode else seconds)
    while True:
        code, out, err = module.run_command(command)
        if code == 0 or time.monotonic() > until:
            return code, out, err
        time.sleep(0.5)
