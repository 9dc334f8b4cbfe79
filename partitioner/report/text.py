"""Plain text for people: aligned columns, hanging indents, nothing a terminal would obey, and no line too wide.

with text_within(60):
    print(plan)             every line has 60 characters or fewer; 80 where nothing is said
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

WIDTH = 80
"""The width, in characters, of texts for which nobody asks for another: a terminal's since the VT100."""
NARROWEST, WIDEST = 40, 120
"""The least and the most characters of a line that texts are fitted into: below, tables fall apart; above, lines are hard
to read."""
LEAST_TEXT = 20
"""A column of words is not made narrower than this, or, where that saves the table from being cut in two, than its longest
word; else the table is cut in two."""
_HANGING = "  "
"""Indent of what a cell goes on with on the next line."""

_width: ContextVar[int] = ContextVar("width", default=WIDTH)


def text_width() -> int:
    """Return the width that texts are fitted into."""
    return _width.get()


@contextmanager
def text_within(characters: int) -> Iterator[None]:
    """Fit the texts that are written within into lines of so many characters."""
    token = _width.set(max(NARROWEST, min(WIDEST, characters)))
    try:
        yield
    finally:
        _width.reset(token)


def labelled(label: str, text: str, margin: int = 12) -> str:
    """Write "label       text", wrapped with a hanging indent."""
    return textwrap.fill(
        text,
        text_width(),
        initial_indent=f"{label:<{margin}}",
        subsequent_indent=" " * margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def hanging(text: str, margin: int = 4) -> str:
    """Write each line of ``text`` wrapped, what it goes on with indented by ``margin``."""
    return "\n".join(
        textwrap.fill(
            line,
            text_width(),
            subsequent_indent=" " * margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def rate_text(per_second: float) -> str:
    """Write a rate: 1234.5 -> "1,234", 1.2345 -> "1.23"."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:,.3g}"


# --------------------------------------------------------------------------------------------------
# Tables


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[str] = (),
    under: Sequence[str] = (),
) -> str:
    """Write a table without lines: two blanks between columns, numbers to the right, columns in ``left`` to the left.

    Too wide, its headings and then its words are wrapped; if that is not enough, further columns follow as a table below,
    beside the first one again. ``under``: a line for the heading and for each row, written below it.
    """
    table = [list(header), *map(list, rows)]
    words = [name in left for name in header]
    widths = [max(len(row[c]) for row in table) for c in range(len(header))]
    if _total(widths) <= text_width():
        return _written(table, widths, words, under)
    half = (text_width() - 2) // 2  # the first column and another one fit always
    least = [
        max(min(width, LEAST_TEXT, half) if is_words else _widest(table[1:], c), _longest_word(header[c]))
        for c, (width, is_words) in enumerate(zip(widths, words, strict=True))
    ]
    narrow = [
        min(size, max(_longest_word(row[c]) for row in table) + len(_HANGING)) if words[c] else size
        for c, size in enumerate(least)
    ]
    if _total(least) > text_width() >= _total(narrow):
        least = narrow
    texts: list[str] = []
    for part in _parts(least):
        fitted = _fitted([widths[c] for c in part], [least[c] for c in part])
        cells = [[row[c] for c in part] for row in table]
        texts.append(_written(cells, fitted, [words[c] for c in part], () if texts else under))
    return "\n\n".join(texts)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _widest(rows: Sequence[Sequence[str]], column: int) -> int:
    return max((len(row[column]) for row in rows), default=0)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _parts(least: Sequence[int]) -> list[list[int]]:
    """Cut the columns into tables that fit, the first column in each."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(least)):
        if len(parts[-1]) > 1 and _total([least[c] for c in (*parts[-1], column)]) > text_width():
            parts.append([0])
        parts[-1].append(column)
    return parts


def _fitted(widths: Sequence[int], least: Sequence[int]) -> list[int]:
    """Narrow the widest columns, none below its least, until all fit."""
    found = list(widths)
    while _total(found) > text_width():
        wide = [c for c in range(len(found)) if found[c] > least[c]]
        if not wide:
            break
        found[max(wide, key=found.__getitem__)] -= 1
    return found


def _written(
    table: Sequence[Sequence[str]], widths: Sequence[int], words: Sequence[bool], under: Sequence[str]
) -> str:
    lines = []
    for number, row in enumerate(table):
        hanging = _HANGING if number else ""
        cells = [wrapped(cell, width, hanging) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        for line in range(height):
            here = []
            for cell, width, is_words in zip(cells, widths, words, strict=True):
                place = line - (height - len(cell) if number == 0 else 0)  # headings stand on their columns
                text = cell[place] if 0 <= place < len(cell) else ""
                here.append(f"{text:<{width}}" if is_words else f"{text:>{width}}")
            lines.append("  ".join(here).rstrip())
        if under:
            lines.append(f"{' ' * (widths[0] + 2)}{under[number]}".rstrip())
    return "\n".join(lines)


def wrapped(text: str, width: int, hanging: str = _HANGING) -> list[str]:
    """Break a cell into lines: at blanks; words that are longer at dots and slashes, or at underscores, or anywhere."""
    if len(text) <= width:
        return [text]
    hanging = hanging if width >= LEAST_TEXT // 2 else ""
    lines = [""]
    for piece in _pieces(text, width - len(hanging)):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1].strip():
            lines[-1] = lines[-1].rstrip()
            lines.append(hanging)
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(text: str, room: int, breaks: Sequence[str] = (r"\s", r"[./]", "_")) -> Iterator[str]:
    if len(text.rstrip()) <= room:
        yield text
    elif breaks:
        first, *rest = breaks
        for piece in re.findall(rf"(?:(?!{first}).)*(?:{first})+|(?:(?!{first}).)+", text):
            yield from _pieces(piece, room, rest)
    else:
        yield from (text[start : start + room] for start in range(0, len(text), room))


# --------------------------------------------------------------------------------------------------
# Terminals: texts there are as wide as they are, in colour where they have any


STYLES = {
    r"(?m)^[a-z][a-z /-]{10} (?=\S)": "bold cyan",  # the label of a line
    r"(?:\A|(?<=\n\n))(?![a-z][a-z /-]{10} \S)[^\n]*\S {2,}\S[^\n]*": "bold",  # headings of a table
    r"(?m)\bdoes not fit\b.*$|^DIFFERS\b|^ +differs:": "red",
    r"(?m)^verified\b": "green",
}
"""Patterns of what is coloured, by the style. Colour says nothing that the words do not say."""
BARS = {r"F[0-9]*-*": "green", r"[BIW][0-9]*-*": "blue", r"[+S]-*": "yellow", r"\.+": "dim"}
"""The same within the rows of a timeline."""
BAR = r"(?m)(?<=  )[.+SFBIW0-9-]{10,}(?=  busy)"


def terminal_width() -> int:
    """Return the columns of the terminal that stdout is (or of ``$COLUMNS``); elsewhere those of any text."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def coloured(text: str) -> str:
    """Return ``text`` with colours for stdout: as it is where that is no terminal, or ``$NO_COLOR`` is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    from rich.console import Console
    from rich.text import Text

    painted = Text(text)
    for pattern, style in STYLES.items():
        painted.highlight_regex(pattern, style)
    for bar in re.finditer(BAR, text):
        for pattern, style in BARS.items():
            for part in re.compile(pattern).finditer(text, *bar.span()):
                painted.stylize(style, *part.span())
    console = Console(highlight=False)
    with console.capture() as shown:
        console.print(painted, soft_wrap=True, end="")
    return shown.get()
