"""Fetch a file from the cluster's depot, on a node."""

from __future__ import annotations

import errno
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.fetching import TooMuchError, download

# The longest pause in a transfer.
IDLE_S = 60
# Arguments of a module that describe a file.
FILE = {
    "url": {"type": "str", "required": True},
    "sha256": {"type": "str", "required": True},
    "size": {"type": "int", "required": True},
}


def from_depot(url: str, target: Path, size: int) -> str:
    """Download without a proxy, which may not reach the depot, and return the sha256."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    digest: str = download(lambda: opener.open(url, timeout=IDLE_S), target, size)
    return digest


def words(error: Exception) -> str:
    """Why something could not be fetched; unlike what ssh writes, which is explained as a login that fails."""
    reason = getattr(error, "reason", error)
    return (getattr(reason, "strerror", None) or "").lower() or str(reason)


def fetch(module: AnsibleModule, file: Mapping[str, Any], target: Path, *, full: str = "free some space there") -> None:
    """Fetch a file and check its sha256; never write more than the expected size."""
    url, wanted, size = (file[name] for name in FILE)
    try:
        got = from_depot(url, target, size)
    except TooMuchError:
        module.fail_json(
            msg=f"{url} is damaged: it is longer than {size} bytes. It was discarded; run again to have the depot's "
            "copy checked and replaced"
        )
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            module.fail_json(msg=f"{target.parent} is full: {full}")
        module.fail_json(
            msg=f"{url} cannot be fetched: {words(error)}. Check that the depot is running (systemctl status "
            "farandole-depot on the head) and that this node can reach it"
        )
    if got != wanted:
        module.fail_json(
            msg=f"{url} is damaged: its sha256 is {got}, expected {wanted}. It was discarded; run again to have the "
            "depot's copy checked and replaced"
        )
