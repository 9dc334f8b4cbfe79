"""A drawing of boxes and arrows as SVG, laid out here: no Graphviz is needed.

Each open box is laid out for itself, its children in rows, and then is one box in the one that holds it. An arrow goes
between the two boxes of one open box that hold its ends. A bridge is a box on its arrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partitioner.pictures.drawing import BridgeLabel, Drawing, Edge, Node, together
from partitioner.pictures.layered import XY, RowLayout, layered
from partitioner.pictures.svg import (
    GROUND,
    LINE,
    PALE_INK,
    PALETTE,
    document,
    element,
    filled,
    stage_hatch,
    text_pixels,
    tint,
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
    canvas = _Canvas(root, drawing)
    tile = canvas.tile(root)
    top = PADDING + 22
    head = [words(PADDING, PADDING + 10, drawing.title, size=14.0, anchor="start", bold=True)]
    legend_width = 0.0
    if drawing.legend:
        legend, legend_width, legend_height = _legend(drawing.legend, max(tile.width, 640.0))
        head += [element("g", *legend, transform=f"translate({PADDING} {top})")]
        top += legend_height + PADDING
    width = max(tile.width, legend_width, text_pixels(drawing.title, 14.0)) + 2 * PADDING
    body = canvas.draw(tile, PADDING, top)
    return document(width, top + tile.height + PADDING, drawing.title, [*head, *body])


@dataclass(frozen=True)
class _Line:
    """An arrow between two tiles, by their numbers. One that leads to a bridge has no head."""

    source: int
    target: int
    faint: bool = False
    has_head: bool = True


@dataclass(frozen=True)
class _Tile:
    """A box with its size; an open one with the tiles in it, bridges behind its children. A bridge has no node."""

    node: Node | None
    lines: tuple[str, ...]
    width: float
    height: float
    head: float = 0.0
    """Pixels of its own lines above what is in it."""
    inside: tuple[_Tile, ...] = ()
    arrows: tuple[_Line, ...] = ()
    layout: RowLayout | None = None


class _Canvas:
    """A drawing's boxes by number, and its arrows by the open box that holds both ends."""

    def __init__(self, root: Node, drawing: Drawing) -> None:
        self.has_legend = bool(drawing.legend)
        self.nodes = {node.id: node for node in root.all()}
        self.within: dict[str, dict[tuple[str, str], list[Edge]]] = defaultdict(dict)
        """Arrows between each two children of a box, by the box."""
        self.again: defaultdict[str, list[BridgeLabel]] = defaultdict(list)
        paths: dict[str, tuple[str, ...]] = {}

        def walk(node: Node, above: tuple[str, ...]) -> None:
            paths[node.id] = (*above, node.id)
            for child in node.children:
                walk(child, paths[node.id])

        walk(root, ())
        for edge in drawing.edges:
            ends = zip(paths[edge.source], paths[edge.target], strict=False)
            around = ""
            for source, target in ends:
                if source == target:
                    around = source
                    continue
                if edge.again:
                    self.again[around] += edge.bridges
                else:
                    self.within[around].setdefault((source, target), []).append(edge)
                break

    def tile(self, node: Node) -> _Tile:
        """Find the sizes of a box and of all in it."""
        lines = (*node.lines, *((node.stage_text,) if node.stage_text else ()))
        if self.again[node.id]:
            lines += (f"to the next: {', '.join(bridge.text for bridge in together(self.again[node.id]))}",)
        wide = max((text_pixels(line, SIZE) for line in lines), default=0.0) + 2 * PADDING
        high = len(lines) * LINE_HEIGHT + PADDING
        if not node.children:
            return _Tile(node, lines, max(wide, 60.0), high)
        tiles, arrows, order = self._content(node)
        layout = layered(
            [(tile.width, tile.height) for tile in tiles],
            [(arrow.source, arrow.target) for arrow in arrows],
            order,
        )
        head = high if lines else 0.0
        width = max(layout.width + 2 * PADDING, wide)
        height = head + layout.height + 2 * PADDING
        return _Tile(node, lines, width, height, head, tuple(tiles), tuple(arrows), layout)

    def _content(self, node: Node) -> tuple[list[_Tile], list[_Line], list[float]]:
        """Return a box's children and bridges, the arrows between them, and the order of the model."""
        tiles = [self.tile(child) for child in node.children]
        order = [float(number) for number in range(len(tiles))]
        number = {child.id: place for place, child in enumerate(node.children)}
        arrows = []
        for (source, target), edges in self.within[node.id].items():
            a, b = number[source], number[target]
            bridges = together(bridge for edge in edges for bridge in edge.bridges)
            if not bridges:
                faint = self.has_legend and not any(self.nodes[edge.source].stages for edge in edges)
                arrows.append(_Line(a, b, faint))
                continue
            lines = tuple(bridge.text for bridge in bridges)
            width = max(text_pixels(line, SIZE - 1) for line in lines) + 2 * PADDING
            arrows += [_Line(a, len(tiles), has_head=False), _Line(len(tiles), b)]
            tiles.append(_Tile(None, lines, width, len(lines) * LINE_HEIGHT + 6))
            order.append((a + b) / 2)
        return tiles, arrows, order

    def draw(self, tile: _Tile, x: float, y: float) -> Iterator[str]:
        """Draw a tile with its upper left corner at (x, y), and all in it."""
        if tile.node is None:
            yield _bridge(tile, x, y)
        elif tile.node.id:
            yield _box(tile, tile.node, x, y)
        if tile.layout is None:
            return
        left = x + (tile.width - tile.layout.width) / 2
        top = y + tile.head + PADDING
        for path, arrow in zip(tile.layout.paths, tile.arrows, strict=True):
            yield _curve([(px + left, py + top) for px, py in path], arrow)
        for inner, (middle, upper) in zip(tile.inside, tile.layout.places, strict=True):
            yield from self.draw(inner, left + middle - inner.width / 2, top + upper)


def _box(tile: _Tile, node: Node, x: float, y: float) -> str:
    stage = node.stages[0] if len(node.stages) == 1 else None
    line = LINE if stage is None else PALETTE[stage % len(PALETTE)]
    plain = tile.layout is not None or stage is None
    fill, over = (GROUND, None) if plain or stage is None else (tint(stage), stage_hatch(stage))
    if node.bridge:
        fill, line = BRIDGE_FILL, BRIDGE_LINE
    shape = filled(
        x, y, tile.width, tile.height, fill, over,
        rx=7,
        stroke=line,
        stroke_width=2.5 if node.kind == "fold" else 1.2,
        stroke_dasharray="6 3" if node.kind == "ops" and not node.children else None,
    )  # fmt: skip
    middle, base = x + tile.width / 2, y + PADDING / 2 + LINE_HEIGHT - 3
    texts = []
    for number, text in enumerate(tile.lines):
        below = base + number * LINE_HEIGHT
        if over is not None:  # ground of its own on the hatch
            width = text_pixels(text, SIZE) * 0.9
            texts.append(filled(middle - width / 2, below - SIZE + 1, width, LINE_HEIGHT - 1, fill, None))
        texts.append(words(middle, below, text, size=SIZE, bold=number == 0))
    return element("g", shape, *texts)


def _bridge(tile: _Tile, x: float, y: float) -> str:
    """Draw a bridge: a hexagon with its words."""
    tip, right, bottom, middle = 7.0, x + tile.width, y + tile.height, y + tile.height / 2
    above = [(x, middle), (x + tip, y), (right - tip, y), (right, middle)]
    corners = [*above[1:], (right - tip, bottom), (x + tip, bottom), above[0]]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    shape = element("polygon", points=points, fill=BRIDGE_FILL, stroke=BRIDGE_LINE, stroke_width=1.5)
    texts = [
        words(x + tile.width / 2, y + LINE_HEIGHT * (number + 1) - 1, text, size=SIZE - 1, ink=BRIDGE_INK)
        for number, text in enumerate(tile.lines)
    ]
    return element("g", shape, *texts)


def _curve(points: Sequence[XY], arrow: _Line) -> str:
    """Draw a line through points: curved between rows, straight through them."""
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    for nx, ny in rest:
        bend = (ny - y) / 2
        curve = f"C{x:.1f} {y + bend:.1f} {nx:.1f} {ny - bend:.1f} {nx:.1f} {ny:.1f}"
        path.append(f"V{ny:.1f}" if abs(nx - x) < 0.05 else curve)
        x, y = nx, ny
    colour = FAINT if arrow.faint else PALE_INK
    line = element("path", d="".join(path), fill="none", stroke=colour, stroke_width=1.2)
    if not arrow.has_head:
        return line
    way = 1 if points[-1][1] >= points[-2][1] else -1
    return line + element("path", d=f"M{x:.1f} {y:.1f}l-3.5 {-7 * way}h7Z", fill=colour)


def _legend(entries: Sequence[tuple[int, str]], most: float) -> tuple[list[str], float, float]:
    """Draw the stages in columns, as many as have room. Returns them with their width and height."""
    drawn = []
    width = max(text_pixels(text, SIZE) for _, text in entries) + 32
    in_a_row = max(1, min(len(entries), int(most / width)))
    rows = -(-len(entries) // in_a_row)
    for number, (stage, text) in enumerate(entries):
        x, y = width * (number // rows), 20.0 * (number % rows)
        if stage >= 0:
            colour = PALETTE[stage % len(PALETTE)]
            drawn.append(filled(x, y, 15, 13, tint(stage), stage_hatch(stage), rx=2, stroke=colour))
        drawn.append(words(x + 20, y + 11, text, size=SIZE, anchor="start"))
    return drawn, width * -(-len(entries) // rows), 20.0 * rows - 6
