"""Text that came from elsewhere, made fit to be shown: as words, never as orders."""

from __future__ import annotations

import re

# What Ansible colours its own lines with.
COLOUR = re.compile(r"(\x1b\[(?:0|[01];3\d)m)")
USER_OF_URL = re.compile(r"(\w://)[^\s/'\"<>]*@")
SHOWN = 300


def visible(text: str, keep: str = "") -> str:
    """Every character that does not print, but for those to keep, as Python would write it down."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)


def one_line(text: object, limit: int = SHOWN) -> str:
    """A node's words: their end, as programs name the cause last, on one line."""
    # Far less than the whole has to be looked at.
    words = visible(" ".join(str(text)[-4 * limit :].split()))
    return words if len(words) <= limit else f"… {words[-limit:]}"


def without_passwords(text: str) -> str:
    """No URL in it says any more as whom it is opened."""
    return USER_OF_URL.sub(r"\1***@", text)


def on_terminal(text: str) -> str:
    """Lines and colours as they are; what else would steer a terminal is shown instead."""
    parts = COLOUR.split(text)
    return "".join(part if COLOUR.fullmatch(part) else visible(part, keep="\n\t") for part in parts)


def in_xml(text: str) -> str:
    """As XML 1.0 can hold it, which knows no control characters and no surrogates."""
    return visible(text, keep="\n\t")
