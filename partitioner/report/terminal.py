"""Texts on a terminal: as wide as it is, in colour where it has any. Anywhere else they are plain."""

from __future__ import annotations

import os
import re
import shutil
import sys

from partitioner.report.text import WIDTH

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
