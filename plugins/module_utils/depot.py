"""Fetch a file from the cluster's depot, on a node."""

import errno
import urllib.request
from collections.abc import Callable, Mapping
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


class DamagedError(OSError):
    """What was sent is not the expected file."""


def ask(url: str, offset: int = 0) -> Any:
    """Open a URL without a proxy, which may not reach the depot; a server may send all of it in spite of the offset."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})  # noqa: S310
    return opener.open(request, timeout=IDLE_S)


def from_depot(url: str, target: Path, size: int) -> str:
    """Download a file and return its sha256."""
    digest: str = download(lambda: ask(url), target, size)
    return digest


def words(error: Exception) -> str:
    """Why something could not be fetched; unlike what ssh writes, which is explained as a login that fails."""
    reason = getattr(error, "reason", error)
    return (getattr(reason, "strerror", None) or "").lower() or str(reason)


def fetch(
    module: AnsibleModule,
    file: Mapping[str, Any],
    target: Path,
    *,
    full: str = "free some space there",
    get: Callable[[str, Path, int], str] = from_depot,
) -> None:
    """Fetch a file and check its sha256; never write more than the expected size."""
    url, wanted, size = (file[name] for name in FILE)
    try:
        if (got := get(url, target, size)) != wanted:
            raise DamagedError(f"its sha256 is {got}, expected {wanted}")
    except DamagedError as error:
        module.fail_json(
            msg=f"{url} is damaged: {error}. It was discarded; run again to have the depot's copy checked and replaced"
        )
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
