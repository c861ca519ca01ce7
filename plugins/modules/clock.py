#!/usr/bin/python
DOCUMENTATION = """
module: clock
short_description: Let a machine ask for the time, and serve it
description:
  - Gives the machine's time daemon, chrony or systemd-timesyncd, a file of settings, and has it read. Any other daemon,
    and one that is disabled, is left alone; so is a chrony to which somebody else has given servers, unless it serves.
  - Waits a few seconds for the right time, so that no file gets a timestamp in the future, and warns if nobody answers.
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

import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import put
from ansible_collections.farandole.cluster.plugins.module_utils.services import in_container

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
    r"^\s*(?:server|pool|peer|refclock)\s"
    r"(?!\s*(?:\S+\.)?(?:(?:debian|ubuntu)\.pool\.ntp\.org|ntp(?:-bootstrap)?\.ubuntu\.com)(?:\s|$))",
    re.MULTILINE | re.IGNORECASE,
)
SERVER = re.compile(r"[\w.:-]+")
# The head may still be getting its settings.
ANSWER_S, SYNC_S = 30, 10


def text(path: Path) -> str:
    """The text of a file; empty without one."""
    return path.read_text(errors="replace") if path.exists() else ""


def has_servers() -> bool:
    """Whether somebody else has given chrony servers."""
    files = [file for place in PLACES for file in Path("/etc/chrony").glob(place) if file != FILES[CHRONY]]
    return any(GIVEN.search(text(file)) for file in files)


def of_timesyncd() -> list[str]:
    """The servers that somebody has given timesyncd, which chrony has replaced."""
    folder = Path("/etc/systemd")
    files = [folder / "timesyncd.conf", *sorted(folder.glob("timesyncd.conf.d/*.conf"))]
    found = [re.findall(r"^\s*NTP\s*=(.*)$", text(file), re.MULTILINE) for file in files if file != FILES[TIMESYNCD]]
    return [name for lines in found for line in lines for name in line.split() if SERVER.fullmatch(name)]


def settings(daemon: str, ask: list[str], serve: list[str]) -> str:
    """The text of our file; empty for none."""
    if daemon == TIMESYNCD:
        # It resyncs at once when somebody sets the clock, and tries another server, if it has one, when this is silent.
        # A jump of the server's it believes the second time it sees it.
        lines = ["[Time]", f"NTP={' '.join(ask)}", "PollIntervalMaxSec=64"] if ask else []
    else:
        given = has_servers()
        ask = ask or ([] if given else of_timesyncd()) if serve else ask * (not given)
        lines = [f"server {name} iburst prefer trust" for name in ask]
        lines += ["local stratum 10", *(f"allow {address}" for address in serve)] if serve else []
    return HEADER + "".join(f"{line}\n" for line in lines) if lines else ""


def answers(server: str) -> bool:
    """Whether a server tells the time."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(server, 123, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.settimeout(1)
            asking.connect(address)
            # A client's question in version 4.
            asking.send(b"\x23" + bytes(47))
            reply = asking.recv(48)
            # One that does not know the time itself says stratum 0 or 16.
            return len(reply) == 48 and reply[1] in range(1, 16)
    except OSError:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.5)
    return met


def follow(module: AnsibleModule) -> None:
    """Wait until the clock is right."""
    shown = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    within(SYNC_S, lambda: module.run_command(shown)[1].strip() == "yes")


def apply(module: AnsibleModule, daemon: str) -> tuple[bool, list[str]]:
    """Bring the files into the state that is asked for; returns whether that changed anything, and what was removed."""
    ask, serve = module.params["ask"], module.params["serve"]
    file, wanted = FILES[daemon], settings(daemon, ask, serve)
    gone = [other for other in FILES.values() if other.exists() and not (other == file and wanted)]
    written = bool(wanted) and wanted != text(file)
    active = module.run_command(["systemctl", "--quiet", "is-active", daemon])[0] == 0
    # A file that was read has no time, see below, whatever the clock has said or will say.
    due = active if file in gone else bool(wanted) and (written or not active or file.stat().st_mtime != 0)
    if module.check_mode:
        return due or bool(gone), [str(other) for other in gone]
    for other in gone:  # removed last, so that the next run repairs what a killed one left
        put(other, HEADER)
    if written:
        put(file, wanted)
    if due:
        silent = ask if wanted and not serve and not within(ANSWER_S, lambda: any(map(answers, ask))) else []
        module.run_command(["systemctl", "restart", daemon], check_rc=True)
        if silent:
            module.warn(
                f"nobody tells the time on UDP port 123 of {', '.join(silent)}, so this node does not follow it yet: "
                "open that port there, and run site.yml for the head as well"
            )
        elif wanted and not serve:
            follow(module)
    if wanted:
        os.utime(file, (0, 0))
    for other in gone:
        other.unlink()
    return due or bool(gone), [str(other) for other in gone]


def main() -> None:
    """Find the daemon, and configure it."""
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(argument_spec={"ask": strings, "serve": strings}, supports_check_mode=True)
    os.umask(0o022)
    if odd := [name for name in module.params["ask"] + module.params["serve"] if not SERVER.fullmatch(name)]:
        module.fail_json(msg=f"{odd[0]!r} is no name or address of a machine")
    daemon = next((name for name, program in PROGRAMS.items() if program.exists()), "")
    # Before chrony is installed, check mode cannot look at it.
    changed, removed = module.check_mode and daemon == TIMESYNCD and bool(module.params["serve"]), list[str]()
    if daemon and not in_container(module):
        state = module.run_command(["systemctl", "is-enabled", daemon])[1].strip()
        if state in ("disabled", "masked") and module.params["ask"] + module.params["serve"]:
            module.warn(f"{daemon} is {state} here, and stays so: nothing keeps this node's clock right")
        elif not changed:
            changed, removed = apply(module, daemon)
    module.exit_json(changed=changed, removed=removed)


if __name__ == "__main__":
    main()
