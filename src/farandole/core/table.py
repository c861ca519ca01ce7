"""Tables for the terminal and for other programs."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns without borders, easy to copy from and to cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)
