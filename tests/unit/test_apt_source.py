"""Keys that gpg made, and how the module reads them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from .loading import load

apt_source = load("modules", "apt_source")

ONE, TWO = "60BBED8BD8DDFC99EEE44C2FA26E648D11F8952D", "66FE7D5FF5A71D916D2965B90B95B7E714B06FA9"
BODY = {
    ONE: """\
mDMEawCYthYJKwYBBAHaRw8BAQdAc6cXU1efdWc8FBOUYCW2u16lRlYwyCuabRcD
qdeslK+0A29uZYiQBBMWCAA4FiEEYLvti9jd/Jnu5Ewvom5kjRH4lS0FAmsAmLYC
GwMFCwkIBwIGFQoJCAsCBBYCAwECHgECF4AACgkQom5kjRH4lS346AD+OVzOmfoT
7OxVps0cwW2Ihl5bskIw/fZlObswRMS7c5oA/i3hWL16mZBgCFSVdvbi2oZS/0Up
W/B3R5Gd5VFpX6YL
""",
    TWO: """\
mDMEawCYthYJKwYBBAHaRw8BAQdAVXOrk4QIg3NcbV5yfNvz26zzmq5duWnjihYF
6uIvoIW0A3R3b4iQBBMWCAA4FiEEZv59X/WnHZFtKWW5C5W35xSwb6kFAmsAmLYC
GwMFCwkIBwIGFQoJCAsCBBYCAwECHgECF4AACgkQC5W35xSwb6lMlAD+JL6c1feQ
/WzYo1UqojMwPYbatHkx0BmKCbCqQa6KLGAA/R7Fvu/KBBhDXQjmX+P1/Xy/a8y8
FJ5Tjajn28VoWdsN
""",
}
CHECKSUM = {ONE: "=I13y\n", TWO: "=At2y\n"}
BEGIN, END = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n", "-----END PGP PUBLIC KEY BLOCK-----\n"


def armoured(key: str, headers: str = "", checksum: bool = True) -> str:
    return f"{BEGIN}{headers}\n{BODY[key]}{CHECKSUM[key] if checksum else ''}{END}"


def binary(key: str) -> bytes:
    return base64.b64decode(BODY[key])


def found(text: bytes) -> set[str]:
    result: set[str] = apt_source.fingerprints(apt_source.dearmor(text))
    return result


@pytest.mark.parametrize("key", [ONE, TWO])
@pytest.mark.parametrize(
    "options", [{}, {"headers": "Version: GnuPG v2.0.22\nComment: a: b\n"}, {"checksum": False}], ids=str
)
def test_the_fingerprint_is_that_of_gpg(key: str, options: dict[str, object]) -> None:
    text = armoured(key, **options)  # type: ignore[arg-type]
    assert found(text.encode()) == {key}
    assert found(text.replace("\n", "\r\n").encode()) == {key}
    assert apt_source.dearmor(text.encode()) == binary(key)


def test_a_key_without_armour_is_read_too() -> None:
    assert found(binary(ONE)) == {ONE}


@pytest.mark.parametrize(
    "text",
    [armoured(ONE).encode() + armoured(TWO).encode(), binary(ONE) + binary(TWO), binary(TWO) + binary(ONE)],
    ids=["two armoured blocks", "two keys", "the other way round"],
)
def test_a_second_key_in_the_file_does_not_hide(text: bytes) -> None:
    assert found(text) == {ONE, TWO}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>404</html>",
        binary(ONE)[:-1],
        binary(ONE)[:3],
        binary(ONE) + b"\x00",
        armoured(ONE).replace("mDME", "m=ME").encode(),
        BEGIN.encode(),
        # Version 3, whose fingerprints are MD5.
        binary(ONE).replace(b"\x98\x33\x04", b"\x98\x33\x03", 1),
    ],
)
def test_what_is_no_whole_key_has_no_fingerprint(text: bytes) -> None:
    assert found(text) == set()


def test_new_packet_lengths_are_read() -> None:
    body = bytes(300)
    data = (
        b"\xc6\x05hello"
        + b"\xc2" + bytes([192 + (300 - 192 >> 8), (300 - 192) & 255]) + body
        + b"\xcd\xff" + (300).to_bytes(4, "big") + body
    )  # fmt: skip
    assert list(apt_source.packets(data)) == [(6, b"hello"), (2, body), (13, body)]


def test_the_entry_says_by_which_key_it_is_believed() -> None:
    source = apt_source.Source("https://example.org/apt", ["/"], [], "/etc/apt/keyrings/x.gpg")
    assert source.text() == (
        "# Managed by Farandole.\nTypes: deb\nURIs: https://example.org/apt\nSuites: /\n"
        "Signed-By: /etc/apt/keyrings/x.gpg\n"
    )


def test_the_release_s_own_key_is_found_in_both_formats(tmp_path: Path) -> None:
    deb822, lines = tmp_path / "debian.sources", tmp_path / "sources.list"
    deb822.write_text(
        "# a comment\n\nTypes: deb\nURIs: http://a\nSigned-By: /one.gpg\n\n# another\nTypes: deb\nSigned-By: /two.gpg\n"
    )
    lines.write_text("# a comment\ndeb [arch=amd64 signed-by=/three.gpg] http://a bookworm main\ndeb http://a b main\n")
    assert [apt_source.signed_by(deb822, number) for number in (1, 2)] == ["/one.gpg", "/two.gpg"]
    assert [apt_source.signed_by(lines, number) for number in (2, 3)] == ["/three.gpg", ""]
