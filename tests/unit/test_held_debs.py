"""How held_debs reads apt's output. The Molecule scenario nccl tests on real nodes what it does to dpkg."""

from pathlib import Path

import pytest

from .loading import load

held_debs = load("modules", "held_debs")


def test_a_missing_version_is_reported_with_the_available_ones() -> None:
    assert held_debs.lacking({"a": ["2", "1"], "b": ["1"]}, "1") == ""
    reason = held_debs.lacking({"a": [], "b": ["3", "2"], "c": ["1"]}, "1")
    assert reason == "a 1 is not available (available: none); b 1 is not available (available: 3, 2)"


@pytest.mark.parametrize(
    ("entry", "keyrings"),
    [
        ("deb [signed-by=/usr/share/keyrings/a.gpg] file:///var/x /\n", ["/usr/share/keyrings/a.gpg"]),
        ("deb [signed-by=/k/a.gpg arch=amd64] file:///var/x /\n", ["/k/a.gpg"]),
        ("Types: deb\nSigned-By: /k/a.asc\nURIs: file:///var/x\n", ["/k/a.asc"]),
        ("deb file:///var/x /\n", []),
    ],
)
def test_the_keyrings_of_an_entry_are_read_in_both_formats(entry: str, keyrings: list[str]) -> None:
    assert held_debs.signed_by(entry) == [Path(path) for path in keyrings]
