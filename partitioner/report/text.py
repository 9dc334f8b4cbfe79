"""Plain text for people: aligned columns, hanging indents, counts that read well, nothing a terminal would obey."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 118
"""Columns of everything printed."""


def printable(text: str) -> str:
    """``text`` with control characters (escape sequences of a hostile file) replaced; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def counted(number: int, word: str) -> str:
    """1, "stage" -> "1 stage"; 2,000 -> "2,000 stages"."""
    ending = "" if number == 1 else "es" if word.endswith(("s", "ch", "x")) else "s"
    return f"{number:,} {word}{ending}"


def labelled(label: str, text: str, margin: int = 12) -> str:
    """ "label       text", wrapped with a hanging indent."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{label:<{margin}}",
        subsequent_indent=" " * margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """A table without lines: two blanks between columns, numbers to the right, columns in ``left`` to the left."""
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


def percent(part: float) -> str:
    """0 -> "0%", 0.0004 -> "0.04%", 0.123 -> "12.3%"."""
    return "0%" if part == 0 else f"{part:.1%}" if abs(part) >= 0.001 else f"{part:.2%}"
