#!/usr/bin/python
"""The keys by which a node is known."""

from __future__ import annotations

DOCUMENTATION = """
module: ssh_identity
short_description: The keys by which a node is known
description:
  - Makes sure that the node has an ed25519 host key and, where jobs are launched, a key of the job user.
  - Returns the public halves; the private ones never leave the node.
options:
  user:
    description: The job user, who owns the job key.
    type: str
    required: true
  job_key:
    description: Path of the job user's private key, outside of its home, which may be shared between nodes.
    type: path
    required: true
  launcher:
    description: Whether jobs are launched here; elsewhere a job key and its certificate are removed.
    type: bool
    required: true
  revoked:
    description: The revoked keys; a job key among them is replaced by a new one.
    type: str
    default: ""
author: Farandole
"""

EXAMPLES = """
- name: Find out by which keys the node is known
  ssh_identity:
    user: trainer
    job_key: /etc/farandole/ssh/id_job
    launcher: true
"""

RETURN = """
host_key:
  description: The public host key; empty before the first run in check mode.
  type: str
  returned: always
job_key:
  description: The public job key; empty where no jobs are launched.
  type: str
  returned: always
openssh:
  description: Version of OpenSSH, as a number to compare.
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
    """Where ssh-keygen puts the public half."""
    return key.with_name(f"{key.name}.pub")


def certificate(key: Path) -> Path:
    """Where ssh looks for the certificate of a key."""
    return key.with_name(f"{key.name}-cert.pub")


def generate(module: AnsibleModule, key: Path, user: str) -> None:
    """Make a key under another name first: a half-written one must never count as there."""
    key.parent.mkdir(parents=True, exist_ok=True)
    draft = key.with_name(f".{key.name}.new")
    for leftover in (draft, public(draft)):
        leftover.unlink(missing_ok=True)
    module.run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key.name, "-f", str(draft)], check_rc=True)
    # Private before public: what is there of a pair is never of two.
    key.unlink(missing_ok=True)
    shutil.chown(draft, user, pwd.getpwnam(user).pw_gid)
    public(draft).replace(public(key))
    draft.replace(key)


def read(key: Path) -> str:
    """The public half, without its comment."""
    return " ".join(public(key).read_text().split()[:2]) if key.exists() else ""


def is_revoked(key: Path, revoked: str) -> bool:
    """Whether a key stands in the list of revoked ones."""
    public_key = read(key)
    return bool(public_key) and public_key in {" ".join(line.split()[:2]) for line in revoked.splitlines()}


def openssh(module: AnsibleModule) -> float:
    """9.2 of `OpenSSH_9.2p1 Debian-2`."""
    _, _, version = module.run_command(["ssh", "-V"], check_rc=True)
    found = re.match(r"OpenSSH_(\d+\.\d+)", version)
    return float(found[1]) if found else 0.0


def main() -> None:
    """Make what is missing, remove what must not be there, report."""
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
        # In check mode what is to go, or to be replaced, is still there.
        job_key=read(job_key) if job_key in wanted and not (module.check_mode and job_key in missing) else "",
        openssh=openssh(module),
    )


if __name__ == "__main__":
    main()
