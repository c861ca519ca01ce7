"""Where the files of Farandole itself are (playbooks, roles, plugins, patches), and which version they are."""

import importlib.metadata
import json
import os
from pathlib import Path

from farandole.core.errors import FarandoleError

# Tasks of its roles have names that begin so.
COLLECTION = "farandole.cluster."
PACKAGE = Path(__file__).resolve().parents[1]
# Where setup.py puts the files in a wheel.
IN_WHEEL = PACKAGE / "ansible_collections/farandole/cluster"
INSTALLED = IN_WHEEL.is_dir()
ROOT = IN_WHEEL if INSTALLED else PACKAGE.parents[1]
CONFIG = ROOT / "ansible.cfg"


def version() -> str:
    return importlib.metadata.version("farandole")


def environment() -> dict[str, str]:
    """The environment for Ansible's programs, which use these files and not those of another Farandole."""
    refuse_other(Path(os.environ.get("ANSIBLE_CONFIG") or CONFIG).absolute().parent, "unset ANSIBLE_CONFIG")
    home = Path(os.environ.get("ANSIBLE_HOME") or "~/.ansible").expanduser()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FarandoleError(f"Ansible needs a folder of its own: {error}: set ANSIBLE_HOME to another one") from error
    return {"ANSIBLE_CONFIG": str(CONFIG), **os.environ}


def refuse_other(folder: Path, cure: str) -> None:
    """Refuse the playbooks of another checkout or package; those of an installed collection need the same version."""
    if (
        folder.resolve() == ROOT
        or not (folder / "roles/ssh_trust").is_dir()
        or _collection_version(folder) == version()
    ):
        return
    raise FarandoleError(
        f"nothing was done: the playbooks and settings of {folder} would run with the package farandole {version()} of "
        f"{ROOT}, which is another one: {cure}"
    )


def _collection_version(folder: Path) -> str:
    """The version of a collection that ansible-galaxy installed; empty if it did not."""
    try:
        return str(json.loads((folder / "MANIFEST.json").read_text())["collection_info"]["version"])
    except FileNotFoundError:
        return ""
