"""Rules of the cluster's certificate authority: which keys it signs, and which are revoked."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives import serialization

from farandole.core.errors import FarandoleError
from farandole.core.findings import Finding, FindingsError, finding

# Exactly one ed25519 key: no options before it, no comment or second line after it.
KEY = r"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43}"
_KEY = re.compile(KEY)
# The job user's kind is `user`; those of people with accounts of their own have their names in them. With a key of kind
# `files`, root on a node mounts homes of the head.
_KIND = re.compile("host|files|user(:[a-z][a-z0-9_-]*)?")
# Whose key that is. No person can have this name.
MOUNTER = "root"
# Before a user's name, what a certificate for the files of that user names. No account's name has a colon.
FILES = "files:"


@dataclass(frozen=True)
class Signed:
    """A public key, the node for which it was signed, and its kind: host, user or user:NAME."""

    key: str
    name: str
    kind: str


def read_ledger(text: str, where: str) -> list[Signed]:
    """Parse the record of every key ever signed, oldest first."""
    rows = [line.rsplit(" ", 2) for line in text.splitlines()]
    for number, row in enumerate(rows, 1):
        if len(row) != 3 or not is_key(row[0]) or not _KIND.fullmatch(row[2]):
            raise FarandoleError(
                f"line {number} of {where} is not a signed key: restore the file from your backup, "
                "or move it away and make a new CA with -e ssh_trust_rotate=true"
            )
    return [Signed(*row) for row in rows]


def kinds_of(users: Sequence[str]) -> dict[str, str]:
    """The kind of each user's keys; the first one is the job user."""
    return {user: f"user:{user}" if number else "user" for number, user in enumerate(users)}


def kinds_at(name: str, users: Sequence[str], launchers: Collection[str], mounters: Collection[str]) -> dict[str, str]:
    """The kinds of a node's keys other than its host key, by their owners."""
    return {**(kinds_of(users) if name in launchers else {}), **({MOUNTER: "files"} if name in mounters else {})}


def principals(user: str, kind: str, homes: Sequence[str]) -> tuple[str, ...]:
    """What a certificate is good for: a login as the user, or the files in these users' homes."""
    return tuple(f"{FILES}{home}" for home in homes) if kind == "files" else (user,)


def principal_files(users: Sequence[str], homes: Collection[str], folder: str) -> list[dict[str, str]]:
    """What the head's sshd accepts for each user: the user, and nodes that mount the home, which get files alone."""
    files = {user: f'restrict,command="internal-sftp" {FILES}{user}\n' if user in homes else "" for user in users}
    return [{"path": f"{folder}/{user}", "content": f"{user}\n{line}"} for user, line in files.items()]


def job_keys(users: Sequence[str]) -> dict[str, str]:
    """Where a node that launches jobs has the key of each user; the first one is the job user."""
    return {user: _file(kind) for user, kind in kinds_of(users).items()}


def certificate_files(certificates: Mapping[str, str], keys: Mapping[str, str]) -> list[dict[str, str]]:
    """The files of a node's user certificates, beside their keys."""
    return [{"path": f"{keys[user]}-cert.pub", "content": text} for user, text in certificates.items()]


def login_files(people: Sequence[Mapping[str, Any]], folder: str) -> list[dict[str, str]]:
    """The files of the keys with which people log in."""
    return [
        {"path": f"{folder}/{user['name']}", "content": "".join(f"{key.strip()}\n" for key in user.get("ssh_keys", []))}
        for user in people
    ]


def _file(kind: str) -> str:
    """Where a node has its key of a kind."""
    if kind == "host":
        return "/etc/ssh/ssh_host_ed25519_key"
    if kind == "files":
        return "/etc/farandole/ssh/id_files"
    _, _, user = kind.partition(":")
    return f"/etc/farandole/ssh/id_jobs/{user}" if user else "/etc/farandole/ssh/id_job"


def ledger_text(ledger: Sequence[Signed]) -> str:
    """Format the record as one line per key: the key, the node, the kind."""
    return "".join(f"{entry.key} {entry.name} {entry.kind}\n" for entry in ledger)


def is_key(text: object) -> bool:
    """Whether a value is exactly one ed25519 public key in OpenSSH's format."""
    if not (isinstance(text, str) and _KEY.fullmatch(text)):
        return False
    try:
        serialization.load_ssh_public_key(text.encode())
    except ValueError:
        return False
    return True


def refuse_answers(
    nodes: Sequence[Mapping[str, Any]],
    launchers: Collection[str],
    mounters: Collection[str],
    users: Sequence[str],
    *,
    check_mode: bool,
) -> None:
    """Refuse to sign if any node answered with anything but the keys it was asked for."""
    kinds = {node["name"]: kinds_at(node["name"], users, launchers, mounters) for node in nodes}
    _refuse([fault for node in nodes for fault in _answer_faults(node, kinds[node["name"]], check_mode)])


def _answer_faults(node: Mapping[str, Any], kinds: Mapping[str, str], check_mode: bool) -> Iterator[Finding]:
    name, wanted, keys = node["name"], {"host": node["host_key"]}, node["job_keys"]
    job_keys = keys if isinstance(keys, Mapping) else {}
    wanted |= {kind: job_keys.get(user) for user, kind in kinds.items()}
    if (job_keys.keys() - kinds.keys()) or (keys and not job_keys):
        yield _finding("launcher-unexpected", name)
    for kind, key in wanted.items():
        # In check mode a bare node has no key yet.
        if not is_key(key) and not (check_mode and key == ""):
            yield _finding("key-malformed", name, kind, seen=_shown(key))


def _finding(code: str, name: str, kind: str = "host", **fields: str) -> Finding:
    return finding(code, name, kind=kind, file=_file(kind), **fields)


def _shown(answer: object) -> str:
    """Shorten a node's answer and escape its control characters."""
    text = ascii(answer)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(text)} characters)"


def refuse_shared(ledger: Sequence[Signed], asked: Sequence[Signed], cluster: Collection[str]) -> None:
    """Refuse to sign a key of two nodes, as each could impersonate the other."""
    # A node that was renamed is not in the cluster under its former name.
    owners = {entry.key: entry for entry in ledger if entry.name in cluster}
    faults = []
    for entry in asked:
        owner = owners.setdefault(entry.key, entry)
        if (owner.name, owner.kind) != (entry.name, entry.kind):
            faults.append(_finding("key-shared", entry.name, entry.kind, owner=owner.name, owner_kind=owner.kind))
    _refuse(faults)


def _refuse(findings: Sequence[Finding]) -> None:
    if findings:
        raise FindingsError(findings, "found {problems} with the keys of the nodes; nothing was signed.")


def withdrawn(
    ledger: Sequence[Signed],
    launchers: Collection[str],
    mounters: Collection[str],
    revoked: Collection[str],
    users: Sequence[str],
) -> list[Signed]:
    """The keys that the inventory revokes: of revoked nodes, of people not listed, of users on nodes without jobs."""
    kept = {
        name: {"host", *kinds_at(name, users, launchers, mounters).values()}
        for name in {entry.name for entry in ledger}
    }
    return [entry for entry in ledger if entry.name in revoked or entry.kind not in kept[entry.name]]


def replaced(ledger: Sequence[Signed], asked: Sequence[Signed]) -> list[Signed]:
    """The keys that a node has since replaced with another one."""
    current = {(entry.name, entry.kind): entry.key for entry in [*ledger, *asked]}
    return [entry for entry in ledger if current[entry.name, entry.kind] != entry.key]


def revoke(lines: Sequence[str], gone: Sequence[Signed]) -> list[str]:
    """Add keys to the list of revoked keys, which never gets shorter."""
    known = dict.fromkeys(key_of(line) for line in lines)
    names = {entry.key: entry.name for entry in gone}
    return [*lines, *(f"{key} {name}" for key, name in names.items() if key not in known)]


def key_of(line: str) -> str:
    """The key in a line of the list of revoked keys."""
    return " ".join(line.split()[:2])


def refuse_revoked(asked: Sequence[Signed], revoked: Sequence[str]) -> None:
    """Refuse to sign a revoked key again."""
    gone = {key_of(line) for line in revoked}
    repeats = [entry for entry in asked if entry.key in gone]
    codes = {"host": "host-key-revoked"}
    _refuse([_finding(codes.get(entry.kind, "job-key-revoked"), entry.name, entry.kind) for entry in repeats])


def refuse_misspelt(names: Sequence[str], known: Collection[str]) -> None:
    """Refuse misspelt names: the node that the operator meant to revoke would stay trusted."""
    for name in names:
        if name not in known:
            raise FarandoleError(
                f"ssh_trust_revoked names {name}, which is not in the inventory and never had a key signed here: "
                "check the spelling"
            )


def refuse_no_launcher(launchers: Collection[str]) -> None:
    """Refuse a cluster in which no node could launch jobs."""
    if not launchers:
        raise FarandoleError(
            "no node could launch jobs, because ssh_trust_revoked names the head: put another node into group head"
        )


def why_renew(folder: str, missing: Sequence[str], *, ledger: bool, restored: str = "") -> str:
    """Why a new CA is needed although nobody asked for one; empty if the present one is fine."""
    if len(missing) == 1:
        return f"{missing[0]} is missing from {folder}"
    if missing:
        return f"the CA of this cluster is missing: there is none in {folder}"
    if not ledger:
        return f"the CA in {folder} is from a version that did not record the keys it signed, so none can be revoked"
    if restored:
        return f"the CA in {folder} was restored from a backup of {restored}, which lacks what was signed since"
    return ""


def refuse_partial(left_out: Collection[str], why: str, *, lost: bool) -> None:
    """Refuse a new CA in a partial run: the other nodes would still trust the old CA and reject the new one."""
    if left_out:
        names = ", ".join(sorted(left_out))
        cure = "Restore the folder from your backup, or run" if lost else "Run"
        raise FarandoleError(
            f"{why}. A new CA affects every node, and this run leaves out {names}. {cure} site.yml without --limit"
        )
