"""Texts as they are shown: without what a terminal would obey, and as HTML for notebooks.

A class that inherits from ``ShownInNotebooks`` looks there as ``print`` shows it: there is one text, not two.
"""

from __future__ import annotations

import html
from collections.abc import Iterable


def printable(text: str) -> str:
    """Replace control characters (escape sequences of a hostile file) in ``text``; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def as_html(text: str, rows: Iterable[tuple[str, str]] = ()) -> str:
    """Write a text as escaped HTML in a font of fixed width, below a table of ``rows`` if there are any."""
    cells = "".join(f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>" for name, value in rows)
    table = f"<table>{cells}</table>" if cells else ""
    return f'{table}<pre style="overflow-x:auto">{_escaped(text)}</pre>'


def _escaped(text: str) -> str:
    return html.escape(printable(text))


class ShownInNotebooks:
    """A thing that a notebook shows as ``str`` writes it."""

    def _repr_html_(self) -> str:
        return as_html(str(self))
