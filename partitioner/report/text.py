"""Plain text for people: aligned columns, hanging indents, nothing a terminal would obey."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 118
"""The width, in characters, of everything that is printed."""


def printable(text: str) -> str:
    """Replace control characters (escape sequences of a hostile file) in ``text``; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def labelled(label: str, text: str, margin: int = 12) -> str:
    """Write "label       text", wrapped with a hanging indent."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{label:<{margin}}",
        subsequent_indent=" " * margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def rate_text(per_second: float) -> str:
    """Write a rate: 1234.5 -> "1,234", 1.2345 -> "1.23"."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:,.3g}"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Write a table without lines: two blanks between columns, numbers to the right, columns in ``left`` to the left."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[c]) for row in table) for c in range(len(header))]
    lines = []
    for row in table:
        cells = [
            f"{cell:<{width}}" if name in left else f"{cell:>{width}}"
            for cell, width, name in zip(row, widths, header, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
