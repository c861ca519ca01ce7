"""What the module packages reads from dpkg. Molecule and tests/lab test on real nodes what it does."""

import pytest

from .loading import load

packages = load("modules", "packages")
INSTALLED = {"curl", "libc6", "libc6:amd64", "chrony", "time-daemon"}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["curl"], []),
        (["curl", "git"], ["git"]),
        (["libc6:amd64", "libc6:i386"], ["libc6:i386"]),
        (["systemd-timesyncd | time-daemon"], []),
        (["systemd-timesyncd | ntpsec"], ["systemd-timesyncd"]),
        # Only apt knows whether these are satisfied.
        (["curl=8.0", "cur*"], ["curl=8.0", "cur*"]),
    ],
)
def test_only_what_is_missing_is_left_to_apt(names: list[str], missing: list[str]) -> None:
    assert packages.lacking(names, INSTALLED) == missing
