"""Make text from elsewhere safe to show: no control characters, no passwords."""

import re

# The colour codes that Ansible itself uses.
COLOUR = re.compile(r"(\x1b\[(?:0|[01];3\d)m)")
USER_OF_URL = re.compile(r"(\w://)[^\s/'\"<>]*@")
SHOWN = 300


def visible(text: str, keep: str = "") -> str:
    """Escape every non-printable character as Python would, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)


def one_line(text: object, limit: int = SHOWN) -> str:
    """Shorten a node's text to one line; keep its end, because programs print the cause last."""
    # Cut first: the text may be huge.
    line = visible(" ".join(str(text)[-4 * limit :].split()))
    return line if len(line) <= limit else f"… {line[-limit:]}"


def without_passwords(text: str) -> str:
    """Mask the user and password in every URL."""
    return USER_OF_URL.sub(r"\1***@", text)


def on_terminal(text: str) -> str:
    """Keep lines and colours; escape everything else that could control a terminal."""
    parts = COLOUR.split(text)
    return "".join(part if COLOUR.fullmatch(part) else visible(part, keep="\n\t") for part in parts)


def in_xml(text: str) -> str:
    """Escape what XML 1.0 cannot contain: control characters and surrogates."""
    return visible(text, keep="\n\t")
