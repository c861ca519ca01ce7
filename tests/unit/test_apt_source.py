"""How apt_source reads keys and sources. The Molecule scenario nccl tests on real nodes what apt accepts."""

from pathlib import Path

import pytest

from .loading import load
from .stack import run_module

apt_source = load("modules", "apt_source")


@pytest.mark.parametrize("fingerprint", ["", "A4B469963BF863CC", "0123456789" * 5, "x" * 40])
def test_an_incomplete_fingerprint_is_refused(fingerprint: str) -> None:
    asked = {"name": "x", "uri": "http://x", "key_url": "http://x/key", "key_fingerprint": fingerprint}
    for check_mode in (True, False):
        answer = run_module("apt_source", asked, check_mode=check_mode)
        assert "key_fingerprint must be a full fingerprint" in answer["msg"]


def test_a_key_is_stored_in_the_format_that_apt_reads() -> None:
    armour = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmDME\n-----END PGP PUBLIC KEY BLOCK-----\n"
    assert apt_source.suffix(armour) == apt_source.suffix(b"A comment.\r\n" + armour) == ".asc"
    assert apt_source.suffix(b"\x98\x33\x04") == ".gpg"


def test_the_entry_names_its_signing_key() -> None:
    signed = "/etc/apt/keyrings/x.asc 0123456789ABCDEF0123456789ABCDEF01234567"
    entry = apt_source.Source("https://example.org/apt", ["/"], [], signed).text()
    fields = dict(line.split(": ", 1) for line in entry.splitlines() if not line.startswith("#"))
    assert fields == {"Types": "deb", "URIs": "https://example.org/apt", "Suites": "/", "Signed-By": signed}


def test_the_distributions_own_key_is_found_in_both_formats(tmp_path: Path) -> None:
    deb822, lines = tmp_path / "debian.sources", tmp_path / "sources.list"
    deb822.write_text(
        "# a comment\n\nTypes: deb\nURIs: http://a\nSigned-By: /one.gpg\n\n# another\nTypes: deb\nSigned-By: /two.gpg\n"
    )
    lines.write_text("# a comment\ndeb [arch=amd64 signed-by=/three.gpg] http://a bookworm main\ndeb http://a b main\n")
    assert [apt_source.signed_by(deb822, number) for number in (1, 2)] == ["/one.gpg", "/two.gpg"]
    assert [apt_source.signed_by(lines, number) for number in (2, 3)] == ["/three.gpg", ""]
