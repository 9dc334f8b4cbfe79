"""A drawing of boxes and arrows as SVG, laid out here: no Graphviz is needed.

Each open box is laid out for itself, its children in rows, and then is one box in the one that holds it. An arrow goes
between the two boxes of one open box that hold its ends. A bridge is a box on its arrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partitioner.pictures.drawing import Bridge, Drawing, Edge, Node, together
from partitioner.pictures.layered import Layout, Point, layered
from partitioner.pictures.looks import PALETTE, tint
from partitioner.pictures.svg import (
    GROUND,
    LINE,
    PALE_INK,
    document,
    element,
    filled,
    stage_hatch,
    text_pixels,
    words,
)

SIZE, LINE_HEIGHT = 11.0, 14.0
"""Pixels of text and of a line of it."""
PADDING = 12.0
"""Pixels around what is in a box."""
BRIDGE_FILL, BRIDGE_LINE, BRIDGE_INK = "#fff1e0", "#b04a00", "#7a3300"
FAINT = "#c3cad1"
"""The lines of what every stage computes for itself, which much reads."""


def to_svg(drawing: Drawing) -> str:
    """Lay out a drawing and write it as SVG: title and stages above, then the boxes."""
    root = Node("", "module", (), children=drawing.nodes)
    inside = _Canvas(drawing)
    plan = inside.plan(root)
    top = PADDING + 22
    head = [words(PADDING, PADDING + 10, drawing.title, size=14.0, anchor="start", bold=True)]
    legend_width = 0.0
    if drawing.legend:
        legend, legend_width, legend_height = _legend(drawing.legend, max(plan.width, 640.0))
        head += [element("g", *legend, transform=f"translate({PADDING} {top})")]
        top += legend_height + PADDING
    title_width = text_pixels(drawing.title, 14.0)
    width = max(plan.width, legend_width, title_width) + 2 * PADDING
    body = list(inside.draw(plan, PADDING, top))
    return document(width, top + plan.height + PADDING, drawing.title, [*head, *body])


@dataclass(frozen=True)
class _Plan:
    """A box with its size; an open one with the plans of what is in it, bridges behind its children."""

    node: Node | None
    lines: tuple[str, ...]
    width: float
    height: float
    head: float = 0.0
    inside: tuple[_Plan, ...] = ()
    layout: Layout | None = None
    faint: tuple[bool, ...] = ()
    heads: tuple[bool, ...] = ()
    """Per arrow, whether it ends in an arrowhead: one that leads to a bridge does not."""


class _Canvas:
    def __init__(self, drawing: Drawing) -> None:
        self.within: dict[str, list[Edge]] = defaultdict(list)
        self.child_of: dict[str, dict[str, int]] = {}
        self.legend = bool(drawing.legend)
        holders: dict[str, tuple[str, ...]] = {}

        def walk(node: Node, above: tuple[str, ...]) -> None:
            holders[node.id] = above
            for child in node.children:
                walk(child, (*above, child.id))

        walk(Node("", "module", (), children=drawing.nodes), ("",))
        self.holders = holders
        self.again: defaultdict[str, list[Bridge]] = defaultdict(list)
        for edge in drawing.edges:
            source, target = holders[edge.source], holders[edge.target]
            depth = next(
                (d for d, pair in enumerate(zip(source, target, strict=False)) if pair[0] != pair[1]), None
            )
            if depth is None:
                continue
            if edge.again:
                self.again[source[depth - 1]] += edge.bridges
            else:
                self.within[source[depth - 1]].append(edge)

    def plan(self, node: Node) -> _Plan:
        """Find the sizes of a box and of all in it."""
        lines = (*node.lines, *((node.stage_text,) if node.stage_text else ()))
        if self.again[node.id]:
            lines += (f"to the next: {', '.join(bridge.text for bridge in together(self.again[node.id]))}",)
        wide = max((text_pixels(line, SIZE) for line in lines), default=0.0) + 2 * PADDING
        high = len(lines) * LINE_HEIGHT + PADDING
        if not node.children:
            return _Plan(node, lines, max(wide, 60.0), high)
        children = [self.plan(child) for child in node.children]
        boxes, edges, faint, heads, order = self._arrows(node, children)
        layout = layered([(box.width, box.height) for box in boxes], edges, order)
        head = high if lines else 0.0
        return _Plan(
            node,
            lines,
            max(layout.width, wide - 2 * PADDING) + 2 * PADDING,
            head + layout.height + 2 * PADDING,
            head,
            tuple(boxes),
            layout,
            tuple(faint),
            tuple(heads),
        )

    def _arrows(
        self, node: Node, children: Sequence[_Plan]
    ) -> tuple[list[_Plan], list[tuple[int, int]], list[bool], list[bool], list[float]]:
        """Return a box's children and bridges, the arrows between them, how these look, and the order of the model."""
        position = {child.id: number for number, child in enumerate(node.children)}
        depth = len(self.holders[node.id])
        found: dict[tuple[int, int], list[Bridge]] = {}
        everywhere: dict[tuple[int, int], bool] = {}
        leaves = {leaf.id: leaf for child in node.children for leaf in child.leaves()}
        for edge in self.within[node.id]:
            ends = tuple(position[self.holders[end][depth]] for end in (edge.source, edge.target))
            key = ends[0], ends[1]
            found.setdefault(key, []).extend(edge.bridges)
            faint = self.legend and not leaves[edge.source].stages
            everywhere[key] = everywhere.get(key, True) and faint
        boxes, order = list(children), [float(number) for number in range(len(children))]
        edges, faints, heads = [], [], []
        for (a, b), bridges in found.items():
            if not bridges:
                edges.append((a, b))
                faints.append(everywhere[a, b])
                heads.append(True)
                continue
            lines = tuple(bridge.text for bridge in together(bridges))
            width = max(text_pixels(line, SIZE - 1) for line in lines) + 2 * PADDING
            edges += [(a, len(boxes)), (len(boxes), b)]
            faints += [False, False]
            heads += [False, True]
            boxes.append(_Plan(None, lines, width, len(lines) * LINE_HEIGHT + 6))
            order.append((a + b) / 2)
        return boxes, edges, faints, heads, order

    def draw(self, plan: _Plan, x: float, y: float) -> Iterator[str]:
        """Draw a box with its upper left corner at (x, y), and all in it."""
        if plan.node is None:
            yield _bridge(plan, x, y)
            return
        if plan.node.id:
            yield _box(plan, plan.node, x, y)
        if plan.layout is None:
            return
        left = x + (plan.width - plan.layout.width) / 2
        top = y + plan.head + PADDING
        for path, faint, head in zip(plan.layout.paths, plan.faint, plan.heads, strict=True):
            yield _arrow([(px + left, py + top) for px, py in path], faint, head)
        for box, (middle, upper) in zip(plan.inside, plan.layout.places, strict=True):
            yield from self.draw(box, left + middle - box.width / 2, top + upper)


def _box(plan: _Plan, node: Node, x: float, y: float) -> str:
    stage = node.stages[0] if len(node.stages) == 1 else None
    line = LINE if stage is None else PALETTE[stage % len(PALETTE)]
    open_ = plan.layout is not None
    fill = GROUND if open_ or stage is None else tint(stage)
    over = None if open_ or stage is None else stage_hatch(stage)
    wide = 2.5 if node.kind == "fold" else 1.2
    dash = "6 3" if node.kind == "ops" and not node.children else None
    if node.bridge:
        fill, line = BRIDGE_FILL, BRIDGE_LINE
    shape = filled(
        x, y, plan.width, plan.height, fill, over, rx=7, stroke=line, stroke_width=wide, stroke_dasharray=dash
    )
    middle, base = x + plan.width / 2, y + PADDING / 2 + LINE_HEIGHT - 3
    texts = [
        _lined(
            middle, base + number * LINE_HEIGHT, text, over is not None, tint(stage or 0), bold=number == 0
        )
        for number, text in enumerate(plan.lines)
    ]
    return element("g", shape, *texts)


def _lined(x: float, y: float, text: str, hatched: bool, ground: str, *, bold: bool) -> str:
    """Write a line of a box, on ground of its own where the box is hatched."""
    line = words(x, y, text, size=SIZE, bold=bold)
    if not hatched:
        return line
    width = text_pixels(text, SIZE) * 0.9
    return filled(x - width / 2, y - SIZE + 1, width, LINE_HEIGHT - 1, ground, None) + line


def _bridge(plan: _Plan, x: float, y: float) -> str:
    """Draw a bridge: a hexagon with its words."""
    tip, right, bottom, middle = 7.0, x + plan.width, y + plan.height, y + plan.height / 2
    corners = (
        (x + tip, y),
        (right - tip, y),
        (right, middle),
        (right - tip, bottom),
        (x + tip, bottom),
        (x, middle),
    )
    shape = element(
        "polygon",
        points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners),
        fill=BRIDGE_FILL,
        stroke=BRIDGE_LINE,
        stroke_width=1.5,
    )
    texts = [
        words(x + plan.width / 2, y + LINE_HEIGHT * (number + 1) - 1, text, size=SIZE - 1, ink=BRIDGE_INK)
        for number, text in enumerate(plan.lines)
    ]
    return element("g", shape, *texts)


def _arrow(points: Sequence[Point], faint: bool, head: bool) -> str:
    """Draw a line through points: curved between rows, straight through them."""
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    for nx, ny in rest:
        bend = (ny - y) / 2
        curve = f"C{x:.1f} {y + bend:.1f} {nx:.1f} {ny - bend:.1f} {nx:.1f} {ny:.1f}"
        path.append(f"V{ny:.1f}" if abs(nx - x) < 0.05 else curve)
        x, y = nx, ny
    colour = FAINT if faint else PALE_INK
    line = element("path", d="".join(path), fill="none", stroke=colour, stroke_width=1.2)
    way = 1 if points[-1][1] >= points[-2][1] else -1
    if not head:
        return line
    tip = f"M{x:.1f} {y:.1f}l-3.5 {-7 * way}h7Z"
    return line + element("path", d=tip, fill=colour)


def _legend(entries: Sequence[tuple[int, str]], most: float) -> tuple[list[str], float, float]:
    """Draw the stages in columns, as many as have room. Returns them with their width and height."""
    found = []
    width = max(text_pixels(text, SIZE) for _, text in entries) + 32
    in_a_row = max(1, min(len(entries), int(most / width)))
    rows = -(-len(entries) // in_a_row)
    for number, (stage, text) in enumerate(entries):
        x, y = width * (number // rows), 20.0 * (number % rows)
        if stage >= 0:
            colour = PALETTE[stage % len(PALETTE)]
            found.append(filled(x, y, 15, 13, tint(stage), stage_hatch(stage), rx=2, stroke=colour))
        found.append(words(x + 20, y + 11, text, size=SIZE, anchor="start"))
    return found, width * -(-len(entries) // rows), 20.0 * rows - 6
