"""Which time servers a node asks. tests/lab/test_kernels.py tests on nodes with clocks of their own what that does."""

import pytest

from .loading import load

clock = load("modules", "clock")
DEBIAN = "# Welcome\npool 2.debian.pool.ntp.org iburst\nsourcedir /run/chrony-dhcp\n"
UBUNTU = "pool ntp.ubuntu.com        iburst maxsources 4\npool 0.ubuntu.pool.ntp.org iburst maxsources 1\n"
HEAD, NODES = ["192.0.2.1"], ["192.0.2.2", "192.0.2.3"]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (DEBIAN, False),
        (UBUNTU, False),
        (f"{DEBIAN}server time.example.org iburst\n", True),
        ("  Peer 192.0.2.9\n", True),
        ("#server time.example.org\n", False),
        ("pool ntp.ubuntu.com.example.org iburst\n", True),
        ("server debian.example.org\n", True),
        ("refclock PHC /dev/ptp0\n", True),
    ],
)
def test_servers_that_somebody_has_given_are_told_from_those_of_the_distribution(text: str, given: bool) -> None:
    assert bool(clock.GIVEN.search(text)) == given


@pytest.mark.parametrize("given", [False, True])
def test_a_chrony_with_servers_of_its_own_keeps_them_and_serves(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    monkeypatch.setattr(clock, "has_servers", lambda: given)
    asks = clock.settings("chrony", HEAD, [])
    assert ("server 192.0.2.1 iburst" in asks, bool(asks)) == (not given, not given)
    serves = clock.settings("chrony", ["time.example.org"], NODES).splitlines()[1:]
    assert serves == [
        "server time.example.org iburst prefer trust",
        "local stratum 10",
        "allow 192.0.2.2",
        "allow 192.0.2.3",
    ]


def test_timesyncd_asks_the_head_or_has_no_file() -> None:
    assert clock.settings("systemd-timesyncd", HEAD, []).splitlines()[1:3] == ["[Time]", "NTP=192.0.2.1"]
    assert clock.settings("systemd-timesyncd", [], []) == ""
