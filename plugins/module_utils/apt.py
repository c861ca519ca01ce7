"""What several modules need of apt."""

from __future__ import annotations

from pathlib import Path


def update(source: Path | str) -> list[str]:
    """The command that updates the package lists of one source only."""
    settings = (f"Dir::Etc::sourcelist={source}", "Dir::Etc::sourceparts=-", "APT::Get::List-Cleanup=0")
    return ["apt-get", "update", "--quiet=2", "--error-on=any", *(f"--option={setting}" for setting in settings)]


def reasons(out: str, err: str) -> list[str]:
    """The lines that say why apt or dpkg has failed, without warnings."""
    return [line for line in (err or out).splitlines() if line and not line.startswith("W: ")]
