"""Checks of the job user and of cluster_users, made before any node is contacted."""

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from farandole.core.findings import Finding, finding
from farandole.inventory.cluster import JOB_USER_ID, job_user, login_name

Person = Mapping[str, Any]
# As Debian's adduser wants it, so that neither sshd's patterns nor sudo's read it as anything else.
NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
# Debian's range for people; what a package creates is below, and what has no name is above.
LOWEST, HIGHEST = 1000, 59999
WITH_TOKEN = ("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")
SHOWN = 40
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# What authorized_keys may have in front of a key.
OPTIONS = re.compile(r'\A(?:"(?:\\"|[^"])*"|[^\s"])+ +')
# Accounts that packages make when a role installs them. Slurm, for one, obeys whoever is called slurm.
OF_PACKAGES = ("ceph", "ganesha", "gluster", "munge", "mysql", "slurm", "statd")
TAKEN = {
    "root": "root",
    **dict.fromkeys(("farandole", "farandole-build", "farandole-jobs"), "a name of Farandole's"),
    **dict.fromkeys(OF_PACKAGES, "the account of a service, which a package makes"),
}


def judge_people(hostvars: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[Finding]:
    """Findings about base_user and cluster_users of all nodes, whose values have the right types."""
    taken = {**TAKEN}
    every = [hostvars[name] for name in names]
    people = (every[0].get("cluster_users") or []) if every else []
    for own in every:
        taken.setdefault(login_name(own) or "root", "the account with which Ansible logs in")
    jobs = dict.fromkeys(map(job_user, every))
    faults = [finding("job-user-taken", "inventory", seen=user, owner=taken[user]) for user in jobs if user in taken]
    taken = {**dict.fromkeys(jobs, "the job user"), **taken}
    uids = {int(own.get("base_user_id") or JOB_USER_ID): "the job user" for own in every}
    if any(boolean(own.get("ssh_trust_mesh") or False) for own in every):
        admins = [str(person["name"]) for person in people if boolean(person.get("admin") or False)]
        faults += [finding("admin-in-mesh", "inventory", account=name) for name in admins]
    logins = {name: login_fault(hostvars[name].get("ssh_trust_login_keys") or ()) for name in names}
    faults += [finding("login-key-wrong", name, seen=why) for name, why in logins.items() if why]
    faults += [fault for person in people for fault in judge_person(person, taken, uids)]
    return faults


def judge_person(person: Person, taken: dict[str, str], uids: dict[int, str]) -> Iterator[Finding]:
    """Findings about a person; adds the name and the uid to those that are taken."""
    name, uid = str(person["name"]), int(person["uid"])
    if not NAME.fullmatch(name):
        yield finding("person-name-malformed", "inventory", seen=start(name))
        return
    if name in taken:
        yield finding("person-name-taken", "inventory", seen=name, owner=taken[name])
    if not LOWEST <= uid <= HIGHEST:
        yield finding("person-uid-wrong", "inventory", account=name, seen=uid)
    elif uid in uids:
        yield finding("person-uid-repeated", "inventory", account=name, seen=uid, owner=uids[uid])
    taken.setdefault(name, "already another entry")
    uids.setdefault(uid, name)
    for key in person.get("ssh_keys") or ():
        if why := key_fault(key):
            yield finding("person-key-wrong", "inventory", account=name, seen=why)


def key_fault(line: str) -> str:
    """What a line is, if it is not a single public key; shows nothing of a private one."""
    text = line.strip(" \t\r\n")
    if "PRIVATE KEY" in text:
        return "a private key, which you should replace now"
    if CONTROL.search(text):
        return "several lines"
    kind, _, rest = text.partition(" ")
    # What looks like a blank is none to sshd.
    key = f"{kind} {rest.lstrip(' ').partition(' ')[0]}"
    try:
        serialization.load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm):
        return "" if kind in WITH_TOKEN and has_kind(rest, kind) else start(text)
    return ""


def login_fault(entries: Sequence[str]) -> str:
    """What the first line for authorized_keys is that has no public key, if any; shows nothing of a private one."""
    text = "\n".join(entries)
    if "PRIVATE KEY" in text:
        return key_fault(text)
    lines = [line.strip(" \t\r\n").replace("\t", " ") for line in text.split("\n")]
    keys = [line for line in lines if line and not line.startswith("#")]
    return next((why for line in keys if (why := key_fault(line)) and key_fault(OPTIONS.sub("", line))), "")


def start(text: str) -> str:
    """The start of a text that is not what it should be."""
    return ascii(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def has_kind(text: str, kind: str) -> bool:
    """Whether an encoded key is of a kind, as cryptography does not read those of security keys."""
    try:
        return b64decode(text.partition(" ")[0], validate=True)[4 : 4 + len(kind)] == kind.encode()
    except ValueError:
        return False
