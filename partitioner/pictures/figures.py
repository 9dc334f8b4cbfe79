"""Still figures of a plan for papers and slides, as SVG: the step's timeline, memory over it, the placement graph.

The ground is light, and all that a colour says is also said by a letter, a hatch or a word, for print in black.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cost_models.errors import UsageError
from cost_models.units import format_bytes, format_seconds
from partitioner.pictures.drawing import short_text
from partitioner.pictures.graph_svg import to_svg
from partitioner.pictures.lanes import Lane, Lanes, lanes_of
from partitioner.pictures.memory import memory_data
from partitioner.pictures.plan_drawing import plan_drawing
from partitioner.pictures.svg import (
    LINE,
    PALE_INK,
    document,
    element,
    filled,
    hatch,
    text_pixels,
    tint,
    words,
)
from partitioner.record.data import PlanData
from partitioner.record.file import write_text
from partitioner.record.rebuild import simulate_plan

WIDTH, MARGIN, LABEL, RIGHT = 960.0, 14.0, 110.0, 24.0
"""Pixels: of a figure, around it, of the names of lanes, and right of them, where the words of the last mark end."""
LANE, GAP = 26.0, 6.0
"""Pixels of a timeline's lane, and between two."""
CHART, CHART_GAP = 110.0, 34.0
"""Pixels of a memory chart, and between two."""
MOST_LANES, MOST_CHARTS = 32, 12
"""The most lanes of a timeline and charts of memory: one page. The rest is counted in words."""
MOST_COLUMNS = 400
"""The most moments of a memory chart: two pixels each."""
LEAST_WIDTH = 0.2
"""Pixels below which a span is not drawn: nothing would be seen of it."""
PNG_SCALE, LONGEST_PNG = 2.0, 32_000
"""Pixels of a PNG per pixel of the SVG, for print; and the most on a side: cairo has none of more than 32,767."""
SMALL_PART = 0.25
"""The part of its device below which memory is drawn to its own scale, and the capacity is said in words."""
KINDS = {
    # words, place in the palette, hatch
    "F": ("forward", 0, 0),
    "B": ("backward", 1, 1),
    "I": ("backward, gradients of inputs", 1, 1),
    "W": ("backward, gradients of weights", 2, 2),
    "R": ("sum of gradients", 5, 6),
    "O": ("optimizer", 3, 4),
}
"""The looks of a span by its letter."""


def timeline_figure(plan: PlanData) -> str:
    """Draw a step from left to right, a row for all devices that do the same; gaps are waiting."""
    lanes = lanes_of(simulate_plan(plan))
    shown = lanes.lanes[:MOST_LANES]
    scale = (WIDTH - 2 * MARGIN - LABEL - RIGHT) / (lanes.step_seconds or 1.0)
    top = MARGIN + 26
    body = [
        _title(f"{plan.model.name} on {plan.cluster.name}: one step of {format_seconds(lanes.step_seconds)}")
    ]
    letters = [
        letter for letter in KINDS if any(span.letter == letter for lane in shown for span in lane.spans)
    ]
    looks = [(f"{letter}: {KINDS[letter][0]}", *KINDS[letter][1:]) for letter in letters]
    legend, high = _legend([*looks, ("waiting", None, 0)], top)
    body += legend
    top += high + 8
    bottom = top + len(shown) * (LANE + GAP)
    body += _time_axis(lanes.step_seconds, scale, top, bottom)
    for number, lane in enumerate(shown):
        body += _lane(lane, lanes, scale, top + number * (LANE + GAP))
    height = bottom + 22 + MARGIN
    if len(lanes.lanes) > len(shown):
        body.append(_words(bottom + 34, f"and {len(lanes.lanes) - len(shown)} more lanes"))
        height += 16
    return document(WIDTH, height, f"Timeline of a step of {plan.model.name}", body)


def _lane(lane: Lane, lanes: Lanes, scale: float, y: float) -> Iterator[str]:
    left = MARGIN + LABEL
    yield _words(y + LANE / 2 + 4, short_text(lane.label, 17))
    yield filled(left, y, lanes.step_seconds * scale, LANE, "#f0f1f3", None)
    for span in lane.spans:
        width = (span.end_seconds - span.start_seconds) * scale
        if width < LEAST_WIDTH:
            continue
        _, colour, pattern = KINDS[span.letter]
        x = left + span.start_seconds * scale
        yield filled(
            x, y, width, LANE, tint(colour, 0.4), hatch(pattern), stroke="#ffffff" if width > 3 else None
        )
        text = f"{span.letter}{span.microbatch}" if span.microbatch >= 0 else span.letter
        if text_pixels(text, 10.0) + 4 < width:
            ground = filled(x + width / 2 - 9, y + 6, 18, 14, tint(colour, 0.4), None) if pattern else ""
            yield ground + words(x + width / 2, y + LANE / 2 + 4, text, size=10.0)


def memory_figure(plan: PlanData) -> str:
    """Draw the memory of a device of each lane over a step, stacked by what holds it, below the device's capacity."""
    simulation = simulate_plan(plan)
    lanes = lanes_of(simulation)
    charts = memory_data(plan, simulation, lanes)["lanes"]
    shown = charts[:MOST_CHARTS]
    kinds = list(dict.fromkeys(kind for chart in shown for kind in chart["kinds"]))
    top = MARGIN + 26
    body = [_title(f"{plan.model.name} on {plan.cluster.name}: memory over a step")]
    legend, high = _legend([(kind, number, number) for number, kind in enumerate(kinds)], top)
    body += legend
    top += high + 22
    scale = (WIDTH - 2 * MARGIN - LABEL - RIGHT) / (lanes.step_seconds or 1.0)
    for chart in shown:
        body += _chart(chart, kinds, scale, top)
        top += CHART + CHART_GAP
    body += _time_axis(lanes.step_seconds, scale, top - CHART_GAP, top - CHART_GAP)
    if len(charts) > len(shown):
        body.append(_words(top + 4, f"and {len(charts) - len(shown)} more lanes"))
    return document(WIDTH, top + MARGIN, f"Memory over a step of {plan.model.name}", body)


def _chart(chart: Mapping[str, Any], kinds: Sequence[str], scale: float, top: float) -> Iterator[str]:
    left, bottom = MARGIN + LABEL, top + CHART
    right = WIDTH - MARGIN - RIGHT
    peak, capacity = chart["peak_bytes"], chart["capacity_bytes"]
    most = capacity if peak >= SMALL_PART * capacity else peak
    tall = CHART / (max(most, peak) * 1.05 or 1.0)
    share = f"{peak / capacity:.0%}" if capacity else ""
    heading = f"peak {format_bytes(peak)}, {share} of {format_bytes(capacity)}: {chart['peak_text']}"
    yield words(left, top - 5, short_text(heading, 110), size=11.0, anchor="start")
    yield _words(top + CHART / 2, short_text(chart["label"], 17))
    kept = _columns(chart)
    xs = [left + chart["seconds"][moment] * scale for moment in kept]
    below = [0.0] * len(xs)
    for kind, sizes in zip(chart["kinds"], chart["stacks"], strict=True):
        above = [under + size for under, size in zip(below, (sizes[at] for at in kept), strict=True)]
        if any(sizes):
            path = _area(xs, [bottom - b * tall for b in above], [bottom - b * tall for b in below], right)
            number = kinds.index(kind)
            yield element("path", d=path, fill=tint(number, 0.4), stroke=PALE_INK, stroke_width=0.4)
            if pattern := hatch(number):
                yield element("path", d=path, fill=pattern)
        below = above
    if most == capacity:
        y = bottom - capacity * tall
        yield element("path", d=f"M{left} {y:.1f}H{right}", stroke="#1c2126", stroke_dasharray="6 3")
    yield element("path", d=f"M{left} {top:.1f}V{bottom:.1f}H{right}", stroke=LINE, fill="none")


def _columns(chart: Mapping[str, Any]) -> list[int]:
    """Choose the moments to draw: of those that fall into one column of the picture the fullest."""
    totals = [sum(sizes) for sizes in zip(*chart["stacks"], strict=True)]
    if len(totals) <= MOST_COLUMNS:
        return list(range(len(totals)))
    first, last = chart["seconds"][0], chart["seconds"][-1]
    fullest: dict[int, int] = {}
    for moment, seconds in enumerate(chart["seconds"]):
        column = int((seconds - first) / (last - first or 1.0) * MOST_COLUMNS)
        if totals[moment] > totals[fullest.setdefault(column, moment)]:
            fullest[column] = moment
    return sorted(fullest.values())


def _area(xs: Sequence[float], above: Sequence[float], below: Sequence[float], right: float) -> str:
    """Draw between two curves that change at ``xs`` and keep their values until the next."""

    ends = [*xs[1:], max(right, xs[-1])]
    there = list(zip(xs, ends, above, strict=True))
    back = [(end, x, y) for x, end, y in reversed(list(zip(xs, ends, below, strict=True)))]
    path, last = [f"M{xs[0]:.1f} {above[0]:.1f}"], f"{above[0]:.1f}"
    for start, _, y in [*there, *back, (xs[0], xs[0], above[0])]:
        if f"{y:.1f}" != last:
            last = f"{y:.1f}"
            path.append(f"H{start:.1f}V{last}")
    return "".join(path) + "Z"


def placement_figure(plan: PlanData) -> str:
    """Draw the placement graph, as ``partitioner graph`` does."""
    return to_svg(plan_drawing(plan))


def _title(text: str) -> str:
    return words(MARGIN, MARGIN + 10, short_text(text, 110), size=14.0, anchor="start", bold=True)


def _words(y: float, text: str) -> str:
    return words(MARGIN, y, text, anchor="start")


def _legend(entries: Sequence[tuple[str, int | None, int]], top: float) -> tuple[list[str], float]:
    """Draw texts with their colours and hatches, in as many rows as they need. Returns them with their height."""
    found, x, y = [], MARGIN, top
    for text, colour, pattern in entries:
        width = text_pixels(text, 11.0) + 34
        if x > MARGIN and x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + 20
        fill = "#f0f1f3" if colour is None else tint(colour, 0.4)
        found.append(filled(x, y, 18, 13, fill, hatch(pattern), stroke=LINE))
        found.append(words(x + 23, y + 11, text, anchor="start"))
        x += width
    return found, y - top + 16


def _time_axis(seconds: float, scale: float, top: float, bottom: float) -> Iterator[str]:
    left = MARGIN + LABEL
    for number in range(6):
        moment = seconds * number / 5
        x = left + moment * scale
        yield element("path", d=f"M{x:.1f} {top:.1f}V{bottom + 4:.1f}", stroke="#d5d9de")
        yield words(x, bottom + 17, "0" if not number else format_seconds(moment), size=10.0, ink=PALE_INK)


FIGURES: Mapping[str, Callable[[PlanData], str]] = {
    "timeline": timeline_figure,
    "memory": memory_figure,
    "placement": placement_figure,
}
"""The figures by name."""


def figure(plan: PlanData, kind: str, path: str | PathLike[str] | None = None) -> str:
    """Draw a figure and return it as SVG; write it to ``path``, .svg or .png, if one is given."""
    if kind not in FIGURES:
        raise UsageError(f"there is no figure {kind!r}", [f"there are: {', '.join(FIGURES)}"])
    ending = ".svg" if path is None else Path(path).suffix.lower()
    if ending not in (".svg", ".png"):
        raise UsageError(f"cannot write a figure to {path}", ["its name ends neither in .svg nor in .png"])
    text = FIGURES[kind](plan)
    if path is not None and ending == ".png":
        _write_png(text, Path(path))
    elif path is not None:
        write_text(Path(path), text)
    return text


def _write_png(text: str, path: Path) -> None:
    try:
        from cairosvg import svg2png  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra
    except (
        ImportError,
        OSError,
    ) as error:  # OSError: the package is there and the library that it needs is not
        raise UsageError(
            f"cannot write {path}",
            ["PNG needs the package cairosvg, which is not installed or finds no cairo library"],
            ["pip install 'partitioner[png]'", "or write .svg, which needs nothing"],
        ) from error
    longest = max(float(ElementTree.fromstring(text).attrib[side]) for side in ("width", "height"))
    try:
        data = svg2png(bytestring=text.encode(), scale=min(PNG_SCALE, LONGEST_PNG / longest))
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}", [str(error.strerror or error)]) from error
