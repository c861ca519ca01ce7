#!/usr/bin/python
DOCUMENTATION = """
module: remove
short_description: Remove what a role has put on a node
description:
  - Also removes what a killed run has left of it under a temporary name. A folder is renamed before it is removed.
  - Never follows a link, and never removes what is mounted, nor a command that somebody else has put into its place.
options:
  paths:
    description: Files, links and folders with all that is in them, in this order; C(*) in a name matches several.
    type: list
    elements: path
    default: []
  empty: {description: Folders to remove if nothing is left in them., type: list, elements: path, default: []}
  lines:
    description: For each file, a regular expression of the lines to remove; a file with no others is removed.
    type: dict
    default: {}
  units:
    description: Systemd units to stop and disable first; C(*) in a name matches all that are loaded.
    type: list
    elements: str
    default: []
  linger: {description: Accounts whose services no longer run without a login., type: list, elements: str, default: []}
  unhold: {description: Packages that are no longer held at their version., type: list, elements: str, default: []}
  masked:
    description: Units that stay masked while one of O(packages) is installed.
    type: list
    elements: str
    default: []
  packages:
    description: Packages that stay, to be returned if they are installed.
    type: list
    elements: str
    default: []
"""

import glob
import os
import re
import stat
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import replacing
from ansible_collections.farandole.cluster.plugins.module_utils.mounts import TABLE, mounts_in

UNITS = Path("/etc/systemd/system")
COMMANDS = Path("/usr/local/bin")
# Each of ours names a folder of ours.
OURS = re.compile(rb"/(etc|usr/local/lib)/farandole\b")
LINGER = Path("/var/lib/systemd/linger")
LISTS = {
    "paths": "path",
    "empty": "path",
    "units": "str",
    "linger": "str",
    "unhold": "str",
    "masked": "str",
    "packages": "str",
}


class Removal:
    """What is removed from this machine, and what is not."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.active = module, not module.check_mode
        self.gone: list[Path] = []
        self.removed: list[str] = []
        self.left: list[str] = []
        self.mounts = [Path(mount.point) for mount in mounts_in(TABLE.read_text())]

    def run(self, *command: str) -> str:
        """Run a command that has to succeed, and return what it prints."""
        return str(self.module.run_command(list(command), check_rc=True, environ_update={"LC_ALL": "C"})[1])

    def path(self, path: Path) -> None:
        """Remove a path and what killed runs have left of it."""
        targets = [*path.parent.glob(f".{glob.escape(path.name)}.*"), path]
        targets = [target for target in targets if exists(target) and may_remove(target)]
        for target in targets:
            if mounted := [mount for mount in self.mounts if mount == target or target in mount.parents]:
                self.left.append(f"{target}: {mounted[0]} is a mount point; unmount it and run this again")
                continue
            if target == path and path.parent == COMMANDS and not is_ours(path):
                self.left.append(f"{path}, because it is not Farandole's")
                continue
            self.gone.append(target)
            if self.active:
                discard(target)
        if set(targets) & set(self.gone):
            self.removed.append(str(path))

    def folder(self, path: Path) -> None:
        """Remove a folder in which nothing is left."""
        if not exists(path):
            return
        if path.is_symlink() or path in self.mounts:
            self.left.append(f"{path}, because it is a {'link' if path.is_symlink() else 'mount point'}")
        elif not path.is_dir():
            self.left.append(f"{path}, because it is not a folder")
        elif others := sorted(entry.name for entry in path.iterdir() if entry not in self.gone):
            self.left.append(f"{path}, because others have put something there: {', '.join(others[:5])}")
        else:
            self.removed.append(str(path))
            if self.active:
                path.rmdir()

    def lines(self, path: Path, own: str) -> None:
        """Remove lines from a file."""
        if not path.exists():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        others = [line for line in lines if not re.search(own.encode(), line.rstrip(b"\n"))]
        if others == lines:
            return
        self.removed.append(f"{'lines in ' if others else ''}{path}")
        if self.active and others:
            with replacing(path, stat.S_IMODE(path.stat().st_mode)) as draft:
                draft.writelines(others)
        elif self.active:
            path.unlink()

    def unit(self, pattern: str) -> None:
        """Stop a unit, and start it no longer with the machine."""
        listed = self.run("systemctl", "list-units", "--all", "--plain", "--no-legend", pattern)
        for name in [line.split()[0] for line in listed.splitlines()] if "*" in pattern else [pattern]:
            shown = self.run("systemctl", "show", "--property=ActiveState,UnitFileState", name)
            state = dict(line.split("=", 1) for line in shown.splitlines())
            if state["ActiveState"] == "inactive" and state["UnitFileState"] != "enabled":
                continue
            self.removed.append(f"unit {name}")
            if self.active:
                self.run("systemctl", "stop", name)
                self.module.run_command(["systemctl", "reset-failed", name])
                if state["UnitFileState"] == "enabled":
                    self.run("systemctl", "disable", "--quiet", name)

    def linger(self, name: str) -> None:
        """Let an account's services end with its last login."""
        file = LINGER / name
        if file.exists():
            self.removed.append(f"lingering of {name}")
            if self.active:
                # It fails if somebody has removed the account.
                self.module.run_command(["loginctl", "disable-linger", name])
                file.unlink(missing_ok=True)

    def unhold(self, names: list[str]) -> None:
        """Let packages be upgraded again."""
        held = self.run("apt-mark", "showhold", *names).split() if names else []
        self.removed += [f"hold of package {name}" for name in held]
        if held and self.active:
            self.run("apt-mark", "unhold", *held)

    def unmask(self, name: str, *, installed: bool) -> None:
        """Remove a mask, unless the package would then start its service."""
        mask = UNITS / name
        if mask.is_symlink() and mask.readlink() == Path(os.devnull):
            if installed:
                self.left.append(f"the mask of {name}, without which it would start: systemctl unmask {name}")
            else:
                self.path(mask)

    def installed(self, names: list[str]) -> list[str]:
        """Those of the packages that are installed."""
        plain = [name.strip() for entry in names for name in entry.split("|")]
        form = "--showformat=${db:Status-Status} ${Package}\n"
        # It fails if one of them is unknown.
        listed = self.module.run_command(["dpkg-query", "--show", form, *plain])[1] if plain else ""
        return sorted({line.split()[1] for line in listed.splitlines() if line.startswith("installed ")})


def exists(path: Path) -> bool:
    """Whether there is anything, even a link that leads nowhere."""
    return path.is_symlink() or path.exists()


def is_ours(command: Path) -> bool:
    """Whether a command is one that a role has written."""
    return command.is_file() and not command.is_symlink() and bool(OURS.search(command.read_bytes()))


def removing(path: Path) -> Path:
    """The name that a folder has while it is removed."""
    return path.with_name(f".{path.name}.removing")


def may_remove(path: Path) -> bool:
    """Where every account can write, only what belongs to the account that logs in."""
    if not path.parent.stat().st_mode & stat.S_IWOTH:
        return True
    return not path.is_symlink() and path.stat().st_uid in (0, int(os.environ.get("SUDO_UID", "0")))


def discard(path: Path) -> None:
    """Remove a file or a folder; a killed run leaves no part of a folder under its name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    aside = path if path == removing(path) or path.parent.stat().st_mode & stat.S_IWOTH else removing(path)
    if path != aside:
        remove(aside)
        path.rename(aside)
    remove(aside)


def remove(folder: Path) -> None:
    """Remove a folder with rm, which handles any depth."""
    subprocess.run(["/bin/rm", "-rf", "--one-file-system", "--", str(folder)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Remove all of it, services first."""
    lists = {name: {"type": "list", "elements": kind, "default": []} for name, kind in LISTS.items()}
    module = AnsibleModule(argument_spec={**lists, "lines": {"type": "dict", "default": {}}}, supports_check_mode=True)
    given, removal = module.params, Removal(module)
    for unit in given["units"]:
        removal.unit(unit)
    for name in given["linger"]:
        removal.linger(name)
    for entry in map(Path, given["paths"]):
        for path in sorted(entry.parent.glob(entry.name)) if "*" in entry.name else [entry]:
            removal.path(path)
    for path, own in given["lines"].items():
        removal.lines(Path(path), own)
    for folder in given["empty"]:
        removal.folder(Path(folder))
    removal.unhold(given["unhold"])
    packages = removal.installed(given["packages"])
    for name in given["masked"]:
        removal.unmask(name, installed=bool(packages))
    if removal.active and any(UNITS in path.parents for path in removal.gone):
        removal.run("systemctl", "daemon-reload")
    module.exit_json(
        changed=bool(removal.removed),
        removed=removal.removed,
        left=removal.left,
        packages=packages,
        diff={"before": "".join(f"{what}\n" for what in removal.removed), "after": ""},
    )


if __name__ == "__main__":
    main()
