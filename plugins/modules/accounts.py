#!/usr/bin/python
DOCUMENTATION = """
module: accounts
short_description: Create the accounts of those who start jobs, and lock those that are no longer listed
description:
  - Each account has a group of the same name and number, no password, and a home that nobody else can read. It is a
    member of group farandole-jobs, to which sshd's settings and the limits apply.
  - Members of that group that are not listed are locked. Their files stay.
  - The uids of the listed are written to /etc/farandole/uids, by which the queue decides whose jobs it starts.
  - One module for all accounts, because with many users and nodes the time of a run depends on the number of calls.
options:
  users: {description: "The accounts, by name, with their uids.", type: dict, required: true}
  job_user:
    description: The account of the list whose password, if somebody has set one, is removed.
    type: str
    default: ""
  admins: {description: Those who may use sudo here without a password., type: list, elements: str, default: []}
  linger:
    description: Whether their services run without a login, as runs do, which are units of the user's own systemd.
    type: bool
    default: false
  end_jobs: {description: Whether to end what the accounts run that are locked., type: bool, default: false}
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.accounts import account, group
from ansible_collections.farandole.cluster.plugins.module_utils.folders import opened, put
from ansible_collections.farandole.cluster.plugins.module_utils.processes import end_all, processes

GROUP = "farandole-jobs"
LINGER = Path("/var/lib/systemd/linger")
SUDOERS = Path("/etc/sudoers.d/farandole")
# The uids of those who may start jobs.
LISTED = Path("/etc/farandole/uids")
# Days since 1970 from which a locked account is not valid.
LOCKED = "1"
PATIENCE_S = 15
Command = list[str]


def members() -> list[str]:
    common = group(GROUP)
    return common.gr_mem if common else []


def shadow() -> dict[str, list[str]]:
    """The fields of /etc/shadow by account."""
    return {line.split(":")[0]: line.split(":") for line in Path("/etc/shadow").read_text().splitlines()}


def wanted(name: str, uid: int, *, job_user: bool) -> Iterator[Command]:
    """The commands that make an account as it has to be."""
    if not group(name):
        yield ["groupadd", "--gid", str(uid), name]
    present = account(name)
    if not present:
        home = ["--create-home", "--key", "HOME_MODE=0700", "--shell", "/bin/bash", "--password", "*"]
        yield ["useradd", "--uid", str(uid), "--gid", name, "--groups", GROUP, *home, name]
        return
    # Those of a directory service are as they are.
    known = shadow().get(name)
    if known:
        if present.pw_gid != uid:
            yield ["usermod", "--gid", name, name]
        if present.pw_shell != "/bin/bash":
            yield ["usermod", "--shell", "/bin/bash", name]
        # No password matches `*` either, but sshd may refuse an account with `!`.
        if known[1].startswith("!") or (job_user and known[1] != "*"):
            yield ["usermod", "--password", "*", name]
        if known[7]:
            yield ["usermod", "--expiredate", "", name]
    if name not in members():
        yield ["gpasswd", "--add", name, GROUP]


def lingering(name: str) -> Iterator[Command]:
    """The command that lets an account's services run without a login."""
    if not (LINGER / name).exists():
        yield ["loginctl", "enable-linger", name]


def locking(name: str) -> Iterator[Command]:
    """The commands that lock an account."""
    known = shadow().get(name)
    if known and known[7] != LOCKED:
        yield ["usermod", "--expiredate", LOCKED, name]


def end(module: AnsibleModule, name: str, uid: int) -> list[str]:
    """End what an account runs: its jobs, its sessions and services in order, and then the rest; says what was done."""
    lingers, runs = (LINGER / name).exists(), bool(processes(uid))
    if not module.check_mode:
        if shutil.which("scancel"):
            # Programs of a job can start others here from another node. Role slurm fails if the queue does not answer.
            module.run_command(["timeout", str(PATIENCE_S), "scancel", f"--user={uid}"])
        if lingers:
            module.run_command(["loginctl", "disable-linger", name], check_rc=True)
        if runs:
            # What does not end when it is asked to is killed.
            module.run_command(["timeout", str(PATIENCE_S), "systemctl", "stop", f"user-{uid}.slice"])
        try:
            # Also if nothing was seen, for what is never there when one looks.
            end_all(uid, PATIENCE_S)
        except TimeoutError as error:
            module.fail_json(msg=f"{name}: {error}")
    return [f"end what {name} runs"] if lingers or runs else []


def keep(path: Path, text: str, mode: int, *, check_mode: bool) -> list[str]:
    """Write a file, or remove it if the text is empty; says what was done."""
    if text == (path.read_text() if path.exists() else ""):
        return []
    if text and not check_mode:
        put(path, text, mode)
    elif not check_mode:
        path.unlink()
    return [f"{'write' if text else 'remove'} {path}"]


def sudoers(admins: list[str]) -> str:
    """The rules by which exactly these use sudo; empty if nobody does."""
    rules = [f"{name} ALL=(ALL:ALL) NOPASSWD: ALL\n" for name in admins]
    return "".join(["# Managed by Farandole, role base.\n", *rules]) if admins else ""


def apply(module: AnsibleModule, users: dict[str, int]) -> list[str]:
    """Make all accounts as they have to be; says what was done."""
    due: list[Command] = [] if group(GROUP) else [["groupadd", "--system", GROUP]]
    for name, uid in users.items():
        commands = wanted(name, uid, job_user=name == module.params["job_user"])
        due += [*commands, *(lingering(name) if module.params["linger"] else [])]
    former = {name: known for name in members() if name not in users and (known := account(name))}
    for name in former:
        due += locking(name)
    for command in due if not module.check_mode else ():
        module.run_command(command, check_rc=True)
    done = [" ".join(command) for command in due]
    done += keep(SUDOERS, sudoers(module.params["admins"]), 0o440, check_mode=module.check_mode)
    done += [f"open {folder}" for folder in opened([LISTED.parent], check_mode=module.check_mode)]
    # Before anything is ended, so that no job starts afterwards.
    done += keep(LISTED, "".join(f"{uid}\n" for uid in users.values()), 0o644, check_mode=module.check_mode)
    for name, known in former.items() if module.params["end_jobs"] else ():
        done += end(module, name, known.pw_uid)
    return done


def main() -> None:
    """Run the commands that are due."""
    module = AnsibleModule(
        argument_spec={
            "users": {"type": "dict", "required": True},
            "job_user": {"type": "str", "default": ""},
            "admins": {"type": "list", "elements": "str", "default": []},
            "linger": {"type": "bool", "default": False},
            "end_jobs": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    done = apply(module, {str(name): int(uid) for name, uid in module.params["users"].items()})
    module.exit_json(changed=bool(done), done=done)


if __name__ == "__main__":
    main()
