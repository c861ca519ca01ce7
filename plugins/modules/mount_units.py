#!/usr/bin/python
DOCUMENTATION = """
module: mount_units
short_description: Mount file systems on first use, by units of systemd
description:
  - Writes a mount and an automount unit for each file system, and removes those that it wrote earlier and that are no
    longer wanted. Boot never waits for a server; mounting from one that is dead fails after O(mounts.timeout).
  - Never enters a mount point once it is set up, so a dead server does not hold up this module.
  - What is mounted differently from now on, or no more, is unmounted first. If programs use it, nothing is changed.
options:
  mounts:
    description: The file systems.
    type: list
    elements: dict
    required: true
    suboptions:
      what: {description: "The server and what it exports, in the words of the file system.", type: str, required: true}
      where: {description: Mount point., type: str, required: true}
      type: {description: Type of file system., type: str, required: true}
      options: {description: "Mount options, separated by commas.", type: str, default: ""}
      timeout: {description: Seconds that mounting may take., type: int, default: 10}
      hides: {description: Whether the mount point may contain files., type: bool, default: false}
  supplied:
    description: Types of file system whose packages are installed before, which a dry run on a bare host cannot see.
    type: list
    elements: str
    default: []
  serving:
    description: Files of a machine that serves homes; the answer says whether it has one of them.
    type: list
    elements: path
    default: []
"""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import make, put
from ansible_collections.farandole.cluster.plugins.module_utils.mounts import TABLE, mounts_in

UNITS = Path("/etc/systemd/system")
MARKER = "# Managed by Farandole, role storage.\n"
# Seconds that unmounting may take, until it is done without the server.
UNMOUNT_S = 10
# StartLimitIntervalSec: a server that refuses at once would end the automount after five attempts in ten seconds, and
# programs would then write to the local disk.
MOUNT = (
    MARKER
    + """\
[Unit]
Description={where} from {what}
StartLimitIntervalSec=0

[Mount]
What={what}
Where={where}
Type={type}
Options={options}
TimeoutSec={timeout}
"""
)
AUTOMOUNT = (
    MARKER
    + """\
[Unit]
Description={where} from {what}, on first use

[Automount]
Where={where}

[Install]
WantedBy=multi-user.target
"""
)
Mount = dict[str, Any]


def unit_name(where: str) -> str:
    """The name that systemd requires for the units of a mount point."""
    escaped = re.sub(
        r"[^\w:./]", lambda char: "".join(f"\\x{byte:02x}" for byte in char[0].encode()), where, flags=re.A
    )
    return escaped.strip("/").replace("/", "-")


def texts(mount: Mount) -> dict[str, str]:
    """The units of a file system, by name."""
    # By _netdev, systemd unmounts any type of file system before it stops the network. What other machines wrote is
    # neither set-user-ID nor a device, unless the options that follow say so.
    options = ",".join(filter(None, ["_netdev,nosuid,nodev", mount["options"]]))
    fields = {name: str(value).replace("%", "%%") for name, value in {**mount, "options": options}.items()}
    name = unit_name(mount["where"])
    return {f"{name}.mount": MOUNT.format(**fields), f"{name}.automount": AUTOMOUNT.format(**fields)}


def own_units() -> dict[str, str]:
    """The units on disk that this module wrote."""
    paths = [path for kind in ("mount", "automount") for path in UNITS.glob(f"*.{kind}") if not path.is_symlink()]
    texts = {path.name: path.read_text(errors="replace") for path in paths}
    return {name: text for name, text in texts.items() if text.startswith(MARKER)}


def place(text: str) -> str:
    """The mount point that a unit names."""
    match = re.search("^Where=(.*)$", text, re.MULTILINE)
    return match[1].replace("%%", "%") if match else ""


def mounted() -> dict[str, list[str]]:
    """The types of what is mounted, by mount point."""
    kinds: dict[str, list[str]] = {}
    for mount in mounts_in(TABLE.read_text()):
        kinds.setdefault(mount.point, []).append(mount.kind)
    return kinds


def loaded(module: AnsibleModule, names: list[str]) -> bool:
    """Whether systemd has read these units as they are on disk and waits for the first use of each."""
    if not names:
        return True
    shown = "--property=ActiveState,NeedDaemonReload,UnitFileState"
    _, out, _ = module.run_command(["systemctl", "show", shown, *names], check_rc=True)
    units = [dict(line.split("=", 1) for line in block.splitlines()) for block in out.strip().split("\n\n")]
    return all(
        unit["NeedDaemonReload"] == "no"
        and (name.endswith(".mount") or (unit["ActiveState"], unit["UnitFileState"]) == ("active", "enabled"))
        for name, unit in zip(names, units, strict=True)
    )


def refusals(mounts: list[Mount], supplied: list[str]) -> list[str]:
    """Why new file systems cannot be mounted here."""
    reasons, now = [], mounted()
    for mount in mounts:
        where, kind = Path(mount["where"]), mount["type"]
        if kind not in supplied and not helped(kind):
            reasons.append(
                f"nothing here can mount type {kind} for {where}: there is no /sbin/mount.{kind}, and the kernel does "
                "not know it; add the Debian package that brings it to base_extra_packages"
            )
        if str(where) in now:
            reasons.append(f"{where} is already mounted by somebody else, as {now[str(where)][-1]}: unmount it there")
        elif (where.exists() or where.is_symlink()) and (where.is_symlink() or not where.is_dir()):
            reasons.append(f"{where} is not a folder: move it away")
        elif where.is_dir() and not mount["hides"] and (files := sorted(file.name for file in where.iterdir())):
            reasons.append(f"{where} contains files, such as {files[0]}, which the mount would hide: move them away")
    return reasons


def helped(kind: str) -> bool:
    """Whether mount(8) or the kernel knows a type of file system, or a module of the kernel does."""
    kinds = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    helpers = [f"/sbin/mount.{kind}", f"/usr/sbin/mount.{kind}"]
    probing = ["modprobe", "--dry-run", "--quiet", kind]
    return kind in kinds or any(map(os.path.exists, helpers)) or bounded(probing)[0] == 0


def bounded(command: list[str]) -> tuple[int | None, str]:
    """The status and the words of a command, in English; no status if it takes too long."""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except FileNotFoundError:
        return 127, ""
    try:
        _, err = process.communicate(timeout=UNMOUNT_S)
    except subprocess.TimeoutExpired:
        # It may not even be possible to kill it, so nobody waits for that.
        process.kill()
        return None, ""
    return process.returncode, err.strip()


def unmount(where: str) -> str:
    """Unmount a file system, without its server if that is dead; returns why it could not be done."""
    for _ in range(2):
        if not set(mounted().get(where, [])) - {"autofs"}:
            return ""
        # Without --no-canonicalize it would first ask the server about the mount point.
        status, err = bounded(["umount", "--no-canonicalize", where])
        if "busy" in err and bounded(["stat", "--file-system", where])[0] == 0:
            return f"{where} is in use by {', '.join(users(where)) or 'the kernel'}: {cure(where)}"
        if status != 0:
            bounded(["umount", "--no-canonicalize", "--force", "--lazy", where])
    return f"{where} could not be unmounted" if set(mounted().get(where, [])) - {"autofs"} else ""


def cure(where: str) -> str:
    """What to do about those who use a file system."""
    ends = "; with -e base_end_jobs=true it ends what people run who were removed" if where.startswith("/home/") else ""
    return f"end that, and run site.yml again{ends}"


def users(where: str) -> list[str]:
    """The processes that use a file system; the kernel knows without asking the server."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "cwd", process / "root", process / "exe", *(process / "fd").iterdir()]
            if any(f"{link.readlink()}/".startswith(f"{where}/") for link in links):
                processes.append(f"{(process / 'comm').read_text().strip()} (process {process.name})")
        except OSError:
            continue
    return processes[:5]


def change(module: AnsibleModule, wanted: dict[str, str], differing: list[str], gone: dict[str, str]) -> None:
    """Unmount what differs, then write, remove and start units; a killed run is repaired by the next one."""
    known = own_units()
    old = {name: text for name, text in known.items() if name in gone or name in differing}
    if busy := list(filter(None, map(unmount, sorted({place(text) for text in old.values()})))):
        module.fail_json(msg=f"nothing was changed on this node: {'; '.join(busy)}")
    systemctl = ["systemctl", "--quiet"]
    # Stopped before its file changes: then a unit that runs is always what its file says.
    if stopped := [name for name in old if name.endswith(".automount")]:
        module.run_command([*systemctl, "disable", "--now", *stopped], check_rc=True)
    for name in differing:
        where = place(wanted[name])
        if where not in mounted():
            make(Path(where))
        put(UNITS / name, wanted[name])
    for name, text in gone.items():
        (UNITS / name).unlink(missing_ok=True)
        point = Path(place(text))
        if name.endswith(".automount") and point.is_dir() and point.stat().st_uid == 0:
            with suppress(OSError):
                point.rmdir()
    module.run_command([*systemctl, "daemon-reload"], check_rc=True)
    if names := [name for name in wanted if name.endswith(".automount")]:
        module.run_command([*systemctl, "enable", "--now", *names], check_rc=True)


def main() -> None:
    """Compare, refuse, change."""
    options = {
        "what": {"type": "str", "required": True},
        "where": {"type": "str", "required": True},
        "type": {"type": "str", "required": True},
        "options": {"type": "str", "default": ""},
        "timeout": {"type": "int", "default": 10},
        "hides": {"type": "bool", "default": False},
    }
    module = AnsibleModule(
        argument_spec={
            "mounts": {"type": "list", "elements": "dict", "required": True, "options": options},
            "supplied": {"type": "list", "elements": "str", "default": []},
            "serving": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    mounts, known = module.params["mounts"], own_units()
    wanted = {name: text for mount in mounts for name, text in texts(mount).items()}
    differing = [name for name, text in wanted.items() if known.get(name) != text]
    gone = {name: text for name, text in known.items() if name not in wanted}
    new = [mount for mount in mounts if f"{unit_name(mount['where'])}.mount" not in known]
    supplied = module.params["supplied"] if module.check_mode else []
    if why := refusals(new, supplied):
        module.fail_json(msg=f"nothing was changed on this node: {'; '.join(why)}")
    changed = bool(differing or gone) or not loaded(module, list(wanted))
    if changed and not module.check_mode:
        change(module, wanted, differing, gone)
    diff = [
        {"before_header": name, "after_header": name, "before": known.get(name, ""), "after": wanted.get(name, "")}
        for name in [*differing, *gone]
    ]
    removed = [str(UNITS / name) for name in gone]
    serves = any(map(os.path.exists, module.params["serving"]))
    module.exit_json(changed=changed, units=[*differing, *gone], removed=removed, serves=serves, diff=diff)


if __name__ == "__main__":
    main()
