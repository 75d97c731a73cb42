"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A header, a rule and one line for each row, the columns two spaces apart."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    found = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    found.insert(1, "  ".join("-" * width for width in widths))
    return found
