#!/usr/bin/python
"""Ensure that a node has its ssh keys, and return the public ones."""

from __future__ import annotations

DOCUMENTATION = """
module: ssh_identity
short_description: Ensure that a node has its ssh keys, and return the public ones
description:
  - Generates an ed25519 host key and, on nodes that launch jobs, a key for the job user, if they are missing.
  - Private keys never leave the node.
options:
  user:
    description: The job user, the owner of the job key.
    type: str
    required: true
  job_key:
    description: Path of the job user's private key, outside its home, which nodes may share.
    type: path
    required: true
  launcher:
    description: Whether the node launches jobs; otherwise a job key and its certificate are removed.
    type: bool
    required: true
  revoked:
    description: List of revoked keys; a job key among them is replaced.
    type: str
    default: ""
author: Farandole
"""

EXAMPLES = """
- name: Read the node's public keys
  ssh_identity:
    user: trainer
    job_key: /etc/farandole/ssh/id_job
    launcher: true
"""

RETURN = """
host_key:
  description: The public host key; empty in check mode if there is none yet.
  type: str
  returned: always
job_key:
  description: The public job key; empty on nodes that launch no jobs.
  type: str
  returned: always
openssh:
  description: Version of OpenSSH, as a number.
  type: float
  returned: always
"""

import pwd
import re
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

HOST_KEY = Path("/etc/ssh/ssh_host_ed25519_key")


def public(key: Path) -> Path:
    """The path of the public half of a key."""
    return key.with_name(f"{key.name}.pub")


def certificate(key: Path) -> Path:
    """The path at which ssh looks for a key's certificate."""
    return key.with_name(f"{key.name}-cert.pub")


def generate(module: AnsibleModule, key: Path, user: str) -> None:
    """Generate a key under another name first, so that an incomplete one is never used."""
    key.parent.mkdir(parents=True, exist_ok=True)
    draft = key.with_name(f".{key.name}.new")
    for leftover in (draft, public(draft)):
        leftover.unlink(missing_ok=True)
    module.run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key.name, "-f", str(draft)], check_rc=True)
    # The old private key goes first: after an interruption, a new public key never has an old private one.
    key.unlink(missing_ok=True)
    shutil.chown(draft, user, pwd.getpwnam(user).pw_gid)
    public(draft).replace(public(key))
    draft.replace(key)


def read(key: Path) -> str:
    """The public half of a key, without its comment."""
    return " ".join(public(key).read_text().split()[:2]) if key.exists() else ""


def is_revoked(key: Path, revoked: str) -> bool:
    """Whether a key is in the list of revoked ones."""
    public_key = read(key)
    return bool(public_key) and public_key in {" ".join(line.split()[:2]) for line in revoked.splitlines()}


def openssh(module: AnsibleModule) -> float:
    """The version of OpenSSH: 9.2 for `OpenSSH_9.2p1 Debian-2`."""
    _, _, version = module.run_command(["ssh", "-V"], check_rc=True)
    found = re.match(r"OpenSSH_(\d+\.\d+)", version)
    return float(found[1]) if found else 0.0


def main() -> None:
    """Generate the missing keys, remove unwanted ones, and return the public keys."""
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "job_key": {"type": "path", "required": True, "no_log": False},
            "launcher": {"type": "bool", "required": True},
            "revoked": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    job_key = Path(module.params["job_key"])
    wanted = {HOST_KEY: "root"}
    if module.params["launcher"]:
        wanted[job_key] = module.params["user"]
    missing = [key for key in wanted if not key.exists()]
    if job_key in wanted and is_revoked(job_key, module.params["revoked"]):
        missing.append(job_key)
    unwanted = [] if job_key in wanted else [job_key, public(job_key), certificate(job_key)]
    unwanted = [path for path in unwanted if path.exists()]
    if not module.check_mode:
        for key in missing:
            generate(module, key, wanted[key])
        for path in unwanted:
            path.unlink()
    module.exit_json(
        changed=bool(missing or unwanted),
        host_key=read(HOST_KEY),
        # In check mode, a key that would be removed or replaced still exists.
        job_key=read(job_key) if job_key in wanted and not (module.check_mode and job_key in missing) else "",
        openssh=openssh(module),
    )


if __name__ == "__main__":
    main()
