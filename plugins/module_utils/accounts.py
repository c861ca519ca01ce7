"""Accounts and groups, which may not exist."""

from __future__ import annotations

import grp
import pwd
from contextlib import suppress


def account(name: str) -> pwd.struct_passwd | None:
    """The account of this name."""
    with suppress(KeyError, ValueError):
        return pwd.getpwnam(name)
    return None


def group(name: str) -> grp.struct_group | None:
    """The group of this name."""
    with suppress(KeyError, ValueError):
        return grp.getgrnam(name)
    return None
