"""Plots of a few series over logarithmic axes, as SVG: panels side by side, what the lines are below each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

WIDTH, HEIGHT = 430, 410
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 142
"""Pixels of a panel, and of its margins; what the lines are stands below."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Distinct for colour-blind readers (Okabe and Ito)."""


@dataclass(frozen=True)
class Series:
    """``points``: (x, y). ``dashed`` tells two kinds of one colour apart."""

    label: str
    points: tuple[tuple[float, float], ...]
    color: str
    dashed: bool


@dataclass(frozen=True)
class Panel:
    """One plot. ``span``: the lowest and highest y; ``across``: the name of x."""

    title: str
    across: str
    series: tuple[Series, ...]
    span: tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From data to pixels; logarithmic."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Pixels of ``value``; what is outside lies on the edge."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def decades(self) -> list[float]:
        """The powers of ten on the axis."""
        return [
            10.0**n for n in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        ]


def write_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels side by side."""
    image = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=str(len(panels) * WIDTH),
        height=str(HEIGHT),
        viewBox=f"0 0 {len(panels) * WIDTH} {HEIGHT}",
    )
    image.set("font-family", "sans-serif")
    image.set("font-size", "11")
    _add(image, "rect", width=len(panels) * WIDTH, height=HEIGHT, fill="white")
    for number, panel in enumerate(panels):
        _panel(image, number * WIDTH, panel)
    ElementTree.indent(image)
    path.write_text(ElementTree.tostring(image, encoding="unicode") + "\n", encoding="utf-8")


def _panel(image: ElementTree.Element, offset: float, panel: Panel) -> None:
    values = [x for one in panel.series for x, _ in one.points]
    across = Axis(min(values) / 1.3, max(values) * 1.3, offset + LEFT, offset + WIDTH - RIGHT)
    up = Axis(*panel.span, HEIGHT - BOTTOM, TOP)
    _text(image, (across.start + across.end) / 2, 16, panel.title, weight="bold")
    for value in up.decades():
        y = up.at(value)
        _add(image, "line", x1=across.start, x2=across.end, y1=y, y2=y, stroke="#dddddd")
        _text(image, across.start - 6, y + 4, f"{value:g}", anchor="end")
    for value in across.decades():
        x = across.at(value)
        _add(image, "line", x1=x, x2=x, y1=up.start, y2=up.end, stroke="#dddddd")
        _text(image, x, up.start + 16, f"{value:,.0f}")
    _text(image, (across.start + across.end) / 2, up.start + 32, panel.across)
    for one in panel.series:
        points = [(across.at(x), up.at(y)) for x, y in one.points]
        line = _add(
            image,
            "polyline",
            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            fill="none",
            stroke=one.color,
        )
        line.set("stroke-width", "2")
        if one.dashed:
            line.set("stroke-dasharray", "5 3")
        for x, y in points:
            _add(image, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill=one.color)
    for row, one in enumerate(panel.series):
        y = up.start + 52 + 15 * row
        key = _add(
            image, "line", x1=across.start + 8, x2=across.start + 34, y1=y - 4, y2=y - 4, stroke=one.color
        )
        key.set("stroke-width", "2")
        if one.dashed:
            key.set("stroke-dasharray", "5 3")
        _text(image, across.start + 40, y, one.label, anchor="start")


def _text(
    image: ElementTree.Element, x: float, y: float, text: str, anchor: str = "middle", weight: str = "normal"
) -> None:
    element = _add(image, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill="#222222")
    element.set("text-anchor", anchor)
    element.set("font-weight", weight)
    element.text = text


def _add(image: ElementTree.Element, tag: str, **values: object) -> ElementTree.Element:
    return ElementTree.SubElement(image, tag, {key: str(value) for key, value in values.items()})
