"""A small writer of SVG: elements from names and attributes, all text escaped, sizes of texts estimated.

The pictures have a light ground and can be printed without colour: what a colour says is also said by words or a hatch.
The colours are those of the report page in its light theme: eight that people with any colour vision tell apart
(M. Okabe and K. Ito, "Color Universal Design", two of them made darker), thinned so that black text stands on them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from html import escape

from cost_models.shown import printable

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7b61c4", "#8f8200")
TINT = 0.24
"""The share of the colour in a tint; the rest is white."""
FONT = "Helvetica, Arial, 'DejaVu Sans', 'Noto Sans', sans-serif"
INK, PALE_INK, LINE, GROUND = "#1c2126", "#59636e", "#8a939c", "#ffffff"
"""Text, text of less weight (7:1 and 5.6:1 on white), lines, and the ground, as on the report page."""
HATCHES = (
    "",
    "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    "M0 4H8",
    "M0 0L8 8M-2 6L2 10M6 -2L10 2",
    "M4 0V8",
    "M0 4H8M4 0V8",
    "M0 8L8 0M0 0L8 8",
    "M2 4H6",
)
"""Lines in squares of 8 pixels; the first of no hatch."""


def tint(number: int, share: float = TINT) -> str:
    """Return a colour thinned with white."""
    colour = PALETTE[number % len(PALETTE)]
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)


def element(name: str, /, *children: str, **attributes: object) -> str:
    """Write an element. Attributes: ``stroke_width=2`` is stroke-width="2"; None leaves one out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{''.join(children)}</{name}>" if children else f"<{name}{words}/>"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def words(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 11.0,
    anchor: str = "middle",
    bold: bool = False,
    ink: str = INK,
) -> str:
    """Write a line of text with its base at ``y``."""
    return element(
        "text",
        escape(printable(text)),
        x=round(x, 1),
        y=round(y, 1),
        font_size=size,
        text_anchor=anchor if anchor != "start" else None,
        font_weight="bold" if bold else None,
        fill=ink if ink != INK else None,
    )


def document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """Put elements into an SVG file of its own. ``title`` is what a screen reader says."""
    return element(
        "svg",
        "\n" + element("title", escape(printable(title))),
        "\n" + hatch_patterns(),
        "\n" + element("rect", width="100%", height="100%", fill=GROUND),
        *(f"\n{item}" for item in body),
        "\n",
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        viewBox=f"0 0 {width:.6g} {height:.6g}",
        width=round(width),
        height=round(height),
        font_family=FONT,
        fill=INK,
    ) + "\n"  # fmt: skip


def hatch_patterns() -> str:
    """Write the patterns that ``hatch`` refers to."""
    patterns = [
        element(
            "pattern",
            element("path", d=lines, stroke=INK, stroke_opacity=0.45, fill="none"),
            id=f"hatch-{number}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for number, lines in enumerate(HATCHES)
        if lines
    ]
    return element("defs", *patterns)


def hatch(number: int) -> str | None:
    """Return the fill of hatch ``number``; None of no hatch."""
    number %= len(HATCHES)
    return f"url(#hatch-{number})" if HATCHES[number] else None


def stage_hatch(stage: int) -> str | None:
    """Return the hatch that tells a stage from the ones of the same colour."""
    return hatch(stage // len(PALETTE))


def filled(
    x: float, y: float, width: float, height: float, fill: str, over: str | None, **more: object
) -> str:
    """Write a rectangle, and a hatch over it if there is one."""
    place = {"x": round(x, 2), "y": round(y, 2), "width": round(width, 2), "height": round(height, 2)}
    radius = more.get("rx")
    below = element("rect", **place, fill=fill, **more)
    return below if over is None else below + element("rect", **place, fill=over, rx=radius)


NARROW, WIDE = frozenset("iljtfrI.,:;'|!()[]{} ·-/"), frozenset("mwMWO@%QGDN…—")
"""Letters of less and of more than usual width."""


def text_pixels(text: str, size: float) -> float:
    """Estimate the width of a text from above: fonts differ, and a box must hold it in all of them."""
    return size * sum(map(_ems, text))


def _ems(character: str) -> float:
    if unicodedata.category(character) == "Mn":
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.35
    if character in NARROW:
        return 0.42
    return 0.95 if character in WIDE else 0.72 if character.isupper() else 0.64
