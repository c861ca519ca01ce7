"""How a node fetches a file from the cluster's depot."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fetching import TooMuchError, from_depot

# The arguments of a module that describe a file.
FILE = {
    "url": {"type": "str", "required": True},
    "sha256": {"type": "str", "required": True},
    "size": {"type": "int", "required": True},
}


def fetch(module: AnsibleModule, file: Mapping[str, Any], target: Path, *, full: str = "make room there") -> None:
    """Fetch a file and check its sha256; no more bytes than its size are written."""
    url, wanted, size = (file[name] for name in FILE)
    try:
        got = from_depot(url, target, size)
    except TooMuchError:
        module.fail_json(
            msg=f"{url} is damaged: it is longer than {size} bytes, where it was cut off. Nothing was used of it; run "
            "again, which checks the depot's copy and sends it anew"
        )
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            module.fail_json(msg=f"{target.parent} is full: {full}")
        module.fail_json(
            msg=f"{url} cannot be fetched: {getattr(error, 'reason', error)}. Does the depot answer "
            "(systemctl status farandole-depot on the head), and may this node reach it?"
        )
    if got != wanted:
        module.fail_json(
            msg=f"{url} is damaged: its sha256 is {got}, wanted is {wanted}. Nothing was used of it; run again, which "
            "checks the depot's copy and sends it anew"
        )
