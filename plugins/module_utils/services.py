"""What systemd says of services, and of the machine."""

import time
from collections.abc import Iterable
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def unread(module: AnsibleModule, name: str, files: Iterable[Path]) -> list[Path]:
    """Those of the files that do not exist, or have changed since the service last changed its state."""
    shown = ["systemctl", "show", "--property=StateChangeTimestampMonotonic", "--value", name]
    since = int(module.run_command(shown, check_rc=True)[1]) / 1e6
    read_at = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC) + since
    return [file for file in files if not file.exists() or file.stat().st_mtime > read_at]


def in_container(module: AnsibleModule) -> bool:
    """Whether the machine has the kernel and the clock of another."""
    return bool(module.run_command(["systemd-detect-virt", "--container", "--quiet"])[0] == 0)
