"""What several modules need of apt."""

import re
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

# A setting that somebody has changed is kept, and nobody is asked.
KEEP = ("--force-confdef", "--force-confold")
DPKG = ("dpkg", *KEEP)
APT = [
    *("apt-get", "--yes", "--quiet", "--no-install-recommends", "--option=Dpkg::Use-Pty=0"),
    *(f"--option=Dpkg::Options::={option}" for option in KEEP),
]
BUSY = re.compile(r"Could not get lock|frontend lock was locked|is locked by another|Unable to acquire the dpkg")
# Seconds to wait for other programs, in all and between two tries.
PATIENCE_S, PAUSE_S = 600, 5


def update(source: Path | str) -> list[str]:
    """The command that updates the package lists of one source only."""
    settings = (f"Dir::Etc::sourcelist={source}", "Dir::Etc::sourceparts=-", "APT::Get::List-Cleanup=0")
    return ["apt-get", "update", "--quiet=2", "--error-on=any", *(f"--option={setting}" for setting in settings)]


def reasons(out: str, err: str) -> list[str]:
    """The lines that say why apt or dpkg has failed, without warnings."""
    return [line for line in (err or out).splitlines() if line and not line.startswith("W: ")]


class Apt:
    """Runs apt and dpkg, which other programs may be using."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.patience = PATIENCE_S
        # Its words are looked for in what they print.
        self.environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}

    def run(self, *command: str) -> tuple[int, str, str]:
        """Run a command, again while another program has locked the packages."""
        while True:
            code, out, err = self.module.run_command(list(command), environ_update=self.environment)
            if not code or not BUSY.search(err) or self.patience <= 0:
                return code, out, err
            time.sleep(PAUSE_S)
            self.patience -= PAUSE_S

    def must(self, *command: str) -> str:
        """Run a command that has to succeed, and return its warnings."""
        code, out, err = self.run(*command)
        if code:
            why = " ".join(reasons(out, err)[-10:])
            self.module.fail_json(msg=f"{' '.join(command[:1] + command[-1:])} failed: {why or code}")
        return "\n".join(line for line in err.splitlines() if line.startswith("W: "))[-1000:]

    def finish(self) -> None:
        """Complete what dpkg has begun."""
        if not self.run(*DPKG, "--configure", "--pending")[0]:
            return
        # A package whose unpacking was interrupted at the very end cannot be configured, only unpacked again; one that
        # depends on what was not unpacked yet needs that first.
        form = "--showformat=${db:Status-Eflag} ${binary:Package}\n"
        rows = [line.split() for line in self.run("dpkg-query", "--show", form)[1].splitlines()]
        broken = [word[1] for word in rows if word[0] == "reinstreq"]
        run = self.must if broken else self.run
        run("apt-get", "--quiet", "update")
        run(*APT, "install", "--fix-broken", "--no-remove", "--reinstall", *broken)
        self.must(*DPKG, "--configure", "--pending")
