#!/usr/bin/python
DOCUMENTATION = """
module: system_upgrade
short_description: Upgrade the packages of the operating system
description:
  - Removes no package, asks no question, and keeps settings that somebody has changed. What that forbids is kept back.
  - First completes what a killed dpkg has left behind.
  - Returns what is upgraded, which kernel runs and which one the next boot would start, and which drivers run in
    another version than the installed one, as NVIDIA's after an upgrade; and with which stack jobs would run. In check
    mode it only reads apt's package lists again.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.apt import APT, Apt

# Packages that are new, such as kernels, are installed, and what a killed one of them lacks; none is removed.
UPGRADE = (*APT, "--with-new-pkgs", "--fix-broken", "--no-remove", "upgrade")
# As a simulation tells it; a package that is new has no former version.
INSTALLS = re.compile(r"^Inst (\S+) (?:\[(\S+)\] )?\((\S+)", re.MULTILINE)
KEPT = re.compile(r"^The following packages have been kept back:\n((?:  .*\n)+)", re.MULTILINE)
# A release as Debian (6.1.0-37, since Debian 13 6.12.63+deb13) and Ubuntu number it, and its flavour.
RELEASE = re.compile(r"(\d[\d.]*(?:-\d|\+)[^-]*)-(.+)")
BUILD = re.compile(r"Debian (\S+)")
CURRENT = Path("/opt/farandole/current")
BOOT, REQUIRED = Path("/boot"), Path("/run/reboot-required")
MODULES = Path("/sys/module")
# Ends too early to be of use where a machine is not told to ask less.
QUIET = {"NEEDRESTART_MODE": "l", "UCF_FORCE_CONFFOLD": "1", "APT_LISTCHANGES_FRONTEND": "none"}


def planned(simulation: str) -> tuple[list[list[str]], list[str]]:
    """The packages that would be upgraded, each with both versions, and those that are kept back."""
    kept = KEPT.search(simulation)
    return [[*found] for found in INSTALLS.findall(simulation)], kept[1].split() if kept else []


def newest(running: str, installed: list[str]) -> str:
    """The kernel that the next boot starts: the last one of the flavour that runs; that which runs if there is none."""
    form = RELEASE.fullmatch(running)
    same = {name: found[1] for name in installed if form and (found := RELEASE.fullmatch(name)) and found[2] == form[2]}
    return max(same, key=lambda name: order(same[name]), default=running)


def order(version: str) -> list[tuple[str, int]]:
    """What is compared of a version: each number, and what stands before it."""
    return [(before, int(number or 0)) for before, number in re.findall(r"(\D*)(\d*)", version)]


def booted(apt: Apt, running: str, version: str) -> bool:
    """Whether the kernel that runs is the one that is installed by this name."""
    built = BUILD.search(version)
    code, out, _ = apt.run("dpkg-query", "--show", "--showformat=${Version}", f"linux-image-{running}")
    return bool(code) or not built or out.strip() == built[1]


def other_drivers(apt: Apt) -> Iterator[str]:
    """The drivers that run in another version than the one that is installed for this kernel."""
    for file in sorted(MODULES.glob("*/version")) if shutil.which("modinfo") else ():
        name = file.parent.name
        code, out, _ = apt.run("modinfo", "--field=version", name)
        if not code and out.strip() not in ("", file.read_text().strip()):
            yield name


def main() -> None:
    """Upgrade what can be upgraded."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    os.umask(0o022)
    apt = Apt(module)
    apt.environment |= QUIET
    if not module.check_mode:
        apt.finish()
    apt.must("apt-get", "--quiet", "--option=APT::Update::Error-Mode=any", "update")
    code, simulation, err = apt.run(*UPGRADE, "--simulate")
    if code:
        module.fail_json(msg=f"the packages cannot be upgraded: {' '.join((err or simulation).split())[-1000:]}")
    packages, kept = planned(simulation)
    if packages and not module.check_mode:
        apt.must(*UPGRADE)
    running = os.uname()
    after = newest(running.release, [file.name.partition("-")[2] for file in BOOT.glob("vmlinuz-*")])
    drivers = [*other_drivers(apt)]
    reboot = REQUIRED.exists() or after != running.release or not booted(apt, running.release, running.version)
    stack = CURRENT.resolve().name if (CURRENT / "manifest.json").exists() else ""
    module.exit_json(
        changed=bool(packages), packages=packages, kept=kept, kernel=running.release, next_kernel=after,
        drivers=drivers, reboot=reboot or bool(drivers), stack=stack,
    )  # fmt: skip


if __name__ == "__main__":
    main()
