#!/usr/bin/python
DOCUMENTATION = """
module: former_accounts
short_description: Remove accounts with their processes and homes
description:
  - Ends all their processes, then removes account, group, home, mail and crontab.
  - Their common group is removed in any case.
  - A home on storage of the network stays, because other machines use it, and so does one with a mount point in it.
  - Other members of the group, who were taken off the list earlier, keep account and home. What they run is ended.
options:
  names: {description: The accounts., type: list, elements: str, required: true}
  group: {description: Their common group., type: str, required: true}
  keep: {description: "Remove no account, and only return which stay.", type: bool, default: false}
"""

import pwd
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.accounts import account, group
from ansible_collections.farandole.cluster.plugins.module_utils.mounts import TABLE, mounts_in
from ansible_collections.farandole.cluster.plugins.module_utils.processes import end_all

# Below are the accounts of the system.
FIRST_UID = 1000
# Only there, a home belongs to this machine alone.
LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs")
PATIENCE_S = 10
CRONTABS = Path("/var/spool/cron/crontabs")


def end_processes(module: AnsibleModule, account: pwd.struct_passwd) -> None:
    """End an account's sessions and services, then whatever else it runs."""
    # It fails if the account has none.
    module.run_command(["loginctl", "disable-linger", account.pw_name])
    module.run_command(["loginctl", "terminate-user", account.pw_name])
    try:
        end_all(account.pw_uid, PATIENCE_S)
    except TimeoutError as error:
        module.fail_json(msg=f"{account.pw_name}: {error}")


def is_local(module: AnsibleModule, home: str) -> bool:
    """Whether no other machine uses a home."""
    kind = module.run_command(["findmnt", "--noheadings", "--output=FSTYPE", "--target", home])[1].strip()
    return kind in LOCAL and not Path(home).is_symlink()


def mounted_in(home: Path) -> str:
    """What is mounted on a home or below it, which userdel would empty."""
    points = [Path(mount.point) for mount in mounts_in(TABLE.read_text())]
    return next((str(point) for point in points if home in (point, *point.parents)), "")


def remove(module: AnsibleModule, account: pwd.struct_passwd, *, with_home: bool) -> None:
    """Remove an account, and its home."""
    name = account.pw_name
    end_processes(module, account)
    module.run_command(["userdel", *(["--remove"] if with_home else []), name], check_rc=True)
    (CRONTABS / name).unlink(missing_ok=True)


def stays(account: pwd.struct_passwd, why: str) -> list[str]:
    """What stays with an account, and what that means."""
    reasons = [f"account {account.pw_name} with its home {account.pw_dir}, because {why}"]
    keys = Path(account.pw_dir) / ".ssh/authorized_keys"
    with suppress(OSError):
        if keys.stat().st_size:
            reasons.append(f"{keys}, which lets people log in again: its keys were ignored until now")
    return reasons


def main() -> None:
    """Remove the accounts, or say that they stay."""
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
            "group": {"type": "str", "required": True},
            "keep": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    removed, left = [], []
    common = group(module.params["group"])
    for name in dict.fromkeys([*module.params["names"], *(common.gr_mem if common else ())]):
        present = account(name)
        if not present:
            continue
        listed = name in module.params["names"]
        if module.params["keep"] or not listed:
            left += stays(present, "it was not asked for" if listed else "it is no longer in cluster_users")
            if not module.params["keep"] and present.pw_uid >= FIRST_UID and not module.check_mode:
                end_processes(module, present)
            continue
        if present.pw_uid < FIRST_UID:
            where = "take it out of base_user and cluster_users"
            module.fail_json(msg=f"{name} is an account of the system (uid {present.pw_uid}): {where}")
        home = Path(present.pw_dir)
        mounted = mounted_in(home)
        with_home = home.is_dir() and not mounted and is_local(module, present.pw_dir)
        removed.append(f"account {name}{f' with its home {home}' if with_home else ''}")
        if home.is_dir() and not with_home:
            why = f"{mounted} is mounted" if mounted else "it is on storage that other machines can use"
            left.append(f"{home}, because {why}")
        if not module.check_mode:
            remove(module, present, with_home=with_home)
    if common:
        removed.append(f"group {module.params['group']}")
        if not module.check_mode:
            module.run_command(["groupdel", module.params["group"]], check_rc=True)
    module.exit_json(
        changed=bool(removed), removed=removed, left=left,
        diff={"before": "".join(f"{what}\n" for what in removed), "after": ""},
    )  # fmt: skip


if __name__ == "__main__":
    main()
