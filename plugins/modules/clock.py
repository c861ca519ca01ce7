#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = """
module: clock
short_description: Let a machine ask for the time, and serve it
description:
  - Gives the machine's time daemon, chrony or systemd-timesyncd, a file of settings, and has it read. Any other daemon
    is left alone; so is a chrony to which somebody else has given servers, unless it has to serve.
  - Without any option it removes the file, and returns it as RV(removed).
  - Does nothing in a container, which has the clock of its host.
options:
  ask: {description: Servers to ask., type: list, elements: str, default: []}
  serve:
    description: Addresses that may ask this machine, which then answers even if it knows no better than its own clock.
    type: list
    elements: str
    default: []
"""

import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import put
from ansible_collections.farandole.cluster.plugins.module_utils.services import being_read, unread

# systemd writes it in a container.
CONTAINER = Path("/run/systemd/container")
CHRONY, TIMESYNCD = "chrony", "systemd-timesyncd"
PROGRAMS = {CHRONY: Path("/usr/sbin/chronyd"), TIMESYNCD: Path("/usr/lib/systemd/systemd-timesyncd")}
FILES = {
    CHRONY: Path("/etc/chrony/conf.d/farandole.conf"),
    TIMESYNCD: Path("/etc/systemd/timesyncd.conf.d/90-farandole.conf"),
}
HEADER = "# Managed by Farandole, role base.\n"
# Where chrony reads servers, other than those of Debian and Ubuntu.
PLACES = ("chrony.conf", "conf.d/*.conf", "sources.d/*.sources")
GIVEN = re.compile(
    r"^\s*(?:server|pool|peer|refclock)\s(?!\s*(?:\S+\.)?(?:(?:debian|ubuntu)\.pool\.ntp\.org|ntp\.ubuntu\.com)\s)",
    re.M | re.I,
)
SERVER = re.compile(r"[\w.:-]+")


def text(path: Path) -> str:
    """The text of a file; empty without one."""
    return path.read_text(errors="replace") if path.exists() else ""


def has_servers() -> bool:
    """Whether somebody else has given chrony servers."""
    folder = Path("/etc/chrony")
    files = [file for place in PLACES for file in folder.glob(place) if file != FILES[CHRONY]]
    return any(GIVEN.search(text(file)) for file in files)


def settings(daemon: str, ask: list[str], serve: list[str]) -> str:
    """The text of our file; empty for none."""
    if daemon == TIMESYNCD:
        # It asks at once if somebody sets the clock, and another server, if it knows one, if this one is silent.
        lines = ["[Time]", f"NTP={' '.join(ask)}", "PollIntervalMaxSec=256"] if ask else []
    else:
        lines = [f"server {name} iburst" for name in ask] if serve or not has_servers() else []
        lines += ["local stratum 10", *(f"allow {address}" for address in serve)] if serve else []
    return HEADER + "".join(f"{line}\n" for line in lines) if lines else ""


def apply(module: AnsibleModule, daemon: str) -> tuple[bool, list[str]]:
    """Bring the files into the state that is asked for; returns whether that changed anything, and what was removed."""
    file, wanted = FILES[daemon], settings(daemon, module.params["ask"], module.params["serve"])
    gone = [other for other in FILES.values() if other.exists() and not (other == file and wanted)]
    written = bool(wanted) and wanted != text(file)
    due = written or file in gone or (bool(wanted) and bool(unread(module, daemon, [file])))
    if not module.check_mode:
        for other in gone:
            other.unlink()
        if written:
            put(file, wanted)
        if due:
            being_read([file])
            module.run_command(["systemctl", "restart", daemon], check_rc=True)
    return due or bool(gone), [str(other) for other in gone]


def main() -> None:
    """Find the daemon, and configure it."""
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(argument_spec={"ask": strings, "serve": strings}, supports_check_mode=True)
    if odd := [name for name in module.params["ask"] + module.params["serve"] if not SERVER.fullmatch(name)]:
        module.fail_json(msg=f"{odd[0]!r} is no name or address of a machine")
    daemon = next((name for name, program in PROGRAMS.items() if program.exists()), "")
    changed, removed = apply(module, daemon) if daemon and not CONTAINER.exists() else (False, [])
    module.exit_json(changed=changed, removed=removed)


if __name__ == "__main__":
    main()
