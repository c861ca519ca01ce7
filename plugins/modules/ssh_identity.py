#!/usr/bin/python
DOCUMENTATION = """
module: ssh_identity
short_description: Ensure that a node has its ssh keys, and return the public ones
description:
  - Generates an ed25519 host key and, on nodes that launch jobs, a key for each user, if they are missing.
  - Private keys never leave the node.
options:
  folder: {description: "Where job keys are, outside the homes, which nodes may share.", type: path, required: true}
  job_keys:
    description: Path of each user's private key; all others, and their certificates, are removed.
    type: dict
    required: true
  revoked:
    description:
      - List of revoked keys; a job key among them is replaced, and so is one that somebody else owns.
      - Those that the node has in its own list besides are returned, as the caller may have restored an older list.
    type: str
    default: ""
"""

import pwd
import re
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import make, opened

HOST_KEY = Path("/etc/ssh/ssh_host_ed25519_key")
KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
KEY = r"ssh-ed25519 [\w+/]{68}"
# More revoked keys than a CA that was restored from an older copy can reasonably lack.
MANY = 1000


def public(key: Path) -> Path:
    """The path of the public half of a key."""
    return key.with_name(f"{key.name}.pub")


def certificate(key: Path) -> Path:
    """The path at which ssh looks for a key's certificate."""
    return key.with_name(f"{key.name}-cert.pub")


def generate(module: AnsibleModule, key: Path, user: str) -> None:
    """Generate a key under another name first, so that an incomplete one is never used."""
    make(key.parent)
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
    return read(key) in {" ".join(line.split()[:2]) for line in revoked.splitlines()}


def belongs_to(key: Path, user: str) -> bool:
    """Whether nobody else can read a key, as the job user of earlier could."""
    try:
        return key.owner() == user
    except KeyError:
        return False


def found(pattern: str, path: Path) -> list[str]:
    """What matches in the lines of a file, which may be damaged or missing."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return re.findall(f"^{pattern}$", text, re.MULTILINE)


def remembered(folder: Path, revoked: str) -> dict[str, Any]:
    """What earlier runs left here, by which the control machine sees that its own copy is older."""
    known = {" ".join(line.split()[:2]) for line in revoked.splitlines()}
    own = found(f"({KEY} [!-~]+)", folder / "revoked_keys")
    hosts = found(rf"@cert-authority \* ({KEY}) farandole", KNOWN_HOSTS)
    signed = found(r"(ssh-ed25519-cert-v01@openssh\.com \S+)", certificate(HOST_KEY))
    return {
        "authorities": [*hosts, *found(f"({KEY})", folder / "user_ca.pub")],
        "revoked": [line for line in own if line.rsplit(" ", 1)[0] not in known][:MANY],
        "certificate": "".join(signed[:1]),
    }


def openssh(module: AnsibleModule) -> float:
    """The version of OpenSSH: 9.2 for `OpenSSH_9.2p1 Debian-2`."""
    _, _, version = module.run_command(["ssh", "-V"], check_rc=True)
    match = re.match(r"OpenSSH_(\d+\.\d+)", version)
    return float(match[1]) if match else 0.0


def main() -> None:
    """Generate the missing keys, remove unwanted ones, and return the public keys."""
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "job_keys": {"type": "dict", "required": True, "no_log": False},
            "revoked": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    folder, revoked = Path(module.params["folder"]), module.params["revoked"]
    job_keys = {user: Path(path) for user, path in module.params["job_keys"].items()}
    missing = [
        (key, user)
        for user, key in job_keys.items()
        if not key.exists() or is_revoked(key, revoked) or not belongs_to(key, user)
    ]
    due = [*missing, *([] if HOST_KEY.exists() else [(HOST_KEY, "root")])]
    wanted = {path for key in job_keys.values() for path in (key, public(key), certificate(key))}
    ours = [path for pattern in ("id_job*", "id_jobs/*", "id_files*") for path in folder.glob(pattern)]
    unwanted = [path for path in ours if path.is_file() and path not in wanted]
    closed = opened(dict.fromkeys([folder, *(path.parent for path in wanted)]), check_mode=module.check_mode)
    if not module.check_mode:
        for key, user in due:
            generate(module, key, user)
        for path in unwanted:
            path.unlink()
    module.exit_json(
        changed=bool(due or unwanted or closed),
        host_key=read(HOST_KEY),
        # In check mode, a key that would be replaced still exists.
        job_keys={
            user: "" if module.check_mode and (key, user) in missing else read(key) for user, key in job_keys.items()
        },
        remembers=remembered(folder, revoked),
        openssh=openssh(module),
    )


if __name__ == "__main__":
    main()
