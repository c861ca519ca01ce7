#!/usr/bin/python
DOCUMENTATION = """
module: packages
short_description: Install the Debian packages that are missing
description:
  - Asks dpkg what is installed, which takes a hundredth of the time that M(ansible.builtin.apt) needs to load apt's
    cache. Only if something is missing, it runs apt-get, without recommended packages and without upgrading others.
  - First completes what a killed dpkg has left behind, also if no package is missing.
  - Waits for another apt or dpkg to finish.
options:
  names:
    description:
      - The packages. C(one | other) is satisfied by either, or by an installed package that provides one of them; the
        first is installed if there is none.
      - What dpkg cannot answer, such as a pattern or C(name=version), is left to apt-get.
    type: list
    elements: str
    required: true
  on_machines:
    description: Further ones, which are not installed in containers.
    type: list
    elements: str
    default: []
"""

import os
import re
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.apt import APT, Apt
from ansible_collections.farandole.cluster.plugins.module_utils.services import in_container

FORM = "--showformat=${binary:Package}\t${Package}\t${db:Status-Abbrev}\t${Provides}\n"
NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?")
# Where dpkg journals what it is doing; empty unless it was killed.
JOURNAL = Path("/var/lib/dpkg/updates")
LISTS = (Path("/var/lib/apt/periodic/update-success-stamp"), Path("/var/lib/apt/lists"))
LISTS_S = 86400


class Packages(Apt):
    """What is installed on this machine, and what can be."""

    def installed(self) -> tuple[set[str], bool]:
        """The names of what is installed or provided, and whether dpkg was interrupted."""
        names: set[str] = set()
        interrupted = any(JOURNAL.iterdir()) if JOURNAL.is_dir() else False
        for line in self.module.run_command(["dpkg-query", "--show", FORM], check_rc=True)[1].splitlines():
            name, plain, state, provides = line.split("\t")
            # Wanted, is, error: `ii ` for installed, `hi ` for held, `rc ` for removed with its settings left.
            interrupted |= state[1] not in "inc" or state[2] != " "
            if state[1] == "i":
                names |= {name, plain, *(provided.split()[0] for provided in provides.split(",") if provided.strip())}
        return names, interrupted

    def install(self, names: list[str]) -> bool:
        """Install packages with a list of candidates that is at most a day old; returns whether anything changed."""
        # apt-get update succeeds even if no mirror answers.
        warnings = self.must("apt-get", "--quiet", "update") if not self.module.check_mode and stale() else ""
        simulate = ["--simulate"] if self.module.check_mode else []
        code, out, err = self.run(*APT, "install", *simulate, *names)
        # In check mode, a bare machine may have no list yet.
        if code and not (self.module.check_mode and stale()):
            errors = [line for line in (err or out).splitlines() if line.startswith("E: ")] or [err or out]
            why = "\n".join(filter(None, [warnings, " ".join(errors).strip()[-1000:]]))
            self.module.fail_json(msg=f"{', '.join(names)} cannot be installed: {why}")
        return bool(code) or "0 upgraded, 0 newly installed, 0 to remove" not in out


def stale() -> bool:
    """Whether apt's list of packages is missing or older than a day."""
    times = [path.stat().st_mtime for path in LISTS if path.exists()]
    return not times or time.time() - times[0] > LISTS_S


def lacking(names: list[str], installed: set[str]) -> list[str]:
    """The first alternative of each package that is not installed."""
    missing = []
    for name in names:
        alternatives = [alternative.strip() for alternative in name.split("|")]
        if not (all(map(NAME.fullmatch, alternatives)) and installed & set(alternatives)):
            missing.append(alternatives[0])
    return missing


def main() -> None:
    """Install what is missing."""
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
            "on_machines": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    packages = Packages(module)
    installed, interrupted = packages.installed()
    if interrupted and not module.check_mode:
        packages.finish()
        installed, _ = packages.installed()
    wanted = module.params["names"] + module.params["on_machines"] * (not in_container(module))
    missing = lacking(wanted, installed)
    changed = bool(missing) and packages.install(missing)
    module.exit_json(changed=changed or interrupted, missing=missing)


if __name__ == "__main__":
    main()
