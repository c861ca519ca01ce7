"""Text from a node, made safe to show."""

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from farandole.core.text import in_xml, on_terminal, one_line

from .loading import load

NASTY = "a\x1b]0;x\x07\x9b2J\x00\u202e\ud800\ufffe\u2028b"
VISIBLE = r"a\x1b]0;x\x07\x9b2J\x00\u202e\ud800\ufffe\u2028b"


def test_non_printable_characters_are_escaped() -> None:
    assert one_line(NASTY) == VISIBLE.replace(r"\u2028", " ")
    assert one_line(" two\r\n\tlines\n") == "two lines"
    assert one_line("größer {0} [red] {{ x }}") == "größer {0} [red] {{ x }}"


def test_long_text_keeps_its_end() -> None:
    line = one_line("x" * 10_000_000 + " the cause", 20)
    assert line == "… " + "x" * 10 + " the cause"


def test_a_terminal_gets_only_lines_and_ansible_colours() -> None:
    assert on_terminal(NASTY) == VISIBLE
    assert on_terminal("\x1b[0;32mok: [a]\x1b[0m\n\tmore\r") == "\x1b[0;32mok: [a]\x1b[0m\n\tmore\\r"
    # These would hide a line, or start a colour that never ends.
    assert on_terminal("\x1b[8m\x1b[0;3") == r"\x1b[8m\x1b[0;3"


def test_escaped_xml_can_be_parsed() -> None:
    root = ET.Element("a", message=in_xml(NASTY))
    root.text = in_xml("".join(map(chr, range(0x300))) + NASTY)
    assert ET.fromstring(ET.tostring(root)).get("message") == VISIBLE  # noqa: S314, it was written here


def test_everything_that_ansible_shows_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = load("callback", "plain_terminal")
    shown: list[Any] = []
    display = callback.CallbackBase()._display
    monkeypatch.setattr(display, "display", lambda msg, *_, **__: shown.append(msg))
    callback.CallbackModule(display=display)
    display.display("fatal: \x1b[2J", color="red")
    display.warning("\x1b]0;x\x07")
    assert shown[0] == r"fatal: \x1b[2J"
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", "".join(shown))
