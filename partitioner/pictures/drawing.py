"""A drawing of boxes and arrows: boxes nested in boxes, in the colours of stages, bridges on the arrows.

    Drawing ─► dot.py          text for Graphviz
            ├► graph_svg.py    SVG, laid out here
            └► drawing_json    plain data

Texts are short already and hold nothing that a terminal would obey; each writer escapes them for its own format.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from cost_models.shown import printable
from cost_models.units import format_bytes

WIDEST = 44
"""The most characters of a line in a box; longer ones are cut in the middle. A box of more is wider than its neighbours."""
BridgeWay = Literal["there", "back", "each way"]
BoxKind = Literal["op", "ops", "module", "fold", "stage", "note"]


@dataclass(frozen=True)
class BridgeLabel:
    """Bridges of one kind between two boxes, or inside of one. ``cost`` in ``unit``: of graphs that know no bytes."""

    kind: str
    size_bytes: float
    way: BridgeWay = "there"
    """"back": gradients, from the reader of a value to its maker; "each way": as much in both directions."""
    count: int = 1
    cost: float = 0.0
    unit: str = ""

    @property
    def text(self) -> str:
        """Such as "all-gather 4× 16.0 KiB": all of them together."""
        times = f" {self.count}×" if self.count > 1 else ""
        amount = f"{self.cost:.4g} {self.unit}" if self.unit else format_bytes(self.size_bytes)
        return f"{self.kind}{times} {amount}{'' if self.way == 'there' else f' {self.way}'}"


def together(bridges: Iterable[BridgeLabel]) -> tuple[BridgeLabel, ...]:
    """Add up bridges by kind, the largest first; what goes there and comes back alike is one "each way"."""
    found: dict[tuple[str, str], dict[BridgeWay, BridgeLabel]] = {}
    for bridge in bridges:
        ways = found.setdefault((bridge.kind, bridge.unit), {})
        sum_ = ways.get(bridge.way)
        ways[bridge.way] = (
            bridge
            if sum_ is None
            else replace(
                bridge,
                size_bytes=sum_.size_bytes + bridge.size_bytes,
                count=sum_.count + bridge.count,
                cost=sum_.cost + bridge.cost,
            )
        )
    sums: list[BridgeLabel] = []
    for ways in found.values():
        there, back = ways.get("there"), ways.get("back")
        if there is not None and back is not None and there == replace(back, way="there"):
            ways = {**ways, "each way": replace(there, way="each way")}
            del ways["there"], ways["back"]
        sums += ways.values()
    return tuple(sorted(sums, key=lambda bridge: (-bridge.size_bytes, -bridge.cost)))


@dataclass(frozen=True)
class Node:
    """A box. With ``children`` it is drawn around them. ``stages``: numbers; of none in a drawing without a plan."""

    id: str
    kind: BoxKind
    lines: tuple[str, ...]
    stages: tuple[int, ...] = ()
    stage_text: str = ""
    children: tuple[Node, ...] = ()
    ops: tuple[str, ...] = ()
    bridge: bool = False
    """True of an op that is a bridge itself."""

    def leaves(self) -> Iterator[Node]:
        """Yield the boxes without children."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()

    def all(self) -> Iterator[Node]:
        """Yield the box and all in it."""
        yield self
        for child in self.children:
            yield from child.all()


@dataclass(frozen=True)
class Edge:
    """An arrow between two boxes without children. ``again``: from a block of a fold to the next one."""

    source: str
    target: str
    values: int = 1
    bridges: tuple[BridgeLabel, ...] = ()
    again: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(bridge.text for bridge in self.bridges)


@dataclass(frozen=True)
class Drawing:
    """Boxes, arrows between them, and the words for each stage's colour."""

    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    legend: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


def short_text(text: str, most: int = WIDEST) -> str:
    """Make a name fit for a box: one line of printable text, cut in the middle, its direction kept to itself."""
    # Only as much as can be shown is looked at: a name may have 10,000 characters.
    head, tail = text[: most * 4], text[-most * 4 :]
    cut = len(text) > most * 8
    text = _plain(head) + ("…" if cut else "") + _plain(tail) if cut else _plain(text)
    if text_width(text) <= most:
        return text
    front, back = most * 2 // 3, most - most * 2 // 3 - 1
    return f"{_within(text, front)}…{_within(text[::-1], back)[::-1]}"


def _plain(text: str) -> str:
    """Leave out what turns or joins the text around it, and all but two marks on one character."""
    kept, marks = [], 0
    for character in " ".join(text.split()):
        category = unicodedata.category(character)
        marks = marks + 1 if category == "Mn" else 0
        if category != "Cf" and marks <= 2:
            kept.append(character)
    return printable("".join(kept))


def _within(text: str, most: int) -> str:
    found, width = [], 0
    for character in text:
        width += _columns(character)
        if width > most:
            break
        found.append(character)
    return "".join(found)


def text_width(text: str) -> int:
    """Count the columns of a text: two of a wide character, such as an emoji, none of a mark above another."""
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) == "Mn":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def drawing_json(drawing: Drawing) -> dict[str, Any]:
    """Return a drawing as plain data: boxes with the box that holds them, arrows with their bridges."""
    nodes: list[dict[str, Any]] = []

    def add(node: Node, parent: str | None) -> None:
        nodes.append(
            {
                "id": node.id,
                "kind": node.kind,
                "label": "\n".join(node.lines),
                "parent": parent,
                "stages": list(node.stages),
                "bridge": node.bridge,
                "ops": list(node.ops),
            }
        )
        for child in node.children:
            add(child, node.id)

    for node in drawing.nodes:
        add(node, None)
    return {
        "name": drawing.title,
        "stages": [{"stage": stage, "label": text} for stage, text in drawing.legend],
        "nodes": nodes,
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "values": edge.values,
                "again": edge.again,
                "bridges": [
                    {
                        "kind": bridge.kind,
                        "count": bridge.count,
                        "size_bytes": int(bridge.size_bytes),
                        "way": bridge.way,
                        **({"cost": bridge.cost, "unit": bridge.unit} if bridge.unit else {}),
                    }
                    for bridge in edge.bridges
                ],
            }
            for edge in drawing.edges
        ],
    }
