"""File systems that all nodes see: what may be mounted where, and what that needs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean

Mount = Mapping[str, Any]

# Nothing may be mounted on, below or above these.
SYSTEM = [
    PurePosixPath(path)
    for path in (
        *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt/farandole", "/proc", "/root"),
        *("/run", "/sbin", "/sys", "/tmp", "/usr", "/var"),  # noqa: S108
    )
]
# Administrators have their own homes there.
HOMES = PurePosixPath("/home")
WHERE = re.compile(r"(/[\w.-]+)+", re.ASCII)
KIND = re.compile(r"[a-z0-9][a-z0-9._+-]*")
# Everybody on a node can read the options of its mounts. The value of the last two may contain one.
PASSWORD = re.compile(r"(pass|password|passwd|pw|secret)\d?=.+|(user|username)=[^%:]*[%:].*", re.IGNORECASE | re.DOTALL)
USER_OF_URL = re.compile(r"[^/@]*:[^/@]+@|.*//[^/@]*[:%][^/@]+@")


def shared_homes(people: Sequence[Mapping[str, Any]], job_user: str) -> list[str]:
    """Whose homes may be shared: with an administrator's, root of any node would get to root of the head."""
    return [job_user, *(str(person["name"]) for person in people if not boolean(person.get("admin") or False))]


def homes(kind: str, users: Sequence[str], head: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The homes that a node mounts from the head; one by one, as others have theirs beside them."""
    sources = {"nfs": "{head}:/home/{user}", "sshfs": "{user}@{head}:/home/{user}"}
    if kind not in sources:
        return []
    return [
        {"what": sources[kind].format(head=head, user=user), "where": f"/home/{user}", "hides": True, **options[kind]}
        for user in users
    ]


def faults(mounts: Sequence[Mount], homes: Sequence[str] = ()) -> Iterator[str]:
    """What is wrong with a list of file systems, which otherwise has the declared form, beside these users' homes."""
    places = [HOMES / user for user in homes]
    for mount in mounts:
        where = PurePosixPath(mount["where"])
        why = _misplaced(str(mount["where"])) or next(
            (f"lies in or above {other}, which is mounted, too" for other in places if _overlap(where, other)), ""
        )
        if why:
            yield f"{mount['where']} {why}"
        places.append(where)
        for name in ("what", "options"):
            if not re.fullmatch(r"[^\x00-\x20\x7f\\]*", str(mount.get(name) or "")):
                yield f"{name} of {mount['where']} contains a blank, a control character or a backslash"
        if not str(mount["what"]):
            yield f"what of {mount['where']} is empty"
        if not KIND.fullmatch(str(mount["type"])):
            yield f"{mount['type']!r}, the type of {mount['where']}, is not a file system type"
        if int(mount.get("timeout", 10)) < 1:
            yield f"timeout of {mount['where']} must be at least 1"


def passwords(mounts: Sequence[Mount]) -> Iterator[str]:
    """Where in a list of file systems a password is, without its words."""
    for mount in mounts:
        for option in str(mount.get("options") or "").split(","):
            if PASSWORD.fullmatch(option.strip()):
                yield f"options of {mount['where']} ({option.strip().partition('=')[0]}=)"
        if USER_OF_URL.match(str(mount["what"])):
            yield f"what of {mount['where']} (before the @)"


def _misplaced(where: str) -> str:
    path = PurePosixPath(where)
    if not WHERE.fullmatch(where) or {".", ".."} & set(where.split("/")):
        return "is not an absolute path of letters, digits, dots, hyphens and underscores"
    if path == HOMES:
        return "would hide the homes of administrators; mount below it"
    if system := next((place for place in SYSTEM if _overlap(path, place)), None):
        return f"lies in or above {system}, which belongs to the system" if path != system else "belongs to the system"
    return ""


def _overlap(first: PurePosixPath, second: PurePosixPath) -> bool:
    return first.is_relative_to(second) or second.is_relative_to(first)
